# SPDX-License-Identifier: Apache-2.0
"""What a caller does wrong is told to him: which block, which value, which limit."""

from typing import Any

import numpy as np
import pytest

import cpool

from .support import dump, make_request

CHAIN = make_request(8)


@pytest.fixture
def pool() -> Any:
    """Blocks 1 to 4 held, 1 also registered under 16 tokens; it stays as it is."""
    pool = cpool.BlockPool(10, True, 4)
    pool.get_new_block_ids(4)
    pool.cache_partial_id(1, CHAIN.block_hashes[3], 16, 0)
    before = dump(pool)
    yield pool
    assert dump(pool) == before
    pool.check_consistency()


def test_a_double_free_names_the_block_and_its_place(pool: Any) -> None:
    message = r"^block 7 at position 1 is already free$"
    with pytest.raises(cpool.ContractError, match=message):
        pool.free_blocks([pool.blocks[2], pool.blocks[7]])
    with pytest.raises(cpool.ContractError, match=message):
        pool.free_ids([2, 7])
    with pytest.raises(cpool.ContractError, match=message):
        pool.unpin_blocks([pool.blocks[2], pool.blocks[7]], print)


def test_an_over_release_names_the_count(pool: Any) -> None:
    message = r"^block 3 at position 2 is freed more often than it is held: its ref_cnt is 1$"
    with pytest.raises(cpool.ContractError, match=message):
        pool.free_blocks([pool.blocks[i] for i in (3, 2, 3)])
    with pytest.raises(cpool.ContractError, match=message):
        pool.free_ids(np.array([3, 2, 3], np.int64))


def test_a_handle_of_a_freed_block_is_no_claim_to_it() -> None:
    pool = cpool.BlockPool(3, True, 4)
    (block,) = pool.get_new_blocks(1)
    pool.free_blocks([block])
    (again,) = pool.get_new_blocks(1)
    assert again is block  # The handle names the block, not the time it was held.
    pool.free_blocks([again])
    with pytest.raises(cpool.ContractError, match="^block 1 at position 0 is already free$"):
        pool.free_blocks([block])


def test_a_foreign_block_names_the_pool_question(pool: Any) -> None:
    foreign = cpool.BlockPool(10, True, 4).blocks[5]
    message = r"^block 5 does not belong to (this|a) pool$"
    for call in (pool.touch, pool.free_blocks, lambda blocks: pool.unpin_blocks(blocks, print)):
        with pytest.raises(cpool.ContractError, match=message):
            call([pool.blocks[1], foreign])
    with pytest.raises(cpool.ContractError, match=message):
        pool.is_block_writable(foreign)
    with pytest.raises(cpool.ContractError, match=message):
        pool.move_block_hashes(pool.blocks[1], foreign)


def test_a_negative_id_is_not_the_last_block(pool: Any) -> None:
    with pytest.raises(cpool.BlockIdError, match=r"^Invalid block_id -1 < 0: .* blocks 0 to 9$"):
        pool.evict_blocks([1, -1])
    message = r"^block id -1 at position 1 is out of range: the pool has 10 blocks$"
    for call in (pool.evict_ids, pool.touch_ids, pool.free_ids):
        with pytest.raises(cpool.BlockIdError, match=message):
            call([1, -1])


def test_an_id_beyond_the_pool_says_who_may_have_sent_it(pool: Any) -> None:
    with pytest.raises(cpool.BlockIdError, match=r"^Invalid block_id 10 >= 10\. .*KV connector"):
        pool.evict_blocks([10])


def test_a_number_of_blocks_below_zero_names_the_limits(pool: Any) -> None:
    for call in (pool.get_new_blocks, pool.get_new_block_ids):
        with pytest.raises(cpool.ContractError, match=r"^num_blocks is -2; it must be from 0 to"):
            call(-2)


def test_a_key_that_is_not_longer_names_both_lengths(pool: Any) -> None:
    message = "^block 1 at position 0 has a key for 16 tokens: one for {} cannot replace it$"
    for tokens in (8, 16):
        with pytest.raises(cpool.ContractError, match=message.format(tokens)):
            pool.cache_full_ids([1], CHAIN.block_hashes[:1], 0, tokens)
        with pytest.raises(cpool.ContractError, match=message.format(tokens)):
            pool.cache_full_blocks(CHAIN, [pool.blocks[1]], 0, 1, tokens, 0)


def test_the_null_block_is_never_in_queue_or_table(pool: Any) -> None:
    null = pool.null_block
    with pytest.raises(cpool.ContractError, match="^the null block is never registered$"):
        pool._insert_block_hash(bytes(36), null, 4)
    with pytest.raises(cpool.ContractError, match="^the null block is never registered$"):
        pool.move_ids(1, 0)
    with pytest.raises(cpool.ContractError, match="^the null block is never registered$"):
        pool.cached_block_hash_to_block.insert(bytes(36), null)
    with pytest.raises(cpool.ContractError, match="^the null block is never in the free queue$"):
        pool.free_block_queue.append(null)
    with pytest.raises(cpool.ContractError, match="^the null block cannot be unpinned$"):
        pool.unpin_blocks([null], print)


def test_a_block_is_put_into_the_queue_once_and_only_behind_one_that_is_in_it(pool: Any) -> None:
    queue = pool.free_block_queue
    with pytest.raises(cpool.ContractError, match="^block 6 is already in the free queue$"):
        queue.append(pool.blocks[6])
    with pytest.raises(cpool.ContractError, match="^block 2 is not in this free queue$"):
        queue._insert_after(pool.blocks[2], pool.blocks[3])
    other = cpool.BlockPool(100, True, 4)
    with pytest.raises(cpool.ContractError, match="^block 90 is not in this free queue$"):
        queue._insert_after(other.blocks[90], pool.blocks[3])
    with pytest.raises(RuntimeError, match="invalid block"):
        queue.remove(pool.blocks[2])


def test_a_look_up_of_an_assigned_key_misses(pool: Any) -> None:
    other = cpool.BlockPool(4, True, 4)
    other.blocks[1].set_block_hash(bytes(36), 4)
    assert other.find_ids([bytes(32)], 0).tolist() == [-1]
    assert other.find_prefix_ids([bytes(32)], 0).tolist() == []
    assert other.get_cached_block(bytes(32), [0]) is None
    other.check_consistency()


def test_a_key_of_no_tokens_is_no_full_block() -> None:
    pool = cpool.BlockPool(4, True, 4)
    pool._insert_block_hash(bytes(36), pool.blocks[1], 0)
    assert pool.find_ids([bytes(32)], 0).tolist() == [1]
    assert pool.find_full_ids([bytes(32)], 0, 4).tolist() == [-1]
