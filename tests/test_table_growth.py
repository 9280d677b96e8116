# SPDX-License-Identifier: Apache-2.0
"""A table that grows moves its keys a few lines at a time: what holds meanwhile."""

import numpy as np
import pytest

from cpool import BlockPool
from cpool.prefix import FullAttention, PrefixCache
from tests.chosen_hashes import digest, take_random_words_away

UNIT = 4
MAX_FILLED = 80  # per cent of the cells; beyond, the table grows
TOP = 0xFFFFFFF0  # a hash whose home is the last line: what finds no room goes on at the first


@pytest.fixture(autouse=True)
def no_random_words(monkeypatch):
    take_random_words_away(monkeypatch)


def any_hashes(count, seed=0):
    return [int(h) for h in np.random.default_rng(seed).integers(0, 1 << 32, count)]


class Keys:
    """A pool whose every block has a full key, and extra keys that make its table grow."""

    def __init__(self, num_blocks, hashes):
        self.pool = BlockPool(num_blocks + 1, True, UNIT)
        self.holders = {digest(h, i): i + 1 for i, h in enumerate(hashes)}
        assert len(self.holders) == num_blocks
        self.pool.cache_full_ids(list(self.holders.values()), list(self.holders), 0, 2 * UNIT)
        self.num_blocks = num_blocks
        self.number = num_blocks
        self.rng = np.random.default_rng(0)

    @property
    def num_leaving(self):
        return self.pool.table_stats()["num_leaving"]

    def add(self, table_hash):
        block = self.number % self.num_blocks + 1
        key = digest(table_hash, self.number)
        self.pool.cache_partial_id(block, key, UNIT, 0)
        self.holders[key] = block
        self.number += 1

    def add_until_growth(self, hashes):
        hashes = iter(hashes)
        while not self.num_leaving:
            self.add(next(hashes))

    def evict(self, block):
        gone = [key for key, holder in self.holders.items() if holder == block]
        assert self.pool.evict_ids([block]) == bool(gone)
        for key in gone:
            del self.holders[key]
        return gone

    def check(self, absent=()):
        self.pool.check_consistency()
        keys = list(self.holders)
        # Of blocks that lie side by side the table is not asked: in any order, too.
        for order in (range(len(keys)), self.rng.permutation(len(keys))):
            asked = [keys[i] for i in order]
            held_by = [self.holders[key] for key in asked]
            assert self.pool.find_ids(asked, 0).tolist() == held_by
            assert self.pool.find_prefix_ids(asked, 0).tolist() == held_by
        assert all(self.pool.get_cached_block(key, [0]) for key in keys[-3:])
        for key in absent:
            assert self.pool.get_cached_block(key, [0]) is None
        if absent:
            assert (self.pool.find_ids(list(absent), 0) == -1).all()
        assert self.pool.num_cached_keys == len(self.holders)


