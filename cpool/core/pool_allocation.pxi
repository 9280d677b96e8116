# SPDX-License-Identifier: Apache-2.0
# Blocks come, are held, are freed, and lose their keys.

cdef class _PoolAllocation(_PoolLookup):
    """A part of `BlockPool`, see there."""

    cdef int check_available(self, int64_t count) except -1:
        if count > self.core.queue.num_free:
            raise ValueError(f"Cannot get {count} free blocks from the pool")
        return 0

    cdef bint is_observed(self):
        # Whether allocation has to call back for every block.
        return bool(self._reuse_watchers or self.metrics_collector is not None)

    cdef int allocate(self, block_id_t* ids, size_t count, bint compact) except -1:
        # Takes the first `count` blocks out of the queue into `ids`.
        cdef size_t i
        cdef RemovedRun removed = None
        cdef bint collects
        # A collection between check and commit could run a __del__ that changes the queue.
        if self.is_observed():
            collects = PyGC_Disable()
            try:
                self.check_available(count)
                head_run(&self.core, ids, count)
                blocks_taken = self.handles_of(ids, count)
                free_queue.take_head_run(&self.core.queue, ids, count, 0)
            finally:
                if collects:
                    PyGC_Enable()
            self.num_allocating += 1
            try:
                self.announce_allocation(blocks_taken, ids, count)
            except BaseException:
                put_back(&self.core, ids, count)
                raise
            finally:
                self.num_allocating -= 1
            return 0
        collects = self.enable_kv_cache_events and PyGC_Disable()
        try:
            self.check_available(count)
            head_run(&self.core, ids, count)
            if self.enable_caching:
                removed = self.log_for(ids, count)
            free_queue.take_head_run(&self.core.queue, ids, count, 1)
        finally:
            if collects:
                PyGC_Enable()
        if self.enable_caching:
            self.num_evicted_blocks += self.evict_quietly(
                ids, count, min(count, <size_t>batches.RING), removed
            )
        try:
            self.emit_removed(removed, compact)
        except BaseException:
            # An interrupt: nobody will know of these blocks.
            put_back(&self.core, ids, count)
            raise
        return 0

    cdef int announce_allocation(self, list taken, const block_id_t* ids, size_t count) except -1:
        # Block by block, in vLLM's order: watchers of all; then evict, count, tell metrics.
        cdef size_t i
        self.notify_reuse(taken)
        for i in range(count):
            if self.enable_caching:
                self.evict(ids[i])
            if state_at(&self.core.blocks, ids[i]).ref_cnt != 0:
                raise ContractError(f"block {ids[i]} was touched while it was handed out")
            state_at(&self.core.blocks, ids[i]).ref_cnt = 1
            if self.metrics_collector is not None:
                self.metrics_collector.on_block_allocated(taken[i])
        return 0

    cdef int notify_reuse(self, list taken) except -1:
        if not self._reuse_watchers:
            return 0
        for block in taken:
            watcher = self._reuse_watchers.pop(block.block_id, None)
            if watcher is not None:
                watcher(block)
        return 0

    cdef bint evict(self, block_id_t id) except -1:
        # All keys of a block leave, with hooks and events. Whether the table knew it.
        cdef RemovedRun removed
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(self.handle(id))
        removed = self.log_for(&id, 1)
        if removed is not None:
            log_keys(&self.core, id, removed, self.truthful_events)
        if registry.drop_keys(&self.core, id) == 0:
            return False
        self.num_evicted_blocks += 1
        self.emit_removed(removed, False)
        return True

    def get_new_blocks(self, num_blocks):
        """Take blocks from the head of the free queue; their keys leave the prefix cache.

        Args:
            num_blocks: How many.

        Returns:
            List of blocks, each with a ref_cnt of 1.

        Raises:
            ValueError: Fewer are free; nothing was changed.
        """
        cdef int64_t count = read_count(num_blocks, "num_blocks", 0, (1 << 62))
        cdef block_id_t few[2 * FEW]
        cdef block_id_t* ids = few
        cdef block_id_t* taken
        cdef IdBuffer buffer
        cdef list result
        cdef int64_t i
        self.check_available(count)
        if count == 0:
            return []
        if count > FEW:
            buffer = make_buffer(2 * count)
            ids = buffer.ids
        taken = ids + count
        head_run(&self.core, ids, count)
        result = self.handles_of(ids, count)
        self.allocate(taken, count, False)
        # The same blocks, unless making their handles ran a __del__ that changed the queue.
        for i in range(count):
            if taken[i] != ids[i]:
                result[i] = self.handle(taken[i])
        self.after()
        return result

    def get_new_block_ids(self, n):
        """As `get_new_blocks`, with ids.

        Returns:
            (n,) uint32 array of block ids.
        """
        cdef int64_t count = read_count(n, "num_blocks", 0, (1 << 62))
        self.check_available(count)
        free_queue.prefetch_near(&self.core.queue, count)
        result = new_array(count, numpy.NPY_UINT32)
        if count:
            self.allocate(<block_id_t*>data_of(result), count, True)
        self.after()
        return result

    def touch(self, blocks):
        """Add a holder to each block; a free one leaves the free queue.

        Args:
            blocks: Sequence of this pool's blocks.

        Raises:
            ContractError: A block belongs to another pool; nothing was changed.
        """
        cdef list items = blocks if type(blocks) is list else list(blocks)
        cdef block_id_t few[FEW]
        cdef block_id_t* ids = few
        cdef IdBuffer buffer
        if len(items) > FEW:
            buffer = make_buffer(len(items))
            ids = buffer.ids
        if not self.read_own(items, ids):
            self.buffer_of(items)   # says what is wrong
        self.touch_run(ids, len(items))

    def touch_ids(self, ids):
        """As `touch`, with an array of block ids."""
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        if self.metrics_collector is not None:
            copy_ids(batch)
        self.touch_run(batch.ids, batch.count)

    cdef int touch_run(self, const block_id_t* ids, size_t count) except -1:
        # With a collector the caller's array was copied: what it calls may write to it.
        cdef size_t i
        collector = self.metrics_collector
        check_touch(&self.core, ids, count)
        if collector is None:
            commit_touch(&self.core, ids, count)
        else:
            for i in range(count):
                check_touch(&self.core, ids + i, 1)
                commit_touch(&self.core, ids + i, 1)
                collector.on_block_accessed(self.handle(ids[i]))
        self.after()
        return 0

    cdef IdBuffer buffer_of(self, object blocks):
        # The ids of this pool's blocks. A batch is read to its end before anything changes.
        cdef list items = blocks if type(blocks) is list else list(blocks)
        cdef IdBuffer buffer = make_buffer(len(items))
        cdef size_t i
        for i in range(buffer.count):
            buffer.ids[i] = self.own_id(items[i])
        return buffer

    def free_blocks(self, ordered_blocks):
        """Take one holder from each block; at 0 it joins the free queue.

        A block without a key goes to the front of the queue, to be reused first; one with a
        key to the tail. Blocks of other pools go to their pools.

        Args:
            ordered_blocks: Blocks in the order in which they may be evicted.

        Raises:
            ContractError: A block is already free, or is named more often than it is held;
                nothing was changed.
        """
        cdef list items = (
            ordered_blocks if type(ordered_blocks) is list else list(ordered_blocks)
        )
        cdef block_id_t few[FEW]
        cdef block_id_t* ids = few
        cdef IdBuffer buffer
        if len(items) > FEW:
            buffer = make_buffer(len(items))
            ids = buffer.ids
        if self.read_own(items, ids):
            release_run(&self.core, ids, len(items), self.enable_caching, False)
            self.after()
        else:
            self._free_of_any_pool(items)

    def _free_of_any_pool(self, blocks):
        # free_blocks() for blocks that are not all this pool's.
        cdef dict by_pool = {}
        for block in blocks:
            if type(block) is not KVCacheBlock:
                raise TypeError(f"expected a KVCacheBlock, not {type(block).__name__}")
            pool = block.pool
            if pool is None:
                raise ContractError(f"block {block.block_id} does not belong to a pool")
            by_pool.setdefault(pool, []).append(block)
        self.release_in_turn(by_pool)

    cdef int release_in_turn(self, dict by_pool) except -1:
        # Pool after pool, this one first. When one refuses, the ones before it take back.
        cdef list done = []
        cdef BlockPool pool
        cdef IdBuffer buffer
        own = by_pool.pop(self, None)
        try:
            if own is not None:
                buffer = self.buffer_of(own)
                self.release(buffer, self.enable_caching, False)
                done.append((self, buffer))
            for other, blocks_of_other in by_pool.items():
                if isinstance(other, BlockPool):
                    pool = <BlockPool>other
                    buffer = pool.buffer_of(blocks_of_other)
                    pool.release(buffer, pool.enable_caching, False)
                    done.append((pool, buffer))
            for other, blocks_of_other in by_pool.items():
                if not isinstance(other, BlockPool):
                    other.free_blocks(blocks_of_other)
        except BaseException:
            for pool, buffer in reversed(done):
                undo_release(&pool.core, buffer.ids, buffer.count)
            raise
        return 0

    def free_ids(self, ids):
        """As `free_blocks`, with an array of block ids."""
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        release_run(&self.core, batch.ids, batch.count, self.enable_caching, False)
        self.after()

    cdef int release(self, IdBuffer buffer, bint hashed_last, bint all_last) except -1:
        release_run(&self.core, buffer.ids, buffer.count, hashed_last, all_last)
        self.after()
        return 0

    def unpin_blocks(self, blocks, on_reuse):
        """Take one holder from each block, whose contents are still read until it is reused.

        The blocks join the tail of the free queue, with or without a key.

        Args:
            blocks: This pool's blocks, each held, none the null block.
            on_reuse: Called with the block when it is handed out again or the cache is reset.

        Raises:
            ContractError: A block is free or the null block; nothing was changed.
        """
        cdef IdBuffer buffer = self.buffer_of(blocks)
        cdef list buffer_ids = []
        cdef size_t i
        if not callable(on_reuse):
            raise TypeError(f"on_reuse must be callable, not {type(on_reuse).__name__}")
        for i in range(buffer.count):
            if buffer.ids[i] == NULL_BLOCK:
                raise ContractError("the null block cannot be unpinned")
            buffer_ids.append(buffer.ids[i])
        # Whoever reads the blocks must hear of their reuse, so the callbacks come first.
        watched = [(block_id, self._reuse_watchers.get(block_id)) for block_id in buffer_ids]
        try:
            for block_id in buffer_ids:
                self._reuse_watchers[block_id] = on_reuse
            self.release(buffer, False, True)
        except BaseException:
            for block_id, watcher in watched:
                if watcher is None:
                    self._reuse_watchers.pop(block_id, None)
                else:
                    self._reuse_watchers[block_id] = watcher
            raise

    def is_block_writable(self, block):
        """Whether a block has one holder and no key, so that its holder may change it."""
        cdef block_id_t id = self.own_id(block)
        return (
            id != NULL_BLOCK
            and state_at(&self.core.blocks, id).ref_cnt == 1
            and not registry.has_primary(&self.core, id)
        )

    def get_num_free_blocks(self):
        """Number of blocks in the free queue."""
        return self.core.queue.num_free

    def get_usage(self):
        """Share of the blocks that are held, 0.0 to 1.0; the null block does not count."""
        cdef uint32_t usable = self.core.blocks.num_blocks - 1
        if usable == 0:
            return 0
        return 1.0 - (<double>self.core.queue.num_free / usable)

    def _maybe_evict_cached_block(self, block):
        """Take all keys of a block away. Whether there were any."""
        cdef bint evicted = self.evict(self.own_id(block))
        self.after()
        return evicted

    def evict_blocks(self, block_ids):
        """Take all keys of some blocks away; blocks that are held stay held.

        Args:
            block_ids: Iterable of block ids.

        Raises:
            BlockIdError: An id is out of range; nothing was changed.
        """
        cdef list ids = [self.check_id(id) for id in block_ids]
        cdef IdBuffer buffer = make_buffer(len(ids))
        cdef size_t i
        for i in range(buffer.count):
            buffer.ids[i] = ids[i]
        self.evict_all(buffer.ids, buffer.count, False)
        self.after()

    def evict_ids(self, ids):
        """As `evict_blocks`, with an array of block ids.

        Returns:
            Number of blocks that had keys.
        """
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        cdef unsigned long long before = self.num_evicted_blocks
        answer = None
        if self.metrics_collector is not None:
            copy_ids(batch)
        elif batch.count > SMALL_INT:
            # The answer is made first: it must not be what fails when all is done.
            answer = self.count_known(batch.ids, batch.count)
        self.evict_all(batch.ids, batch.count, True)
        self.after()
        return self.num_evicted_blocks - before if answer is None else answer

    cdef object count_known(self, const block_id_t* ids, size_t count):
        # How many blocks the table knows; one that is named twice counts once.
        cdef Array seen
        cdef size_t i, known = 0
        memory.allocate(&seen, self.core.blocks.num_blocks, sizeof(uint8_t))
        for i in range(count):
            if seen.data[ids[i]] == 0:
                seen.data[ids[i]] = 1
                known += registry.is_known(&self.core, ids[i])
        memory.release(&seen)
        return known

    cdef int evict_all(self, const block_id_t* ids, size_t count, bint compact) except -1:
        cdef RemovedRun removed
        cdef size_t i
        if self.metrics_collector is not None:
            for i in range(count):
                self.evict(ids[i])
            return 0
        removed = self.log_for(ids, count)
        self.num_evicted_blocks += self.evict_quietly(ids, count, 0, removed)
        return self.emit_removed(removed, compact)

    cdef size_t evict_quietly(
        self, const block_id_t* ids, size_t count, size_t asked, RemovedRun removed
    ) noexcept:
        # `removed` is from log_for(); the keys of the first `asked` blocks are on their way.
        # Returns how many of the blocks the table knew.
        return evict_run(&self.core, ids, count, asked, removed, self.truthful_events)
