# SPDX-License-Identifier: Apache-2.0
"""The life of a request's blocks, step by step."""

import numpy as np
import pytest

from cpool import BlockPool, hash_tokens
from cpool.prefix import FullAttention, Mamba, PrefixCache, SlidingWindow

UNIT = 4


class Engine:
    """The smallest engine: one request at a time, in chunks that states allow."""

    def __init__(self, groups, num_blocks=200, unit=UNIT, max_chunk=1 << 20, **options):
        self.pool = BlockPool(num_blocks, True, unit)
        self.cache = PrefixCache(self.pool, groups, **options)
        self.unit = unit
        self.max_chunk = max_chunk

    def lookup(self, tokens):
        self.cache.begin_step()
        return self.cache.lookup(hash_tokens(tokens, self.unit), len(tokens) - 1)

    def start(self, tokens, keep_junction=True):
        """Compute a prompt; the match it started from and the running request."""
        cache = self.cache
        match = self.lookup(tokens)
        boundary = match.shared_prefix_boundary if keep_junction else 0
        start, request = match.num_tokens, None
        while start < len(tokens):
            new = min(self.max_chunk, len(tokens) - start)
            end = cache.chunk_end(start, new, len(tokens), boundary=boundary)
            if request is None:
                request = cache.admit(match, end - start, len(tokens))
                assert request is not None
            else:
                assert cache.append(request, end - start) is not None
            cache.commit(request)
            cache.copies_done(cache.take_copies())
            cache.begin_step()
            start = end
        self.pool.check_consistency()
        return match, request

    def serve(self, tokens, **options):
        """Tokens that a prompt found in the cache."""
        match, request = self.start(tokens, **options)
        self.cache.finish(request)
        return match.num_tokens


def unlike(shared, num_tokens, seed):
    return [*shared, *range(seed * 1_000_000, seed * 1_000_000 + num_tokens)]


def test_the_same_prompt_hits_all_but_its_last_token_s_block():
    engine = Engine([FullAttention(UNIT)])
    assert engine.serve(list(range(50))) == 0
    assert engine.serve(list(range(50))) == 48
    assert engine.serve(list(range(48))) == 44


@pytest.mark.parametrize(("match", "found"), [("fine", 9984), ("coarse", 9600)])
def test_the_next_turn_of_a_long_chat_hits_up_to_the_match_unit(match, found):
    # vLLM's example: 10,000 tokens, then the same and 200 more, blocks of 1,600.
    engine = Engine([FullAttention(1600), Mamba(1600)], unit=16, max_chunk=8192, match=match)
    assert engine.serve(list(range(10_000))) == 0
    assert engine.serve(list(range(10_200))) == found


@pytest.mark.parametrize("match", ["fine", "coarse"])
def test_a_state_in_the_shared_part_is_what_makes_a_shared_prefix_hit(match):
    # The published pair, blocks of 528 and chunks of 2,048: the first chunk ends at 1,584.
    def hits(num_shared, num_unique, keep_junction):
        engine = Engine([FullAttention(528), Mamba(528)], unit=16, max_chunk=2048, match=match)
        prompts = [unlike(range(num_shared), num_unique, seed) for seed in (1, 2, 3)]
        return [engine.serve(p, keep_junction=keep_junction) for p in prompts]

    assert hits(1600, 600, keep_junction=False) == [0, 1584, 1584]
    assert hits(1500, 700, keep_junction=False) == [0, 0, 0]
    # The second prompt keeps a state where it left the first one.
    assert hits(1500, 700, keep_junction=True) == [0, 0, 1056]


def test_a_partial_tail_is_copied_before_it_is_written():
    engine = Engine([FullAttention(16), Mamba(16)])
    engine.serve(list(range(30)))
    match = engine.lookup(list(range(40)))
    assert match.num_tokens == 28
    tails = match.partial_tails
    assert [(t.group, t.num_tokens, t.ref_cnt) for t in tails] == [(0, 12, 0), (1, 12, 0)]
    request = engine.cache.admit(match, 4, 40)
    batch = engine.cache.take_copies()
    sources = [t.block_id for t in tails]
    targets = [int(ids[-1]) for ids in request.block_ids]
    assert batch.pairs.tolist() == [list(pair) for pair in zip(sources, targets, strict=True)]
    assert batch.group_ids.tolist() == [0, 1]
    assert engine.pool.ref_cnts[sources].tolist() == [1, 1]
    assert engine.pool.ref_cnts[targets].tolist() == [2, 2]
    engine.cache.finish(request)
    assert engine.pool.ref_cnts[sources + targets].tolist() == [1] * 4
    engine.cache.copies_done(batch)
    assert (engine.pool.ref_cnts[sources + targets] <= 0).all()
    with pytest.raises(ValueError, match="done already"):
        engine.cache.copies_done(batch)
    assert engine.lookup(list(range(40))).num_tokens == 28


