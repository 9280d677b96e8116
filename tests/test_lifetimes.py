# SPDX-License-Identifier: Apache-2.0
"""Who may outlive whom: handles, views, pools, processes, interpreters."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpool

from .support import dump, make_request

CHAIN = make_request(8)


def test_handles_of_a_dead_pool_say_what_they_last_said() -> None:
    pool = cpool.BlockPool(6, True, 4)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(CHAIN, blocks, 0, 2, 4, 1)
    null, end = pool.null_block, pool.free_block_queue.fake_free_list_tail
    dead = weakref.ref(pool)
    del pool
    assert dead() is None
    assert [block.block_id for block in blocks] == [1, 2, 3]
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    assert blocks[1].block_hash == CHAIN.block_hashes[1] + b"\0\0\0\1"
    assert blocks[1].block_hash_num_tokens == 8
    assert null.is_null
    assert end.block_id == -1
    assert [block.pool for block in blocks] == [None] * 3
    assert blocks[0].next_free_block is None
    assert "block_id=2" in repr(blocks[1])
    blocks[0].ref_cnt = 5  # A block of its own now.
    assert blocks[0].ref_cnt == 5


def test_a_dead_pools_block_is_refused_by_other_pools() -> None:
    (block,) = cpool.BlockPool(6, True, 4).get_new_blocks(1)
    pool = cpool.BlockPool(6, True, 4)
    before = dump(pool)
    for call in (pool.free_blocks, pool.touch, lambda blocks: pool.unpin_blocks(blocks, print)):
        with pytest.raises(cpool.ContractError, match="block 1 does not belong to"):
            call([block])
    assert dump(pool) == before


def test_handles_die_before_and_after_their_pool_in_any_order() -> None:
    for keep in range(8):
        pool = cpool.BlockPool(300, True, 4)
        blocks = list(pool.blocks)
        del blocks[:: keep + 1]
        del pool
        gc.collect()
        assert all(block.pool is None for block in blocks)
        del blocks[::2]
        gc.collect()


def test_a_pool_in_a_cycle_is_collected() -> None:
    pool = cpool.BlockPool(6, True, 4)
    block = pool.blocks[3]
    pool.metrics_collector = pool
    pool.blocks_that_somebody_keeps = [block]
    dead = weakref.ref(pool)
    del pool
    gc.collect()
    assert dead() is None
    assert block.block_id == 3
    assert block.pool is None


def test_views_keep_their_pool_alive() -> None:
    pool = cpool.BlockPool(6, True, 4)
    pool.touch_ids([2, 2])
    states, tokens, blocks = pool.states, pool.key_num_tokens, pool.blocks
    dead = weakref.ref(pool)
    del pool
    assert states["ref_cnt"][2] == 2
    assert blocks[2].ref_cnt == 2
    assert tokens.tolist() == [0] * 6
    del states, tokens
    assert dead() is not None
    del blocks
    assert dead() is None


def test_a_view_of_the_key_columns_forbids_the_reset_that_would_free_them() -> None:
    pool = cpool.BlockPool(6, True, 4)
    pool.cache_partial_id(1, CHAIN.block_hashes[0], 4, 0)
    tokens = pool.key_num_tokens
    with pytest.raises(BufferError, match="1 numpy views of the key columns are alive"):
        pool.reset_prefix_cache()
    assert tokens.tolist() == [0, 4, 0, 0, 0, 0]
    assert pool.num_cached_keys == 1
    del tokens
    assert pool.reset_prefix_cache()


def test_a_pool_that_was_never_initialised_only_complains() -> None:
    pool = cpool.BlockPool.__new__(cpool.BlockPool)
    calls = [
        lambda: pool.get_new_blocks(1),
        lambda: pool.null_block,
        lambda: pool.touch_ids([0]),
        lambda: pool.registrations(0),
        lambda: pool.cache_partial_id(0, bytes(32), 4, 0),
        lambda: pool.save(os.devnull),
    ]
    for call in calls:
        with pytest.raises((ValueError, AttributeError, ZeroDivisionError, TypeError)):
            call()
    with pytest.raises(cpool.ContractError, match="never initialised"):
        _ = cpool.KVCacheBlock.__new__(cpool.KVCacheBlock).ref_cnt


def test_a_pool_is_initialised_once() -> None:
    pool = cpool.BlockPool(6, True, 4)
    with pytest.raises(cpool.ContractError, match="cannot be initialised twice"):
        pool.__init__(9, True, 4)
    assert len(pool.blocks) == 6


# Processes and interpreters.


def test_a_fork_has_a_pool_of_its_own() -> None:
    pool = cpool.BlockPool(50, True, 4)
    blocks = pool.get_new_blocks(8)
    pool.cache_full_blocks(CHAIN, blocks, 0, 8, 4, 0)
    before = dump(pool)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if dump(pool) == before and blocks[0] is pool.blocks[1]:
                pool.free_blocks(blocks[::-1])
                pool.get_new_blocks(49)
                pool.check_consistency()
                status = 0 if pool.num_cached_keys == 0 else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert dump(pool) == before
    pool.check_consistency()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pools_and_handles_are_not_pickled(protocol: int) -> None:
    pool = cpool.BlockPool(6, True, 4)
    with pytest.raises(TypeError, match="BlockPool cannot be pickled or copied"):
        pickle.dumps(pool, protocol)
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(pool.blocks[1], protocol)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_pools_and_handles_are_not_copied(copied: Any) -> None:
    pool = cpool.BlockPool(6, True, 4)
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copied(pool)
    with pytest.raises(TypeError, match="pickle"):
        copied(pool.blocks[1])


SECOND_INTERPRETER = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import cpool
pool = cpool.BlockPool(6, True, 4)
inside = '''
try:
    import cpool.core.pool
except ImportError as error:
    message = str(error)
else:
    message = "imported"
open(%r, "w").write(message)
'''
number = interpreters.create()
interpreters.run_string(number, inside % %r)
interpreters.destroy(number)
pool.get_new_blocks(5)
pool.check_consistency()
print("unharmed")
"""


