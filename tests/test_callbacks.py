# SPDX-License-Identifier: Apache-2.0
"""Code of the caller that runs inside a call: it may raise, call the pool, change arguments."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cpool

from .support import Request, dump, make_request

CHAIN = make_request(8)


class Hooks:
    """A metrics collector that runs one function at one of its hooks."""

    def __init__(self, hook: str, call: Callable[[Any], None]) -> None:
        self.hook = hook
        self.call = call

    def run(self, hook: str, block: Any) -> None:
        if hook == self.hook:
            self.call(block)

    def on_block_allocated(self, block: Any) -> None:
        self.run("allocated", block)

    def on_block_accessed(self, block: Any) -> None:
        self.run("accessed", block)

    def on_block_evicted(self, block: Any) -> None:
        self.run("evicted", block)

    def reset(self) -> None:
        self.run("reset", None)


def raise_at(block_id: int | None) -> Callable[[Any], None]:
    def call(block: Any) -> None:
        if block_id is None or block.block_id == block_id:
            raise RuntimeError("from the hook")

    return call


def cached_pool(**kwargs: Any) -> Any:
    """Eight cached free blocks, 1 the first to be evicted."""
    pool = cpool.BlockPool(9, True, 4, **kwargs)
    blocks = pool.get_new_blocks(8)
    pool.cache_full_blocks(CHAIN, blocks, 0, 8, 4, 0)
    pool.free_blocks(blocks)
    return pool


# Hooks that raise.


@pytest.mark.parametrize("hook", ["allocated", "evicted"])
def test_an_allocation_whose_hook_raises_gives_all_blocks_back(hook: str) -> None:
    pool = cached_pool()
    pool.metrics_collector = Hooks(hook, raise_at(3))
    for allocate in (pool.get_new_blocks, pool.get_new_block_ids):
        with pytest.raises(RuntimeError, match="from the hook"):
            allocate(5)
        assert pool.free_queue_ids().tolist() == list(range(1, 9))
        assert pool.ref_cnts[1:].max() <= 0
        pool.check_consistency()
    pool.metrics_collector = None
    assert pool.get_new_block_ids(8).tolist() == list(range(1, 9))


def test_a_touch_whose_hook_raises_has_touched_what_the_hooks_were_told() -> None:
    pool = cached_pool()
    pool.metrics_collector = Hooks("accessed", raise_at(3))
    with pytest.raises(RuntimeError, match="from the hook"):
        pool.touch_ids([2, 3, 4])
    assert [block.ref_cnt for block in pool.blocks[1:5]] == [0, 1, 1, 0]
    pool.check_consistency()


def test_an_eviction_whose_hook_raises_stops_there() -> None:
    pool = cached_pool()
    pool.metrics_collector = Hooks("evicted", raise_at(3))
    for evict in (pool.evict_blocks, pool.evict_ids):
        with pytest.raises(RuntimeError, match="from the hook"):
            evict([2, 3, 4])
    assert [block.block_hash is None for block in pool.blocks[1:5]] == [False, True, False, False]
    pool.check_consistency()


def test_a_reset_whose_hook_raises_has_still_forgotten_all_keys() -> None:
    pool = cached_pool()
    pool.metrics_collector = Hooks("reset", raise_at(None))
    with pytest.raises(RuntimeError, match="from the hook"):
        pool.reset_prefix_cache()
    assert pool.num_cached_keys == 0
    pool.check_consistency()


@pytest.mark.parametrize("truthful", [False, True])
def test_consumers_hear_of_a_reset_whose_hook_raises(truthful: bool) -> None:
    pool = cpool.BlockPool(
        6, True, 4, True, Hooks("reset", raise_at(None)), truthful_events=truthful
    )
    pool.cache_full_ids([1, 2], make_request(2).block_hashes, 0, 4)
    pool.take_events()
    with pytest.raises(RuntimeError, match="from the hook"):
        pool.reset_prefix_cache()
    assert [type(event).__name__ for event in pool.take_events()] == ["AllBlocksCleared"]


def test_consumers_hear_of_a_key_that_survives_a_reset() -> None:
    """A watcher registers it and holds a view of the key columns, so they cannot go."""
    pool = cpool.BlockPool(6, True, 4, True, truthful_events=True)
    hashes, views = make_request(2).block_hashes, []

    def register(block: Any) -> None:
        pool.cache_full_ids([3], hashes[1:], 0, 4)
        views.append(pool.key_num_tokens)

    pool.cache_full_ids([2], hashes[:1], 0, 4)
    pool.unpin_blocks(pool.get_new_blocks(1), register)
    pool.take_events()
    with pytest.raises(BufferError, match="1 numpy views"):
        pool.reset_prefix_cache()
    assert pool.find_ids(hashes, 0).tolist() == [-1, 3]
    cleared, stored = pool.take_events()
    assert type(cleared).__name__ == "AllBlocksCleared"
    assert stored.block_hashes == [int.from_bytes(hashes[1][-8:], "big")]


def test_a_watcher_that_raises_at_the_reset_reaches_the_caller() -> None:
    pool = cached_pool()
    pool.unpin_blocks(pool.get_new_blocks(2), raise_at(None))
    with pytest.raises(RuntimeError, match="from the hook"):
        pool.reset_prefix_cache()
    assert pool.num_cached_keys == 0
    pool.check_consistency()


# Hooks that call the pool.


@pytest.mark.parametrize("hook", ["allocated", "evicted"])
def test_a_hook_cannot_touch_or_free_what_is_being_handed_out(hook: str) -> None:
    refused: list[str] = []

    def meddle(block: Any) -> None:
        for call in (pool.touch_ids, pool.free_ids):
            try:
                call([5])
            except cpool.ContractError as error:
                refused.append(str(error))

    pool = cached_pool()
    pool.metrics_collector = Hooks(hook, lambda block: block.block_id == 1 and meddle(block))
    assert pool.get_new_block_ids(5).tolist() == [1, 2, 3, 4, 5]
    assert len(refused) == 2
    assert "block 5 at position 0 has no holder and is not in the free queue" in refused[0]
    assert "block 5 at position 0 is already free" in refused[1]
    pool.check_consistency()


def test_a_hold_that_a_hook_takes_survives_the_failed_allocation() -> None:
    def hold_then_raise(block: Any) -> None:
        pool.metrics_collector = None
        pool.touch([block])
        raise RuntimeError("from the hook")

    pool = cached_pool()
    pool.metrics_collector = Hooks("allocated", hold_then_raise)
    with pytest.raises(RuntimeError, match="from the hook"):
        pool.get_new_blocks(3)
    assert pool.blocks[1].ref_cnt == 1
    assert pool.free_queue_ids().tolist()[:2] == [2, 3]
    pool.check_consistency()


def test_a_hook_that_takes_the_next_blocks_of_a_touch() -> None:
    """The second block is evicted and handed out while the first one is reported."""
    taken: list[int] = []

    def take(block: Any) -> None:
        if not taken:
            pool.metrics_collector = None
            taken.extend(pool.get_new_block_ids(7).tolist())

    pool = cached_pool()
    collector = Hooks("accessed", take)
    pool.metrics_collector = collector
    pool.touch_ids([2, 1])
    assert 1 in taken
    assert pool.blocks[1].ref_cnt == 2
    pool.check_consistency()


def test_a_hook_that_writes_to_the_array_of_ids_changes_nothing_of_the_call() -> None:
    ids = np.array([1, 2, 3], np.uint32)

    def scribble(block: Any) -> None:
        ids[:] = 0xFFFFFFFF

    pool = cached_pool()
    pool.metrics_collector = Hooks("accessed", scribble)
    pool.touch_ids(ids)
    assert [block.ref_cnt for block in pool.blocks[1:5]] == [1, 1, 1, 0]
    ids[:] = [1, 2, 3]
    pool.metrics_collector = Hooks("evicted", scribble)
    assert pool.evict_ids(ids) == 3
    pool.check_consistency()


class Tokens(list):
    """Token ids that run code when an event reads them."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__(range(64))
        self.call = call

    def __getitem__(self, index: Any) -> Any:
        self.call()
        return super().__getitem__(index)


