# SPDX-License-Identifier: Apache-2.0
"""Every argument of every public method gets what it was not made for.

The answer is a TypeError, a ValueError or a LookupError, and then nothing has changed: no
SystemError, no OverflowError that names no limit, no value that was cut to fit.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpool
import cpool.core.pool
from cpool import hashing
from cpool.events import types
from cpool.prefix import (
    ChunkedLocal,
    FullAttention,
    Mamba,
    PrefixCache,
    PrefixMatch,
    SlidingWindow,
)
from cpool.prefix import Request as RunningRequest

from .support import dump, hold_nine, make_request

CHAIN = make_request(8)
HASHES = CHAIN.block_hashes


class Index:
    """An integer in disguise; or one that lies, or fails."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> Any:
        if self.value is None:
            raise RuntimeError("no index")
        return self.value


def bad_values() -> list[Any]:
    numbers = [-1, 0, 1, 3, 1 << 70, -(1 << 31), -(1 << 63), -(1 << 63) - 1]
    for bits in (31, 32, 63, 64):
        numbers += [(1 << bits) - 1, 1 << bits]
    scalars = [np.int64(1), np.uint8(1), np.int8(-1), np.uint64((1 << 64) - 1), np.bool_(True)]
    arrays = [
        np.array(5),
        np.array([1]),
        np.array([-1]),
        np.array([1.5]),
        np.array(["x"]),
        np.array([None]),
        np.array([1 << 63], np.uint64),
        np.zeros((2, 2), np.uint32),
        np.zeros((0, 0), np.uint8),
        np.zeros((1, 0), np.uint8),
        np.zeros((1, 32), np.uint8),
        np.zeros((1, 300), np.uint8),
    ]
    texts = ["x", "", b"", b"xxxxx", bytes(32), bytes(36), bytes(300), memoryview(bytes(32))]
    items = [[], (), {}, set(), [None], [1.5], [True], ["x"], [b"x"], [bytes(32)], [-1], [1 << 64]]
    odd = [None, True, 1.0, 1.5, float("nan"), float("inf"), 1j, object(), int, print]
    indices = [Index(1), Index(1 << 70), Index("x"), Index(None)]
    ranges = [range(3), range(1 << 63, (1 << 63) + 1)]
    return [*numbers, *scalars, np.float64(1), *arrays, *texts, *items, *odd, *indices, *ranges]


BAD = bad_values()
Call = tuple[Callable[..., Any], list[Any], dict[str, Any]]