def test_keys_are_found_at_every_step_and_move_a_few_lines_at_a_time():
    keys = Keys(400, any_hashes(400))
    fresh = any_hashes(4000, 1)
    absent = [digest(h, 10**6) for h in any_hashes(100, 2)]
    keys.add_until_growth(fresh)
    num_lines = keys.num_leaving // 8
    calls = 1
    while keys.num_leaving:
        keys.check(absent)
        keys.add(fresh[1000 + calls])
        calls += 1
    assert calls == -(-num_lines // 4)
    keys.check(absent)


@pytest.mark.parametrize("seed", range(4))
def test_keys_come_and_go_while_the_table_grows(seed):
    rng = np.random.default_rng(seed)
    keys = Keys(300, any_hashes(300, seed))
    hashes = iter(any_hashes(100_000, seed + 100))
    growing = 0
    for _ in range(1200):
        if rng.random() < 0.04 and keys.num_leaving:
            keys.check(keys.evict(int(rng.integers(1, 301))))
        keys.add(next(hashes))
        growing += keys.num_leaving > 0
        if keys.num_leaving:
            keys.check()
    assert growing > 100
    keys.check()


@pytest.mark.parametrize("late", [0, 1, 5, 40])
def test_keys_behind_the_last_line_stand_in_lines_that_all_others_left(late):
    keys = Keys(400, any_hashes(370) + [TOP] * 30)
    keys.add_until_growth(any_hashes(1000, 1))
    for _ in range(late):  # meanwhile more of them come, some after the first lines were left
        keys.add(TOP)
        keys.check([digest(TOP, 10**6), digest(0, 10**6), digest(1 << 27, 10**6)])
    for block in range(371, 401):
        keys.evict(block)
        keys.check()
    fresh = iter(any_hashes(1000, 2))
    while keys.num_leaving:
        keys.add(next(fresh))
        keys.check()


@pytest.mark.parametrize("num_top", [20, 9000])
def test_memory_of_lines_that_were_left_is_given_back_but_not_what_stands_in_them(num_top):
    num_blocks = 30_000
    keys = Keys(num_blocks, [TOP] * num_top + any_hashes(num_blocks - num_top))
    fresh = iter(any_hashes(100_000, 1))
    before = keys.pool.nbytes
    keys.add_until_growth(fresh)
    line, old_lines = 64, keys.num_leaving // 8
    new_lines = keys.pool.table_stats()["num_cells"] // 8
    extra = keys.number - num_blocks
    top = list(keys.holders)[:num_top]
    while keys.num_leaving:
        keys.add(next(fresh))
        # 48 bytes an extra key in chunks of records, and the lines of either array in use.
        records = 48 * (keys.number - num_blocks)
        growth = keys.pool.nbytes - before - records
        assert growth >= 0
        assert growth < line * (new_lines - old_lines + old_lines // 16 + 1024) + 200_000
        if keys.number % 50 == 0:
            # A few, not side by side: the table would not be asked.
            some = keys.rng.permutation(num_top)[:200]
            assert (keys.pool.find_ids([top[i] for i in some], 0) == some + 1).all()
    assert keys.number - num_blocks > extra + old_lines // 4 - 2
    keys.check()


def rows_of(hashes):
    """As `digest` of each, with the numbers from 0."""
    rows = np.zeros((len(hashes), 4), np.uint64)
    rows[:, 0] = np.array(hashes, np.uint64) << np.uint64(32)
    rows[:, 1] = 1
    rows[:, 2] = range(len(hashes))
    return rows.view(np.uint8)


def test_the_last_line_that_keys_of_the_last_reached_is_kept_wherever_pages_begin():
    # Keys of the last line fill it and the first ones, and half of one behind these: each of 65,
    # of which one at least begins a page. All other keys have their homes in between.
    num_blocks, num_extra = 11_000, 4096
    rows = rows_of([0x8800000 + h * 15 // 16 & ~1 for h in any_hashes(num_blocks + num_extra)])
    # Not side by side: the table would not be asked.
    order = np.random.default_rng(0).permutation(num_blocks)
    for num_full in range(65):
        num_top = 8 + 8 * num_full + 4
        rows[:num_top] = rows_of([TOP] * num_top)
        pool = BlockPool(num_blocks + 1, True, UNIT)
        pool.cache_full_ids(range(1, num_blocks + 1), rows[:num_blocks], 0, 2 * UNIT)
        given_back = 0
        for start in range(num_blocks, num_blocks + num_extra, 32):
            before = pool.nbytes
            pool.cache_partial_ids(range(1, 33), rows[start : start + 32], [UNIT] * 32, 0)
            if pool.nbytes < before:
                given_back += 1
                assert (pool.find_ids(rows[order], 0) == order + 1).all()
        assert given_back >= 2


def test_lines_that_were_passed_too_often_to_be_counted_can_be_left():
    keys = Keys(400, any_hashes(400))
    for start in range(0, 1 << 32, 1 << 28):  # each line from there on is passed 255 times
        for block in range(1, 401):
            keys.evict(block)
        keys.pool.cache_full_ids(range(1, 401), [digest(start, i) for i in range(400)], 0, 2 * UNIT)
        keys.holders = {digest(start, i): i + 1 for i in range(400)}
    keys.add_until_growth(any_hashes(1000, 1))
    fresh = iter(any_hashes(1000, 2))
    while keys.num_leaving:
        keys.add(next(fresh))
        keys.check([digest(TOP, 10**6), digest(0, 10**6)])


@pytest.mark.parametrize("count", [30, 100])  # within what grows it little; beyond
def test_a_batch_that_fits_only_too_tightly_makes_the_table_grow_enough_first(count):
    keys = Keys(400, any_hashes(400))
    num_cells = keys.pool.table_stats()["num_cells"]
    for block in range(401 - count, 401):
        keys.evict(block)
    keys.num_blocks = 400 - count
    for table_hash in any_hashes(num_cells * MAX_FILLED // 100 - 400 + count, 1):
        keys.add(table_hash)
    assert keys.pool.table_stats()["num_cells"] == num_cells
    rows = [digest(h, 10**6 + i) for i, h in enumerate(any_hashes(count, 2))]
    keys.pool.cache_full_ids(range(401 - count, 401), rows, 0, 2 * UNIT)
    keys.holders.update(zip(rows, range(401 - count, 401), strict=True))
    stats = keys.pool.table_stats()
    assert stats["num_used"] <= stats["num_cells"] * MAX_FILLED // 100
    keys.check()


@pytest.mark.parametrize("count", [2, 7, 19, 300])
def test_a_batch_moves_as_many_lines_as_its_keys_may_need_in_the_old_array(count):
    keys = Keys(400, any_hashes(400))
    num_lines = keys.pool.table_stats()["num_cells"] // 8
    most = num_lines * 8 * MAX_FILLED // 100
    for table_hash in any_hashes(most - 400, 1):
        keys.add(table_hash)
    assert not keys.num_leaving
    rows = [digest(TOP, 10**6 + i) for i in range(count)]
    blocks = [i % 400 + 1 for i in range(count)]
    keys.pool.cache_partial_ids(blocks, rows, [UNIT] * count, 0)
    keys.holders.update(zip(rows, blocks, strict=True))
    keys.check()
    # Room for the batch is made at once.
    left, calls = max(num_lines - 4 * count, 0), 0
    while keys.num_leaving:
        keys.add(TOP)
        keys.check()
        calls += 1
    assert calls == -(-left // 4)


@pytest.mark.parametrize("beside", [-2, 0, 2])
@pytest.mark.parametrize("num_blocks", [200, 321, 410])
def test_keys_whose_hashes_are_the_first_of_a_line_are_on_the_right_side(num_blocks, beside):
    pool = BlockPool(num_blocks + 1, True, UNIT)
    pool.cache_full_ids([1], [digest(0)], 0, UNIT)
    num_lines = pool.table_stats()["num_cells"] // 8
    # Half of them are odd, which no key's hash is: the last of the line before, instead.
    chosen = [(-(-(line << 32) // num_lines) & ~1) + beside for line in range(1, num_lines)]
    keys = Keys(num_blocks, chosen + any_hashes(num_blocks - len(chosen)))
    fresh = iter(any_hashes(1000, 1))
    keys.add_until_growth(fresh)
    assert keys.num_leaving == 8 * num_lines
    while keys.num_leaving:
        keys.check()
        keys.add(next(fresh))
    keys.check()


def test_a_batch_that_needs_more_than_the_growing_table_has_waits_for_all():
    keys = Keys(200, any_hashes(200))
    keys.add_until_growth(any_hashes(1000, 1))
    assert keys.num_leaving
    rows = [digest(h, 10**5 + i) for i, h in enumerate(any_hashes(400, 3))]
    blocks = [i % 200 + 1 for i in range(400)]
    keys.pool.cache_partial_ids(blocks, rows, [UNIT] * 400, 0)
    keys.holders.update(zip(rows, blocks, strict=True))
    assert keys.num_leaving == 0
    keys.check()


def test_the_second_holder_of_a_key_follows_on_either_side():
    keys = Keys(200, any_hashes(200))
    copied = list(keys.holders)[:150]
    heirs = [block % 200 + 1 for block in range(1, 151)]
    keys.pool.cache_partial_ids(heirs, copied, [UNIT] * 150, 0)
    fresh = iter(any_hashes(1000, 1))
    keys.add_until_growth(fresh)
    blocks = iter(range(1, 151))
    while keys.num_leaving:
        block = next(blocks)
        assert keys.holders[copied[block - 1]] == block
        keys.evict(block)
        # Of this key only its second holder is left, of the key before nobody.
        keys.holders[copied[block - 1]] = heirs[block - 1]
        keys.check(copied[block - 2 : block - 1] if block > 1 else [])
        keys.add(next(fresh))


def growing_keys():
    keys = Keys(200, any_hashes(200))
    keys.add_until_growth(any_hashes(1000, 1))
    assert keys.num_leaving
    return keys


def test_a_saved_pool_that_grows_comes_back_whole(tmp_path):
    keys = growing_keys()
    copied = list(keys.holders)[:100]
    keys.pool.cache_partial_ids([b % 200 + 1 for b in range(1, 101)], copied, [UNIT] * 100, 0)
    while not keys.num_leaving:
        keys.add(any_hashes(1, keys.number)[0])
    keys.pool.save(tmp_path / "pool")
    back = BlockPool.load(tmp_path / "pool")
    back.check_consistency()
    assert back.num_registrations == keys.pool.num_registrations
    for key in keys.holders:
        assert back.find_ids([key], 0).tolist() == keys.pool.find_ids([key], 0).tolist()
    for block in range(1, 101):  # the second holder is next
        keys.pool.evict_ids([block])
        back.evict_ids([block])
        assert back.find_ids(copied, 0).tolist() == keys.pool.find_ids(copied, 0).tolist()
    back.check_consistency()


def test_a_reset_ends_growth():
    keys = growing_keys()
    assert keys.pool.reset_prefix_cache()
    assert keys.num_leaving == 0
    assert keys.pool.num_cached_keys == 0
    assert (keys.pool.find_ids(list(keys.holders), 0) == -1).all()
    keys.pool.check_consistency()
    keys.pool.cache_full_ids([1], [digest(TOP)], 0, UNIT)
    assert keys.pool.find_ids([digest(TOP)], 0).tolist() == [1]


def test_a_prefix_cache_finds_keys_on_both_sides():
    keys = growing_keys()
    cache = PrefixCache(keys.pool, [FullAttention(UNIT)])
    prefix = list(keys.holders)[200:]
    while keys.num_leaving:
        match = cache.lookup(prefix)
        assert match.block_ids[0].tolist() == [keys.holders[key] for key in prefix]
        keys.add(any_hashes(1, keys.number)[0])
