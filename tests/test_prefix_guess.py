# SPDX-License-Identifier: Apache-2.0
"""The run of the last lookup is only a guess: answers are those of a pool that never looked."""

import gc
import itertools
import random

import pytest

from cpool import BlockPool, hash_tokens
from cpool.prefix import FullAttention, Mamba, PrefixCache

UNIT = 4
NUM_BLOCKS = 40


@pytest.fixture
def pool():
    return BlockPool(NUM_BLOCKS, True, UNIT)


def hashes_of(num_blocks, seed=0):
    return hash_tokens([seed * 1000 + i for i in range(num_blocks * UNIT)], UNIT)[:]


def block_by_block(pool, hashes, group=0):
    """Look up hash after hash with `get_cached_block`: ids, None where there is none."""
    found = [pool.get_cached_block(block_hash, [group]) for block_hash in hashes]
    return [hit and hit[0].block_id for hit in found]


@pytest.fixture(
    params=["PrefixCache.lookup", "find_prefix_ids", "find_prefix_blocks", "get_cached_block"]
)
def ids_of(request, pool):
    """Whichever finds prefixes keeps a guess: hashes -> block ids in group 0."""
    if request.param == "find_prefix_ids":
        return lambda hashes: pool.find_prefix_ids(hashes, 0).tolist()
    if request.param == "get_cached_block":
        return lambda hashes: list(itertools.takewhile(bool, block_by_block(pool, hashes)))
    if request.param == "find_prefix_blocks":
        return lambda hashes: [block.block_id for block in pool.find_prefix_blocks(hashes, [0])[0]]
    cache = PrefixCache(pool, [FullAttention(UNIT)])
    return lambda hashes: cache.lookup(hashes).block_ids[0].tolist()


def test_a_block_that_lost_its_key_is_not_found_again(pool, ids_of):
    hashes = hashes_of(6)
    pool.cache_full_ids(range(1, 7), hashes, 0, UNIT)
    assert ids_of(hashes) == [1, 2, 3, 4, 5, 6]
    pool.evict_ids([4])  # its digest is still in its slot
    assert ids_of(hashes) == [1, 2, 3]
    pool.evict_ids([1])
    assert ids_of(hashes) == []


def test_a_block_that_took_another_key_is_not_found_under_the_old_one(pool, ids_of):
    hashes, others = hashes_of(4), hashes_of(4, 1)
    pool.cache_full_ids([1, 2, 3, 4], hashes, 0, UNIT)
    assert ids_of(hashes) == [1, 2, 3, 4]
    pool.evict_ids([2])
    pool.cache_full_ids([2], others[:1], 0, UNIT)
    assert ids_of(hashes) == [1]
    pool.cache_full_ids([9], hashes[1:2], 0, UNIT)
    assert ids_of(hashes) == [1, 9, 3, 4]
    assert ids_of(others) == [2]


def test_a_digest_of_another_group_does_not_count(pool, ids_of):
    hashes = hashes_of(3)
    pool.cache_full_ids([1, 2, 3], hashes, 0, UNIT)
    assert ids_of(hashes) == [1, 2, 3]
    pool.evict_ids([2])
    pool.cache_full_ids([2], hashes[1:2], 7, UNIT)
    assert ids_of(hashes) == [1]


def test_of_several_copies_the_first_one_is_found_whatever_was_found_before(pool, ids_of):
    hashes = hashes_of(3)
    pool.cache_full_ids([1, 2, 3], hashes, 0, UNIT)
    assert ids_of(hashes) == [1, 2, 3]
    pool.cache_full_ids([12], hashes[1:2], 0, UNIT)
    assert ids_of(hashes) == [1, 2, 3]
    pool.evict_ids([2])
    assert ids_of(hashes) == [1, 12, 3]
    pool.cache_full_ids([2], hashes[1:2], 0, UNIT)
    assert ids_of(hashes) == [1, 12, 3]


def test_a_key_assigned_by_hand_is_unknown_to_the_table(pool, ids_of):
    hashes = hashes_of(2)
    pool.cache_full_ids([1, 2], hashes, 0, UNIT)
    assert ids_of(hashes) == [1, 2]
    key = pool.blocks[2].block_hash
    pool.evict_ids([2])
    pool.blocks[2]._block_hash = key
    assert ids_of(hashes) == [1]


