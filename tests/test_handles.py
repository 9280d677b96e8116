# SPDX-License-Identifier: Apache-2.0
"""Handles look like vLLM's blocks: identity, truth, comparison, links, life."""

import gc
import weakref
from typing import Any

import pytest

import cpool
from cpool import BlockHashToBlockMap, FreeKVCacheBlockQueue, KVCacheBlock
from cpool.core.pool import block_ids, count_evictable

from .support import Request, event_fields, make_request

KEY = bytes(range(32)) + bytes(4)
OTHER_KEY = bytes(32) + bytes(4)


@pytest.fixture
def pool() -> Any:
    return cpool.BlockPool(6, True, 4)


# Handles of a pool.


def test_the_same_block_is_the_same_object_while_it_is_held(pool: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    assert block is pool.blocks[1]
    assert pool.blocks[1:3][0] is block
    assert next(iter(pool.blocks[1:])) is block
    assert pool.null_block is pool.blocks[0]
    pool.cache_partial_block(make_request(2), block, 4, 0, 4)
    (hit,) = pool.get_cached_block(make_request(2).block_hashes[0], [0])
    assert hit is block
    pool.free_blocks([block])
    assert pool.free_block_queue.get_all_free_blocks()[-1] is block
    assert block.pool is pool


def test_a_handle_that_died_comes_back_with_the_same_state(pool: Any) -> None:
    pool.get_new_blocks(1)
    pool.blocks[1].ref_cnt += 2
    gc.collect()
    assert pool.blocks[1].ref_cnt == 3
    assert pool.ref_cnts.tolist() == [0, 3, 0, 0, 0, 0]


def test_blocks_is_a_sequence(pool: Any) -> None:
    assert len(pool.blocks) == 6
    assert [block.block_id for block in pool.blocks] == list(range(6))
    assert pool.blocks[-1].block_id == 5
    assert [block.block_id for block in pool.blocks[1:5:2]] == [1, 3]
    assert list(pool.blocks[2:4]) == pool.blocks[2:4]
    for index in (6, -7):
        with pytest.raises(IndexError):
            pool.blocks[index]


def test_the_null_block_is_registered_where_its_key_was_assigned_by_hand() -> None:
    # vLLM's own tests register every block of a pool like this.
    pool = cpool.BlockPool(9, True, 4)
    null, other, key = pool.null_block, pool.blocks[7], bytes(36)
    for block in (null, other):
        block.set_block_hash(key)
        pool.cached_block_hash_to_block.insert(key, block)
    pool.check_consistency()
    assert pool.get_cached_block(key[:-4], [0]) == [null]
    with pytest.raises(cpool.ContractError, match=r"^the null block is never registered$"):
        pool.cached_block_hash_to_block.insert(bytes(35) + b"1", null)
    assert pool._maybe_evict_cached_block(null)
    assert null.block_hash is None
    assert pool.get_cached_block(key[:-4], [0]) == [other]
    pool.check_consistency()


def test_every_block_is_true_even_block_0(pool: Any) -> None:
    assert all(pool.blocks)
    assert bool(pool.blocks[0]) is True
    assert bool(KVCacheBlock(0)) is True


def test_blocks_are_equal_only_to_themselves(pool: Any) -> None:
    other = cpool.BlockPool(6, True, 4)
    assert pool.blocks[1] == pool.blocks[1]
    assert pool.blocks[1] != pool.blocks[2]
    assert pool.blocks[1] != other.blocks[1]
    assert pool.blocks[1] != 1
    assert pool.blocks[1] is not None
    assert pool.blocks[2:4] == [pool.blocks[2], pool.blocks[3]]
    assert pool.blocks[0] == pool.null_block


def test_handles_can_be_keys(pool: Any) -> None:
    names = {block: block.block_id for block in pool.blocks}
    assert len(names) == 6
    assert names[pool.blocks[4]] == 4


def test_handles_are_kv_cache_blocks(pool: Any) -> None:
    assert isinstance(pool.blocks[0], KVCacheBlock)
    assert isinstance(pool.null_block, KVCacheBlock)
    assert isinstance(pool.free_block_queue, FreeKVCacheBlockQueue)
    assert isinstance(pool.cached_block_hash_to_block, BlockHashToBlockMap)


@pytest.mark.parametrize("count", [-2, -1, 0, 1, -(2**31 - 1), 2**31 - 1])
def test_the_null_blocks_count_may_be_any(pool: Any, count: int) -> None:
    pool.null_block.ref_cnt = count
    assert pool.null_block.ref_cnt == count
    for beyond in (-(2**31), 2**31):
        with pytest.raises(cpool.ContractError, match="ref_cnt of block 0 is"):
            pool.null_block.ref_cnt = beyond
    assert pool.null_block.ref_cnt == count


def test_only_block_0_is_null(pool: Any) -> None:
    assert [block.is_null for block in pool.blocks] == [True] + [False] * 5


def test_repr_shows_ids_instead_of_neighbours(pool: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    assert repr(block) == (
        "KVCacheBlock(block_id=1, ref_cnt=1, _block_hash=None, "
        "_block_hash_num_tokens=None, prev_free_block=None, next_free_block=None)"
    )
    assert repr(pool.blocks[3]) == (
        "KVCacheBlock(block_id=3, ref_cnt=0, _block_hash=None, "
        "_block_hash_num_tokens=None, prev_free_block=2, next_free_block=4)"
    )
    assert "prev_free_block=-1, next_free_block=3" in repr(pool.blocks[2])
    assert "prev_free_block=4, next_free_block=-1" in repr(pool.blocks[5])


def test_ref_cnt_can_be_written(pool: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    block.ref_cnt += 1
    pool.free_blocks([block])
    assert block.ref_cnt == 1
    pool.free_blocks([block])
    assert pool.get_num_free_blocks() == 5


def test_a_key_can_be_set_and_reset(pool: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    pool._insert_block_hash(KEY, block, num_tokens=8)
    assert (block.block_hash, block.block_hash_num_tokens) == (KEY, 8)
    assert (block._block_hash, block._block_hash_num_tokens) == (KEY, 8)
    with pytest.raises(AssertionError, match="already has a hash"):
        block.set_block_hash(OTHER_KEY, 4)
    assert pool._maybe_evict_cached_block(block) is True
    assert pool._maybe_evict_cached_block(block) is False
    assert block.block_hash is None


def test_a_key_assigned_by_hand_is_not_findable_until_it_is_inserted(pool: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    table = pool.cached_block_hash_to_block
    block._block_hash = KEY
    assert block.block_hash == KEY
    assert table.get_one_block(KEY) is None
    assert pool._maybe_evict_cached_block(block) is False
    assert block.block_hash is None
    block._block_hash = KEY
    table.insert(KEY, block)
    assert table.get_one_block(KEY) is block
    assert pool._maybe_evict_cached_block(block) is True
    assert len(table) == 0
    pool.check_consistency()


@pytest.mark.parametrize("was_reset", [False, True])
@pytest.mark.parametrize("way", ["evict_ids", "evict_blocks", "get_new_block_ids"])
def test_a_key_assigned_by_hand_leaves_a_pool_without_a_table(
    pool: Any, way: str, was_reset: bool
) -> None:
    if was_reset:
        pool.cache_partial_id(2, OTHER_KEY[:32], 4, 0)
        assert pool.reset_prefix_cache()
    pool.blocks[1].set_block_hash(KEY, 4)
    assert pool.table_stats()["num_cells"] == 0
    getattr(pool, way)(5 if way == "get_new_block_ids" else [1, 2])
    assert pool.blocks[1].block_hash is None
    assert pool.num_evicted_blocks == 0
    pool.check_consistency()


def test_a_key_taken_out_of_the_table_stays_on_the_block(pool: Any) -> None:
    first, second = pool.get_new_blocks(2)
    for block in (first, second):
        pool._insert_block_hash(KEY, block, num_tokens=4)
    table = pool.cached_block_hash_to_block
    assert table.pop(KEY, first.block_id) is first
    assert table.pop(KEY, first.block_id) is None
    assert first.block_hash == KEY
    assert table.get_one_block(KEY) is second
    assert pool._maybe_evict_cached_block(first) is False
    assert table.get_one_block(KEY) is second
    pool.check_consistency()


def test_handles_outlive_their_pool() -> None:
    pool = cpool.BlockPool(6, True, 4)
    blocks = pool.get_new_blocks(2)
    tail = pool.blocks[5]
    queue, table = pool.free_block_queue, pool.cached_block_hash_to_block
    views = [pool.ref_cnts, pool.blocks, pool.cached_block_hashes_by_block]
    del pool
    gc.collect()
    assert [block.block_id for block in blocks] == [1, 2]
    assert blocks[0].ref_cnt == 1
    assert "block_id=2" in repr(blocks[1])
    assert tail.prev_free_block.block_id == 4
    assert queue.num_free_blocks == 3
    assert len(table) == 0
    assert [len(view) for view in views] == [6, 6, 0]


def test_a_pool_and_its_handles_die_together() -> None:
    class Pool(cpool.BlockPool):
        pass

    pool = Pool(6, True, 4)
    held = [*pool.blocks, pool.free_block_queue, pool.cached_block_hash_to_block]
    alive = weakref.ref(pool)
    del pool
    gc.collect()
    assert alive() is not None or held[0].pool is None
    del held
    gc.collect()
    assert alive() is None


def test_pools_are_hashable_by_identity(pool: Any) -> None:
    other = cpool.BlockPool(6, True, 4)
    assert list(dict.fromkeys([pool, other, pool])) == [pool, other]


def test_blocks_of_another_pool_are_freed_there(pool: Any) -> None:
    other = cpool.BlockPool(6, True, 4)
    (mine,), (theirs,) = pool.get_new_blocks(1), other.get_new_blocks(1)
    pool.free_blocks([theirs, mine])
    assert pool.get_num_free_blocks() == other.get_num_free_blocks() == 5


# The queue and the table of a pool, as handles.


def test_the_queue_can_be_walked_from_either_end(pool: Any) -> None:
    pool.get_new_blocks(2)
    queue = pool.free_block_queue
    block, forwards = queue.fake_free_list_head.next_free_block, []
    while block.next_free_block is not None:
        forwards.append(block)
        block = block.next_free_block
    assert block is queue.fake_free_list_tail
    assert forwards == [pool.blocks[i] for i in (3, 4, 5)]
    block, backwards = queue.fake_free_list_tail.prev_free_block, []
    while block.prev_free_block is not None:
        backwards.append(block.block_id)
        block = block.prev_free_block
    assert block is queue.fake_free_list_head
    assert backwards == [5, 4, 3]
    assert queue.num_free_blocks == 3


@pytest.mark.parametrize("method", ["append_n", "prepend_n"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda pool: pool.null_block, "the null block is never"),
        (lambda pool: pool.blocks[4], "block 4 is already in"),
        (lambda pool: pool.blocks[2], "block 2 at position 2 is named twice"),
        (lambda pool: cpool.BlockPool(3, True, 4).blocks[1], "1 does not belong to this pool"),
    ],
)
def test_the_queue_takes_all_of_a_batch_or_nothing(
    pool: Any, method: str, bad: Any, message: str
) -> None:
    queue = pool.free_block_queue
    blocks = queue.popleft_n(2)
    with pytest.raises(cpool.ContractError, match=message):
        getattr(queue, method)([*blocks[::-1], bad(pool)])
    assert pool.free_queue_ids().tolist() == [3, 4, 5]
    getattr(queue, method)(blocks)
    expected = [3, 4, 5, 1, 2] if method == "append_n" else [1, 2, 3, 4, 5]
    assert pool.free_queue_ids().tolist() == expected
    assert queue.popleft_n(0) == queue.popleft_n(-1) == []
    with pytest.raises(AssertionError, match="6 blocks asked for, 5 are free"):
        queue.popleft_n(6)
    pool.check_consistency()


def test_the_queue_may_be_emptied_by_the_blocks_that_it_is_given(pool: Any) -> None:
    queue = pool.free_block_queue
    queue.append_n(queue.popleft() for _ in range(5))
    assert pool.free_queue_ids().tolist() == [1, 2, 3, 4, 5]
    queue.prepend_n(queue.popleft() for _ in range(5))
    assert pool.free_queue_ids().tolist() == [1, 2, 3, 4, 5]
    pool.check_consistency()


def test_the_queue_is_iterated_after_a_cursor(pool: Any) -> None:
    queue = pool.free_block_queue
    assert [b.block_id for b in queue.iter_blocks_after(None)] == [1, 2, 3, 4, 5]
    assert [b.block_id for b in queue.iter_blocks_after(pool.blocks[3])] == [4, 5]
    assert list(queue.iter_blocks_after(pool.blocks[5])) == []
    assert list(queue.iter_blocks_after(*pool.get_new_blocks(1))) == []


def test_blocks_outside_the_queue_have_no_neighbours(pool: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    assert block.prev_free_block is None
    assert block.next_free_block is None
    assert pool.null_block.next_free_block is None
    with pytest.raises(RuntimeError, match=r"remove.*invalid block"):
        pool.free_block_queue.remove(block)


def test_the_table_of_a_pool_answers_for_it(pool: Any) -> None:
    blocks = pool.get_new_blocks(2)
    for block in blocks:
        pool._insert_block_hash(KEY, block, num_tokens=4)
    table = pool.cached_block_hash_to_block
    assert len(table) == 1
    assert table.get_one_block(KEY) is blocks[0]
    assert table.get_one_block(OTHER_KEY) is None
    assert [table.contain(KEY, block_id) for block_id in range(4)] == [False, True, True, False]


# Stand-alone objects, as vLLM's connectors and tests make them.


def test_a_block_without_a_pool() -> None:
    block = KVCacheBlock(block_id=3, is_null=True, _block_hash="anything")
    assert (block.block_id, block.ref_cnt, block.is_null, block.pool) == (3, 0, True, None)
    assert block.block_hash == "anything"
    block.reset_hash()
    assert block.block_hash is None
    block.set_block_hash(KEY, num_tokens=16)
    assert (block.block_hash, block.block_hash_num_tokens) == (KEY, 16)
    with pytest.raises(AssertionError, match="already has a hash"):
        block.set_block_hash(KEY)
    block.ref_cnt -= 1
    assert block.ref_cnt == -1
    assert KVCacheBlock(1, 2).ref_cnt == 2


def test_a_block_made_for_a_pool_by_keyword(pool: Any) -> None:
    assert KVCacheBlock(2, pool=pool).pool is pool
    with pytest.raises(TypeError):
        KVCacheBlock(2, 0, None, None, None, None, False, pool)


def queue_ids(queue: Any) -> list[int]:
    return [block.block_id for block in queue.get_all_free_blocks()]


def test_a_queue_of_blocks_without_a_pool() -> None:
    blocks = [KVCacheBlock(i) for i in range(6)]
    queue = FreeKVCacheBlockQueue(blocks)
    assert queue_ids(queue) == [0, 1, 2, 3, 4, 5]
    assert queue.popleft() is blocks[0]
    queue.remove(blocks[3])
    assert queue.popleft_n(2) == [blocks[1], blocks[2]]
    assert queue.popleft_n(0) == []
    assert queue.num_free_blocks == 2
    queue.append(blocks[3])
    queue.append_n([blocks[1], blocks[0]])
    queue.prepend_n([blocks[2]])
    queue.append_n([])
    queue.prepend_n([])
    assert queue_ids(queue) == [2, 4, 5, 3, 1, 0]
    assert queue.num_free_blocks == 6
    assert [b.block_id for b in queue.iter_blocks_after(blocks[3])] == [1, 0]
    assert queue.fake_free_list_head.next_free_block is blocks[2]
    assert queue.fake_free_list_tail.prev_free_block is blocks[0]
    assert blocks[4].prev_free_block is blocks[2]


def test_an_empty_queue_without_a_pool() -> None:
    queue = FreeKVCacheBlockQueue([])
    assert queue.num_free_blocks == 0
    assert queue.fake_free_list_head.next_free_block is queue.fake_free_list_tail
    assert queue.get_all_free_blocks() == []
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()
    with pytest.raises(AssertionError):
        queue.popleft_n(1)
    block = KVCacheBlock(1)
    queue.append(block)
    assert queue.popleft() is block
    assert block.next_free_block is None
    with pytest.raises(RuntimeError, match=r"remove.*invalid block"):
        queue.remove(block)


def test_a_queue_without_a_pool_whose_ends_lost_their_links_takes_no_blocks() -> None:
    queue, blocks = FreeKVCacheBlockQueue([KVCacheBlock(0)]), [KVCacheBlock(1)]
    queue.fake_free_list_tail.prev_free_block = None
    queue.fake_free_list_head.next_free_block = None
    with pytest.raises(AssertionError, match="prev_free_block of fake_free_list_tail"):
        queue.append_n(blocks)
    with pytest.raises(AssertionError, match="next_free_block of fake_free_list_head"):
        queue.prepend_n(blocks)
    assert queue.num_free_blocks == 1
    assert blocks[0].prev_free_block is None
    queue.append_n([])
    queue.prepend_n([])


def test_a_table_without_a_pool() -> None:
    table, blocks = BlockHashToBlockMap(), [KVCacheBlock(i) for i in range(4)]
    for block in (blocks[2], blocks[0], blocks[3]):
        table.insert(KEY, block)
    table.insert(OTHER_KEY, blocks[1])
    assert len(table) == 2
    assert table.get_one_block(KEY) is blocks[2]
    assert table.contain(KEY, 3)
    assert not table.contain(OTHER_KEY, 3)
    assert table.pop(KEY, 1) is None
    assert table.pop(OTHER_KEY, 2) is None
    assert table.pop(KEY, 2) is blocks[2]
    assert table.get_one_block(KEY) is blocks[0]
    assert table.pop(OTHER_KEY, 1) is blocks[1]
    assert table.pop(OTHER_KEY, 1) is None
    assert len(table) == 1


# Subclasses.


class SharedQueuePool(cpool.BlockPool):
    """Publishes into its owner's queue, as vLLM's HiSparse pool does."""

    def __init__(self, *args: Any, owner: Any, **kwargs: Any) -> None:
        self.owner = owner
        super().__init__(*args, **kwargs)

    @property
    def kv_event_queue(self) -> list[Any]:
        return self.owner.kv_event_queue

    @kv_event_queue.setter
    def kv_event_queue(self, events: list[Any]) -> None:
        assert not events


def test_a_subclass_publishes_into_the_queue_of_another_pool() -> None:
    owner = cpool.BlockPool(6, True, 4, enable_kv_cache_events=True)
    shared = SharedQueuePool(6, True, 4, enable_kv_cache_events=True, medium="CPU", owner=owner)
    chain = make_request(4)
    owner.cache_full_blocks(chain, owner.get_new_blocks(1), 0, 1, 4, 0)
    shared.cache_full_blocks(chain, shared.get_new_blocks(2), 0, 2, 4, 1)
    shared.evict_blocks({1})
    events = [event_fields(event) for event in owner.take_events()]
    assert [(e.medium, e.group_idx) for e in events] == [("GPU", 0), ("CPU", 1), ("CPU", 1)]
    assert owner.take_events() == []
    owner.cache_partial_block(chain, owner.get_new_blocks(1)[0], 8, 0, 4)
    assert len(shared.kv_event_queue) == 1


def test_a_subclass_has_its_own_attributes_and_methods() -> None:
    class Pool(cpool.BlockPool):
        def __init__(self) -> None:
            self.name = "mine"
            super().__init__(4, enable_caching=False, hash_block_size=8, medium="CPU")

        def get_num_free_blocks(self) -> int:
            return super().get_num_free_blocks() + 100

    pool = Pool()
    pool.extra = [1]
    assert (pool.name, pool.extra, pool.get_num_free_blocks()) == ("mine", [1], 103)
    assert (pool.medium, pool.hash_block_size, pool.enable_caching) == ("CPU", 8, False)
    assert pool.num_gpu_blocks == 4
    assert pool.metrics_collector is None
    assert pool.blocks[1].pool is pool


def test_taken_events_are_a_new_list_each_time() -> None:
    pool = cpool.BlockPool(6, True, 4, enable_kv_cache_events=True)
    pool.reset_prefix_cache()
    queue = pool.kv_event_queue
    taken = pool.take_events()
    assert taken is queue
    taken.extend([1, 2])
    assert pool.take_events() == []
    assert pool.take_events() is not pool.take_events()


def test_a_prefix_in_several_groups_ends_where_one_of_them_ends() -> None:
    pool = cpool.BlockPool(12, True, 16)
    hashes = [bytes([i]) * 32 for i in range(6)]
    blocks = {group: pool.get_new_blocks(5) for group in (0, 7)}
    for group, num_full in ((0, 5), (7, 3)):
        pool.cache_full_blocks(Request(hashes), blocks[group], 0, num_full, 16, group)
    for groups in ([0], [7], [0, 7], [7, 0], [0, 1], [1, 0], []):
        expected = []
        for block_hash in hashes:
            found = pool.get_cached_block(block_hash, groups)
            if not found:
                break
            expected.append(found)
        runs = pool.find_prefix_blocks(hashes, groups)
        assert runs == [[found[i] for found in expected] for i in range(len(groups))]
    assert len(pool.find_prefix_blocks(hashes, [0, 7])[0]) == 3
    assert pool.find_prefix_blocks([], [0]) == [[]]


def test_ids_and_evictable_blocks_of_any_block_are_those_its_attributes_say(pool: Any) -> None:
    held, free = pool.get_new_blocks(2)
    pool.free_blocks([free])
    own = [KVCacheBlock(7), KVCacheBlock(8, ref_cnt=1), KVCacheBlock(9, is_null=True)]
    blocks = [held, free, pool.null_block, *own]
    assert block_ids(blocks) == [block.block_id for block in blocks]
    assert count_evictable(blocks) == 2
    assert count_evictable(()) == 0
    with pytest.raises(AttributeError):
        block_ids([object()])
