# SPDX-License-Identifier: Apache-2.0
"""Every bad argument is refused with the value and the limit, and changes nothing."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cpool

from .support import Request, dump, make_request

NUM_BLOCKS = 10
HELD_ONCE = 1  # Registered under 32-byte hashes.
HELD_TWICE = 2
PARTIAL = 3  # Held; one primary and one extra key.
HELD_PLAIN = 4
FREE_CACHED = 5
FREE_PLAIN = 6
NUM_FREE = 5

HASH = bytes(range(32))
CHAIN = make_request(8, seed=3)


@pytest.fixture(params=[False, True], ids=["quiet", "events"])
def pool(request: Any) -> Iterator[Any]:
    """A pool with blocks in every state; it must be the same after the test."""
    pool = cpool.BlockPool(NUM_BLOCKS, True, 4, enable_kv_cache_events=request.param)
    blocks = pool.get_new_blocks(5)
    assert [block.block_id for block in blocks] == [1, 2, 3, 4, 5]
    chain = make_request(8)
    pool.touch([blocks[1]])
    pool.cache_full_ids([HELD_ONCE], chain.block_hashes[3:4], 0, 16)
    pool.cache_partial_block(chain, blocks[2], 12, 0, 16)
    pool.cache_partial_block(chain, blocks[2], 4, 0, 16)
    pool.cache_partial_block(chain, blocks[4], 8, 0, 16)
    pool.free_blocks([blocks[4]])
    assert pool.free_queue_ids().tolist() == [6, 7, 8, 9, 5]
    before = dump(pool)
    yield pool
    assert dump(pool) == before
    pool.check_consistency()


def blocks_of(pool: Any, *ids: int) -> list[Any]:
    return [pool.blocks[i] for i in ids]


# Counts.


@pytest.mark.parametrize("method", ["get_new_blocks", "get_new_block_ids"])
@pytest.mark.parametrize("num_blocks", [NUM_FREE + 1, 1 << 31, 1 << 40])
def test_more_blocks_than_are_free(pool: Any, method: str, num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"^Cannot get {num_blocks} free blocks from the pool"):
        getattr(pool, method)(num_blocks)


@pytest.mark.parametrize("method", ["get_new_blocks", "get_new_block_ids"])
@pytest.mark.parametrize("num_blocks", [1 << 70, -1, -(1 << 31), -(1 << 70)])
def test_an_impossible_number_of_blocks(pool: Any, method: str, num_blocks: int) -> None:
    with pytest.raises(ValueError, match=str(num_blocks)):
        getattr(pool, method)(num_blocks)


@pytest.mark.parametrize("method", ["get_new_blocks", "get_new_block_ids"])
@pytest.mark.parametrize("num_blocks", [1.0, "1", None, float("nan"), [1]])
def test_a_number_of_blocks_that_is_no_integer(pool: Any, method: str, num_blocks: Any) -> None:
    with pytest.raises(TypeError):
        getattr(pool, method)(num_blocks)


@pytest.mark.parametrize("num_blocks", [0, -1, -(1 << 70), 1 << 32, 1 << 70])
def test_a_pool_of_impossible_size(num_blocks: int) -> None:
    with pytest.raises(cpool.ContractError, match=str(num_blocks)):
        cpool.BlockPool(num_blocks, True, 16)


@pytest.mark.parametrize("num_blocks", [8.0, "8", None])
def test_a_pool_whose_size_is_no_integer(num_blocks: Any) -> None:
    with pytest.raises((TypeError, AssertionError)):
        cpool.BlockPool(num_blocks, True, 16)


@pytest.mark.parametrize("hash_block_size", [0, -1])
def test_a_hash_block_size_below_one(hash_block_size: int) -> None:
    with pytest.raises(cpool.ContractError, match=str(hash_block_size)):
        cpool.BlockPool(8, True, hash_block_size)


# Ids.

OUT_OF_RANGE = [NUM_BLOCKS, -1, 1 << 31, (1 << 32) + 1, 1 << 63, -(1 << 63)]
BY_ID = {
    "touch_ids": lambda pool, i: pool.touch_ids([1, i]),
    "free_ids": lambda pool, i: pool.free_ids([1, i]),
    "evict_ids": lambda pool, i: pool.evict_ids([1, i]),
    "evict_blocks": lambda pool, i: pool.evict_blocks([1, i]),
    "cache_full_ids": lambda pool, i: pool.cache_full_ids([4, i], [HASH, HASH], 0, 16),
    "cache_partial_id": lambda pool, i: pool.cache_partial_id(i, HASH, 4, 0),
    "move_ids from": lambda pool, i: pool.move_ids(i, 4),
    "move_ids to": lambda pool, i: pool.move_ids(1, i),
    "registrations": lambda pool, i: pool.registrations(i),
}


@pytest.mark.parametrize("block_id", OUT_OF_RANGE)
@pytest.mark.parametrize("method", BY_ID)
def test_an_id_out_of_range(pool: Any, method: str, block_id: int) -> None:
    with pytest.raises(
        cpool.BlockIdError, match=rf"(?<!\d){block_id}\b.*\b({NUM_BLOCKS}|{NUM_BLOCKS - 1})\b"
    ):
        BY_ID[method](pool, block_id)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.uint32, np.int16, np.uint8])
def test_an_id_out_of_range_in_an_array_of_any_width(pool: Any, dtype: Any) -> None:
    with pytest.raises(cpool.BlockIdError, match=rf"\b{NUM_BLOCKS}\b"):
        pool.touch_ids(np.array([1, NUM_BLOCKS], dtype))
    if np.dtype(dtype).kind == "i":
        with pytest.raises(cpool.BlockIdError, match="-1"):
            pool.touch_ids(np.array([1, -1], dtype))


NOT_IDS = {
    "float array": np.array([1.0, 2.0]),
    "nan": np.array([np.nan]),
    "strings": ["1", "2"],
    "string array": np.array(["1"]),
    "floats": [1.0],
    "nan in a list": [1, float("nan")],
    "none": None,
    "none inside": [1, None],
    "integer": 1,
    "complex array": np.array([1j]),
    "nested": [[1, 2], [1, 2]],
    "two-dimensional": np.ones((2, 2), np.uint32),
    "zero-dimensional": np.array(1, np.uint32),
}


@pytest.mark.parametrize("ids", NOT_IDS.values(), ids=NOT_IDS.keys())
@pytest.mark.parametrize("method", ["touch_ids", "free_ids", "evict_ids"])
def test_ids_that_are_none(pool: Any, method: str, ids: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        getattr(pool, method)(ids)


@pytest.mark.parametrize("ids", NOT_IDS.values(), ids=NOT_IDS.keys())
def test_ids_that_are_none_are_not_registered(pool: Any, ids: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        pool.cache_full_ids(ids, [HASH, HASH], 0, 16)


# References.


def test_freeing_a_free_block(pool: Any) -> None:
    for block_id in (FREE_CACHED, FREE_PLAIN):
        with pytest.raises(cpool.ContractError, match=str(block_id)):
            pool.free_blocks(blocks_of(pool, HELD_ONCE, block_id))
        with pytest.raises(cpool.ContractError, match=str(block_id)):
            pool.free_ids([HELD_ONCE, block_id])


def test_freeing_more_often_than_held_in_one_call(pool: Any) -> None:
    with pytest.raises(cpool.ContractError, match=str(HELD_TWICE)):
        pool.free_blocks(blocks_of(pool, HELD_ONCE, HELD_TWICE, HELD_TWICE, HELD_TWICE))
    with pytest.raises(cpool.ContractError, match=str(HELD_TWICE)):
        pool.free_ids([HELD_ONCE, HELD_TWICE, HELD_TWICE, HELD_TWICE])
    with pytest.raises(cpool.ContractError, match=str(HELD_PLAIN)):
        pool.free_ids(np.array([HELD_PLAIN, HELD_ONCE, HELD_PLAIN], np.uint32))


def test_unpinning_more_often_than_held(pool: Any) -> None:
    reused: list[Any] = []
    for ids in ([HELD_ONCE, FREE_PLAIN], [HELD_ONCE, HELD_ONCE], [HELD_ONCE, 0]):
        with pytest.raises(cpool.ContractError):
            pool.unpin_blocks(blocks_of(pool, *ids), reused.append)
    assert reused == []


def test_unpinning_without_a_callback(pool: Any) -> None:
    with pytest.raises(TypeError):
        pool.unpin_blocks(blocks_of(pool, HELD_ONCE), None)


# Blocks that are not blocks of this pool.


@pytest.mark.parametrize("stranger", [None, 1, "1", object()])
def test_what_is_no_block(pool: Any, stranger: Any) -> None:
    held = pool.blocks[HELD_ONCE]
    calls = [
        lambda: pool.touch([held, stranger]),
        lambda: pool.free_blocks([held, stranger]),
        lambda: pool.unpin_blocks([held, stranger], print),
        lambda: pool.cache_full_blocks(CHAIN, [pool.blocks[HELD_PLAIN], stranger], 0, 2, 16, 0),
        lambda: pool.cache_partial_block(CHAIN, stranger, 4, 0, 16),
        lambda: pool.move_block_hashes(held, stranger),
        lambda: pool.is_block_writable(stranger),
    ]
    for call in calls:
        with pytest.raises((TypeError, AttributeError)):
            call()


def test_a_block_of_another_pool(pool: Any) -> None:
    other = cpool.BlockPool(NUM_BLOCKS, True, 4)
    (foreign,) = other.get_new_blocks(1)
    held = pool.blocks[HELD_ONCE]
    before = dump(other)
    calls = [
        lambda: pool.touch([held, foreign]),
        lambda: pool.unpin_blocks([held, foreign], print),
        lambda: pool.cache_full_blocks(CHAIN, [pool.blocks[HELD_PLAIN], foreign], 0, 2, 16, 0),
        lambda: pool.cache_partial_block(CHAIN, foreign, 4, 0, 16),
        lambda: pool.move_block_hashes(held, foreign),
    ]
    for call in calls:
        with pytest.raises(cpool.ContractError):
            call()
        assert dump(other) == before


def test_a_bad_block_of_another_pool_frees_nothing_here(pool: Any) -> None:
    other = cpool.BlockPool(NUM_BLOCKS, True, 4)
    (foreign,) = other.get_new_blocks(1)
    held = pool.blocks[HELD_ONCE]
    before = dump(other)
    with pytest.raises(cpool.ContractError, match=str(foreign.block_id)):
        pool.free_blocks([held, foreign, foreign])
    with pytest.raises(cpool.ContractError, match=str(HELD_ONCE)):
        pool.free_blocks([held, foreign, held])
    assert dump(other) == before
    other.check_consistency()


def test_an_iterable_of_blocks_that_fails(pool: Any) -> None:
    def blocks() -> Iterator[Any]:
        yield pool.blocks[HELD_ONCE]
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        pool.free_blocks(blocks())
    with pytest.raises(RuntimeError, match="half-way"):
        pool.unpin_blocks(blocks(), print)


# Hashes.

NARROW = bytes(16)
BAD_HASHES = {
    "narrow": [NARROW],
    "one narrow": [HASH, NARROW],
    "narrow array": np.zeros((1, 16), np.uint8),
}


@pytest.mark.parametrize("hashes", BAD_HASHES.values(), ids=BAD_HASHES.keys())
def test_hashes_of_another_width(pool: Any, hashes: Any) -> None:
    ids = [HELD_PLAIN, FREE_PLAIN][: len(hashes)]
    with pytest.raises(ValueError, match=r"\b32\b"):
        pool.cache_full_ids(ids, hashes, 0, 16)
    with pytest.raises(ValueError, match=r"\b32\b"):
        pool.find_ids(hashes, 0)
    with pytest.raises(ValueError, match=r"\b32\b"):
        pool.find_prefix_ids(hashes, 0)
    with pytest.raises(ValueError, match=r"\b32\b"):
        pool.find_full_ids(hashes, 0, 16)


def test_a_hash_of_another_width_is_not_registered(pool: Any) -> None:
    with pytest.raises(ValueError, match=r"\b16\b.*\b32\b|\b32\b.*\b16\b"):
        pool.cache_partial_id(HELD_PLAIN, NARROW, 4, 0)
    chain = Request([HASH, NARROW], list(range(8)))
    with pytest.raises(ValueError, match=r"\b16\b.*\b32\b|\b32\b.*\b16\b"):
        pool.cache_full_blocks(chain, blocks_of(pool, HELD_PLAIN, HELD_TWICE), 0, 2, 4, 0)


@pytest.mark.parametrize(
    "hashes",
    [
        None,
        1,
        ["a" * 32],
        [HASH, None],
        [1],
        np.zeros((1, 32), np.float64),
        np.zeros((1, 32), np.int64),
        np.full((1, 32), np.nan),
        np.zeros((1, 1, 32), np.uint8),
    ],
    ids=repr,
)
def test_hashes_of_a_wrong_type(pool: Any, hashes: Any) -> None:
    for call in (
        lambda: pool.find_ids(hashes, 0),
        lambda: pool.find_prefix_ids(hashes, 0),
        lambda: pool.cache_full_ids([HELD_PLAIN], hashes, 0, 16),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()


@pytest.mark.parametrize("block_hash", [None, 1, "a" * 32])
def test_one_hash_of_a_wrong_type(pool: Any, block_hash: Any) -> None:
    with pytest.raises(TypeError):
        pool.cache_partial_id(HELD_PLAIN, block_hash, 4, 0)
    with pytest.raises(TypeError):
        pool.get_cached_block(block_hash, [0])
    chain = Request([block_hash], list(range(4)))
    with pytest.raises(TypeError):
        pool.cache_partial_block(chain, pool.blocks[HELD_PLAIN], 4, 0, 16)
    with pytest.raises(TypeError):
        pool.cache_full_blocks(chain, blocks_of(pool, HELD_PLAIN), 0, 1, 4, 0)


def test_as_many_hashes_as_ids(pool: Any) -> None:
    with pytest.raises(ValueError, match=r"2.*1|1.*2"):
        pool.cache_full_ids([HELD_PLAIN, HELD_TWICE], [HASH], 0, 16)


# Groups, sizes and positions.


@pytest.mark.parametrize("group", [-1, 1 << 32, 1 << 70])
def test_a_group_that_does_not_fit_its_four_bytes(pool: Any, group: int) -> None:
    held = blocks_of(pool, HELD_PLAIN)
    calls = [
        lambda: pool.find_ids([HASH], group),
        lambda: pool.find_prefix_ids([HASH], group),
        lambda: pool.get_cached_block(HASH, [group]),
        lambda: pool.cache_full_ids([HELD_PLAIN], [HASH], group, 16),
        lambda: pool.cache_partial_id(HELD_PLAIN, HASH, 4, group),
        lambda: pool.cache_full_blocks(CHAIN, held, 0, 1, 16, group),
        lambda: pool.cache_partial_block(CHAIN, held[0], 4, group, 16),
    ]
    for call in calls:
        with pytest.raises((ValueError, OverflowError), match=str(group)):
            call()


@pytest.mark.parametrize("block_size", [0, -4, 6])
def test_a_block_size_that_is_no_multiple_of_the_hash_block_size(
    pool: Any, block_size: int
) -> None:
    held = blocks_of(pool, HELD_PLAIN)
    for call in (
        lambda: pool.cache_full_ids([HELD_PLAIN], [HASH], 0, block_size),
        lambda: pool.cache_full_blocks(CHAIN, held, 0, 1, block_size, 0),
        lambda: pool.cache_partial_block(CHAIN, held[0], 4, 0, block_size),
    ):
        with pytest.raises(cpool.ContractError, match=rf"{block_size}\b.*\b[14]\b"):
            call()


def test_numbers_of_blocks_whose_tokens_would_wrap_around_are_refused(pool: Any) -> None:
    """2**33 blocks of 2**31 tokens would be none, counted in 64 bits."""

    class Endless:
        def __len__(self) -> int:
            return 1 << 40

        def __getitem__(self, index: Any) -> Any:
            return [block] if isinstance(index, slice) else bytes(32)

    block = pool.blocks[HELD_PLAIN]
    request = Request(Endless())
    with pytest.raises(cpool.ContractError, match="num_cached_blocks is 8589934591"):
        pool.cache_full_blocks(request, Endless(), (1 << 33) - 1, 1 << 33, 1 << 31, 0)


@pytest.mark.parametrize("first_block", [-1, 1 << 40, 1 << 62, 1 << 70])
def test_a_position_whose_tokens_cannot_be_counted(pool: Any, first_block: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        pool.cache_full_ids([HELD_PLAIN], [HASH], 0, 16, first_block)


@pytest.mark.parametrize("num_tokens", [1 << 40, 1 << 62, 1 << 70])
def test_more_tokens_than_can_be_counted(pool: Any, num_tokens: int) -> None:
    with pytest.raises((ValueError, OverflowError)):
        pool.cache_partial_id(HELD_PLAIN, HASH, num_tokens, 0)


def test_a_range_of_blocks_that_is_not_there(pool: Any) -> None:
    held = blocks_of(pool, HELD_PLAIN, HELD_TWICE)
    with pytest.raises(cpool.ContractError, match="-1"):
        pool.cache_full_blocks(CHAIN, held, -1, 1, 4, 0)
    if pool.enable_kv_cache_events:  # else vLLM registers those that are (tests/test_batches.py)
        with pytest.raises(cpool.ContractError, match=r"3.*2|2.*3"):
            pool.cache_full_blocks(CHAIN, held, 0, 3, 4, 0)
    short = Request(CHAIN.block_hashes[:1], list(range(8)))
    with pytest.raises(IndexError):
        pool.cache_full_blocks(short, held, 0, 2, 4, 0)


def test_a_chain_that_is_too_short_for_the_event(pool: Any) -> None:
    short = Request(CHAIN.block_hashes[:1], list(range(64)))
    null = blocks_of(pool, 0, 0, 0)
    if not pool.enable_kv_cache_events:
        pool.emit_cached_block_events(short, 3, 4, 0)
        return
    with pytest.raises(IndexError):
        pool.emit_cached_block_events(short, 3, 4, 0)
    with pytest.raises(IndexError):
        pool.emit_cached_block_events(short, 1, 16, 0)
    with pytest.raises(IndexError):
        pool.cache_full_blocks(short, null, 2, 3, 4, 0)


def test_a_mask_of_another_length(pool: Any) -> None:
    held = blocks_of(pool, HELD_PLAIN, HELD_TWICE)
    for mask in ([], [True], [True] * 3):
        with pytest.raises(cpool.ContractError, match=rf"{len(mask)}.*2|2.*{len(mask)}"):
            pool.cache_full_blocks(CHAIN, held, 0, 2, 4, 0, mask)


# Requests that fail half-way.


class FailingHashes(list):
    """A chain whose second hash cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 1 or isinstance(index, slice):
            raise RuntimeError("half-way")
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        yield super().__getitem__(0)
        raise RuntimeError("half-way")