class World:
    """A pool with blocks in every state, a cache over it, and a good call of each method."""

    def __init__(self, events: bool, folder: Path) -> None:
        self.pool = pool = cpool.BlockPool(14, True, 4, enable_kv_cache_events=events)
        blocks = hold_nine(pool, CHAIN)
        pool.free_blocks([blocks[8], blocks[2]])
        self.folder = folder
        self.cache = PrefixCache(pool, [FullAttention(4)], remember_evictions=10)
        self.states = PrefixCache(pool, [FullAttention(8), Mamba(8)])
        self.hashes = cpool.hash_tokens(range(30), 4)
        other = self.cache.lookup(cpool.hash_tokens(range(100, 120), 4))
        self.request = self.cache.admit(other, 5, 9)
        self.match = self.cache.lookup(self.hashes)
        self.chain = hashing.BlockHashes(hashing.BlockHasher(4), range(10))
        self.calls: dict[str, Call] = {}
        self.add_pool_calls()
        self.add_view_calls()
        self.add_prefix_calls()
        self.add_hashing_calls()

    def add(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.calls[name] = (call, list(args), kwargs)

    def add_methods(self, target: Any, **arguments: tuple[Any, ...]) -> None:
        for name, args in arguments.items():
            self.add(f"{type(target).__name__}.{name}", getattr(target, name), *args)

    def add_pool_calls(self) -> None:
        pool, at = self.pool, self.pool.blocks
        key = at[1].block_hash
        self.add_methods(
            pool,
            get_new_blocks=(2,),
            get_new_block_ids=(2,),
            touch=([at[1]],),
            touch_ids=([1],),
            free_blocks=([at[1]],),
            free_ids=([1],),
            unpin_blocks=([at[1]], print),
            evict_blocks=([1],),
            evict_ids=([1],),
            get_cached_block=(HASHES[0], [0]),
            cache_full_blocks=(CHAIN, [at[7], at[8]], 0, 2, 4, 2, [True, False]),
            cache_partial_block=(CHAIN, at[7], 8, 2, 16, False),
            emit_cached_block_events=(CHAIN, 2, 4, 0),
            move_block_hashes=(at[1], at[7]),
            move_ids=(1, 7),
            is_block_writable=(at[1],),
            find_ids=(HASHES, 0),
            find_prefix_ids=(HASHES, 0),
            find_full_ids=(HASHES, 0, 4),
            find_prefix_blocks=(HASHES, [0]),
            registrations=(1,),
            save=(str(self.folder / "saved"),),
            load=(str(self.folder / "none"),),
            _insert_block_hash=(key, at[7], 4),
            _maybe_evict_cached_block=(at[1],),
        )
        self.add(
            "BlockPool.cache_full_ids", pool.cache_full_ids, [7], HASHES[4:5], 2, 4, 0,
            parent_hash=None, token_ids=[1, 2, 3, 4],
        )  # fmt: skip
        self.add(
            "BlockPool.cache_partial_id", pool.cache_partial_id, 7, HASHES[4], 8, 2, False,
            parent_hash=HASHES[3], token_ids=[1, 2, 3, 4],
        )  # fmt: skip
        self.add(
            "BlockPool.cache_partial_ids", pool.cache_partial_ids, [7], HASHES[4:5], [8], 2,
            parent_hashes=[HASHES[3]], token_ids=[[1]],
        )  # fmt: skip
        self.add("BlockPool", cpool.BlockPool, 8, True, 4, False, None, "GPU")
        block = at[1]
        for name in ("ref_cnt", "_block_hash", "_block_hash_num_tokens", "is_null"):
            self.add(f"set {name}", lambda value, name=name: setattr(block, name, value), 0)
        for name in ("prev_free_block", "next_free_block"):
            self.add(f"set {name}", lambda value, name=name: setattr(block, name, value), None)
        self.add_methods(at[7], set_block_hash=(bytes(36), 8))

    def add_view_calls(self) -> None:
        pool, at = self.pool, self.pool.blocks
        queue, table = pool.free_block_queue, pool.cached_block_hash_to_block
        key = at[1].block_hash
        self.add_methods(at, __getitem__=(1,), __contains__=(at[1],))
        self.add_methods(
            queue,
            remove=(at[10],),
            append=(at[7],),
            append_n=([at[7]],),
            prepend_n=([at[7]],),
        )
        self.add("iter_blocks_after", lambda at: list(queue.iter_blocks_after(at)), at[10])
        self.add_methods(
            table, get_one_block=(key,), contain=(key, 1), insert=(key, at[7]), pop=(key, 1)
        )
        self.add_methods(table._cache, __getitem__=(key,), __contains__=(key,))
        rows = pool.cached_block_hashes_by_block
        self.add_methods(rows, __getitem__=(5,), __contains__=(5,))

    def add_prefix_calls(self) -> None:
        cache, request = self.cache, self.request
        for kind, sizes in (
            (FullAttention, [4]),
            (SlidingWindow, [4, 8]),
            (ChunkedLocal, [4, 8]),
            (Mamba, [4]),
        ):
            self.add(
                kind.__name__, lambda *a, kind=kind: PrefixCache(self.pool, [kind(*a)]), *sizes
            )
        self.add("PrefixCache", PrefixCache, self.pool, [FullAttention(4)], match=None)
        self.add("reach", self.states.reach, self.hashes, 0, 12, drop=True)
        self.add("append", cache.append, request, 1, num_computed_tokens=5, reserve=0)
        self.add("admit", cache.admit, self.match, 2, 9, reserve=0)
        self.add("chunk_end", self.states.chunk_end, 0, 4, 9, num_tokens=12, boundary=0)
        self.add_methods(
            cache,
            lookup=(self.hashes, 20),
            commit=(request, 5),
            finish=(request,),
            preempt=(request,),
            copies_done=(cache.take_copies(),),
            num_blocks_to_admit=(self.match, 3),
            eviction_of=(HASHES[0], 0),
            digests=(self.hashes,),
        )

    def add_hashing_calls(self) -> None:
        hasher, chain = self.chain.hasher, self.chain
        self.add("BlockHasher", hashing.BlockHasher, 4, "sha256", root=None)
        self.add("BlockHashes", hashing.BlockHashes, hasher, [1, 2, 3, 4], None)
        self.add("hash_tokens", hashing.hash_tokens, [1] * 8, 4, "sha256", root=None)
        self.add("a view", hashing.BlockHashListWithBlockSize, [bytes(32)] * 4, 4, 8)
        self.add("default_root", hashing.default_root, "sha256")
        self.add_methods(hasher, new_hashes=([1] * 8, [], None))
        self.add_methods(
            chain,
            append_tokens=([1, 2], None),
            append_token=(1, None),
            truncate=(9, list(range(10))),
            append=(bytes(32),),
            extend=([bytes(32)],),
            view=(8,),
            __getitem__=(0,),
            __delitem__=(slice(1, None),),
        )
        self.add_methods(chain.view(8), __getitem__=(0,))

    def seen(self) -> Any:
        rows = [row.tolist() for row in self.request.block_ids]
        running = self.request.is_running, self.request.num_tokens, rows
        return dump(self.pool), running, self.chain.tolist(), self.chain.num_tokens


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)  # save("x") is a good call


