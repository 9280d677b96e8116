# SPDX-License-Identifier: Apache-2.0
"""One object per block while anyone holds it, however many live, come and go."""

import gc
import random
import weakref

import pytest

import cpool

from .support import make_request

NUM_BLOCKS = 40_000  # above what the smallest table of handles serves


@pytest.mark.parametrize("num_blocks", [1, 700, 1_500, 5_000, NUM_BLOCKS])
def test_a_held_handle_is_found_again_whatever_else_comes_and_goes(num_blocks: int) -> None:
    pool = cpool.BlockPool(num_blocks, True, 4)
    rng = random.Random(num_blocks)
    held: dict[int, cpool.KVCacheBlock] = {}
    for share in (0.01, 0.3, 0.02, 0.9, 0.001, 0.4, 0.0):
        wanted = round(share * num_blocks)
        while len(held) > wanted:
            held.pop(rng.choice(list(held)) if len(held) < 50 else next(iter(held)))
        while len(held) < wanted:
            block_id = rng.randrange(num_blocks)
            block = pool.blocks[block_id]
            assert held.setdefault(block_id, block) is block
        for block_id, block in held.items():
            assert block.block_id == block_id
            assert pool.blocks[block_id] is block
        strangers = [i for i in rng.sample(range(num_blocks), min(50, num_blocks)) if i not in held]
        assert [pool.blocks[i].block_id for i in strangers] == strangers


@pytest.mark.parametrize("num_held", [20, 300, 500, 1_900])
def test_a_handle_that_dies_hides_no_other(num_held: int) -> None:
    pool = cpool.BlockPool(NUM_BLOCKS, True, 4)
    rng = random.Random(num_held)
    held = {i: pool.blocks[i] for i in rng.sample(range(NUM_BLOCKS), num_held)}
    for turn in range(4_000):
        del held[rng.choice(list(held))]
        block_id = rng.randrange(NUM_BLOCKS)
        while block_id in held:
            block_id = rng.randrange(NUM_BLOCKS)
        held[block_id] = pool.blocks[block_id]
        if turn % 100 == 0:
            assert all(pool.blocks[i] is block for i, block in held.items())


def test_handles_of_a_batch_are_those_that_live_and_new_ones() -> None:
    pool = cpool.BlockPool(NUM_BLOCKS, True, 4)
    held = pool.blocks[1:NUM_BLOCKS:3]
    taken = pool.get_new_blocks(NUM_BLOCKS - 1)
    assert [block.block_id for block in taken] == list(range(1, NUM_BLOCKS))
    assert all(a is b for a, b in zip(taken[::3], held, strict=True))
    assert len({id(block) for block in taken}) == len(taken)


def test_the_map_gives_back_what_many_handles_took() -> None:
    pool = cpool.BlockPool(NUM_BLOCKS, True, 4)
    before = pool.nbytes
    blocks = list(pool.blocks)
    assert pool.nbytes - before <= 8 * NUM_BLOCKS + 4096
    del blocks
    assert pool.blocks[7].block_id == 7
    assert pool.nbytes - before <= 16 * 1024


def test_the_memory_of_a_handle_serves_a_block_of_its_own_and_back() -> None:
    pool = cpool.BlockPool(6, True, 4)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(make_request(3), blocks, 0, 3, 4, 0)
    del blocks
    own = [cpool.KVCacheBlock(block_id=i, ref_cnt=i) for i in range(8)]
    assert [(b.block_id, b.ref_cnt, b.block_hash, b.pool, b.is_null) for b in own] == [
        (i, i, None, None, False) for i in range(8)
    ]
    del own
    handles = pool.blocks[:]
    assert [(b.block_id, b.ref_cnt, b.pool is pool) for b in handles] == [
        (0, 0, True), (1, 1, True), (2, 1, True), (3, 1, True), (4, 0, True), (5, 0, True),
    ]  # fmt: skip


def test_the_collector_knows_the_blocks_that_can_be_part_of_a_cycle() -> None:
    class Witness:
        pass

    pool = cpool.BlockPool(6, True, 4)
    assert not any(map(gc.is_tracked, pool.blocks))
    first, second = cpool.KVCacheBlock(1), cpool.KVCacheBlock(2)
    assert gc.is_tracked(first)
    first.next_free_block, second.prev_free_block = second, first
    witness = Witness()
    cycle = cpool.KVCacheBlock(3, _block_hash=witness, next_free_block=first)
    second.next_free_block = cycle
    gone = weakref.ref(witness)
    del witness, cycle, first, second
    gc.collect()
    assert gone() is None


def test_a_handle_that_outlives_its_pool_can_be_part_of_a_cycle() -> None:
    class Witness:
        pass

    block = cpool.BlockPool(6, True, 4).blocks[3]
    assert block.pool is None
    assert gc.is_tracked(block)
    witness = Witness()
    gone = weakref.ref(witness)
    witness.block = block
    block.next_free_block = witness
    del witness, block
    gc.collect()
    assert gone() is None


def test_handles_come_and_go_without_work_for_the_collector() -> None:
    pool = cpool.BlockPool(2_000, True, 4)
    pool.free_blocks(pool.get_new_blocks(1_000))
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        for _ in range(20):
            pool.free_blocks(pool.get_new_blocks(1_000))
        assert gc.get_count()[0] - before < 1_000
    finally:
        gc.enable()
