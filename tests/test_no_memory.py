# SPDX-License-Identifier: Apache-2.0
"""Each allocation of each operation is refused in turn, those of Python objects too.

`test_failures.py` refuses the pool's own arrays one by one. Here CPython's allocators refuse,
so lists, integers, handles and events run out as well.
"""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cpool
from cpool.events import types

from .support import dump, event_fields, hold_nine, image, lora, make_request

# What nobody can raise is lost: compiled code that must not fail has to take no memory at all.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
testcapi = pytest.importorskip("_testcapi", reason="needs CPython's hook that refuses memory")

CHAIN = make_request(8, cache_salt="salt", lora_request=lora(), mm_features=[image("a", 0, 9)])
WIDE = bytes(range(64))
# CPython and numpy can do without some allocations: that many runs in a row must get through.
ENOUGH_SUCCESSES = 8

MODES: dict[str, dict[str, bool]] = {
    "no events": {},
    "events": {"enable_kv_cache_events": True},
    "truthful events": {"enable_kv_cache_events": True, "truthful_events": True},
    "detailed snapshots": {"enable_kv_cache_events": True, "detailed_snapshots": True},
}


def make_pool(mode: str) -> Any:
    """Blocks 1 to 9 held, as `hold_nine` does it.

    Block 9 was registered by its id, so that a compact run waits among the events.
    """
    pool = cpool.BlockPool(14, True, 4, **MODES[mode])
    hold_nine(pool, CHAIN)
    pool.cache_full_ids([9], CHAIN.block_hashes[6:7], 2, 4, 6, parent_hash=CHAIN.block_hashes[5])
    return pool


def blocks_of(pool: Any, *ids: int) -> list[Any]:
    return [pool.blocks[i] for i in ids]


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "get_new_blocks": lambda pool: pool.get_new_blocks(4),
    "get_new_block_ids": lambda pool: pool.get_new_block_ids(4),
    "touch": lambda pool: pool.touch(blocks_of(pool, 1, 12)),
    "touch_ids": lambda pool: pool.touch_ids([1, 12]),
    "free_blocks": lambda pool: pool.free_blocks(blocks_of(pool, 5, 8)),
    "free_ids": lambda pool: pool.free_ids([5, 8]),
    "unpin_blocks": lambda pool: pool.unpin_blocks(blocks_of(pool, 5, 8), print),
    "evict_blocks": lambda pool: pool.evict_blocks([1, 5]),
    "evict_ids": lambda pool: pool.evict_ids([1, 5]),
    "evicting allocation": lambda pool: pool.get_new_blocks(5),
    "cache_full_blocks": lambda pool: pool.cache_full_blocks(
        CHAIN, blocks_of(pool, 1, 2, 3, 7, 8), 3, 5, 4, 0
    ),
    "cache_full_ids": lambda pool: pool.cache_full_ids(
        [7, 8],
        CHAIN.block_hashes[3:5],
        0,
        4,
        3,
        parent_hash=CHAIN.block_hashes[2],
        token_ids=range(8),
    ),
    "promotion": lambda pool: pool.cache_full_blocks(CHAIN, blocks_of(pool, 5), 0, 1, 16, 1),
    "cache_partial_block": lambda pool: pool.cache_partial_block(CHAIN, pool.blocks[7], 8, 0, 16),
    "an extra key": lambda pool: pool.cache_partial_block(CHAIN, pool.blocks[5], 4, 1, 16),
    "a longer key": lambda pool: pool.cache_partial_block(CHAIN, pool.blocks[5], 16, 1, 16),
    "cache_partial_id": lambda pool: pool.cache_partial_id(7, CHAIN.block_hashes[0], 4, 2),
    "cache_partial_ids": lambda pool: pool.cache_partial_ids(
        [5, 7, 8, 5, 6],
        CHAIN.block_hashes[3:8],
        [16, 4, 8, 20, 8],
        1,
        parent_hashes=[None, *CHAIN.block_hashes[2:6]],
        token_ids=[range(16), [1, 2, 3, 4], None, [5], [6]],
    ),
    "insert into the map": lambda pool: pool.cached_block_hash_to_block.insert(
        bytes(36), pool.blocks[7]
    ),
    "insert an assigned key": lambda pool: pool.cached_block_hash_to_block.insert(
        bytes(36), pool.blocks[8]
    ),
    "pop from the map": lambda pool: pool.cached_block_hash_to_block.pop(
        pool.blocks[1].block_hash, 1
    ),
    "_insert_block_hash": lambda pool: pool._insert_block_hash(bytes(36), pool.blocks[7], None),
    "a wider key": lambda pool: pool._insert_block_hash(WIDE, pool.blocks[7], 4),
    "_maybe_evict_cached_block": lambda pool: pool._maybe_evict_cached_block(pool.blocks[5]),
    "move_block_hashes": lambda pool: pool.move_block_hashes(*blocks_of(pool, 5, 7)),
    "move_ids": lambda pool: pool.move_ids(5, 7),
    "set_block_hash": lambda pool: pool.blocks[7].set_block_hash(bytes(36), 8),
    "emit_cached_block_events": lambda pool: pool.emit_cached_block_events(CHAIN, 2, 4, 0),
    "take_events": lambda pool: pool.take_events(),
    "take_event_runs": lambda pool: pool.take_event_runs(),
    "find_ids": lambda pool: pool.find_ids(CHAIN.block_hashes, 0),
    "find_prefix_ids": lambda pool: pool.find_prefix_ids(CHAIN.block_hashes, 0),
    "find_full_ids": lambda pool: pool.find_full_ids(CHAIN.block_hashes, 1, 4),
    "get_cached_block": lambda pool: pool.get_cached_block(CHAIN.block_hashes[0], [0]),
    "registrations": lambda pool: pool.registrations(5),
    "free_queue_ids": lambda pool: pool.free_queue_ids(),
}