# Objects that the pool reads attributes of; the message says which one is missing.
READ_FROM = ("block_hashes", "mm_features")


def error_of(call: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    return None


def is_proper(error: Exception) -> bool:
    if isinstance(error, AttributeError):
        return any(f"has no attribute '{name}'" in str(error) for name in READ_FROM)
    if isinstance(error, RuntimeError):
        return str(error) == "no index"
    return isinstance(error, (TypeError, ValueError, LookupError, OSError))


@pytest.mark.parametrize("events", [False, True])
def test_no_argument_of_a_wrong_kind_does_harm(events: bool, tmp_path: Path) -> None:
    logging.disable(logging.CRITICAL)
    world = World(events, tmp_path)
    before = world.seen()
    refused = accepted = 0
    for name, (_, args, kwargs) in list(world.calls.items()):
        for place in [*range(len(args)), *kwargs]:
            for bad in BAD:
                call, good, named = world.calls[name]
                wrong = [bad if i == place else value for i, value in enumerate(good)]
                wrong_named = {k: bad if k == place else value for k, value in named.items()}
                error = error_of(call, wrong, wrong_named)
                changed = world.seen() != before
                if error is not None:
                    what = f"{name}, argument {place}: {bad!r}: {error!r}"
                    assert is_proper(error), what
                    assert not changed, what
                    refused += 1
                    continue
                accepted += 1
                if changed:
                    world = World(events, tmp_path)
                    before = world.seen()
    logging.disable(logging.NOTSET)
    assert refused > 5 * accepted > 0


HAS_NO_ARGUMENTS = {"snapshot_events", "take_events", "take_event_runs", "reset_hash"}


@pytest.mark.parametrize("kind", [cpool.BlockPool, cpool.KVCacheBlock, PrefixCache])
def test_no_public_method_is_left_out(kind: Any, tmp_path: Path) -> None:
    called = {name.rpartition(".")[2] for name in World(False, tmp_path).calls}
    for name in dir(kind):
        method = getattr(kind, name)
        if name.startswith("_") or not callable(method) or name in HAS_NO_ARGUMENTS:
            continue
        if name in ("logger", "event_types"):
            continue
        signature = (method.__doc__ or "").partition("\n")[0]
        if signature.endswith("(self)"):
            continue
        assert name in called, signature


# Values that went through, or ended in an error that names nothing.


@pytest.mark.parametrize("path", [1, True])
def test_a_number_is_no_path(path: Any) -> None:
    """open() would read a descriptor, and close it."""
    with pytest.raises(TypeError):
        cpool.BlockPool.load(path)
    os.fstat(1)


@pytest.mark.parametrize("index", [None, "1", 1.0])
def test_an_index_of_the_blocks_is_an_integer(index: Any) -> None:
    with pytest.raises(TypeError, match=type(index).__name__):
        cpool.BlockPool(8, True, 4).blocks[index]


@pytest.mark.parametrize("medium", [None, 5, b"GPU"])
def test_a_medium_that_is_no_text_would_not_be_loaded_as_it_was_saved(medium: Any) -> None:
    with pytest.raises(TypeError, match=f"medium must be str, not {type(medium).__name__}"):
        cpool.BlockPool(8, True, 4, medium=medium)


@pytest.mark.parametrize("tokens", ["abcd", np.int64(4), np.zeros(4), np.zeros((4, 1), int)])
def test_tokens_that_are_no_integers_reach_no_event(tokens: Any) -> None:
    pool = cpool.BlockPool(8, True, 4, enable_kv_cache_events=True)
    pool.get_new_block_ids(1)
    with pytest.raises(TypeError, match=r"token_ids must be integers, not|no len"):
        pool.cache_full_ids([1], HASHES[:1], 0, 4, token_ids=tokens)
    with pytest.raises(TypeError, match=r"token_ids must be integers, not|no len"):
        pool.cache_partial_id(1, HASHES[0], 4, 0, token_ids=tokens)
    assert pool.num_registrations == 0
    assert pool.take_events() == []


def test_the_null_block_s_count_stays_at_its_ends() -> None:
    pool = cpool.BlockPool(8, True, 4)
    most = (1 << 31) - 1
    pool.null_block.ref_cnt = most
    pool.touch([pool.null_block])
    pool.touch_ids([0, 0])
    assert pool.null_block.ref_cnt == most
    pool.null_block.ref_cnt = -most
    pool.free_ids([0, 0, 0])
    assert pool.null_block.ref_cnt == -most
    with pytest.raises(cpool.ContractError, match="already free"):
        pool.free_ids([0, 1])
    pool.check_consistency()


@pytest.mark.parametrize("size", [1 << 32, 1 << 64])
@pytest.mark.parametrize("kind", [FullAttention, Mamba])
def test_a_block_size_that_cannot_be_counted_names_the_limit(kind: Any, size: int) -> None:
    with pytest.raises(ValueError, match=rf"block_size is {size}; the limit is 4294967295"):
        PrefixCache(cpool.BlockPool(8, True, 4), [kind(size)])


def test_block_sizes_whose_multiple_cannot_be_counted_are_refused() -> None:
    groups = [FullAttention((1 << 31) - 1), FullAttention((1 << 31) - 2)]
    with pytest.raises(ValueError, match=r"multiple .* is \d+ tokens; the limit is 4294967295"):
        PrefixCache(cpool.BlockPool(8, True, 1), groups)


@pytest.mark.parametrize("window", [0, 1 << 32])
def test_a_window_out_of_range_names_both_limits(window: int) -> None:
    with pytest.raises(ValueError, match=rf"{window} tokens; it must be from 1 to 4294967295"):
        PrefixCache(cpool.BlockPool(8, True, 4), [SlidingWindow(4, window)])


@pytest.mark.parametrize("group", [-1, 1, 1 << 32])
def test_a_group_of_an_eviction_is_one_of_the_cache(group: int) -> None:
    cache = PrefixCache(cpool.BlockPool(8, True, 4), [FullAttention(4)])
    with pytest.raises(ValueError, match=f"kv_cache_group_id is {group}; it must be from 0 to 0"):
        cache.eviction_of(bytes(32), group)


@pytest.mark.parametrize("size", [4.0, True, None, "4", np.zeros((2, 2), np.uint32)])
def test_block_sizes_of_hashes_are_integers(size: Any) -> None:
    for call in (
        lambda: hashing.BlockHasher(size),
        lambda: hashing.BlockHashListWithBlockSize([], size, 8),
        lambda: hashing.BlockHashListWithBlockSize([], 4, size),
    ):
        with pytest.raises(TypeError, match="integer"):
            call()


@pytest.mark.parametrize("number", [1 << 31, 1 << 63, 1 << 64])
def test_large_numbers_for_hashes_are_named(number: int) -> None:
    with pytest.raises(ValueError, match=str(number)):
        hashing.BlockHashListWithBlockSize([], 1, number)
    with pytest.raises(ValueError, match=str(number)):
        hashing.hash_tokens(range(9), 4).truncate(number)
    with pytest.raises(IndexError):
        hashing.hash_tokens(range(9), 4)[number]


# None in the place of what the call is about.


def none_calls() -> dict[str, Callable[[], Any]]:
    pool = cpool.BlockPool(8, True, 4, enable_kv_cache_events=True)
    held = pool.get_new_blocks(1)
    cache = PrefixCache(pool, [FullAttention(4)])
    return {
        "lookup": lambda: cache.lookup(None),
        "digests": lambda: cache.digests(None),
        "find_ids": lambda: pool.find_ids(None, 0),
        "touch_ids": lambda: pool.touch_ids(None),
        "cache_full_blocks": lambda: pool.cache_full_blocks(None, held, 0, 1, 4, 0),
        "cache_partial_block": lambda: pool.cache_partial_block(None, held[0], 4, 0, 4),
        "emit": lambda: pool.emit_cached_block_events(None, 1, 4, 0),
        "hash_tokens": lambda: hashing.hash_tokens(None, 4),
        "a view": lambda: hashing.BlockHashListWithBlockSize(None, 4, 8),
        "queue": lambda: type(pool.free_block_queue)(None),
        "map": lambda: type(pool.cached_block_hash_to_block)(None),
    }


@pytest.mark.parametrize("name", none_calls())
def test_none_is_named(name: str) -> None:
    with pytest.raises(TypeError, match="None"):
        none_calls()[name]()


def test_none_is_no_event_and_no_pool() -> None:
    wire = pytest.importorskip("cpool.events.wire")
    for event in (None, 5, {}):
        for legacy in (False, True):
            with pytest.raises(TypeError, match=type(event).__name__):
                wire.encode_batch([event], 0.0, legacy_array=legacy)
    assert wire.encode_event(types.AllBlocksCleared())
    publisher = pytest.importorskip("cpool.events.publisher")
    pool = cpool.BlockPool(8, True, 4, enable_kv_cache_events=True)
    with pytest.raises(TypeError, match="pool must be a BlockPool, not NoneType"):
        publisher.EventPublisher(None)
    for name in ("endpoint", "topic", "data_parallel_rank", "hwm", "buffer_steps"):
        arguments = {"endpoint": "inproc://wrong-types", name: None}
        with pytest.raises(TypeError, match=f"{name} must be .*, not NoneType"):
            publisher.EventPublisher(pool, **arguments)
    with pytest.raises(TypeError, match="endpoint must be str, not NoneType"):
        publisher.offset_endpoint(None, 0)


# Objects that __new__ made and nobody set up.


@pytest.mark.parametrize("kind", [cpool.BlockPool, PrefixCache, PrefixMatch, RunningRequest])
def test_what_was_never_set_up_refuses_its_use(kind: Any) -> None:
    made = kind.__new__(kind)
    uses: list[Callable[[], Any]] = {
        cpool.BlockPool: [made_call(made, "check_consistency")],
        PrefixCache: [
            made_call(made, "lookup", [bytes(32)]),
            made_call(made, "reach", [bytes(32)], 0, 0),
            made_call(made, "eviction_of", bytes(32), 0),
            made_call(made, "digests", [bytes(32)]),
            made_call(made, "take_copies"),
            made_call(made, "begin_step"),
            lambda: made.groups,
        ],
        PrefixMatch: [made_call(made, "explain")],
        RunningRequest: [
            lambda: PrefixCache(cpool.BlockPool(8, True, 4), [FullAttention(4)]).finish(made)
        ],
    }[kind]
    for use in uses:
        with pytest.raises(ValueError, match=r"never|made by hand|not running"):
            use()
    if kind is cpool.BlockPool:
        blocks = type(made.blocks).__new__(type(made.blocks))
        with pytest.raises(cpool.ContractError, match="made by hand"):
            len(blocks)


def made_call(target: Any, name: str, *args: Any) -> Callable[[], Any]:
    return lambda: getattr(target, name)(*args)
