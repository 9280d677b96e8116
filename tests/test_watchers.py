# SPDX-License-Identifier: Apache-2.0
"""Blocks that stay readable until reuse: when their callback fires, and what it may do."""

from typing import Any

import pytest

import cpool

from .support import make_request


@pytest.fixture
def pool() -> Any:
    return cpool.BlockPool(6, True, 4)


def test_an_unpinned_block_is_the_last_to_be_reused_even_without_a_key(pool: Any) -> None:
    blocks = pool.get_new_blocks(2)
    pool.unpin_blocks(blocks, print)
    assert pool.free_queue_ids().tolist() == [3, 4, 5, 1, 2]


def test_the_callback_fires_once_before_the_keys_leave(pool: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(make_request(2), block, 8, 0, 8)
    seen = []
    pool.unpin_blocks([block], lambda b: seen.append((b is block, b.block_hash is not None)))
    pool.get_new_blocks(4)
    assert seen == []
    pool.get_new_blocks(1)
    assert seen == [(True, True)]
    assert block.block_hash is None
    pool.free_blocks([block])
    pool.get_new_blocks(1)
    assert len(seen) == 1


def test_all_callbacks_of_a_call_fire_before_the_first_eviction(pool: Any) -> None:
    chain = make_request(5)
    blocks = pool.get_new_blocks(5)
    pool.cache_full_blocks(chain, blocks, 0, 5, 4, 0)
    keys = []
    pool.unpin_blocks(blocks, lambda block: keys.append(pool.num_cached_keys))
    pool.get_new_blocks(5)
    assert keys == [5] * 5


def test_allocation_by_id_fires_the_callback(pool: Any) -> None:
    reused: list[Any] = []
    blocks = pool.get_new_blocks(5)
    pool.unpin_blocks(blocks, reused.append)
    assert pool.get_new_block_ids(2).tolist() == [1, 2]
    assert reused == blocks[:2]


def test_the_last_callback_of_a_block_counts(pool: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    first: list[Any] = []
    second: list[Any] = []
    pool.unpin_blocks([block], first.append)
    pool.unpin_blocks([block], second.append)
    pool.get_new_blocks(5)
    assert (first, second) == ([], [block])


def test_reset_fires_what_is_left(pool: Any) -> None:
    blocks = pool.get_new_blocks(3)
    reused: list[int] = []
    pool.unpin_blocks(blocks[::-1], lambda block: reused.append(block.block_id))
    assert pool.reset_prefix_cache()
    assert reused == [3, 2, 1]
    pool.get_new_blocks(5)
    assert reused == [3, 2, 1]


def test_a_callback_may_call_the_pool(pool: Any) -> None:
    chain = make_request(4)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks(chain, [second], 0, 1, 4, 0)

    def on_reuse(block: Any) -> None:
        pool.free_blocks([second])
        pool.evict_blocks({second.block_id})

    pool.unpin_blocks([first], on_reuse)
    pool.touch([pool.blocks[3]])
    assert [b.block_id for b in pool.get_new_blocks(3)] == [4, 5, 1]
    assert pool.free_queue_ids().tolist() == [2]
    assert pool.num_cached_keys == 0
    pool.check_consistency()


def test_a_callback_that_allocates_takes_other_blocks(pool: Any) -> None:
    (first,) = pool.get_new_blocks(1)
    taken: list[int] = []
    pool.unpin_blocks([first], lambda b: taken.extend(x.block_id for x in pool.get_new_blocks(1)))
    pool.touch([pool.blocks[2], pool.blocks[3], pool.blocks[4]])
    pool.free_blocks([pool.blocks[2]])
    pool.unpin_blocks([pool.blocks[3]], print)
    assert pool.free_queue_ids().tolist() == [2, 5, 1, 3]
    assert [b.block_id for b in pool.get_new_blocks(3)] == [2, 5, 1]
    assert taken == [3]
    assert pool.ref_cnts.tolist() == [0] + [1] * 5
    pool.check_consistency()


def test_a_callback_that_fails_leaves_a_consistent_pool(pool: Any) -> None:
    blocks = pool.get_new_blocks(5)

    def on_reuse(block: Any) -> None:
        raise RuntimeError("no")

    pool.unpin_blocks(blocks, on_reuse)
    with pytest.raises(RuntimeError, match="no"):
        pool.get_new_blocks(3)
    pool.check_consistency()
