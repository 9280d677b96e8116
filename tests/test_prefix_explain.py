# SPDX-License-Identifier: Apache-2.0
"""Every lookup can say why it is not longer."""

import pytest

from cpool import BlockPool, hash_tokens
from cpool.prefix import ChunkedLocal, FullAttention, Mamba, PrefixCache, Reason, SlidingWindow

UNIT = 4


class World:
    """A pool with chosen boundaries of the prompt 0, 1, 2, ... resident."""

    def __init__(self, groups, num_tokens, *, num_blocks=100, **options):
        self.pool = BlockPool(num_blocks, True, UNIT)
        self.cache = PrefixCache(self.pool, groups, **options)
        self.hashes = hash_tokens(range(num_tokens), UNIT)
        self.max_tokens = max(0, num_tokens - 1)

    def put(self, group, *boundaries):
        for num_tokens in boundaries:
            [block_id] = self.pool.get_new_block_ids(1).tolist()
            self.pool.cache_partial_id(
                block_id, self.hashes[num_tokens // UNIT - 1], num_tokens, group
            )
            self.pool.free_ids([block_id])

    def explain(self):
        return self.cache.lookup(self.hashes, self.max_tokens).explain()


def test_all_that_may_hit_did():
    world = World([FullAttention(UNIT)], 10)
    world.put(0, 4, 8)
    why = world.explain()
    assert (why.num_tokens, why.max_tokens, why.reason) == (8, 9, Reason.NOTHING_LEFT)


def test_an_unknown_prefix_was_never_seen():
    world = World([FullAttention(UNIT)], 30)
    world.put(0, 4, 8, 16)
    why = world.explain()
    assert why.reason == Reason.NEVER_SEEN
    assert why.groups[0].at_tokens == 12
    assert "no prefix at 12 is known" in str(why)


def test_an_evicted_block_says_how_long_ago():
    world = World([FullAttention(UNIT)], 30, num_blocks=12, remember_evictions=100)
    match = world.cache.lookup(world.hashes, 29)
    request = world.cache.admit(match, 30, 30)
    world.cache.commit(request)
    world.cache.finish(request)
    # Three blocks were never used and one has no key: the others take the end of the prefix.
    other = hash_tokens(range(1000, 1036), UNIT)
    request = world.cache.admit(world.cache.lookup(other, 35), 28, 28)
    world.cache.commit(request)
    why = world.explain()
    assert why.reason == Reason.EVICTED
    assert world.cache.num_evictions == 3
    [group] = why.groups
    assert (why.num_tokens, group.at_tokens, group.evictions_since) == (16, 20, 0)
    assert group.seconds_since in (0, 1)
    assert "evicted" in str(why)


def test_evictions_are_forgotten_when_nobody_asked_for_them():
    world = World([FullAttention(UNIT)], 30)
    assert world.cache.eviction_of(world.hashes[0], 0) is None
    assert world.cache.num_evictions == 0


def test_a_state_further_left_is_a_coarser_one():
    world = World([FullAttention(8), Mamba(8)], 40)
    world.put(0, 8, 16, 24, 32)
    world.put(1, 8)
    why = world.explain()
    assert (why.num_tokens, why.reason) == (8, Reason.COARSER_STATE)
    full, state = why.groups
    assert (full.num_tokens, full.reason) == (32, Reason.OTHER_GROUP)
    assert (state.num_tokens, state.at_tokens) == (8, 32)


def test_a_prefix_without_any_state():
    world = World([FullAttention(8), Mamba(8)], 40)
    world.put(0, 8, 16)
    why = world.explain()
    assert (why.num_tokens, why.reason) == (0, Reason.NO_STATE)
    assert why.groups[1].at_tokens == 16


def test_a_longer_state_waits_for_attention():
    world = World([FullAttention(8), Mamba(8)], 40)
    world.put(0, 8, 16)
    world.put(1, 16, 32)
    why = world.explain()
    assert (why.num_tokens, why.reason) == (16, Reason.NEVER_SEEN)
    assert [g.reason for g in why.groups] == [Reason.NEVER_SEEN, Reason.OTHER_GROUP]


def test_a_window_with_a_hole_is_incomplete():
    world = World([FullAttention(UNIT), SlidingWindow(UNIT, 9)], 24)
    world.put(0, 4, 8, 12, 16, 20)
    world.put(1, 4, 8, 12, 20)
    why = world.explain()
    assert (why.num_tokens, why.reason) == (12, Reason.WINDOW_INCOMPLETE)
    assert why.groups[1].at_tokens == 16


def test_a_missing_block_of_the_current_chunk():
    world = World([FullAttention(UNIT), ChunkedLocal(UNIT, 16)], 32)
    world.put(0, *range(4, 32, 4))
    world.put(1, 20)
    why = world.explain()
    assert (why.num_tokens, why.reason) == (20, Reason.NEVER_SEEN)
    assert why.groups[1].at_tokens == 24


def test_a_drafter_takes_a_unit_off():
    world = World([FullAttention(UNIT, eagle=True)], 17)
    world.put(0, 4, 8, 12, 16)
    why = world.explain()
    assert (why.num_tokens, why.reason) == (12, Reason.EAGLE_DROP)


def test_what_lies_between_the_multiples_of_the_match_unit():
    world = World([FullAttention(8), Mamba(16)], 40, match="coarse")
    world.put(0, 8, 16, 24)
    world.put(1, 16)
    why = world.explain()
    assert (why.num_tokens, why.match_unit, why.reason) == (16, 16, Reason.MATCH_UNIT)
    assert why.groups[0].at_tokens == 24


def test_a_partial_state_is_out_of_reach_of_coarse_matching():
    world = World([FullAttention(8), Mamba(8)], 40, match="coarse")
    world.put(0, 8, 16)
    world.put(1, 12)
    why = world.explain()
    assert (why.num_tokens, why.reason, why.groups[1].at_tokens) == (0, Reason.MATCH_UNIT, 12)


@pytest.mark.parametrize(
    ("groups", "match", "shortest"),
    [
        ([FullAttention(1600), Mamba(1600)], "coarse", 1601),
        ([FullAttention(1600), Mamba(1600)], "fine", 5),
        ([FullAttention(UNIT)], None, 5),
        ([FullAttention(UNIT, eagle=True)], None, 9),
        ([FullAttention(16, eagle=True), Mamba(16)], "fine", 8),
        ([FullAttention(UNIT), SlidingWindow(UNIT, 9)], None, 5),
        ([FullAttention(8), SlidingWindow(UNIT, 8, eagle=True)], None, 12),
    ],
)
def test_the_shortest_prompt_that_can_hit_is_told_and_true(groups, match, shortest):
    def hit(num_tokens):
        pool = BlockPool(3000, True, UNIT)
        cache = PrefixCache(pool, groups, match=match)
        hashes = hash_tokens(range(num_tokens), UNIT)
        for _ in range(2):
            found = cache.lookup(hashes, num_tokens - 1)
            start, request = found.num_tokens, None
            while start < num_tokens:
                end = cache.chunk_end(start, num_tokens - start, num_tokens)
                if request is None:
                    request = cache.admit(found, end - start, num_tokens)
                else:
                    cache.append(request, end - start)
                cache.commit(request)
                cache.copies_done(cache.take_copies())
                cache.begin_step()
                start = end
            cache.finish(request)
        return found

    assert hit(shortest).explain().min_prompt_tokens == shortest
    assert hit(shortest).num_tokens > 0
    assert hit(shortest - 1).num_tokens == 0


def test_a_prompt_shorter_than_a_unit_is_told_so():
    world = World([FullAttention(1600), Mamba(1600)], 1000, match="coarse")
    why = world.explain()
    assert why.reason == Reason.MATCH_UNIT
    assert "the shortest prompt that can hit has 1,601" in str(why)


def changed_world():
    """A match of four blocks of the prompt's seven, nobody's."""
    world = World([FullAttention(UNIT)], 30, remember_evictions=100)
    world.put(0, 4, 8, 12, 16)
    match = world.cache.lookup(world.hashes, world.max_tokens)
    assert match.num_tokens == 16
    return world, match


def test_a_match_of_a_pool_that_did_not_change_is_not_stale():
    world, match = changed_world()
    why = match.explain()
    assert (why.is_stale, why.stale_tokens, why.num_tokens) == (False, None, 16)
    assert str(why).startswith("16 of 29 tokens hit")
    other = hash_tokens(range(1000, 1008), UNIT)
    world.pool.cache_full_ids(world.pool.get_new_block_ids(2), other, 0, UNIT)
    assert not match.explain().is_stale


def test_a_match_whose_blocks_were_evicted_explains_what_is_left():
    world, match = changed_world()
    world.pool.evict_ids(match.block_ids[0][2:])
    why = match.explain()
    assert (why.is_stale, why.stale_tokens, why.num_tokens, why.max_tokens) == (True, 16, 8, 29)
    assert (why.reason, why.groups[0].at_tokens) == (Reason.NEVER_SEEN, 12)
    assert str(why).startswith(
        "The pool has changed since the lookup, which found 16 tokens. Now 8 of 29 tokens hit"
    )


def test_a_match_after_a_reset_explains_an_empty_pool():
    world, match = changed_world()
    assert world.pool.reset_prefix_cache()
    why = match.explain()
    assert (why.is_stale, why.stale_tokens, why.num_tokens) == (True, 16, 0)
    assert why.reason == Reason.NEVER_SEEN


@pytest.mark.parametrize("width", [16, 32])
def test_hashes_in_one_buffer_keep_their_width_after_a_reset(width):
    world = World([FullAttention(UNIT)], 30)
    rows = b"".join(bytes([i]) * width for i in range(5))
    world.pool.cache_full_ids(world.pool.get_new_block_ids(1), [rows[:width]], 0, UNIT)
    match = world.cache.lookup(rows)
    assert match.num_tokens == 4
    world.pool.free_ids([1])
    world.pool.reset_prefix_cache()
    assert match.explain().max_tokens == 20
    with pytest.raises(ValueError, match="stale"):
        world.cache.admit(match, 1, 21)


def test_a_match_that_would_be_longer_now_says_so():
    world, match = changed_world()
    world.put(0, 20, 24)
    why = match.explain()
    assert (why.stale_tokens, why.num_tokens, why.groups[0].num_tokens) == (16, 24, 24)
    assert why.groups[0].at_tokens == 28


def test_a_match_whose_hashes_were_cut_explains_those_that_are_left():
    world, match = changed_world()
    world.hashes.truncate(8)
    why = match.explain()
    assert (why.stale_tokens, why.num_tokens, why.max_tokens) == (16, 8, 11)
    assert why.reason == Reason.NOTHING_LEFT


def registered_anew(pool, ids, hashes):
    """As many keys as before, of other blocks."""
    pool.reset_prefix_cache()
    pool.cache_full_ids(ids, hashes, 0, UNIT)


def moved(pool, ids, hashes):
    for i in ids:
        pool.move_ids(i, i + 20)


@pytest.mark.parametrize("change", [registered_anew, moved])
def test_a_pool_that_changed_and_looks_the_same_in_numbers_is_noticed(change):
    world, match = changed_world()
    before = (world.pool.num_registrations, world.pool.num_evicted_blocks)
    ids = match.block_ids[0].tolist()
    change(world.pool, ids, [bytes([i]) * 32 for i in ids])
    assert (world.pool.num_registrations, world.pool.num_evicted_blocks) == before
    assert world.pool.get_num_free_blocks() == 99
    assert match.explain().is_stale
    with pytest.raises(ValueError, match="stale"):
        world.cache.admit(match, 1, 30)
