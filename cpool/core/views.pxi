# SPDX-License-Identifier: Apache-2.0
# Views of a pool with the methods of vLLM's free queue, hash map and per-block sets.

class PoolFreeQueue(FreeKVCacheBlockQueue):
    """A pool's free queue."""

    def __init__(self, BlockPool pool not None):
        self._pool = pool

    @property
    def num_free_blocks(self):
        """Number of free blocks."""
        return self._pool.get_num_free_blocks()

    @property
    def fake_free_list_head(self):
        """The end before the first free block."""
        cdef BlockPool pool = self._pool
        return pool.handle(pool.core.blocks.num_blocks + 1)

    @property
    def fake_free_list_tail(self):
        """The end behind the last free block."""
        cdef BlockPool pool = self._pool
        return pool.handle(pool.core.blocks.num_blocks)

    def remove(self, block):
        """Take a block out of the middle. Raises RuntimeError when it is not in the queue."""
        cdef BlockPool pool = self._pool
        cdef block_id_t id = pool.own_id(block)
        if not free_queue.contains(&pool.core.queue, id):
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        free_queue.remove(&pool.core.queue, id)

    def popleft_n(self, n):
        """Take the first ``n`` free blocks. Raises AssertionError when there are fewer."""
        cdef BlockPool pool = self._pool
        cdef bint collects
        num_free = min(self.num_free_blocks, pool.core.queue.num_free)
        if n > num_free:
            raise AssertionError(f"{n} blocks asked for, {num_free} are free")
        # A collection for the list could run a __del__ that changes the queue.
        collects = PyGC_Disable()
        try:
            blocks = list(islice(self.iter_blocks_after(None), max(n, 0)))
            for block in blocks:
                free_queue.remove(&pool.core.queue, (<KVCacheBlock>block).index)
        finally:
            if collects:
                PyGC_Enable()
        return blocks

    def append_n(self, blocks):
        """Put blocks at the end, in the given order.

        Raises:
            ContractError: A block is free already, the null block, named twice or not this
                pool's; nothing was changed.
        """
        self._insert_all(blocks, True)

    def prepend_n(self, blocks):
        """As `append_n`, at the front."""
        self._insert_all(blocks, False)

    def _insert_all(self, blocks, bint at_end):
        cdef BlockPool pool = self._pool
        cdef IdBuffer buffer = pool.buffer_of(blocks)
        cdef block_id_t place = pool.core.queue.end
        cdef size_t i
        seen = set()
        for i in range(buffer.count):
            self._refuse_insertion(buffer.ids[i])
            if buffer.ids[i] in seen:
                raise ContractError(f"block {buffer.ids[i]} at position {i} is named twice")
            seen.add(buffer.ids[i])
        # Only now: `blocks` may have been an iterator that took blocks out itself.
        if at_end:
            place = state_at(&pool.core.blocks, place).prev
        for i in range(buffer.count):
            free_queue.insert_after(&pool.core.queue, place, buffer.ids[i])
            place = buffer.ids[i]

    def _refuse_insertion(self, block_id_t id):
        cdef BlockPool pool = self._pool
        if id == NULL_BLOCK:
            raise ContractError("the null block is never in the free queue")
        if free_queue.contains(&pool.core.queue, id):
            raise ContractError(f"block {id} is already in the free queue")

    def _insert_after(self, place, block):
        cdef BlockPool pool = self._pool
        cdef block_id_t id = pool.own_id(block)
        cdef KVCacheBlock before = place
        if before.owner != <PyObject*>pool or not free_queue.contains(
            &pool.core.queue, min(before.index, pool.core.queue.end)
        ):
            raise ContractError(f"block {before.block_id} is not in this free queue")
        self._refuse_insertion(id)
        free_queue.insert_after(
            &pool.core.queue, min(before.index, pool.core.blocks.num_blocks), id
        )

    def iter_blocks_after(self, cursor):
        """Iterate over the blocks behind ``cursor``, or over all of them if it is None."""
        cdef BlockPool pool = self._pool
        cdef block_id_t id = pool.core.queue.end if cursor is None else pool.own_id(cursor)
        while True:
            id = free_queue.next_of(&pool.core.queue, id)
            if id == pool.core.queue.end or id == NOT_QUEUED:
                return
            yield pool.handle(id)


