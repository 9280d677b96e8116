# SPDX-License-Identifier: Apache-2.0
# Who holds which key, one key at a time or many, and keys that come by hand.

cdef class _PoolLookup(_PoolEvents):
    """A part of `BlockPool`, see there."""

    cdef int assign_primary(self, block_id_t id, object key, object num_tokens) except -1:
        # As code outside the pool assigns it: the table does not learn of it.
        cdef Key wanted
        cdef uint32_t group
        cdef int width
        cdef space_t flags = LOOSE_FLAG
        cdef uint32_t tokens = 0
        cdef RemovedRun removed
        if id >= self.core.blocks.num_blocks:
            raise ContractError("the end of a free queue has no block hash")
        removed = self.departure_log()
        if key is None:
            if registry.has_primary(&self.core, id):
                self.log_departure(registry.primary(id), removed)
                registry.drop_primary(&self.core, id)
            return self.emit_removed(removed, False)
        width = read_key(key, &wanted.digest, &group)
        if num_tokens is None:
            flags |= NO_TOKENS_FLAG
        else:
            tokens = read_count(num_tokens, "num_tokens", 0, MAX_NUM_TOKENS)
        registry.prepare_keys(&self.core, width)
        wanted.space = registry.intern_space(&self.core, group, width)
        if registry.has_primary(&self.core, id):
            self.log_departure(registry.primary(id), removed)
            registry.drop_primary(&self.core, id)
        registry.write_primary(&self.core, id, &wanted, flags, tokens)
        note_parent(&self.core, &self.parents, id, False, 0)
        self.note_detail(id, False, None, 0)
        return self.emit_removed(removed, False)

    cdef int assign_primary_tokens(self, block_id_t id, object num_tokens) except -1:
        if id >= self.core.blocks.num_blocks or not registry.has_primary(&self.core, id):
            if num_tokens is None:
                return 0
            raise ContractError(f"block {id} has no hash whose tokens could be counted")
        if num_tokens is None:
            key_at(&self.core.blocks, id).space |= NO_TOKENS_FLAG
            key_at(&self.core.blocks, id).num_tokens = 0
            return 0
        key_at(&self.core.blocks, id).num_tokens = read_count(
            num_tokens, "num_tokens", 0, MAX_NUM_TOKENS
        )
        key_at(&self.core.blocks, id).space &= ~<space_t>NO_TOKENS_FLAG
        return 0

    cdef int link_primary(self, block_id_t id) except -1:
        # The table learns of a primary key that was assigned by hand. This is the one way in
        # which the null block, too, can be registered: whoever does so twice said what it wants.
        cdef Key key
        cdef keys.Space space
        cdef Holder other
        cdef uint64_t num_keys
        cdef bytes name
        if not key_at(&self.core.blocks, id).space & LOOSE_FLAG:
            return 0
        key = registry.key_of(&self.core, registry.primary(id))
        space = self.core.spaces[key.space]
        registry.reserve(&self.core, space.group, space.width, 1, 0)
        key = registry.key_of(&self.core, registry.primary(id))
        if registry.find_held_by(&self.core, &key, id, &other):
            return 0
        name = self.key_bytes(registry.primary(id))
        key_at(&self.core.blocks, id).space &= ~<space_t>LOOSE_FLAG
        num_keys = self.core.table.num_used
        registry.link(&self.core, registry.primary(id), registry.hash_of(&self.core, &key))
        if self.core.table.num_used != num_keys:
            self.emit_arrival(name)
        return 0

    cdef int insert_key(self, object key, block_id_t id, object num_tokens) except -1:
        # Registers unless the table maps the key to the block already.
        cdef Key wanted
        cdef Holder holder
        cdef uint32_t group
        cdef uint32_t tokens = 0
        cdef space_t flags = 0
        cdef bint as_extra
        cdef uint64_t num_keys
        cdef int width = read_key(key, &wanted.digest, &group)
        if id == NULL_BLOCK:
            raise ContractError("the null block is never registered")
        if num_tokens is None:
            flags = NO_TOKENS_FLAG
        else:
            tokens = read_count(num_tokens, "num_tokens", 0, MAX_NUM_TOKENS)
        if self.primary_key(id) == key:
            return 0
        wanted.space = registry.find_space(&self.core, group, width)
        if registry.find_held_by(&self.core, &wanted, id, &holder):
            return 0
        as_extra = registry.has_primary(&self.core, id)
        wanted.space = registry.reserve(&self.core, group, width, 1, as_extra)
        self.reserve_parents()
        num_keys = self.core.table.num_used
        registry.register(
            &self.core, id, &wanted, registry.hash_of(&self.core, &wanted), flags, tokens
        )
        note_parent(&self.core, &self.parents, id, as_extra, 0)
        self.note_detail(id, as_extra, None, 0)
        if self.core.table.num_used != num_keys:
            self.emit_arrival(key)
        return 0

    def get_cached_block(self, block_hash, kv_cache_group_ids):
        """The first block registered under a hash in each group, or None if one has none.

        Args:
            block_hash: The digest, as bytes, without group.
            kv_cache_group_ids: Sequence of group ids.

        Returns:
            One block per group, or None.
        """
        cdef Key key
        cdef Holder holder
        cdef hash_t hash
        cdef uint64_t place
        cdef Py_ssize_t width
        cdef uint32_t group_id
        cdef list found
        if not isinstance(block_hash, bytes):
            raise TypeError(f"a block hash must be bytes, not {type(block_hash).__name__}")
        width = PyBytes_GET_SIZE(block_hash)
        check_width(width)
        key.digest = <const uint8_t*>PyBytes_AS_STRING(block_hash)
        if type(kv_cache_group_ids) is list and len(<list>kv_cache_group_ids) == 1:
            # A miss makes no object. A hit asks for all that the answer takes, and makes the
            # list meanwhile; only then it reads the digest and the handle.
            group_id = read_group((<list>kv_cache_group_ids)[0])
            key.space = registry.find_space(&self.core, group_id, <uint32_t>width)
            if key.space == 0 or not table.exists(&self.core.table):
                return None
            if not self.is_next_hit(&key):
                hash = registry.hash_of(&self.core, &key)
                place = table.seek(&self.core.table, hash)
                if place == cells.NOWHERE:
                    return None
                self.prefetch_answer(table.ref_at(&self.core.table, hash, place))
            found = PyList_New(1)
            block = None
            # From the start: a collection for the list may have run anything.
            key.space = registry.find_space(&self.core, group_id, <uint32_t>width)
            holder.block = self.next_hit
            if self.is_next_hit(&key) or registry.find_first(&self.core, &key, &holder):
                block = self.handle(holder.block)
                self.note_hit(holder.block)
            Py_INCREF(block)
            PyList_SET_ITEM(found, 0, block)
            return None if block is None else found
        found = []
        for group in kv_cache_group_ids:
            key.space = registry.find_space(&self.core, read_group(group), <uint32_t>width)
            if not registry.find_first(&self.core, &key, &holder):
                return None
            found.append(self.handle(holder.block))
        return found

    cdef void prefetch_answer(self, ref_t ref) noexcept:
        # The digest that a cell stands for, and the handle of its block.
        batches.prefetch_holder(&self.core, ref)
        if (ref & ~<ref_t>INDEX_MASK) != <ref_t>SHARED:
            self.prefetch_handle(ref & INDEX_MASK)

    cdef void prefetch_handle(self, block_id_t id) noexcept:
        if self.handles.num_places:
            handle_map.prefetch_home(&self.handles, id)
        if num_spare:
            prefetch_write(spare_blocks[num_spare - 1])

    cdef bint is_next_hit(self, const Key* key) noexcept:
        # Whether the key is that of the block that lies next: then the table is not read.
        return key.space != 0 and self.next_hit < self.core.blocks.num_blocks and (
            registry.holds_alone(
                &self.core, self.next_hit, key.space, key.digest,
                self.core.spaces[key.space].width,
            )
        )

    cdef void note_hit(self, block_id_t id) noexcept:
        # Whoever asks block by block finds the next one at hand, where blocks lie side by side.
        cdef block_id_t step = id - self.last_hit
        self.last_hit = id
        self.next_hit = NO_BLOCK
        if ((step + 1) & ~<block_id_t>2) == 0 and id + step < self.core.blocks.num_blocks:
            self.next_hit = id + step
            guess.prefetch_block(&self.core, self.next_hit)
            self.prefetch_handle(self.next_hit)

    cdef size_t find_prefix(
        self, HashBatch batch, size_t count, space_t space, block_id_t* found
    ) noexcept:
        return guess.find_run(
            &self.core, batch.rows, batch.row_bytes, count, space,
            &self.guesses[space % guess.NUM_GUESSES], found,
        )

    cdef object find_rows(self, object hashes, object group, uint32_t multiple_of, bint prefix):
        cdef HashBatch batch = read_hashes(hashes, -1, self.hash_width)
        cdef batches.Begun begun
        cdef uint32_t group_id = read_group(group)
        cdef size_t count = batch.count
        cdef space_t space
        cdef block_id_t* ids
        cdef int64_t* answers
        cdef size_t i
        self.check_batch_width(batch)
        space = registry.find_space(&self.core, group_id, batch.width)
        if space == 0 or count == 0 or not table.exists(&self.core.table):
            if prefix:
                return new_array(0, numpy.NPY_UINT32)
            found = new_array(count, numpy.NPY_INT64)
            found.fill(-1)
            return found
        if not prefix:
            batches.begin(&self.core, batch.rows, batch.row_bytes, count, space, &begun)
        found = new_array(count, numpy.NPY_UINT32 if prefix else numpy.NPY_INT64)
        ids = <block_id_t*>data_of(found)
        if prefix:
            count = self.find_prefix(batch, count, space, ids)
            return found[:count]
        # The ids come in the upper half of the answers, which are then written from below.
        answers = <int64_t*>ids
        ids += count
        batches.find_begun(
            &self.core, batch.rows, batch.row_bytes, count, space, multiple_of, False, ids, &begun
        )
        for i in range(count):
            answers[i] = <int32_t>ids[i]    # of NO_BLOCK that is -1
        return found

    def find_ids(self, hashes, kv_cache_group_id):
        """The first block registered under each hash.

        Args:
            hashes: (n, width) uint8 array, bytes-like of n * width, or sequence of bytes.
            kv_cache_group_id: Group to look in.

        Returns:
            (n,) int64 array of block ids, -1 where nothing is registered.
        """
        return self.find_rows(hashes, kv_cache_group_id, 0, False)

    def find_full_ids(self, hashes, kv_cache_group_id, block_size):
        """As `find_ids`, but only blocks whose registration covers whole blocks.

        A partially filled block is never returned: the registration that answers must cover
        a multiple of ``block_size`` tokens.
        """
        return self.find_rows(
            hashes, kv_cache_group_id,
            <uint32_t>read_count(block_size, "block_size", 1, MAX_NUM_TOKENS), False,
        )

    def find_prefix_ids(self, hashes, kv_cache_group_id):
        """The blocks of the longest run of hashes, from the first, that are registered.

        Args:
            hashes: As in `find_ids`.
            kv_cache_group_id: Group to look in.

        Returns:
            (m,) uint32 array of block ids, m <= n.
        """
        return self.find_rows(hashes, kv_cache_group_id, 0, True)

    def find_prefix_blocks(self, hashes, kv_cache_group_ids):
        """The blocks of the longest prefix of hashes that are all registered in every group.

        Args:
            hashes: As for `find_ids`, from the first block on.
            kv_cache_group_ids: Sequence of group ids.

        Returns:
            A list of as many blocks for each group.
        """
        cdef HashBatch batch = read_hashes(hashes, -1, self.hash_width)
        cdef size_t count = batch.count
        cdef space_t space
        cdef IdBuffer buffer
        cdef list buffers = []
        self.check_batch_width(batch)
        for group in kv_cache_group_ids:
            buffer = make_buffer(count)
            buffers.append(buffer)
            space = registry.find_space(&self.core, read_group(group), batch.width)
            if space == 0 or not table.exists(&self.core.table):
                count = 0
            if count:
                count = self.find_prefix(batch, count, space, buffer.ids)
        return [self.handles_of((<IdBuffer>buffer).ids, count) for buffer in buffers]

    def registrations(self, block):
        """Each key under which a block is registered, the primary one first.

        Args:
            block: A block of this pool, or a block id.

        Returns:
            List of `Registration`, which says how many tokens each key covers.
        """
        cdef Holder holder
        cdef list found = []
        holder = registry.primary(
            self.own_id(block) if isinstance(block, KVCacheBlock) else self.check_id(block)
        )
        if registry.has_primary(&self.core, holder.block):
            if not key_at(&self.core.blocks, holder.block).space & LOOSE_FLAG:
                found.append(self.registration(holder, True))
        holder.extra = reverse_index.first(&self.core.index, holder.block)
        while holder.extra != NO_RECORD:
            found.append(self.registration(holder, False))
            holder.extra = reverse_index.extra(&self.core.index, holder.extra).next
        return found

    cdef object registration(self, Holder holder, bint is_primary):
        cdef Key key = registry.key_of(&self.core, holder)
        cdef keys.Space* space = &self.core.spaces[key.space]
        cdef bint unknown = registry.flagged_space(&self.core, holder) & NO_TOKENS_FLAG
        return Registration(
            PyBytes_FromStringAndSize(<const char*>key.digest, space.width),
            space.group,
            None if unknown else registry.num_tokens_of(&self.core, holder),
            is_primary,
        )

    def _insert_block_hash(self, block_hash_with_group_id, block, num_tokens):
        """Register a block under a key (digest and group); nothing if it already is."""
        self.insert_key(block_hash_with_group_id, self.own_id(block), num_tokens)
        self.after()