class Chain:
    """A chain that is a sequence, but no list."""

    def __init__(self, hashes: list[bytes]) -> None:
        self.hashes = FailingHashes(hashes)

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, index: Any) -> Any:
        return self.hashes[index]


def test_a_chain_that_fails_half_way(pool: Any) -> None:
    chain = Request(Chain(CHAIN.block_hashes), CHAIN.all_token_ids)
    held = blocks_of(pool, HELD_PLAIN, HELD_TWICE)
    with pytest.raises(RuntimeError, match="half-way"):
        pool.cache_full_blocks(chain, held, 0, 2, 4, 0)
    with pytest.raises(RuntimeError, match="half-way"):
        pool.cache_partial_block(chain, held[0], 8, 0, 16)


class FailingTokens:
    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("no tokens")


def test_tokens_that_fail_when_the_event_is_made() -> None:
    pool = cpool.BlockPool(NUM_BLOCKS, True, 4, enable_kv_cache_events=True)
    held = pool.get_new_blocks(2)
    pool.cache_partial_block(CHAIN, held[0], 4, 0, 16)
    before = dump(pool)
    chain = Request(CHAIN.block_hashes, FailingTokens())
    with pytest.raises(RuntimeError, match="no tokens"):
        pool.cache_full_blocks(chain, held, 0, 2, 16, 0)
    assert dump(pool) == before
    with pytest.raises(RuntimeError, match="no tokens"):
        pool.cache_partial_block(chain, held[0], 8, 0, 16)
    assert dump(pool) == before
    pool.check_consistency()


