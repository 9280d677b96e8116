# SPDX-License-Identifier: Apache-2.0
"""A pool that knows the width of its hashes takes the memory for keys when it is built."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cpool
import cpool.core.pool

from .test_memory import digests

testing = getattr(cpool.core.pool, "_testing", None)
NUM_BLOCKS = 100_000
# Chunks of records for keys that several blocks hold: there from the first registration on.
SLACK = 1 << 20


def new_pool(hash_width: int | None, num_blocks: int = NUM_BLOCKS, **options: Any) -> Any:
    return cpool.BlockPool(num_blocks, True, 16, hash_width=hash_width, **options)


def fill(pool: Any, width: int, seed: int = 0) -> np.ndarray:
    """Register every block once; the digests."""
    rows = digests(pool.num_gpu_blocks - 1, width, seed)
    ids = pool.get_new_block_ids(len(rows))
    pool.cache_full_ids(ids, rows, 0, 16)
    assert (pool.find_ids(rows[:1000], 0) == ids[:1000]).all()
    return rows


def empty(pool: Any) -> None:
    pool.free_ids(np.arange(1, pool.num_gpu_blocks))
    assert pool.reset_prefix_cache()


RESIDENT = """
import os, sys
import numpy as np
from cpool import BlockPool

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

width = eval(sys.argv[1])
rows = np.random.default_rng(0).integers(0, 256, (10_000, 32), np.uint8)
BlockPool(1000, True, 16).cache_full_ids(np.arange(1, 3), rows[:2], 0, 16)
before = resident()
pool = BlockPool(1_000_000, True, 16, hash_width=width)
built = resident()
# Blocks from everywhere, so that every page of the columns is written to.
ids = pool.get_new_block_ids(999_999)[::100][: len(rows)]
faults = resident()
pool.cache_full_ids(ids, rows[: len(ids)], 0, 16)
print(built - before, resident() - faults, pool.nbytes)
"""


def resident_bytes(hash_width: int | None) -> list[int]:
    """Bytes that became resident when the pool was built, and by registrations; nbytes."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", RESIDENT, repr(hash_width)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [int(number) for number in run.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_registrations_find_their_memory_there() -> None:
    built, by_registrations, nbytes = resident_bytes(32)
    assert built >= nbytes - 2 * SLACK
    assert by_registrations <= SLACK
    # Not told, the pool takes it as it comes.
    built, by_registrations, nbytes = resident_bytes(None)
    assert built <= nbytes // 3
    assert by_registrations >= nbytes // 2


@pytest.mark.parametrize("width", [16, 32])
def test_a_pool_takes_the_same_memory_sooner(width: int) -> None:
    prepared, other = new_pool(width), new_pool(None)
    before = prepared.nbytes
    fill(prepared, width)
    fill(other, width)
    assert prepared.nbytes == other.nbytes
    assert prepared.nbytes - before <= SLACK < before - new_pool(None).nbytes


@pytest.mark.parametrize("expected", [8, 16, 32, 64, 255])
@pytest.mark.parametrize("width", [1, 16, 32, 33, 255])
def test_memory_follows_the_hashes_that_come(expected: int, width: int) -> None:
    pool, other = new_pool(expected, 1000), new_pool(None, 1000)
    for seed in range(2):
        rows = digests(200, max(width, 8), seed)[:, :width]
        for each in (pool, other):
            ids = each.get_new_block_ids(200)
            each.cache_full_ids(ids, rows, 0, 16)
            assert (each.find_ids(rows, 0) == ids).all()
        assert pool.nbytes == other.nbytes
        pool.check_consistency()
        for each in (pool, other):
            each.free_ids(ids)
            assert each.reset_prefix_cache()


def test_a_reset_keeps_what_was_prepared_and_nothing_else() -> None:
    pool = new_pool(32)
    built = pool.nbytes
    rows = fill(pool, 32)
    # As many extra keys, so that the table grows, and keys of two blocks.
    pool.cache_partial_ids(
        np.arange(1, NUM_BLOCKS), digests(NUM_BLOCKS - 1, 32, 1), np.full(NUM_BLOCKS - 1, 16), 1
    )
    pool.cache_partial_ids([1, 2], rows[[7, 7]], [16, 16], 2)
    assert pool.nbytes > 1.5 * built
    empty(pool)
    assert pool.nbytes <= built
    assert pool.num_registrations == 0
    assert (pool.find_ids(rows, 0) == -1).all()
    assert not pool.key_num_tokens.any()
    pool.check_consistency()
    # The queue's order is as before the reset: in order of the frees.
    fill(pool, 32, seed=2)
    assert (pool.find_ids(rows, 0) == -1).all()
    pool.check_consistency()
    empty(pool)
    assert pool.nbytes == built


def add_extra_keys(pool: Any, keys_per_block: int) -> None:
    """So many on each block, in one batch: a table for a key a block becomes too small."""
    ids = np.repeat(np.arange(1, pool.num_gpu_blocks), keys_per_block)
    pool.cache_partial_ids(ids, digests(len(ids), 32, 1), np.full(len(ids), 16), 1)


def test_a_table_that_grew_is_as_at_first_after_each_reset() -> None:
    pool = new_pool(32, 1000)
    built = pool.nbytes
    for _ in range(3):
        add_extra_keys(pool, 20)
        assert pool.nbytes > 2 * built
        assert pool.reset_prefix_cache()
        assert pool.nbytes == built
        pool.check_consistency()


@pytest.mark.skipif(testing is None, reason="a release build cannot fail allocations")
def test_a_reset_that_finds_no_memory_for_a_table_succeeds() -> None:
    pool = new_pool(32, 1000)
    built = pool.nbytes
    add_extra_keys(pool, 20)
    testing.fail_allocation(1)
    try:
        assert pool.reset_prefix_cache()
    finally:
        testing.fail_allocation(0)
    assert pool.num_registrations == 0
    assert pool.nbytes <= built
    pool.check_consistency()
    fill(pool, 32)
    empty(pool)
    assert pool.nbytes == built


@pytest.mark.skipif(testing is None, reason="a release build cannot fail allocations")
@pytest.mark.parametrize("width", [8, 16, 32, 33, 255])
@pytest.mark.parametrize("after_reset", [False, True])
def test_a_registration_that_finds_no_memory_leaves_a_usable_pool(
    width: int, after_reset: bool
) -> None:
    for countdown in range(1, 100):
        pool = new_pool(32, 100)
        if after_reset:
            fill(pool, 24)
            empty(pool)
        ids = pool.get_new_block_ids(9)
        rows = digests(9, width)
        testing.fail_allocation(countdown)
        try:
            pool.cache_full_ids(ids, rows, 0, 16)
        except MemoryError:
            testing.fail_allocation(0)
            assert pool.num_registrations == 0
            pool.check_consistency()
            # Hashes of the expected width still come, and those that did not get in.
            for other in (32, width):
                pool.cache_full_ids(ids, digests(9, other), 0, 16)
                assert (pool.find_ids(digests(9, other), 0) == ids).all()
                pool.check_consistency()
                pool.free_ids(ids)
                assert pool.reset_prefix_cache()
                ids = pool.get_new_block_ids(9)
        else:
            break
        finally:
            testing.fail_allocation(0)
    assert 3 <= countdown < 100


def test_a_view_of_keys_forbids_the_reset_of_a_prepared_pool_too() -> None:
    pool = new_pool(32, 100)
    ids = pool.get_new_block_ids(9)
    pool.cache_full_ids(ids, digests(9, 32), 0, 16)
    pool.free_ids(ids)
    view = pool.key_num_tokens
    with pytest.raises(BufferError, match="views of the key columns"):
        pool.reset_prefix_cache()
    assert view[ids].tolist() == list(range(16, 160, 16))
    del view
    assert pool.reset_prefix_cache()


def test_without_caching_nothing_is_prepared() -> None:
    pool = cpool.BlockPool(NUM_BLOCKS, False, 16, hash_width=32)
    assert pool.nbytes == cpool.BlockPool(NUM_BLOCKS, False, 16).nbytes


@pytest.mark.parametrize(
    ("width", "error"),
    [(0, ValueError), (256, ValueError), (-1, ValueError), ("32", TypeError), (32.0, TypeError)],
)
def test_a_width_that_no_hash_has_is_refused(width: Any, error: type[Exception]) -> None:
    with pytest.raises((error, cpool.ContractError), match="hash_width"):
        new_pool(width)


@pytest.mark.skipif(testing is None, reason="a release build cannot fail allocations")
def test_a_pool_that_finds_no_memory_can_be_built_again() -> None:
    for countdown in range(1, 100):
        pool = cpool.BlockPool.__new__(cpool.BlockPool)
        testing.fail_allocation(countdown)
        try:
            pool.__init__(1000, True, 16, hash_width=32)
        except MemoryError:
            testing.fail_allocation(0)
            pool.__init__(1000, True, 16, hash_width=32)
            fill(pool, 32)
            pool.check_consistency()
        else:
            break
        finally:
            testing.fail_allocation(0)
    assert 4 <= countdown < 100