class PoolHashMap(BlockHashToBlockMap):
    """A pool's table, addressed with digest and group in one bytes object."""

    def __init__(self, BlockPool pool not None):
        self._pool = pool

    @property
    def _cache(self):
        return PoolHashCache(self._pool)

    def get_one_block(self, key):
        """The first block registered under ``key``, or None."""
        cdef BlockPool pool = self._pool
        cdef Holder holder
        cdef Key wanted
        if not pool.look_up(key, &wanted, &holder):
            return None
        return pool.handle(holder.block)

    def contain(self, key, block_id):
        """Whether that block is registered under ``key``."""
        cdef BlockPool pool = self._pool
        cdef Holder holder
        cdef Key wanted
        if not pool.look_up(key, &wanted, &holder):
            return False
        return registry.find_held_by(&pool.core, &wanted, pool.check_id(block_id), &holder)

    def insert(self, key, block):
        """Register ``block`` under ``key``, behind the blocks that already are."""
        cdef BlockPool pool = self._pool
        cdef block_id_t id = pool.own_id(block)
        if pool.primary_key(id) == key:
            pool.link_primary(id)
        else:
            pool.insert_key(key, id, None)

    def pop(self, key, block_id):
        """Take one block away from under ``key``; None if it is not there."""
        cdef BlockPool pool = self._pool
        cdef Holder holder
        cdef Key wanted
        cdef block_id_t id = pool.check_id(block_id)
        cdef RemovedRun removed = pool.departure_log()
        block = pool.handle(id)
        if not pool.look_up(key, &wanted, &holder) or not registry.find_held_by(
            &pool.core, &wanted, id, &holder
        ):
            return None
        pool.log_departure(holder, removed)
        if holder.extra == NO_RECORD:
            registry.unlink(&pool.core, holder)
            key_at(&pool.core.blocks, id).space |= LOOSE_FLAG
        else:
            registry.drop_extra(&pool.core, holder)
        pool.emit_removed(removed, False)
        return block

    def __len__(self):
        cdef BlockPool pool = self._pool
        return pool.core.table.num_used


class PoolHashCache(Mapping):
    """key -> block, or {block id: block} where several blocks hold the key."""

    def __init__(self, BlockPool pool not None):
        self._pool = pool

    def __getitem__(self, key):
        cdef BlockPool pool = self._pool
        cdef Holder holder
        cdef Key wanted
        if not isinstance(key, bytes) or not pool.look_up(key, &wanted, &holder):
            raise KeyError(key)
        ids = pool.holders(&wanted)
        if len(ids) == 1:
            return pool.handle(ids[0])
        return {id: pool.handle(id) for id in ids}

    def __iter__(self):
        cdef BlockPool pool = self._pool
        seen = set()
        for id in range(pool.core.blocks.num_blocks):
            for key in pool.keys_of(id):
                if key not in seen:
                    seen.add(key)
                    yield key

    def __len__(self):
        cdef BlockPool pool = self._pool
        return pool.core.table.num_used

    def pop(self, key, *default):
        """Take every block away from under ``key`` and return what ``[key]`` gave."""
        if key not in self and default:
            return default[0]
        found = self[key]
        blocks = list(found.values()) if isinstance(found, dict) else [found]
        for block in blocks:
            self._pool.cached_block_hash_to_block.pop(key, block.block_id)
        return found

    def clear(self):
        """Take all keys away."""
        for key in list(self):
            self.pop(key)


class PoolRows(Mapping):
    """block id -> the extra keys of that block, for blocks that have some."""

    def __init__(self, BlockPool pool not None):
        self._pool = pool

    def __getitem__(self, block_id):
        cdef BlockPool pool = self._pool
        keys = (
            pool.extra_keys(block_id)
            if isinstance(block_id, int) and 0 <= block_id < pool.core.blocks.num_blocks
            else None
        )
        if not keys:
            raise KeyError(block_id)
        return set(keys)

    def __iter__(self):
        cdef BlockPool pool = self._pool
        cdef uint32_t id
        for id in range(pool.core.blocks.num_blocks):
            if reverse_index.first(&pool.core.index, id) != NO_RECORD:
                yield id

    def __len__(self):
        return sum(1 for _ in self)

    def __contains__(self, block_id):
        cdef BlockPool pool = self._pool
        return (
            isinstance(block_id, int)
            and 0 <= block_id < pool.core.blocks.num_blocks
            and reverse_index.first(&pool.core.index, block_id) != NO_RECORD
        )
