# SPDX-License-Identifier: Apache-2.0
# What a pool is made of, its handles, and views of what it holds.

cdef class _PoolState:
    """A part of `BlockPool`, see there."""

    def __cinit__(self, *args, **kwargs):
        self._reuse_watchers = {}

    def __dealloc__(self):
        cdef uint32_t i
        cdef bint collects = PyGC_Disable()
        for i in range(self.handles.num_places):
            if self.handles.handles[i] != NULL:
                (<KVCacheBlock>self.handles.handles[i]).detach()
        if collects:
            PyGC_Enable()
        handle_map.release(&self.handles)
        parents.release(&self.parents)
        self.forget_prefixes()
        registry.release(&self.core)

    cdef void forget_prefixes(self) noexcept:
        cdef uint32_t i
        for i in range(guess.NUM_GUESSES):
            guess.forget(&self.guesses[i])

    cdef KVCacheBlock handle(self, block_id_t id):
        cdef PyObject* found = handle_map.find(&self.handles, id)
        if found != NULL:
            return <KVCacheBlock>found
        self.prepare_handles(1)
        return self.new_handle(handle_map.place_of(&self.handles, id), id)

    cdef int prepare_handles(self, size_t count) except -1:
        # Afterwards that many handles can be made, at most HANDLES_AT_ONCE, and none will fail
        # or run code of anybody's.
        cdef bint collects
        if self.core.blocks.num_blocks == 0:
            raise ContractError("the pool was never initialised")
        self.handles.num_ids = self.core.blocks.num_blocks + 2
        handle_map.reserve(&self.handles, count)
        if num_spare < count:
            # A collection could run a __del__ that asks for the same handles.
            collects = PyGC_Disable()
            try:
                while num_spare < count:
                    add_spare(KVCacheBlock)
            finally:
                if collects:
                    PyGC_Enable()
        return 0

    cdef KVCacheBlock new_handle(self, uint32_t place, block_id_t id):
        # After prepare_handles(), of a block that has none.
        cdef KVCacheBlock block = KVCacheBlock.__new__(KVCacheBlock)
        block.owner = <PyObject*>self
        block.index = id
        handle_map.put(&self.handles, place, id, <PyObject*>block)
        return block

    cdef void forget_handle(self, block_id_t id) noexcept:
        handle_map.remove(&self.handles, id)

    cdef list handles_of(self, const block_id_t* ids, size_t count):
        cdef list result = PyList_New(count)
        cdef size_t start = 0, stop
        while start < count:
            stop = min(count, start + HANDLES_AT_ONCE)
            self.prepare_handles(stop - start)
            self.fill_with_handles(result, ids, start, stop)
            start = stop
        return result

    cdef int fill_with_handles(
        self, list result, const block_id_t* ids, size_t start, size_t stop
    ) except -1:
        # Items from `start` on, in the stages of batches.pxd: places in the map, handles there
        # or memory for new ones, and then the handles themselves.
        cdef size_t i, asked = start, seen = start
        cdef uint32_t place
        cdef PyObject* found
        cdef KVCacheBlock block
        for i in range(start, stop):
            while asked < min(stop, i + 2 * batches.IN_FLIGHT):
                handle_map.prefetch_home(&self.handles, ids[asked])
                asked += 1
            while seen < min(stop, i + batches.IN_FLIGHT):
                found = handle_map.at_home(&self.handles, ids[seen])
                seen += 1
                if found != NULL:
                    prefetch_write(found)
                elif num_spare > seen - i:
                    prefetch_write(spare_blocks[num_spare - (seen - i)])
            place = handle_map.place_of(&self.handles, ids[i])
            found = self.handles.handles[place]
            if found != NULL:
                block = <KVCacheBlock>found
            else:
                block = self.new_handle(place, ids[i])
            Py_INCREF(block)
            PyList_SET_ITEM(result, i, block)
        return 0

    cdef block_id_t own_id(self, object block) except? 0xFFFFFFFF:
        if type(block) is not KVCacheBlock:
            raise TypeError(f"expected a KVCacheBlock, not {type(block).__name__}")
        if (<KVCacheBlock>block).owner != <PyObject*>self or (<KVCacheBlock>block).is_end():
            raise ContractError(f"block {block.block_id} does not belong to this pool")
        return (<KVCacheBlock>block).index

    cdef block_id_t check_id(self, object block_id) except? 0xFFFFFFFF:
        cdef uint32_t num_blocks = self.core.blocks.num_blocks
        cdef int overflow = 0
        cdef long long small
        if type(block_id) is int:
            small = PyLong_AsLongLongAndOverflow(block_id, &overflow)
            if not overflow and 0 <= small < num_blocks:
                return <block_id_t>small
        if isinstance(block_id, (bool, float)) or not hasattr(block_id, "__index__"):
            raise TypeError(f"a block id must be an integer, not {type(block_id).__name__}")
        id = block_id.__index__()
        if id < 0:
            raise BlockIdError(
                f"Invalid block_id {id} < 0: the pool has blocks 0 to {num_blocks - 1}"
            )
        if id >= num_blocks:
            raise BlockIdError(
                f"Invalid block_id {id} >= {num_blocks}. This indicates a bug in the KV "
                "connector - workers should only report block IDs that were allocated by the "
                "scheduler."
            )
        return id

    cdef object neighbour(self, block_id_t id, bint forward):
        cdef block_id_t end = self.core.queue.end
        cdef block_id_t other
        if id == end + 1 and not forward or id == end and forward:
            return None
        other = free_queue.state_at(&self.core.queue, min(id, end)).next if forward else (
            free_queue.state_at(&self.core.queue, min(id, end)).prev
        )
        if other == NOT_QUEUED:
            return None
        if other == end and not forward:
            other = end + 1
        return self.handle(other)

    cdef bytes key_bytes(self, Holder holder):
        cdef Key key = registry.key_of(&self.core, holder)
        cdef keys.Space* space = &self.core.spaces[key.space]
        return make_key(key.digest, space.width, space.group)

    cdef object primary_key(self, block_id_t id):
        if not registry.has_primary(&self.core, id):
            return None
        return self.key_bytes(registry.primary(id))

    cdef object primary_tokens(self, block_id_t id):
        if not registry.has_primary(&self.core, id):
            return None
        if key_at(&self.core.blocks, id).space & NO_TOKENS_FLAG:
            return None
        return key_at(&self.core.blocks, id).num_tokens

    cdef list extra_keys(self, block_id_t id):
        cdef list found = []
        cdef Holder holder
        holder.block = id
        holder.extra = reverse_index.first(&self.core.index, id)
        while holder.extra != NO_RECORD:
            found.append(self.key_bytes(holder))
            holder.extra = reverse_index.extra(&self.core.index, holder.extra).next
        return found

    cdef list keys_of(self, block_id_t id):
        # The keys under which the table knows the block, the primary one first.
        cdef list found = []
        if (
            registry.has_primary(&self.core, id)
            and not key_at(&self.core.blocks, id).space & LOOSE_FLAG
        ):
            found.append(self.key_bytes(registry.primary(id)))
        if self.core.index.heads != NULL:
            found += self.extra_keys(id)
        return found

    cdef bint look_up(self, object key, Key* wanted, Holder* holder) except -1:
        # Fills `wanted`, whose digest is borrowed from `key`, and its first holder.
        cdef uint32_t group
        cdef int width = read_key(key, &wanted.digest, &group)
        wanted.space = registry.find_space(&self.core, group, width)
        return registry.find_first(&self.core, wanted, holder)

    cdef list holders(self, const Key* key):
        # Ids of all blocks under a key, in order of registration.
        cdef Holder holder
        cdef uint64_t place
        cdef ref_t ref = 0
        cdef record_id_t id
        cdef list found = []
        if key.space:
            ref = registry.find(
                &self.core, key, registry.hash_of(&self.core, key), &holder, &place
            )
        if ref == 0:
            return found
        if (ref & ~<ref_t>INDEX_MASK) != <ref_t>SHARED:
            return [holder.block]
        id = shared_keys.key(&self.core.shared, ref & INDEX_MASK).first
        while id != NO_RECORD:
            found.append(shared_keys.member(&self.core.shared, id).block)
            id = shared_keys.member(&self.core.shared, id).next
        return found

    cdef int after(self) except -1:
        # Debug builds look at everything after each operation.
        if CPOOL_DEBUG and self.num_allocating == 0 and (
            self.core.blocks.num_blocks <= CHECKED_UP_TO_BLOCKS
        ):
            try:
                check.check(&self.core)
            except MemoryError:
                pass    # none for the check's messages: the operation has succeeded all the same
        return 0

    @property
    def blocks(self):
        """All blocks, by id: ``len``, index, slice, iterate."""
        cdef BlockList result = BlockList.__new__(BlockList)
        result.pool = <BlockPool>self
        return result

    @property
    def null_block(self):
        """The placeholder block, id 0."""
        return self.handle(NULL_BLOCK)

    @property
    def free_block_queue(self):
        """The free queue, as a view with vLLM's methods."""
        return PoolFreeQueue(self)

    @property
    def cached_block_hash_to_block(self):
        """The table, as a view with vLLM's methods."""
        return PoolHashMap(self)

    @property
    def cached_block_hashes_by_block(self):
        """Block id -> set of its extra keys, for blocks that have some."""
        return PoolRows(self)

    cdef bint read_own(self, list items, block_id_t* ids) noexcept:
        # The ids of blocks that are all this pool's; false if one is not.
        cdef Py_ssize_t i
        cdef PyObject* block
        for i in range(len(items)):
            block = PyList_GET_ITEM(items, i)
            if (
                Py_TYPE(block) != <PyObject*>KVCacheBlock
                or (<KVCacheBlock>block).owner != <PyObject*>self
                or (<KVCacheBlock>block).index >= self.core.blocks.num_blocks
            ):
                return False
            ids[i] = (<KVCacheBlock>block).index
        return True

    cdef object hash_sequence(self, object request, uint64_t block_size, Py_ssize_t* scale):
        # The request's hashes, and how many of them make up one block.
        hashes = hashes_of(request)
        scale[0] = block_size // self.hash_block_size
        if block_size == self.hash_block_size:
            return hashes
        if hasattr(hashes, "scale_factor"):
            if hashes.scale_factor != scale[0]:
                raise ContractError(
                    f"the hashes are a view of {hashes.scale_factor} boundaries a block; "
                    f"block_size {block_size} needs {scale[0]}"
                )
            scale[0] = 1
        elif block_size % self.hash_block_size:
            raise ContractError(
                f"block_size {block_size} is no multiple of hash_block_size "
                f"{self.hash_block_size}"
            )
        return hashes

    cdef void note_width(self, uint32_t width) noexcept:
        if self.hash_width == 0:
            self.hash_width = width

    cdef int check_batch_width(self, HashBatch rows) except -1:
        if self.hash_width and rows.count and rows.width != self.hash_width:
            raise ValueError(
                f"hashes of {rows.width} bytes in a pool of {self.hash_width}-byte hashes"
            )
        return 0

    cdef uint64_t check_boundary(self, object num_tokens) except? 0:
        cdef uint64_t tokens = read_count(num_tokens, "num_tokens", 1, MAX_NUM_TOKENS)
        if tokens % self.hash_block_size:
            raise ContractError(
                f"num_tokens is {tokens}; it must be a multiple of hash_block_size "
                f"{self.hash_block_size}"
            )
        return tokens

    cdef void prefetch_key(self, block_id_t id) noexcept:
        # For has_primary_key(), as soon as the block is known.
        if self.core.blocks.keys != NULL:
            prefetch(&key_at(&self.core.blocks, id).space)
            prefetch(digest_slot(&self.core.blocks, id))

    cdef bint has_primary_key(self, block_id_t id, bytes digest, uint32_t group) noexcept:
        # Whether that is the block's primary key, and no other block's. False may be a lie: it
        # is the answer for whatever takes more than one look.
        cdef space_t space
        cdef uint32_t width = <uint32_t>PyBytes_GET_SIZE(digest)
        if not registry.has_primary(&self.core, id):
            return False
        space = key_at(&self.core.blocks, id).space & (SPACE_MASK | SHARED_FLAG)
        return space < self.core.num_spaces and (
            self.core.spaces[space].group == group
            and self.core.spaces[space].width == width
            and keys.same_digest(
                digest_slot(&self.core.blocks, id),
                <const uint8_t*>PyBytes_AS_STRING(digest), width,
            )
        )

    cdef bint holds(self, block_id_t id, bytes digest, uint32_t group) except -1:
        # Whether that is the block's primary key or the table maps it to the block.
        cdef Key key
        cdef uint32_t width = <uint32_t>PyBytes_GET_SIZE(digest)
        check_width(width)
        key.digest = <const uint8_t*>PyBytes_AS_STRING(digest)
        key.space = registry.find_space(&self.core, group, width)
        return key.space != 0 and registry.holds(&self.core, &key, id)

    cdef bint is_resident(self, object digest, uint32_t group) except -1:
        # Whether a key is in the table; None is not.
        cdef Key key
        cdef Holder holder
        if digest is None:
            return False
        key.digest = <const uint8_t*>PyBytes_AS_STRING(digest)
        key.space = registry.find_space(&self.core, group, <uint32_t>PyBytes_GET_SIZE(digest))
        return registry.find_first(&self.core, &key, &holder)

    @property
    def nbytes(self):
        """Bytes of all arrays, as asked of the allocator."""
        cdef size_t guessed = 0
        cdef uint32_t i
        for i in range(guess.NUM_GUESSES):
            guessed += guess.nbytes(&self.guesses[i])
        return (
            registry.nbytes(&self.core) + parents.nbytes(&self.parents)
            + self.handles.array.nbytes + guessed
        )

    def __sizeof__(self):
        return object.__sizeof__(self) + self.nbytes

    @property
    def num_cached_keys(self):
        """Number of distinct keys."""
        return self.core.table.num_used

    @property
    def num_registrations(self):
        """Number of (key, block) pairs."""
        return self.core.num_registrations

    @property
    def states(self):
        """(num_gpu_blocks + 1,) structured read-only view, zero-copy.

        Fields ``prev`` and ``next`` (uint32) are the neighbours in the free queue, 2**32 - 1
        for both outside of it; ``ref_cnt`` (int32) counts holders outside of the queue, and is
        0 or a negative note of the queue's inside. The last row is the queue's end: its
        ``next`` is the head, its ``prev`` the tail. With caching the rows are 18 bytes apart, so
        that the fields are not aligned: DLPack and memoryview want a copy (``.copy()``).
        """
        return view_column(
            self, self.core.blocks.states, <size_t>self.core.blocks.num_blocks + 1,
            self.core.blocks.state_bytes, STATE_FIELDS, False,
        )

    @property
    def ref_cnts(self):
        """(num_gpu_blocks,) int32, read-only view, zero-copy: holders of each block.

        0 or below means free: while a block is in the free queue, the queue keeps a note in
        the count. Of the null block it means nothing. Not aligned with caching (see `states`).
        """
        return self.states["ref_cnt"][:self.core.blocks.num_blocks]

    @property
    def key_num_tokens(self):
        """(num_gpu_blocks,) uint32, read-only view: tokens that each primary key covers.

        Zero without a key. While a view is alive the prefix cache cannot be reset.
        """
        # Where they lie behind states, the rows begin with these.
        cdef size_t offset = sizeof(BlockState) if has_rows(&self.core.blocks) else 0
        if self.core.blocks.keys == NULL:
            result = np.zeros(self.core.blocks.num_blocks, dtype=np.uint32)
            result.flags.writeable = False
            return result
        return view_column(
            self, self.core.blocks.keys - offset, self.core.blocks.num_blocks,
            self.core.blocks.key_bytes,
            {"names": ["num_tokens"], "formats": ["<u4"], "offsets": [offset]}, True,
        )["num_tokens"]

    def free_queue_ids(self):
        """(num_free,) uint32 array: the free blocks in the order of eviction."""
        cdef block_id_t* ids
        cdef block_id_t id = self.core.queue.end
        cdef uint32_t i
        result = new_array(self.core.queue.num_free, numpy.NPY_UINT32)
        ids = <block_id_t*>data_of(result)
        for i in range(self.core.queue.num_free):
            id = free_queue.next_of(&self.core.queue, id)
            ids[i] = id
        return result

    def table_stats(self):
        """How full the table is, and how far its keys stand from their homes.

        Takes time in proportion to the pool.

        Returns:
            Dict with ``num_cells``, ``num_used``, ``mean_distance`` and ``max_distance``
            (cache lines of eight cells between a key's home and its place), ``mean_miss``
            (lines that a look-up of an unknown hash reads beyond its first), ``max_run`` (full
            lines in a row) and ``num_leaving``: cells of a smaller array which is kept, while
            the table grows, until all its keys have moved.
        """
        cdef uint64_t num_cells = cells.num_cells(&self.core.table.cells)
        cdef uint64_t num_leaving = cells.num_cells(&self.core.table.leaving)
        cdef table_stats.TableStats stats = table_stats.stats_of(&self.core.table)
        return {
            "num_cells": num_cells,
            "num_leaving": num_leaving,
            "num_used": self.core.table.num_used,
            "mean_distance": stats.total_distance / max(self.core.table.num_used, 1.0),
            "max_distance": stats.max_distance,
            "mean_miss": (
                stats.total_miss * cells.CHUNK_CELLS / max(num_cells + num_leaving, 1.0)
            ),
            "max_run": stats.max_run,
        }

    def check_consistency(self):
        """Look at every invariant of every structure; takes time in proportion to the pool.

        Raises:
            AssertionError: One does not hold. That is a bug in cpool, or counts and links
                were written from outside.
        """
        if self.core.blocks.num_blocks == 0:
            raise ContractError("the pool was never initialised")
        check.check(&self.core)
