# SPDX-License-Identifier: Apache-2.0
"""Budgets in bytes, a million blocks each; nothing here depends on time."""

import gc
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

import cpool

NUM_BLOCKS = 1_000_000
GC_SLACK = 64  # Objects that a test may leave tracked, at any number of blocks.


def new_pool(num_blocks: int = NUM_BLOCKS, enable_caching: bool = True) -> Any:
    return cpool.BlockPool(num_blocks, enable_caching, 16)


def digests(num: int, width: int, seed: int = 0) -> np.ndarray:
    """Distinct digests, (num, width) uint8."""
    rows = np.random.default_rng(seed).integers(0, 256, (num, width), np.uint8)
    rows[:, :8] = np.arange(num, dtype=np.uint64).view(np.uint8).reshape(num, 8)
    return rows


def fill(pool: Any, width: int) -> None:
    """Register every block but the null block once."""
    ids = pool.get_new_block_ids(pool.get_num_free_blocks())
    pool.cache_full_ids(ids, digests(len(ids), width), 0, 16)


def traced(build: Any) -> tuple[Any, int]:
    """What ``build()`` returns and the bytes that it left allocated."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = build()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return made, after - before


@pytest.mark.parametrize(("width", "budget"), [(32, 64), (16, 48)])
def test_a_registered_block_costs_no_more_than_its_budget(width: int, budget: int) -> None:
    pool = new_pool()
    fill(pool, width)
    assert pool.num_registrations == NUM_BLOCKS - 1
    assert pool.nbytes <= budget * NUM_BLOCKS
    assert sys.getsizeof(pool) <= budget * NUM_BLOCKS


@pytest.mark.parametrize(("enable_caching", "budget"), [(False, 16), (True, 20)])
def test_a_block_without_a_key_costs_no_more_than_its_budget(
    enable_caching: bool, budget: int
) -> None:
    # With caching the place of its key record is there from the start.
    pool = new_pool(enable_caching=enable_caching)
    pool.get_new_block_ids(NUM_BLOCKS - 1)
    assert sys.getsizeof(pool) <= budget * NUM_BLOCKS


@pytest.mark.parametrize("width", [32, 16])
def test_an_extra_key_costs_56_bytes_at_most(width: int) -> None:
    pool = new_pool(NUM_BLOCKS // 2)
    fill(pool, width)
    before = pool.nbytes
    num_keys = NUM_BLOCKS // 2 - 1
    for block_id, block_hash in enumerate(digests(num_keys, width, seed=1), start=1):
        pool.cache_partial_id(block_id, block_hash.tobytes(), 16, 1)
    assert pool.num_registrations == 2 * num_keys
    assert pool.nbytes - before <= 56 * num_keys


NUM_TAILS = 100_000
SPARE_BYTES = 1 << 20  # What the pool may keep for the next batch; 80 bytes an entry are 8 MB.


def with_tails(batch_size: int, events: bool = False) -> Any:
    """A pool whose first blocks have a partial entry each, none of them another's."""
    pool = cpool.BlockPool(NUM_BLOCKS, True, 16, enable_kv_cache_events=events)
    ids = pool.get_new_block_ids(NUM_TAILS)
    rows = digests(NUM_TAILS, 32)
    for start in range(0, NUM_TAILS, batch_size):
        stop = start + batch_size
        pool.cache_partial_ids(
            ids[start:stop], rows[start:stop], np.full(len(ids[start:stop]), 16), 0
        )
    assert pool.num_registrations == NUM_TAILS
    return pool


@pytest.mark.parametrize("events", [False, True])
def test_a_large_batch_of_partial_entries_keeps_no_more_than_small_ones(events: bool) -> None:
    small, large = with_tails(1000, events), with_tails(NUM_TAILS, events)
    assert large.nbytes <= small.nbytes + SPARE_BYTES