def test_tokens_that_register_the_block_make_the_call_fail() -> None:
    """Checked before the event was made, the block has a longer key afterwards."""
    pool = cpool.BlockPool(9, True, 4, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(2)
    request = Request(
        CHAIN.block_hashes,
        Tokens(
            lambda: pool.cache_partial_id(
                1, CHAIN.block_hashes[7], 32, 0, True, parent_hash=CHAIN.block_hashes[6]
            )
        ),
    )
    with pytest.raises(cpool.ContractError, match="block 1 at position 0 has a key for 32 tokens"):
        pool.cache_full_blocks(request, blocks, 0, 2, 4, 0)
    assert pool.num_registrations == 1
    pool.check_consistency()


def test_tokens_that_write_to_the_array_of_ids_change_nothing_of_the_call() -> None:
    ids = np.array([1, 2], np.uint32)

    def scribble() -> None:
        ids[:] = 0xFFFFFFFF

    pool = cpool.BlockPool(9, True, 4, enable_kv_cache_events=True)
    tokens = Tokens(scribble)[:0] or Tokens(scribble)
    ids[:] = [1, 2]
    del tokens[8:]
    pool.cache_full_ids(ids, CHAIN.block_hashes[:2], 0, 4, token_ids=tokens)
    assert pool.find_ids(CHAIN.block_hashes[:2], 0).tolist() == [1, 2]
    pool.check_consistency()


# Iterables and sequences.


@pytest.mark.parametrize(
    "method", ["touch", "free_blocks", "evict_blocks", "touch_ids", "free_ids"]
)
def test_an_iterable_that_raises_half_way_changes_nothing(method: str) -> None:
    pool = cached_pool()
    held = pool.get_new_blocks(4)
    before = dump(pool)

    def items() -> Iterator[Any]:
        for block in held:
            if block is held[2]:
                raise KeyboardInterrupt
            yield block.block_id if method.endswith(("ids", "evict_blocks")) else block

    with pytest.raises(KeyboardInterrupt):
        getattr(pool, method)(items())
    assert dump(pool) == before


def test_an_iterable_that_frees_what_it_yields_is_refused_whole() -> None:
    pool = cached_pool()
    held = pool.get_new_blocks(3)

    def items() -> Iterator[Any]:
        for block in held:
            yield block
            pool.free_ids([block.block_id])

    with pytest.raises(cpool.ContractError, match="block 1 at position 0 is already free"):
        pool.free_blocks(items())
    pool.check_consistency()


class Shrinking:
    """A chain that loses its end while it is read."""

    def __init__(self, hashes: list[bytes]) -> None:
        self.hashes = list(hashes)

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, index: int) -> bytes:
        found = self.hashes[index]
        self.hashes.pop()
        return found