def evicting(pool: Any) -> Any:
    pool.free_ids([1, 2, 4, 5, 6])
    pool.get_new_block_ids(4)
    return pool


def all_free(pool: Any) -> Any:
    pool.free_ids(range(1, 10))
    return pool


def with_an_assigned_key(pool: Any) -> Any:
    pool.blocks[8].set_block_hash(bytes(36), 8)
    return pool


PREPARED: dict[str, Callable[[Any], Any]] = {
    "insert an assigned key": with_an_assigned_key,
    "evicting allocation": evicting,
    "reset_prefix_cache": all_free,
}
OPERATIONS["reset_prefix_cache"] = lambda pool: pool.reset_prefix_cache()


# CPython and numpy themselves raise SystemError where they return NULL and set no error.
NO_MEMORY = (MemoryError, SystemError)


def state_and_events(pool: Any) -> tuple[dict[str, Any], list[Any]]:
    """What the pool holds, and the events that it hands out."""
    state = dump(pool)
    del state["events"]
    return state, [event_fields(event) for event in pool.take_events()]


def snapshot_of(pool: Any) -> list[Any]:
    """A batch that makes up for lost events."""
    runs = pool.take_event_runs(snapshot=True)
    return [event_fields(event) for event in [runs[0], *runs[1]]]