class OverwritesIds(list):
    """Items that write over an array of ids when they are read."""

    def __init__(self, items: Any, ids: np.ndarray) -> None:
        super().__init__(items)
        self.ids = ids

    def __iter__(self) -> Iterator[Any]:
        self.ids[:] = 1 << 30
        return super().__iter__()


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("argument", ["hashes", "num_tokens", "parent_hashes", "token_ids"])
def test_ids_that_change_while_other_arguments_are_read(argument: str, events: bool) -> None:
    pool = cpool.BlockPool(NUM_BLOCKS, True, 4, enable_kv_cache_events=events)
    held = pool.get_new_block_ids(2)
    ids = held.copy()
    values = {"hashes": CHAIN.block_hashes[:2], "num_tokens": [4, 4], "parent_hashes": [None] * 2}
    values["token_ids"] = [range(4)] * 2
    values[argument] = OverwritesIds(values[argument], ids)
    parents = {name: values.pop(name) for name in ("parent_hashes", "token_ids")}
    pool.cache_partial_ids(ids, *values.values(), 0, **parents)
    assert (pool.find_ids(CHAIN.block_hashes[:2], 0) == held).all()
    if argument == "hashes":
        held = pool.get_new_block_ids(2)
        ids = held.copy()
        pool.cache_full_ids(ids, OverwritesIds(CHAIN.block_hashes[2:4], ids), 1, 4)
        assert (pool.find_ids(CHAIN.block_hashes[2:4], 1) == held).all()
    pool.check_consistency()