def test_extra_keys_and_promotions_in_a_large_batch_keep_what_they_need() -> None:
    pool = with_tails(1000)
    ids = np.arange(1, NUM_TAILS + 1)
    before = pool.nbytes
    pool.cache_partial_ids(ids, digests(NUM_TAILS, 32, seed=1), np.full(NUM_TAILS, 16), 1)
    assert pool.num_registrations == 2 * NUM_TAILS
    # Records of 42 bytes, heads of 4 a block, and the table, which grows.
    needed = 42 * NUM_TAILS + 4 * NUM_BLOCKS
    assert pool.nbytes - before <= needed + 12 * NUM_TAILS + SPARE_BYTES
    before = pool.nbytes
    pool.cache_full_ids(ids, digests(NUM_TAILS, 32, seed=2), 0, 32)
    assert pool.num_registrations == NUM_TAILS
    assert pool.nbytes <= before + SPARE_BYTES
    pool.check_consistency()


def test_usual_batches_find_their_memory_again() -> None:
    pool = with_tails(1000)
    ids = np.arange(1, 1001)
    sizes = set()
    for seed in range(1, 9):
        pool.evict_ids(ids)
        pool.cache_partial_ids(ids, digests(1000, 32, seed=seed), np.full(1000, 16), 0)
        sizes.add(pool.nbytes)
    assert len(sizes) == 1


@pytest.mark.parametrize("num_blocks", [1, 1000, 300_000])
def test_getsizeof_says_what_tracemalloc_saw(num_blocks: int) -> None:
    def build() -> Any:
        pool = new_pool(num_blocks)
        fill(pool, 32)
        return pool

    rows = digests(num_blocks, 32)  # Warm numpy up outside the measurement.
    del rows
    pool, num_bytes = traced(build)
    # The instance dictionary, the queue object and the like are the pool's, not its arrays'.
    assert abs(num_bytes - sys.getsizeof(pool)) <= 4096
    assert pool.nbytes <= sys.getsizeof(pool) <= pool.nbytes + 4096


def test_freeing_a_pool_returns_all_of_it() -> None:
    def build_and_drop() -> None:
        pool = new_pool(100_000)
        fill(pool, 32)
        # The run is kept, as a guess for the next lookup.
        assert len(pool.find_prefix_ids(digests(99_999, 32), 0)) == 99_999

    build_and_drop()
    _, num_bytes = traced(build_and_drop)
    assert num_bytes <= 4096


def test_memory_shrinks_back_after_reset() -> None:
    pool = new_pool(100_000)
    empty = pool.nbytes
    fill(pool, 32)
    pool.cache_partial_id(1, bytes(31) + b"\x01", 16, 1)
    assert pool.nbytes > empty + 32 * 100_000
    pool.free_ids(np.arange(1, 100_000))
    assert pool.reset_prefix_cache()
    assert pool.nbytes <= empty + 4096


def test_registering_and_evicting_for_long_does_not_grow() -> None:
    pool = new_pool(2000)
    rows = digests(40_000, 32)
    sizes = set()
    for start in range(0, len(rows), 1000):
        ids = pool.get_new_block_ids(1000)
        pool.cache_full_ids(ids, rows[start : start + 1000], 0, 16)
        pool.cache_partial_id(int(ids[0]), rows[start].tobytes(), 16, 1)
        pool.free_ids(ids)
        if start >= 4000:
            sizes.add(pool.nbytes)
    assert len(sizes) <= 2


def num_tracked(num_blocks: int) -> int:
    gc.collect()
    before = len(gc.get_objects())
    pool = new_pool(num_blocks)
    fill(pool, 32)
    gc.collect()
    tracked = len(gc.get_objects()) - before
    del pool
    return tracked


def test_what_the_garbage_collector_tracks_does_not_grow_with_the_pool() -> None:
    small, large = num_tracked(1000), num_tracked(200_000)
    assert small <= GC_SLACK
    assert large <= GC_SLACK


def test_dropped_handles_leave_nothing_behind() -> None:
    pool = new_pool(100_000)
    pool.get_new_block_ids(1)

    def walk() -> None:
        for block in pool.blocks:
            assert block.ref_cnt >= 0

    walk()
    _, num_bytes = traced(walk)
    assert num_bytes <= 4096


def test_handles_cost_a_pointer_a_block_at_most() -> None:
    pool = new_pool(100_000)
    before = pool.nbytes
    assert len([block for block in pool.blocks if block.is_null]) == 1
    assert pool.nbytes - before <= 8 * 100_000 + 4096