def test_nothing_is_found_after_a_reset(pool, ids_of):
    hashes = hashes_of(3)
    pool.cache_full_ids([1, 2, 3], hashes, 0, UNIT)
    assert ids_of(hashes) == [1, 2, 3]
    assert pool.reset_prefix_cache()
    assert ids_of(hashes) == []
    pool.cache_full_ids([5], hashes[:1], 0, UNIT)
    assert ids_of(hashes) == [5]


def test_a_shorter_and_a_longer_lookup_follow_each_other(pool, ids_of):
    hashes = hashes_of(39)
    pool.cache_full_ids(range(39, 0, -1), hashes, 0, UNIT)
    expected = list(range(39, 0, -1))
    for length in (2, 39, 0, 1, 20, 39, 38):
        assert ids_of(hashes[:length]) == expected[:length]


def test_spaces_keep_a_guess_each_and_share_it_when_there_are_many(pool):
    hashes = hashes_of(4)
    expected = {}
    for group in range(9):
        ids = range(4 * group + 1, 4 * group + 5)
        pool.cache_full_ids(ids, hashes, group, UNIT)
        expected[group] = list(ids)
    for _ in range(2):
        for group in (0, 4, 8, 0, 1, 2, 3, 4):
            assert pool.find_prefix_ids(hashes, group).tolist() == expected[group]
    pool.evict_ids([expected[4][2]])
    assert pool.find_prefix_ids(hashes, 4).tolist() == expected[4][:2]


def test_what_is_remembered_is_counted_and_given_back(pool):
    hashes, empty = hashes_of(30), pool.nbytes
    pool.cache_full_ids(range(1, 31), hashes, 0, UNIT)
    before = pool.nbytes
    pool.find_prefix_ids(hashes, 0)
    assert pool.nbytes == before + 30 * 4
    pool.find_prefix_ids(hashes[:5], 0)
    assert pool.nbytes == before + 30 * 4
    assert pool.reset_prefix_cache()
    assert pool.nbytes == empty


@pytest.mark.parametrize(
    "groups",
    [
        [FullAttention(UNIT)],
        [FullAttention(UNIT), FullAttention(UNIT)],
        [FullAttention(2 * UNIT), Mamba(2 * UNIT)],
    ],
)
def test_every_lookup_is_that_of_a_cache_without_a_past(groups):
    rng = random.Random(len(groups))
    shared = [hashes_of(14, seed) for seed in range(2)]
    # Prompts with a common beginning, and one apart.
    prompts = [shared[0], shared[0][:6] + shared[1][6:], shared[1]]
    pool = BlockPool(NUM_BLOCKS, True, UNIT)
    cache = PrefixCache(pool, groups)
    hits = 0
    for _ in range(3000):
        block = rng.randrange(1, NUM_BLOCKS)
        hashes = rng.choice(prompts)
        row = rng.randrange(len(hashes))
        if rng.random() < 0.2:
            pool.evict_ids([block])
        elif pool.blocks[block].block_hash is None:
            pool.cache_partial_id(block, hashes[row], (row + 1) * UNIT, rng.randrange(len(groups)))
        hashes = rng.choice(prompts)
        limit = rng.choice((len(hashes), row)) * UNIT
        found = cache.lookup(hashes, limit)
        fresh = PrefixCache(pool, groups).lookup(hashes, limit)
        assert found.num_tokens == fresh.num_tokens
        assert [ids.tolist() for ids in found.block_ids] == [
            ids.tolist() for ids in fresh.block_ids
        ]
        known = [block if block >= 0 else None for block in pool.find_ids(hashes, 0).tolist()]
        run = [*known, None].index(None)
        assert pool.find_prefix_ids(hashes, 0).tolist() == known[:run]
        hits += found.num_tokens > UNIT
    assert hits > 50


def test_a_pool_that_is_reset_by_the_lookup_itself_answers_for_the_right_group(pool):
    """The number of tokens is read by the caller's code, which here gives group 0's space away."""
    cache, hashes = PrefixCache(pool, [FullAttention(UNIT)]), hashes_of(3)
    pool.cache_full_ids([1, 2, 3], hashes, 0, UNIT)

    class Number(int):
        def __index__(self):
            assert pool.reset_prefix_cache()
            pool.cache_full_ids([5, 6, 7], hashes, 1, UNIT)
            return int(self)

    assert cache.reach(hashes, 0, Number(3 * UNIT)) == 0
    assert cache.lookup(hashes, Number(3 * UNIT)).num_tokens == 0