# They need no memory, or only for the events that a snapshot can replace.
CANNOT_FAIL = {"move_ids", "take_events", "take_event_runs", "reset_prefix_cache"}
CANNOT_FAIL_WHEN = {
    ("cache_partial_id", "no events"),
    ("emit_cached_block_events", "no events"),
    ("emit_cached_block_events", "truthful events"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_refused_allocation_changes_nothing(name: str, mode: str) -> None:
    """Or the call succeeds; if then an event could not be made, a snapshot takes its place."""
    operation = OPERATIONS[name]
    prepare = PREPARED.get(name, lambda pool: pool)
    expected = []
    for call in (lambda pool: None, operation):
        pool = prepare(make_pool(mode))
        call(pool)
        state, events = state_and_events(pool)
        expected.append([(state, events), (state, snapshot_of(pool) if events else [])])
    number = num_successes = num_failures = 0
    while num_successes < ENOUGH_SUCCESSES:
        assert number < 500, "500 refusals and no end"
        pool = prepare(make_pool(mode))
        gc.disable()
        testcapi.set_nomemory(number, number + 1)
        try:
            operation(pool)
            has_failed = False
        except NO_MEMORY:
            has_failed = True
        finally:
            testcapi.remove_mem_hooks()
            gc.enable()
        pool.check_consistency()
        found = state_and_events(pool)
        if has_failed:
            num_failures += 1
            operation(pool)
            assert state_and_events(pool)[0] == expected[1][0][0], f"allocation {number}"
            pool.check_consistency()
        assert found in expected[not has_failed], f"allocation {number}"
        num_successes = 0 if has_failed else num_successes + 1
        number += 1
    assert num_failures > 0 or name in CANNOT_FAIL or (name, mode) in CANNOT_FAIL_WHEN


def test_the_answer_is_made_before_the_eviction() -> None:
    """A number beyond those that Python has ready."""
    number = num_successes = num_failures = 0
    while num_successes < ENOUGH_SUCCESSES:
        pool = cpool.BlockPool(400, True, 4)
        ids = pool.get_new_block_ids(300)
        pool.cache_full_ids(ids, make_request(300).block_hashes, 0, 4)
        before, answer = dump(pool), 0
        gc.disable()
        testcapi.set_nomemory(number, number + 1)
        try:
            answer = pool.evict_ids(ids)
            num_successes += 1
        except NO_MEMORY:
            num_successes = 0
            num_failures += 1
        finally:
            testcapi.remove_mem_hooks()
            gc.enable()
        if num_successes:
            assert answer == 300
            assert pool.num_registrations == 0
        else:
            assert dump(pool) == before
        number += 1
    assert num_failures > 0


class Hooks:
    """A metrics collector that does nothing."""

    def ignore(self, block: Any = None) -> None:
        pass

    on_block_allocated = on_block_accessed = on_block_evicted = reset = ignore


OBSERVED = ("get_new_blocks", "get_new_block_ids", "touch_ids", "evict_ids", "evicting allocation")


@pytest.mark.parametrize("name", [*OBSERVED, "reset_prefix_cache"])
def test_with_hooks_a_refused_allocation_leaves_the_pool_sound(name: str) -> None:
    """Hooks run code of the caller's, which may fail at any block: what was told stays done."""

    def watch(pool: Any) -> Any:
        pool.metrics_collector = Hooks()
        pool.unpin_blocks(pool.get_new_blocks(2), Hooks.ignore)
        return PREPARED.get(name, lambda pool: pool)(pool)

    def free_and_held(pool: Any) -> int:
        held = sum(block.ref_cnt > 0 for block in list(pool.blocks)[1:])
        return pool.get_num_free_blocks() + held

    number = num_successes = num_failures = 0
    while num_successes < ENOUGH_SUCCESSES:
        pool = watch(make_pool("truthful events"))
        pool.take_events()
        told = {(h, e.group_idx) for e in pool.snapshot_events().events for h in e.block_hashes}
        gc.disable()
        testcapi.set_nomemory(number, number + 1)
        try:
            OPERATIONS[name](pool)
            num_successes += 1
        except NO_MEMORY:
            num_successes = 0
            num_failures += 1
        finally:
            testcapi.remove_mem_hooks()
            gc.enable()
        pool.check_consistency()
        assert free_and_held(pool) == 13
        for event in pool.take_events():
            if isinstance(event, types.BlockStored):
                told |= {(h, event.group_idx) for h in event.block_hashes}
            elif isinstance(event, types.BlockRemoved):
                told -= {(h, event.group_idx) for h in event.block_hashes}
            else:
                told.clear()
        now = {(h, e.group_idx) for e in pool.snapshot_events().events for h in e.block_hashes}
        assert told == now, f"allocation {number}"
        number += 1
    assert num_failures > 0


def refuse_each(call: Callable[[], Any], check: Callable[[], Any]) -> int:
    """Call with one allocation refused after the other; ``check`` after each failure.

    Files and modules of the standard library turn a refusal into errors of many kinds.
    """
    number = num_successes = num_failures = 0
    while num_successes < ENOUGH_SUCCESSES:
        assert number < 5000, "5000 refusals and no end"
        gc.disable()
        testcapi.set_nomemory(number, number + 1)
        try:
            call()
            has_failed = False
        except Exception:
            has_failed = True
        finally:
            testcapi.remove_mem_hooks()
            gc.enable()
        number += 1
        num_successes = 0 if has_failed else num_successes + 1
        num_failures += has_failed
        if has_failed:
            check()
    return num_failures


# Found with no cpool in sight: a function that returns tuple(x for x in y), refused in turn.
SURVIVES_GENERATORS = pytest.mark.skipif(
    sys.version_info >= (3, 12),
    reason="this Python crashes when a generator cannot be allocated, and its json makes some",
)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@SURVIVES_GENERATORS
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_a_save_without_memory_leaves_the_old_file(tmp_path: Path) -> None:
    pool, path = make_pool("detailed snapshots"), tmp_path / "pool"
    pool.save(path)
    content, before, num_open = path.read_bytes(), dump(pool), open_descriptors()

    def check() -> None:
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]
        assert open_descriptors() == num_open

    assert refuse_each(lambda: pool.save(path), check) > 20
    assert dump(pool) == before
    assert dump(cpool.BlockPool.load(path)) == {**before, "events": []}


@SURVIVES_GENERATORS
def test_a_load_without_memory_makes_no_pool(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    pool = make_pool("detailed snapshots")
    pool.save(path)
    loaded: list[Any] = []
    assert refuse_each(lambda: loaded.append(cpool.BlockPool.load(path)), lambda: None) > 20
    expected = {**dump(pool), "events": []}
    assert all(dump(each) == expected for each in loaded)
    for each in loaded:
        each.check_consistency()


def test_a_large_batch_that_runs_out_of_memory_gives_back_what_it_reserved() -> None:
    num_blocks = 20_000
    pool = cpool.BlockPool(num_blocks, True, 4)
    ids = pool.get_new_block_ids(num_blocks - 1)
    request = make_request(num_blocks)
    pool.cache_full_ids(ids[:1], request.block_hashes[:1], 0, 4)
    pool.cache_partial_id(2, request.block_hashes[1], 4, 0)
    rows, ends = request.block_hashes[2:num_blocks], [4] * (num_blocks - 2)
    before, num_bytes = dump(pool), pool.nbytes
    sizes = set()

    def check() -> None:
        sizes.add(pool.nbytes)

    def call() -> None:
        pool.cache_partial_ids(ids[1:], rows, ends, 1)
        assert pool.num_registrations == num_blocks
        pool.evict_ids(ids[1:])
        pool.cache_partial_id(2, request.block_hashes[1], 4, 0)

    assert refuse_each(call, check) > 50
    assert dump(pool)["registrations"] == before["registrations"]
    # The table may have grown, and a batch of the usual size finds its memory.
    assert max(sizes) <= num_bytes + 8 * num_blocks + (1 << 20)
    pool.check_consistency()