def test_a_running_request_leaves_its_prompt_s_state_in_a_copy():
    engine = Engine([FullAttention(16), Mamba(16)])
    match = engine.lookup(list(range(31)))
    request = engine.cache.admit(match, 28, 31)
    engine.cache.commit(request)
    engine.cache.begin_step()
    state = int(request.block_ids[1][-1])
    assert engine.pool.registrations(state)[0].num_tokens == 28
    engine.cache.append(request, 3)
    [[source, copy]] = engine.cache.take_copies().pairs.tolist()
    assert source == state
    assert int(request.block_ids[1][-1]) == state
    assert engine.pool.registrations(state) == []
    assert engine.pool.registrations(copy)[0].num_tokens == 28


def test_a_full_block_takes_the_place_of_its_partial_entry():
    engine = Engine([FullAttention(16)], match="fine")
    _, request = engine.start(list(range(10)))
    block = int(request.block_ids[0][0])
    assert [r.num_tokens for r in engine.pool.registrations(block)] == [8]
    request.hashes.append_tokens(list(range(10, 16)))
    engine.cache.append(request, 6)
    engine.cache.commit(request)
    # The prompt's boundary stays findable, as an extra key.
    found = engine.pool.registrations(block)
    assert [(r.num_tokens, r.is_primary) for r in found] == [(16, True), (8, False)]


def test_a_state_of_this_step_is_not_started_from():
    engine = Engine([FullAttention(16), Mamba(16)])
    engine.cache.begin_step()
    first = engine.cache.admit(engine.cache.lookup(hash_tokens(range(33), UNIT), 32), 32, 33)
    engine.cache.commit(first)
    match = engine.cache.lookup(hash_tokens(range(40), UNIT), 39)
    assert match.num_tokens == 32
    assert engine.cache.admit(match, 8, 40) is None
    engine.cache.begin_step()
    assert engine.cache.admit(match, 8, 40) is not None


def state_of(pool):
    blocks = range(1, pool.num_gpu_blocks)
    return (
        pool.free_queue_ids().tolist(),
        np.maximum(pool.ref_cnts, 0).tolist(),
        [pool.registrations(i) for i in blocks],
    )


@pytest.mark.parametrize(
    "groups",
    [[FullAttention(16), Mamba(16)], [FullAttention(UNIT), SlidingWindow(UNIT, 12)]],
)
def test_an_admission_that_does_not_fit_changes_nothing(groups):
    engine = Engine(groups, num_blocks=31)
    _, request = engine.start(list(range(30)))
    engine.cache.finish(request)
    match = engine.lookup(list(range(60)))
    assert match.num_tokens > 0
    needed = engine.cache.num_blocks_to_admit(match, 30)
    free = engine.pool.get_num_free_blocks()
    taken = engine.pool.get_new_block_ids(free)
    engine.pool.free_ids(taken)
    match = engine.lookup(list(range(60)))
    before = state_of(engine.pool)
    needed = engine.cache.num_blocks_to_admit(match, 30)
    assert engine.cache.admit(match, 30, 60, reserve=free - needed + 1) is None
    assert state_of(engine.pool) == before
    assert engine.cache.admit(match, 30, 60, reserve=free - needed) is not None
    assert engine.pool.get_num_free_blocks() == free - needed


def test_blocks_of_a_match_count_when_nobody_holds_them():
    engine = Engine([FullAttention(UNIT)])
    _, request = engine.start(list(range(17)))
    match = engine.lookup(list(range(21)))
    assert engine.cache.num_blocks_to_admit(match, 5) == 2
    engine.cache.finish(request)
    match = engine.lookup(list(range(21)))
    assert engine.cache.num_blocks_to_admit(match, 5) == 2 + 4