def test_a_pool_that_is_reset_while_the_match_is_made_answers_for_the_right_group(pool):
    """A collection falls on each allocation of a lookup in turn (up to Python 3.11)."""
    cache, hashes = PrefixCache(pool, [FullAttention(UNIT)]), hashes_of(3)

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            assert pool.reset_prefix_cache()
            pool.cache_full_ids([5, 6, 7], hashes, 1, UNIT)

    thresholds, matches = gc.get_threshold(), []
    try:
        for threshold in range(1, 40):
            gc.collect()
            gc.disable()
            assert pool.reset_prefix_cache()
            pool.cache_full_ids([1, 2, 3], hashes, 0, UNIT)
            Cycle()
            gc.set_threshold(threshold)
            gc.enable()
            match = cache.lookup(hashes)
            gc.disable()
            matches.append(match)  # else the next one is made of its memory
            assert match.block_ids[0].tolist() in ([], [1, 2, 3])
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()


def change_nothing(pool, block, block_hash):
    return block


def take_its_key(pool, block, block_hash):
    pool.evict_ids([block])


def give_it_another_key(pool, block, block_hash):
    pool.evict_ids([block])
    pool.cache_full_ids([block], hashes_of(1, 7), 0, UNIT)


def give_its_key_to_another_group(pool, block, block_hash):
    pool.evict_ids([block])
    pool.cache_full_ids([block], [block_hash], 1, UNIT)


def assign_its_key_by_hand(pool, block, block_hash):
    handle = pool.blocks[block]
    handle.reset_hash()
    handle.set_block_hash(block_hash + bytes(4), UNIT)


def move_its_key(pool, block, block_hash):
    pool.move_ids(block, 30)
    return 30


def hold_the_key_elsewhere_first(pool, block, block_hash):
    pool.evict_ids([block])
    pool.cache_full_ids([30, block], [block_hash] * 2, 0, UNIT)
    return 30


def forget_all(pool, block, block_hash):
    assert pool.reset_prefix_cache()


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize(
    "change",
    [
        change_nothing, take_its_key, give_it_another_key, give_its_key_to_another_group,
        assign_its_key_by_hand, move_its_key, hold_the_key_elsewhere_first, forget_all,
    ],
)  # fmt: skip
def test_the_block_that_lies_next_is_asked_first_and_never_believed(pool, change, step):
    hashes = hashes_of(6)
    ids = list(range(10, 16))[::step]
    pool.cache_full_ids(ids, hashes, 0, UNIT)
    assert block_by_block(pool, hashes[:3]) == ids[:3]
    expected = change(pool, ids[3], hashes[3])
    assert block_by_block(pool, [hashes[3]]) == [expected]
    assert pool.find_ids(hashes[3:4], 0).tolist() == [-1 if expected is None else expected]
    assert block_by_block(pool, hashes[2:4], 5) == [None, None]


@pytest.mark.parametrize("step", [1, -1])
def test_no_block_lies_behind_the_last_one_or_before_the_first(pool, step):
    ids = [*range(NUM_BLOCKS - 3, NUM_BLOCKS)] if step > 0 else [2, 1, 0]
    hashes = hashes_of(4)
    pool.cache_full_ids(ids, hashes[:3], 0, UNIT)  # the null block is passed over
    expected = [block or None for block in ids]
    assert block_by_block(pool, hashes) == [*expected, None]


@pytest.mark.parametrize("seed", range(4))
def test_block_by_block_in_any_order_against_single_lookups(pool, seed):
    rng = random.Random(seed)
    hashes = hashes_of(2 * NUM_BLOCKS)
    for _ in range(2000):
        block = rng.randrange(1, NUM_BLOCKS)
        if rng.random() < 0.3:
            pool.evict_ids([block])
            row = block + rng.choice([0, 0, 0, 1, NUM_BLOCKS])
            pool.cache_full_ids([block], hashes[row - 1 : row], 0, UNIT)
        start, step = rng.randrange(len(hashes)), rng.choice([1, 1, -1, 2])
        asked = hashes[start::step][:5]
        single = [int(pool.find_ids([block_hash], 0)[0]) for block_hash in asked]
        assert block_by_block(pool, asked) == [None if i < 0 else i for i in single]
