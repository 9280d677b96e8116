# SPDX-License-Identifier: Apache-2.0
"""Under the GIL each call is atomic, but for the callbacks in it."""

import ctypes
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cpool

from .support import make_request

NUM_THREADS = 4
NUM_ROUNDS = 150


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Threads take turns every few microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_in_threads(work: Callable[[int], None]) -> None:
    """Run ``work`` in each thread and raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("events", [False, True])
def test_no_block_is_handed_out_twice(events: bool) -> None:
    pool = cpool.BlockPool(200, True, 4, enable_kv_cache_events=events)
    owners = [0] * 200

    def work(number: int) -> None:
        chain = make_request(8, seed=number)
        for turn in range(NUM_ROUNDS):
            blocks = pool.get_new_blocks(8)
            ids = pool.get_new_block_ids(8)
            for block_id in [*ids.tolist(), *(block.block_id for block in blocks)]:
                assert owners[block_id] == 0
                owners[block_id] = number + 1
            pool.cache_full_blocks(chain, blocks, 0, 8, 4, number)
            pool.cache_partial_id(int(ids[0]), chain.block_hashes[turn % 8], 4, number)
            for block_id in [*ids.tolist(), *(block.block_id for block in blocks)]:
                assert owners[block_id] == number + 1
                owners[block_id] = 0
            pool.free_blocks(blocks)
            pool.free_ids(ids)

    run_in_threads(work)
    pool.check_consistency()
    assert pool.get_num_free_blocks() == 199


def test_handles_of_one_block_are_one_object_in_all_threads() -> None:
    pool = cpool.BlockPool(50, True, 4)

    def work(number: int) -> None:
        for _ in range(NUM_ROUNDS):
            for block_id in range(50):
                block = pool.blocks[block_id]
                assert block is pool.blocks[block_id]
                pool.touch([block])
                pool.free_blocks([block])

    run_in_threads(work)
    pool.check_consistency()
    assert pool.ref_cnts[1:].max() <= 0


def test_hooks_that_let_other_threads_in_do_not_break_the_pool() -> None:
    """A hook runs Python code, so other threads call the pool in the middle of a call."""

    class Hooks:
        def on_block_allocated(self, block: Any) -> None:
            sum(range(50))

        on_block_accessed = on_block_evicted = on_block_allocated

        def reset(self) -> None:
            pass

    pool = cpool.BlockPool(60, True, 4, metrics_collector=Hooks())

    def work(number: int) -> None:
        chain = make_request(4, seed=number)
        for turn in range(NUM_ROUNDS):
            try:
                ids = pool.get_new_block_ids(4)
            except ValueError:
                continue
            pool.cache_full_ids(ids, chain.block_hashes, 0, 4)
            # Whatever is cached is touched, also what another thread is handing out.
            found = pool.find_ids(chain.block_hashes, 0)
            found = found[found >= 0]
            try:
                pool.touch_ids(found)
            except cpool.ContractError:
                pool.free_ids(ids)
                continue
            pool.free_ids(found)
            pool.free_ids(ids)
            if turn % 10 == number:
                pool.evict_ids(ids)

    run_in_threads(work)
    pool.check_consistency()


def test_an_array_that_another_thread_writes_is_checked_and_used_as_one() -> None:
    """What is written under the GIL is seen before a call or after it."""
    pool = cpool.BlockPool(8, True, 4)
    ids = np.array([1, 2, 3], np.uint32)
    done = threading.Event()

    def scribble() -> None:
        while not done.is_set():
            ids[1] = 0xFFFFFFFF
            ids[1] = 2

    writer = threading.Thread(target=scribble)
    writer.start()
    num_done = 0
    try:
        for _ in range(2000):
            try:
                pool.touch_ids(ids)
                num_done += 1
            except cpool.BlockIdError:
                pass
    finally:
        done.set()
        writer.join()
    pool.check_consistency()
    assert pool.ref_cnts[1:4].tolist() == [num_done] * 3 or num_done == 0


def test_the_gil_is_on_once_cpool_is_imported() -> None:
    """A free-threaded interpreter has switched it back on."""
    if not hasattr(sys, "_is_gil_enabled"):
        pytest.skip("this Python has no free-threaded build")
    assert sys._is_gil_enabled()


class Slot(ctypes.Structure):
    """PyModuleDef_Slot."""

    _fields_ = (("slot", ctypes.c_int), ("value", ctypes.c_void_p))


class ModuleDef(ctypes.Structure):
    """PyModuleDef, up to its slots."""

    _fields_ = (
        ("object", ctypes.c_char * object.__basicsize__),
        ("m_init", ctypes.c_void_p),
        ("m_index", ctypes.c_ssize_t),
        ("m_copy", ctypes.c_void_p),
        ("m_name", ctypes.c_char_p),
        ("m_doc", ctypes.c_char_p),
        ("m_size", ctypes.c_ssize_t),
        ("m_methods", ctypes.c_void_p),
        ("m_slots", ctypes.POINTER(Slot)),
    )


PY_MOD_EXEC, PY_MOD_GIL = 2, 4


@pytest.mark.parametrize(
    "name",
    ["core.pool", "hashing.chain", "hashing.block_hashes", "prefix.cache", "vllm.request"],
)
def test_no_extension_declares_that_it_runs_without_the_gil(name: str) -> None:
    """It is this slot of a module that a free-threaded interpreter reads."""
    module = importlib.import_module(f"cpool.{name}")
    init = ctypes.PyDLL(module.__file__)[f"PyInit_{name.split('.')[1]}"]
    init.restype = ctypes.c_void_p
    definition = ModuleDef.from_address(init())
    slots = {}
    for slot in definition.m_slots:
        if slot.slot == 0:
            break
        slots[slot.slot] = slot.value
    assert PY_MOD_EXEC in slots
    assert not slots.get(PY_MOD_GIL)
