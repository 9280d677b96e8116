# SPDX-License-Identifier: Apache-2.0
"""Each allocation of each operation fails in turn, and the pool does not change.

Needs a debug build (CPOOL_DEBUG=1), whose memory layer can be told to fail.
"""

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

import cpool
import cpool.core.pool

from .support import dump, make_request

testing = getattr(cpool.core.pool, "_testing", None)
pytestmark = pytest.mark.skipif(
    testing is None, reason="a release build cannot fail allocations: build with CPOOL_DEBUG=1"
)

CHAIN = make_request(600)
OTHER_CHAIN = make_request(600, seed=1)
NUM_BLOCKS = 600
WIDE_KEY = bytes(range(68))
LARGE = 2500  # Registrations that reserve memory in several steps.
LARGE_CHAIN = make_request(LARGE, seed=2)


def held(num_held: int = 500, num_blocks: int = NUM_BLOCKS) -> Any:
    pool = cpool.BlockPool(num_blocks, True, 4, enable_kv_cache_events=True)
    pool.get_new_block_ids(num_held)
    return pool


def registered() -> Any:
    """Full blocks, blocks with extra keys, duplicates; then free room in front."""
    pool = held()
    pool.cache_full_ids(range(1, 101), CHAIN.block_hashes[:100], 0, 4)
    pool.cache_full_ids(range(101, 201), CHAIN.block_hashes[:100], 0, 4)
    for block_id in range(201, 301):
        for boundary in (3, 2):
            digest, parent = OTHER_CHAIN.block_hashes[boundary - 1], OTHER_CHAIN.block_hashes[0]
            pool.cache_partial_id(block_id, digest, 4 * boundary, 1, parent_hash=parent)
    return pool