def test_an_append_that_does_not_fit_leaves_the_request_as_it_was():
    engine = Engine([FullAttention(UNIT)], num_blocks=6)
    _, request = engine.start(list(range(16)))
    before = state_of(engine.pool)
    assert engine.cache.append(request, 8) is None
    assert state_of(engine.pool) == before
    assert request.num_tokens == 16
    [new] = engine.cache.append(request, 4)
    assert request.block_ids[0].tolist()[-1:] == new.tolist()


def test_a_window_lets_go_of_the_blocks_behind_it():
    engine = Engine([SlidingWindow(UNIT, 8)])
    _, request = engine.start(list(range(24)))
    engine.cache.append(request, 1)
    assert (request.block_ids[0] == 0).tolist() == [True] * 4 + [False] * 3


def test_rejected_drafts_can_be_appended_again():
    engine = Engine([FullAttention(UNIT)])
    _, request = engine.start(list(range(6)))
    engine.cache.append(request, 5)
    assert request.num_tokens == 11
    [new] = engine.cache.append(request, 5, num_computed_tokens=7)
    assert request.num_tokens == 12
    assert new.tolist() == []


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    engine = Engine([FullAttention(UNIT)], num_blocks=9)
    _, request = engine.start(list(range(16)))
    ids = request.block_ids[0].tolist()
    engine.cache.finish(request)
    assert engine.pool.free_queue_ids().tolist()[-4:] == ids[::-1]


def test_a_stale_match_is_refused():
    engine = Engine([FullAttention(UNIT)], num_blocks=9)
    engine.serve(list(range(17)))
    match = engine.lookup(list(range(17)))
    engine.pool.free_ids(engine.pool.get_new_block_ids(8))
    with pytest.raises(ValueError, match="stale"):
        engine.cache.admit(match, 1, 17)


def test_a_match_outlives_changes_that_do_not_concern_it():
    engine = Engine([FullAttention(UNIT)])
    engine.serve(list(range(17)))
    match = engine.lookup(list(range(17)))
    other = engine.lookup(unlike([], 9, seed=3))
    assert engine.cache.admit(other, 9, 9) is not None
    assert engine.cache.admit(match, 1, 17) is not None


def test_a_chunk_may_not_pass_a_state_boundary_from_inside_a_block():
    engine = Engine([FullAttention(16), Mamba(16)])
    match = engine.lookup(list(range(40)))
    request = engine.cache.admit(match, 8, 40)
    with pytest.raises(ValueError, match="pass the Mamba boundary at 16"):
        engine.cache.append(request, 12)
    assert engine.cache.chunk_end(8, 12, 40) == 16
    assert engine.cache.append(request, 8) is not None


def test_a_released_request_is_refused():
    engine = Engine([FullAttention(UNIT)])
    _, request = engine.start(list(range(16)))
    engine.cache.preempt(request)
    assert not request.is_running
    for use in (engine.cache.finish, engine.cache.preempt, engine.cache.commit):
        with pytest.raises(ValueError, match="not running"):
            use(request)
    with pytest.raises(ValueError, match="not running"):
        engine.cache.append(request, 1)


def test_a_preempted_request_comes_back_to_its_own_blocks():
    engine = Engine([FullAttention(16), Mamba(16)])
    _, request = engine.start(list(range(50)))
    engine.cache.preempt(request)
    match = engine.cache.lookup(request.hashes, 49)
    assert match.num_tokens == 48
    assert engine.cache.admit(match, 2, request.num_prompt_tokens) is not None


def test_committing_beyond_the_hashes_is_refused():
    engine = Engine([FullAttention(UNIT)])
    _, request = engine.start(list(range(8)))
    engine.cache.append(request, 8)
    with pytest.raises(ValueError, match="hashes for 8 tokens"):
        engine.cache.commit(request)
    with pytest.raises(ValueError, match="must be from 0 to 16"):
        engine.cache.commit(request, 17)


@pytest.mark.parametrize("number", [0, -1, 1 << 40])
def test_numbers_of_new_tokens_are_checked(number):
    engine = Engine([FullAttention(UNIT)])
    match = engine.lookup([1])
    with pytest.raises(ValueError, match="num_new_tokens is"):
        engine.cache.admit(match, number, 1)
    with pytest.raises(TypeError, match="must be an integer"):
        engine.cache.admit(match, 1.5, 1)