def test_a_second_interpreter_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    message = tmp_path / "message"
    code = SECOND_INTERPRETER.replace("inside % %r", f"inside % {str(message)!r}")
    run = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )
    assert run.stdout == "unharmed\n", run.stderr
    assert "interpreter" in message.read_text()


# Finalizers that call the pool while the pool is at work.


class CallsWhenCollected:
    """In a cycle, so that the garbage collector decides when its finalizer runs."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.me = self

    def __del__(self) -> None:
        self.call()


def at_every_collection(call: Any, work: Any) -> int:
    """Run ``work`` with a collection at nearly every new object; number of calls made."""
    made: list[None] = []

    def once() -> None:
        made.append(None)
        call()

    before = gc.get_threshold()
    try:
        for threshold in range(1, 40):
            CallsWhenCollected(once)
            gc.set_threshold(threshold, 1, 1)
            work()
            gc.set_threshold(0)
            gc.collect()
    finally:
        gc.set_threshold(*before)
    return len(made)


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("by_ids", [False, True])
def test_a_finalizer_that_allocates_gets_other_blocks(observed: bool, by_ids: bool) -> None:
    pool = cpool.BlockPool(300, True, 4, enable_kv_cache_events=observed)
    taken: list[int] = []

    def steal() -> None:
        taken.extend(pool.get_new_block_ids(2).tolist())

    def work() -> None:
        if by_ids:
            ids = pool.get_new_block_ids(3).tolist()
        else:
            ids = [block.block_id for block in pool.get_new_blocks(3)]
        taken.extend(ids)

    assert at_every_collection(steal, work) > 10
    assert len(taken) == len(set(taken))
    assert 0 not in taken
    assert pool.ref_cnts[taken].tolist() == [1] * len(taken)
    pool.check_consistency()


def test_a_finalizer_that_asks_for_the_same_handle_gets_the_same_object() -> None:
    pool = cpool.BlockPool(4, True, 4)
    kept: list[Any] = []

    def work() -> None:
        kept.append(pool.blocks[1])
        assert kept[0] is kept[-1]
        kept.clear()

    at_every_collection(lambda: kept.append(pool.blocks[1]), work)
    pool.check_consistency()


@pytest.mark.parametrize("events", [False, True])
def test_a_finalizer_that_registers_takes_no_memory_reserved_for_others(events: bool) -> None:
    pool = cpool.BlockPool(2000, True, 4, enable_kv_cache_events=events)
    ids = pool.get_new_block_ids(1999)
    spare = iter(ids[1000:].tolist())
    fresh = iter(np.random.default_rng(0).integers(0, 256, (4000, 32), np.uint8))
    registered: list[int] = []

    def register() -> None:
        for _ in range(3):
            pool.cache_partial_id(next(spare), next(fresh).tobytes(), 8, 0, parent_hash=bytes(32))
            registered.append(1)

    held = iter(ids[:1000].tolist())

    def work() -> None:
        block_id = next(held)
        pool.cache_partial_id(block_id, next(fresh).tobytes(), 4, 0)
        pool.cache_full_ids([block_id], [next(fresh).tobytes()], 0, 8)
        pool.take_events()

    assert at_every_collection(register, work) > 10
    assert len(registered) > 30  # an error in a finalizer is only a warning
    pool.check_consistency()
