# SPDX-License-Identifier: Apache-2.0
"""What code does with stock's pool behind its methods works on ours."""

import copy

import pytest

pytest.importorskip("vllm", reason="needs a vLLM: tests/vllm/run --set own")

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from cpool import KVCacheBlock

from .differential import OurBlockPool, make_request

KEY = make_block_hash_with_group_id(b"k" * 32, 0)


@pytest.fixture
def pool():
    return OurBlockPool(8, True, 4)


def cached_block(pool):
    block = pool.get_new_blocks(1)[0]
    pool._insert_block_hash(KEY, block, num_tokens=4)
    return block


def test_blocks_of_no_pool_are_cached_and_found_beside_the_pools_own(pool):
    own = cached_block(pool)
    request = make_request("0", range(8), 4)
    guests = [KVCacheBlock(block_id=i) for i in (3, 4)]
    pool.cache_full_blocks(request, guests, 0, 2, 4, 0)
    assert pool.get_cached_block(request.block_hashes[1], [0]) == [guests[1]]
    assert pool.get_cached_block(KEY[:-4], [0]) == [own]
    assert pool.get_cached_block(request.block_hashes[1], [1]) is None
    assert len(pool.cached_block_hash_to_block) == 3
    pool.check_consistency()


def test_a_block_of_no_pool_that_is_freed_stays_out_of_the_queue(pool):
    own, guest = pool.get_new_blocks(1)[0], KVCacheBlock(block_id=5, ref_cnt=1)
    pool.free_blocks(iter([guest, own]))
    assert (guest.ref_cnt, own.ref_cnt) == (0, 0)
    assert pool.get_num_free_blocks() == 7
    pool.check_consistency()


def test_a_wrong_free_is_still_refused_as_a_whole(pool):
    held, free = pool.get_new_blocks(1)[0], pool.blocks[6]
    with pytest.raises(AssertionError):
        pool.free_blocks([held, free])
    assert held.ref_cnt == 1
    pool.check_consistency()


def test_a_key_popped_from_the_private_dict_can_be_put_back_from_a_copy(pool):
    block = cached_block(pool)
    cache = pool.cached_block_hash_to_block._cache
    before = copy.copy(cache)
    assert cache.pop(KEY) is block
    assert pool.get_cached_block(KEY[:-4], [0]) is None
    cache[KEY] = before[KEY]
    assert pool.get_cached_block(KEY[:-4], [0]) == [block]
    assert cache == {KEY: block}
    assert cache == {KEY: {block.block_id: block}}
    assert cache != {KEY: pool.null_block}
    pool.check_consistency()


def test_a_free_queue_assigned_empty_gives_nothing_until_something_is_freed(pool):
    blocks = pool.get_new_blocks(2)
    queue = pool.free_block_queue
    queue.num_free_blocks = 0
    assert pool.get_usage() == 1.0
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 are free"):
        queue.popleft_n(1)
    pool.free_blocks(blocks)
    assert queue.num_free_blocks == 2
    queue.num_free_blocks = 7
    assert type(pool) is OurBlockPool
    assert len(pool.get_new_blocks(7)) == 7