@pytest.mark.parametrize("events", [False, True])
def test_a_chain_that_shrinks_while_it_is_read(events: bool) -> None:
    pool = cpool.BlockPool(9, True, 4, enable_kv_cache_events=events)
    blocks = pool.get_new_blocks(8)
    before = dump(pool)
    with pytest.raises(IndexError):
        pool.cache_full_blocks(
            Request(Shrinking(CHAIN.block_hashes), CHAIN.all_token_ids), blocks, 0, 8, 4, 0
        )
    assert dump(pool) == before


@pytest.mark.parametrize("num_hashes", [0, 1, 3])
@pytest.mark.parametrize("events", [False, True])
def test_a_list_that_is_too_short_is_not_read_beyond_its_end(num_hashes: int, events: bool) -> None:
    pool = cpool.BlockPool(9, True, 4, enable_kv_cache_events=events)
    blocks = pool.get_new_blocks(8)
    short = Request(CHAIN.block_hashes[:num_hashes], CHAIN.all_token_ids)
    before = dump(pool)
    with pytest.raises(IndexError):
        pool.cache_full_blocks(short, blocks, 0, 4, 4, 0)
    if events:
        with pytest.raises(IndexError):
            pool.cache_full_blocks(short, [pool.null_block] * 5, 4, 5, 4, 0)
        with pytest.raises(IndexError):
            pool.emit_cached_block_events(short, 4, 4, 0)
    assert dump(pool) == before


# KeyboardInterrupt.


def test_an_interrupted_batch_is_whole_or_not_there() -> None:
    num_blocks = 200_000
    pool = cpool.BlockPool(num_blocks, True, 16)
    ids = pool.get_new_block_ids(num_blocks - 1)
    rows = [number.to_bytes(16, "little") for number in range(num_blocks - 1)]
    interrupted = 0
    for delay in (0.0005, 0.005, 0.02, 0.05, 0.1):
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            pool.cache_full_ids((int(i) for i in ids), rows, 0, 16)
            pool.evict_ids(ids)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert pool.num_registrations in (0, num_blocks - 1)
        pool.evict_ids(ids)
    assert interrupted > 0