def crowded() -> Any:
    """As many keys as the table takes without growing: 30 primary ones, the rest extra."""
    pool = held(50, 60)
    pool.cache_full_ids(range(1, 31), CHAIN.block_hashes[:30], 0, 4)
    num_cells = pool.table_stats()["num_cells"]
    for number in range(num_cells * 80 // 100 - 30):
        pool.cache_partial_id(1 + number % 30, OTHER_CHAIN.block_hashes[number], 4, 1)
    assert pool.table_stats()["num_cells"] == num_cells
    return pool


def freed() -> Any:
    pool = registered()
    pool.free_ids(range(1, 501))
    return pool


def emptied(pool: Any) -> Any:
    pool.take_events()
    return pool


Operation = Callable[[Any], Any]

OPERATIONS: dict[str, tuple[Callable[[], Any], Operation]] = {
    "get_new_blocks": (freed, lambda pool: pool.get_new_blocks(599)),
    "get_new_block_ids": (freed, lambda pool: pool.get_new_block_ids(599)),
    "touch": (freed, lambda pool: pool.touch([pool.blocks[i] for i in range(1, 300)])),
    "touch_ids": (freed, lambda pool: pool.touch_ids(range(1, 300))),
    "free_blocks": (
        registered,
        lambda pool: pool.free_blocks([pool.blocks[i] for i in range(1, 300)]),
    ),
    "free_ids": (registered, lambda pool: pool.free_ids(range(1, 300))),
    "unpin_blocks": (
        registered,
        lambda pool: pool.unpin_blocks([pool.blocks[i] for i in range(1, 300)], print),
    ),
    "evict_blocks": (registered, lambda pool: pool.evict_blocks(range(1, 300))),
    "evict_ids": (registered, lambda pool: pool.evict_ids(range(1, 300))),
    "thousands of registrations": (
        lambda: held(LARGE, LARGE + 1),
        lambda pool: pool.cache_full_ids(range(1, LARGE + 1), LARGE_CHAIN.block_hashes, 0, 4),
    ),
    "thousands of duplicates": (
        lambda: held(LARGE, LARGE + 1),
        lambda pool: pool.cache_full_ids(
            range(1, LARGE + 1), LARGE_CHAIN.block_hashes[: LARGE // 2] * 2, 0, 4
        ),
    ),
    "first registration": (held, lambda pool: pool.cache_partial_id(1, bytes(32), 4, 0)),
    "first registration by handle": (
        held,
        lambda pool: pool.cache_partial_block(CHAIN, pool.blocks[1], 4, 0, 4),
    ),
    "cache_full_blocks": (
        held,
        lambda pool: pool.cache_full_blocks(
            CHAIN, [pool.blocks[i] for i in range(1, 500)], 0, 499, 4, 0
        ),
    ),
    "cache_full_ids": (
        held,
        lambda pool: pool.cache_full_ids(range(1, 501), CHAIN.block_hashes[:500], 0, 4),
    ),
    "more keys": (
        registered,
        lambda pool: pool.cache_full_ids(range(301, 501), OTHER_CHAIN.block_hashes[:200], 0, 4),
    ),
    "promotion": (
        registered,
        lambda pool: pool.cache_full_blocks(
            OTHER_CHAIN, [pool.blocks[i] for i in range(201, 301)], 0, 100, 16, 1
        ),
    ),
    "an extra key": (
        registered,
        lambda pool: pool.cache_partial_id(299, OTHER_CHAIN.block_hashes[0], 4, 1),
    ),
    "a first extra key": (
        registered,
        lambda pool: pool.cache_partial_id(100, OTHER_CHAIN.block_hashes[0], 4, 1),
    ),
    "a longer boundary": (
        registered,
        lambda pool: pool.cache_partial_block(OTHER_CHAIN, pool.blocks[299], 16, 1, 16),
    ),
    "new contents": (
        registered,
        lambda pool: pool.cache_partial_block(OTHER_CHAIN, pool.blocks[299], 4, 1, 16, True),
    ),
    "move_block_hashes": (
        registered,
        lambda pool: pool.move_block_hashes(pool.blocks[299], pool.blocks[400]),
    ),
    "move_ids": (registered, lambda pool: pool.move_ids(299, 400)),
    "a key that makes the table grow": (
        crowded,
        lambda pool: pool.cache_partial_id(40, CHAIN.block_hashes[40], 4, 2),
    ),
    "keys that make the table grow": (
        crowded,
        lambda pool: pool.cache_full_ids(range(31, 51), CHAIN.block_hashes[31:51], 3, 4),
    ),
    "a wider key": (
        registered,
        lambda pool: pool._insert_block_hash(WIDE_KEY, pool.blocks[400], num_tokens=4),
    ),
    "a wider extra key": (
        registered,
        lambda pool: pool._insert_block_hash(WIDE_KEY, pool.blocks[299], num_tokens=4),
    ),
    "a wider key assigned by hand": (
        registered,
        lambda pool: pool.blocks[400].set_block_hash(WIDE_KEY, 4),
    ),
    "snapshot_events": (registered, lambda pool: pool.snapshot_events()),
    "a snapshot as a batch": (
        lambda: emptied(registered()),
        lambda pool: pool.take_event_runs(snapshot=True),
    ),
    "_insert_block_hash": (
        registered,
        lambda pool: pool._insert_block_hash(bytes(36), pool.blocks[400], num_tokens=4),
    ),
    "reset_prefix_cache": (freed, lambda pool: pool.reset_prefix_cache()),
    "emit_cached_block_events": (
        registered,
        lambda pool: pool.emit_cached_block_events(CHAIN, 100, 4, 0),
    ),
    "get_cached_block": (
        registered,
        lambda pool: pool.get_cached_block(CHAIN.block_hashes[0], [0]),
    ),
    "find_ids": (registered, lambda pool: pool.find_ids(CHAIN.block_hashes, 0)),
    "find_prefix_ids": (registered, lambda pool: pool.find_prefix_ids(CHAIN.block_hashes, 0)),
    "take_events": (registered, lambda pool: pool.take_events()),
}

# How many of the pool's own allocations must have failed at least: the arrays that are built
# beside the old ones.
MUST_ALLOCATE = {
    "thousands of registrations": 10,  # Columns, table, chunks of two arenas.
    "thousands of duplicates": 10,
    "first registration": 5,  # Two columns, spaces, table, two arenas.
    "first registration by handle": 5,
    "cache_full_blocks": 5,
    "cache_full_ids": 5,
    "a key that makes the table grow": 1,
    "keys that make the table grow": 2,  # Table, spaces or log of what is replaced.
    "a wider key": 5,  # Column, and directory and chunks of two arenas.
    "a wider extra key": 5,
    "a wider key assigned by hand": 5,
    "snapshot_events": 7,
    "a snapshot as a batch": 7,
}


def share_a_wide_key(pool: Any) -> None:
    """Wide digests in every kind of place: a block's own, an extra key's, a shared key's."""
    for block_id in (400, 401, 299):
        pool._insert_block_hash(WIDE_KEY, pool.blocks[block_id], num_tokens=4)
        pool._insert_block_hash(WIDE_KEY[::-1], pool.blocks[block_id], num_tokens=4)


# What goes wrong later if the operation, tried again, was content with half of the room.
FOLLOW_UPS = {
    "a wider key": share_a_wide_key,
    "a wider extra key": share_a_wide_key,
    "a wider key assigned by hand": share_a_wide_key,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failed_allocation_changes_nothing(name: str) -> None:
    build, operation = OPERATIONS[name]
    follow_up = FOLLOW_UPS.get(name, lambda pool: None)
    clean = build()
    operation(clean)
    follow_up(clean)
    expected = dump(clean)
    num_failures = 0
    try:
        while True:
            pool = build()  # What an earlier failure left reserved would not be asked for again.
            before = dump(pool)
            testing.fail_allocation(num_failures + 1)
            try:
                operation(pool)
                break
            except MemoryError:
                testing.fail_allocation(0)
            num_failures += 1
            assert dump(pool) == before
            pool.check_consistency()
            operation(pool)
            follow_up(pool)
            assert dump(pool) == expected
    finally:
        testing.fail_allocation(0)
    follow_up(pool)
    assert dump(pool) == expected
    assert num_failures >= MUST_ALLOCATE.get(name, 0)
    pool.check_consistency()


def test_the_operations_that_must_grow_the_table_do() -> None:
    for name in ("a key that makes the table grow", "keys that make the table grow"):
        build, operation = OPERATIONS[name]
        pool = build()
        before = pool.table_stats()["num_cells"]
        operation(pool)
        assert pool.table_stats()["num_cells"] > before


def test_a_table_that_could_not_grow_leaves_no_memory_behind() -> None:
    build, operation = OPERATIONS["a key that makes the table grow"]
    pool = build()
    sizes = []
    tracemalloc.start()
    try:
        for _ in range(50):
            testing.fail_allocation(1)
            with pytest.raises(MemoryError):
                operation(pool)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        testing.fail_allocation(0)
        tracemalloc.stop()
    assert sizes[-1] - sizes[10] < 20_000  # Of 40 tables each has some thousand bytes.


def test_a_pool_that_cannot_be_built_leaves_nothing_behind() -> None:
    num_failures = 0
    try:
        while True:
            testing.fail_allocation(num_failures + 1)
            try:
                cpool.BlockPool(1000, True, 16)
                break
            except MemoryError:
                num_failures += 1
    finally:
        testing.fail_allocation(0)
    assert num_failures > 0
    cpool.BlockPool(1000, True, 16).check_consistency()


def test_allocations_are_counted() -> None:
    before = testing.num_allocations()
    cpool.BlockPool(1000, True, 16)
    assert testing.num_allocations() > before
