# SPDX-License-Identifier: Apache-2.0
"""Keys whose table hash is chosen: many in one line, many lines passed, neighbours alike."""

import pytest

from cpool import BlockPool
from cpool.prefix import FullAttention, PrefixCache
from tests.chosen_hashes import digest, take_random_words_away

UNIT = 4
SOME_HASH = 0x12345678


@pytest.fixture(autouse=True)
def no_random_words(monkeypatch):
    take_random_words_away(monkeypatch)


def alike(count, first=0):
    return [digest(SOME_HASH, first + i) for i in range(count)]


def test_the_hash_is_the_chosen_one():
    pool = BlockPool(100, True, UNIT)
    pool.cache_full_ids(range(1, 51), alike(50), 0, UNIT)
    assert pool.table_stats()["max_distance"] == 50 // 8


@pytest.mark.parametrize("group", [0, 1])
def test_a_cell_that_was_left_hides_no_key_that_is_its_opposite(group):
    # An empty cell's hash is that of its last key, bits flipped; one chunk is all keys' home.
    pool = BlockPool(4, True, UNIT)
    pool.cache_full_ids([3], [digest(0)], 0, UNIT)
    pool.evict_ids([3])
    salt = 2 * group
    gone, kept = digest(SOME_HASH), digest(SOME_HASH ^ 0xFFFFFFFE ^ salt)
    pool.cache_full_ids([1], [gone], 0, UNIT)
    pool.cache_full_ids([2], [kept], group, UNIT)
    pool.evict_ids([1])
    assert pool.table_stats()["num_cells"] == 8
    assert pool.find_ids([kept, gone], group).tolist() == [2, -1]
    assert pool.find_prefix_ids([kept], group).tolist() == [2]


@pytest.mark.parametrize("count", [262, 263, 264, 265, 400])
def test_more_keys_pass_a_chunk_than_it_can_count(count):
    pool = BlockPool(count + 1, True, UNIT)
    pool.cache_full_ids(range(1, count + 1), alike(count), 0, UNIT)
    assert pool.find_ids(alike(count), 0).tolist() == list(range(1, count + 1))
    pool.check_consistency()
    left = count
    for last in range(8, count, 8):  # who stands nearest to home leaves first
        pool.evict_ids(range(last - 7, last + 1))
        expected = [-1] * last + list(range(last + 1, count + 1))
        assert pool.find_ids(alike(count), 0).tolist() == expected
        left -= 8
        assert pool.num_cached_keys == left
    pool.check_consistency()


def test_a_search_ends_where_it_began_though_every_chunk_was_passed_too_often():
    count = 400
    pool = BlockPool(count + 1, True, UNIT)
    for start in range(0, 1 << 32, 1 << 28):  # 255 passed each of the 18 chunks from there on
        keys = [digest(start, i) for i in range(count)]
        pool.cache_full_ids(range(1, count + 1), keys, 0, UNIT)
        pool.evict_ids(range(1, count + 1))
    assert pool.table_stats()["num_cells"] < 16 * 8 * 18
    pool.cache_full_ids([1], [digest(SOME_HASH)], 0, UNIT)
    asked = [digest(SOME_HASH), digest(SOME_HASH, 1), digest(0)]
    assert pool.find_ids(asked, 0).tolist() == [1, -1, -1]
    assert pool.find_prefix_ids(asked, 0).tolist() == [1]


def test_a_table_grows_while_its_chunks_count_who_passed():
    pool = BlockPool(65, True, UNIT)
    pool.cache_full_ids(range(1, 65), alike(64), 0, 2 * UNIT)
    before = pool.table_stats()["num_cells"]
    for i, extra in enumerate(alike(64, 64)):
        pool.cache_partial_id(i + 1, extra, UNIT, 0)
    assert pool.table_stats()["num_cells"] > before
    pool.check_consistency()
    assert pool.find_ids(alike(128), 0).tolist() == 2 * list(range(1, 65))
    assert pool.find_full_ids(alike(128), 0, 2 * UNIT).tolist() == [*range(1, 65), *[-1] * 64]
    assert pool.evict_ids(range(1, 65)) == 64
    assert pool.find_ids(alike(128), 0).tolist() == [-1] * 128
    pool.check_consistency()


def test_a_prefix_of_keys_that_collide_is_found():
    pool = BlockPool(41, True, UNIT)
    cache = PrefixCache(pool, [FullAttention(UNIT)])
    hashes = alike(40)
    pool.cache_full_ids(range(40, 0, -1), hashes, 0, UNIT)
    for gone in (None, 7, 39):
        if gone:
            pool.evict_ids([gone])
        expected = list(range(40, gone or 0, -1))
        assert cache.lookup(hashes).block_ids[0].tolist() == expected
        assert pool.find_prefix_ids(hashes, 0).tolist() == expected
        pool.find_prefix_ids(hashes[::-1], 0)
