# SPDX-License-Identifier: Apache-2.0
"""What the id methods accept and return."""

import array
from typing import Any

import numpy as np
import pytest

import cpool

from .support import make_request

HASHES = make_request(6).block_hashes


@pytest.fixture
def pool() -> Any:
    pool = cpool.BlockPool(8, True, 4)
    pool.cache_full_ids(pool.get_new_block_ids(4), HASHES[:4], 2, 4)
    return pool


def rows(hashes: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1)


def test_ids_are_uint32_and_lookups_int64(pool: Any) -> None:
    assert pool.get_new_block_ids(2).dtype == np.uint32
    assert pool.free_queue_ids().dtype == np.uint32
    assert pool.find_ids(HASHES, 2).dtype == np.int64
    assert pool.find_full_ids(HASHES, 2, 4).dtype == np.int64
    assert pool.find_prefix_ids(HASHES, 2).dtype == np.uint32
    assert pool.get_new_block_ids(0).shape == (0,)
    assert pool.find_ids([], 2).shape == (0,)


@pytest.mark.parametrize(
    "ids",
    [
        [5, 6],
        (5, 6),
        range(5, 7),
        array.array("q", [5, 6]),
        array.array("B", [5, 6]),
        bytearray([5, 6]),
        memoryview(array.array("I", [5, 6])),
        np.array([5, 6], np.uint32),
        np.array([5, 6], np.int64),
        np.array([5, 6], np.uint64),
        np.array([5, 6], np.int16),
        np.array([5, 0, 6, 0])[::2],
        np.array([6, 5])[::-1],
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_any_buffer_or_sequence_of_integers_is_accepted(pool: Any, ids: Any) -> None:
    pool.touch_ids(ids)
    assert pool.ref_cnts.tolist() == [0, 1, 1, 1, 1, 1, 1, 0]
    pool.free_ids(ids)
    assert pool.free_queue_ids().tolist() == [5, 6, 7]
    assert pool.evict_ids(ids) == 0


def test_a_read_only_array_of_ids_is_accepted(pool: Any) -> None:
    ids = np.array([5, 6], np.uint32)
    ids.flags.writeable = False
    pool.touch_ids(ids)
    assert pool.ref_cnts[5] == 1


@pytest.mark.parametrize(
    "hashes",
    [
        HASHES,
        tuple(HASHES),
        rows(HASHES),
        np.repeat(rows(HASHES), 2, axis=0)[::2],
        np.asfortranarray(rows(HASHES)),
        np.ascontiguousarray(rows(HASHES)[:, ::-1])[:, ::-1],
    ],
    ids=["list", "tuple", "array", "rows apart", "columns", "reversed"],
)
def test_any_form_of_hashes_finds_the_same(pool: Any, hashes: Any) -> None:
    assert pool.find_ids(hashes, 2).tolist() == [1, 2, 3, 4, -1, -1]
    assert pool.find_full_ids(hashes, 2, 4).tolist() == [1, 2, 3, 4, -1, -1]
    assert pool.find_prefix_ids(hashes, 2).tolist() == [1, 2, 3, 4]
    assert pool.find_ids(hashes, 1).tolist() == [-1] * 6
    pool.evict_ids([2])
    assert pool.find_ids(hashes, 2).tolist() == [1, -1, 3, 4, -1, -1]
    assert pool.find_prefix_ids(hashes, 2).tolist() == [1]


def test_registering_from_an_array_and_from_a_list_is_the_same(pool: Any) -> None:
    other = cpool.BlockPool(8, True, 4)
    other.cache_full_ids(other.get_new_block_ids(4), rows(HASHES[:4]), 2, 4)
    for block_id in range(8):
        assert other.registrations(block_id) == pool.registrations(block_id)


def test_the_end_of_each_block_follows_from_its_position(pool: Any) -> None:
    ids = pool.get_new_block_ids(2)
    pool.cache_full_ids(ids, HASHES[4:], 0, 8, first_block=3)
    assert [pool.registrations(int(i))[0].num_tokens for i in ids] == [32, 40]


def test_the_columns_are_read_only_views(pool: Any) -> None:
    ref_cnts, key_num_tokens = pool.ref_cnts, pool.key_num_tokens
    assert (ref_cnts.dtype, ref_cnts.shape) == (np.int32, (8,))
    assert ref_cnts.tolist()[:5] == [0, 1, 1, 1, 1]
    assert key_num_tokens.tolist() == [0, 4, 8, 12, 16, 0, 0, 0]
    for column in (ref_cnts, key_num_tokens):
        with pytest.raises(ValueError, match="read-only"):
            column[1] = 5
    pool.touch_ids([1])
    pool.evict_ids([2])
    assert ref_cnts[1] == 2
    assert key_num_tokens.tolist() == [0, 4, 0, 12, 16, 0, 0, 0]


def test_a_view_of_keys_is_not_pulled_away_by_a_reset(pool: Any) -> None:
    key_num_tokens = pool.key_num_tokens
    pool.free_ids([1, 2, 3, 4])
    with pytest.raises(BufferError, match="1"):
        pool.reset_prefix_cache()
    assert pool.num_cached_keys == 4
    del key_num_tokens
    assert pool.reset_prefix_cache()


def test_evict_ids_counts_the_blocks_that_held_a_key(pool: Any) -> None:
    assert pool.evict_ids([1, 5, 3, 1, 0]) == 2
    assert pool.num_evicted_blocks == 2
    assert pool.num_cached_keys == 2


@pytest.mark.parametrize("width", [1, 7, 8, 16, 20, 32, 64])
def test_hashes_of_any_one_width(width: int) -> None:
    pool = cpool.BlockPool(4, True, 4)
    hashes = [bytes([i]) * width for i in range(3)]
    pool.cache_full_ids(pool.get_new_block_ids(3), hashes, 0, 4)
    assert pool.find_ids(hashes, 0).tolist() == [1, 2, 3]
    assert pool.registrations(2)[0].block_hash == hashes[1]


@pytest.mark.parametrize("grain", ["handles", "ids"])
@pytest.mark.parametrize("width", [8, 16, 32])
def test_a_flat_buffer_is_cut_by_the_width_of_the_pools_keys(width: int, grain: str) -> None:
    pool = cpool.BlockPool(4, True, 4)
    chain = make_request(3, width=width)
    if grain == "ids":
        pool.cache_full_ids(pool.get_new_block_ids(3), b"".join(chain.block_hashes), 0, 4)
    else:
        pool.cache_full_blocks(chain, pool.get_new_blocks(3), 0, 3, 4, 0)
    assert pool.find_ids(b"".join(chain.block_hashes), 0).tolist() == [1, 2, 3]


def test_many_groups_are_told_apart() -> None:
    pool = cpool.BlockPool(400, True, 4)
    ids = pool.get_new_block_ids(300)
    for group, block_id in enumerate(ids):
        pool.cache_partial_id(int(block_id), HASHES[0], 4, group * 1_000_003)
    for group, block_id in enumerate(ids):
        assert pool.find_ids(HASHES[:1], group * 1_000_003).tolist() == [block_id]
    assert pool.find_ids(HASHES[:1], 1).tolist() == [-1]


def test_a_block_named_twice_ends_up_under_its_last_hash(pool: Any) -> None:
    (block_id,) = pool.get_new_block_ids(1).tolist()
    pool.cache_full_ids([block_id, block_id], HASHES[4:], 0, 4)
    assert pool.registrations(block_id) == [(HASHES[5], 0, 8, True)]
    assert pool.find_ids(HASHES[4:], 0).tolist() == [-1, block_id]
