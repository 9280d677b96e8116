# SPDX-License-Identifier: Apache-2.0
# Blocks become findable as full ones, and keys move to others.

cdef class _PoolRegistration(_PoolAllocation):
    """A part of `BlockPool`, see there."""

    def cache_full_blocks(
        self,
        request,
        blocks,
        num_cached_blocks,
        num_full_blocks,
        block_size,
        kv_cache_group_id,
        block_mask=None,
    ):
        """Register full blocks of a request under the hashes at their ends.

        A block that has a shorter key (a partial entry) is promoted: all its keys leave and
        the full block's key takes their place. Null and masked-out blocks are passed over.

        Args:
            request: Object with ``block_hashes``: one digest per boundary. With events on,
                also ``all_token_ids``, ``lora_request``, ``session_id`` and what extra keys
                need.
            blocks: All blocks of the request.
            num_cached_blocks: Index of the first block to register.
            num_full_blocks: Index behind the last one. Beyond the last of ``blocks`` nothing is
                registered, as by vLLM; with events on it is refused.
            block_size: Tokens in a block; a multiple of ``hash_block_size``.
            kv_cache_group_id: Group that owns the keys.
            block_mask: Sequence of bool, one for each block of the range, or None.

        Raises:
            ContractError: A block has a key that is not shorter, or an argument is out of
                range; nothing was changed.
            IndexError: The request has too few hashes; nothing was changed.
        """
        cdef int64_t first = read_count(
            num_cached_blocks, "num_cached_blocks", 0, MAX_NUM_TOKENS
        )
        cdef int64_t last = read_count(
            num_full_blocks, "num_full_blocks", 0, MAX_NUM_TOKENS
        )
        cdef uint64_t size = read_count(block_size, "block_size", 1, MAX_NUM_TOKENS)
        cdef uint32_t group = read_group(kv_cache_group_id)
        cdef Py_ssize_t scale
        cdef list digests = []
        cdef IdBuffer buffer
        cdef TokenBuffer ends
        cdef RequestSource source = None
        cdef size_t count = 0
        cdef Py_ssize_t i
        cdef list selected
        cdef block_id_t id
        if first >= last:
            return
        if last > len(blocks):
            if self.enable_kv_cache_events:
                raise ContractError(f"num_full_blocks is {last}; there are {len(blocks)} blocks")
            last = len(blocks)
            if first >= last:
                return
        selected = list(blocks[first:last])
        if block_mask is not None and len(block_mask) != len(selected):
            raise ContractError(
                f"block_mask has {len(block_mask)} entries for {len(selected)} blocks"
            )
        hashes = self.hash_sequence(request, size, &scale)
        buffer = make_buffer(len(selected))
        if not self.read_own(selected, buffer.ids):
            self._cache_of_no_pool(
                request, blocks, first, last, size, group, block_mask
            )
            return
        ends = TokenBuffer.__new__(TokenBuffer, len(selected))
        positions = [] if self.enable_kv_cache_events else None
        for i in range(len(selected)):
            id = buffer.ids[i]
            if id == NULL_BLOCK or (block_mask is not None and not block_mask[i]):
                continue
            digests.append(hash_at(hashes, (first + i + 1) * scale - 1))
            buffer.ids[count] = id
            ends.values[count] = <uint64_t>(first + i + 1) * size
            if positions is not None:
                positions.append(first + i)
            count += 1
        buffer.count = count
        batch = read_hashes(digests, count, 0)
        stored = None
        if positions is not None:
            source = RequestSource.__new__(RequestSource)
            source.pool = <BlockPool>self
            source.group = group
            source.size = size
            source.request = request
            source.hashes = hashes
            source.scale = scale
            source.digests = digests
            source.positions = positions
            source.first = positions[0] if self.truthful_events and count else first
            if not self.truthful_events:
                stored = source.stored_range(first, last)
            elif count:
                stored = source.stored(0, count, None)
        self.register_full(buffer.ids, ends.values, batch, group, size, source, stored)
        self.after()

    def _cache_of_no_pool(
        self, request, blocks, num_cached_blocks, num_full_blocks, block_size,
        kv_cache_group_id, block_mask,
    ):
        # cache_full_blocks() for blocks that are not all this pool's: says which is not.
        self.buffer_of(blocks[num_cached_blocks:num_full_blocks])

    cdef int register_full(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, uint32_t group,
        uint64_t size, EventSource source, object stored,
    ) except -1:
        # The check and the commit of both grains. Registers row i for ids[i]. With events on
        # `source` describes the rows and `stored` is the event for all of them.
        # Memory is reserved for the worst case: every key is already another block's. For a
        # large batch that is much, so it goes step by step where steps can be undone.
        cdef RegistrationLog log = None
        cdef size_t step = batch.count
        cdef size_t num_keyed
        cdef bint collects
        if source is not None:
            log = self.start_log(ids, ends, batch, group, size, source)
            if self.detailed_snapshots and stored is not None:
                log.detail = source.detail(stored)
        # From here on no code of the caller's runs: not even a __del__, which a collection
        # for one of the log's objects could call.
        collects = log is not None and PyGC_Disable()
        try:
            num_keyed = check_new_keys(&self.core, ids, ends, batch.count)
            if log is not None:
                self.group_block_sizes[group] = size
            if num_keyed == 0 and not any_has_extra_keys(&self.core, ids, batch.count):
                step = min(step, <size_t>STEP)
            self.register_steps(ids, ends, batch, group, step, num_keyed, log)
        finally:
            if collects:
                PyGC_Enable()
        if log is not None:
            try:
                log.finish(stored)
            except BaseException as error:
                self.lose_events(error)
        return 0

    cdef int register_steps(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, uint32_t group,
        size_t step, size_t num_keyed, RegistrationLog log,
    ) except -1:
        # `num_keyed` of the blocks have a primary key.
        cdef size_t start = 0, count
        while start < batch.count:
            count = min(step, batch.count - start)
            try:
                registry.reserve(
                    &self.core, group, batch.width, count,
                    count_extra(&self.core, ids + start, count),
                )
                if log is not None and start == 0:
                    self.reserve_parents()
                    log.reserve_removals(num_keyed)
            except (MemoryError, ValueError):
                drop_all(&self.core, ids, start)
                registry.trim_excess(&self.core)
                raise
            self.note_width(batch.width)
            self.register_step(ids + start, ends + start, batch, start, count, group, log)
            start += count
        registry.trim_excess(&self.core)
        return 0

    cdef int register_step(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, size_t first,
        size_t total, uint32_t group, RegistrationLog log,
    ) except -1:
        # After reserve(). Row `first` belongs to ids[0].
        cdef batches.Registrations rows
        cdef size_t i
        rows.ids = ids
        rows.ends = ends
        rows.rows = batch.rows + first * batch.row_bytes
        rows.row_bytes = batch.row_bytes
        rows.count = total
        rows.space = registry.find_space(&self.core, group, batch.width)
        rows.fetched = 0
        rows.sought = 0
        if log is not None:
            self.register_logged(&rows, first, log)
            return 0
        if batches.is_plain(&self.core) and batch.width == 32:
            batches.register_plain(&self.core, &rows, 32)
            return 0
        if batches.is_plain(&self.core) and batch.width == 16:
            batches.register_plain(&self.core, &rows, 16)
            return 0
        for i in range(total):
            batches.fetch_rows(&self.core, &rows, i)
            if ids[i] != NULL_BLOCK:
                batches.register_row(&self.core, &rows, i)
        return 0

    cdef void register_logged(
        self, batches.Registrations* rows, size_t first, RegistrationLog log
    ) noexcept:
        cdef block_id_t id
        cdef bint is_new
        cdef size_t i
        for i in range(rows.count):
            batches.fetch_rows(&self.core, rows, i)
            id = rows.ids[i]
            if id == NULL_BLOCK:
                continue
            if registry.has_primary(&self.core, id):
                log.replacing(first + i)
            is_new = batches.register_row(&self.core, rows, i)
            if log.truthful:
                log.registered(first + i, is_new)
            if self.detailed_snapshots:
                log.note_row(first + i)
        log.note_parents(first, first + rows.count)

    def cache_full_ids(
        self,
        ids,
        hashes,
        kv_cache_group_id,
        block_size,
        first_block=0,
        *,
        parent_hash=None,
        token_ids=None,
        lora_id=None,
        lora_name=None,
        extra_keys=None,
        session_id=None,
    ):
        """Register full blocks: ``ids[i]`` under ``hashes[i]``.

        Block ids that are 0 are passed over. Promotion is that of `cache_full_blocks`.

        Args:
            ids: (n,) integer buffer or sequence of block ids.
            hashes: n digests: (n, width) uint8, bytes-like of n * width, or sequence of bytes.
            kv_cache_group_id: Group that owns the keys.
            block_size: Tokens in a block; a multiple of ``hash_block_size``.
            first_block: Index of ``ids[0]`` in its request, so that ``hashes[i]`` covers
                ``(first_block + i + 1) * block_size`` tokens.
            parent_hash: For events only: the digest before ``hashes[0]``, as bytes. With events
                on it is needed if ``first_block`` is not 0 and there are ids, whatever they are.
            token_ids: For events only: the n * block_size tokens of the blocks, an array or
                a sequence of int. Copied, unless it is an array that is read-only.
            lora_id: For events only: the adapter's number.
            lora_name: For events only: the adapter's name.
            extra_keys: For events only: per block None or a tuple of what beside tokens went
                into its hash.
            session_id: For events only: the request's session.

        Raises:
            ContractError: A block has a key that is not shorter, a number is out of range, or
                events would say that a prefix begins at ``first_block``; nothing was changed.
            ValueError: The hashes do not have the width of the pool's others.
        """
        cdef uint64_t size = read_count(block_size, "block_size", 1, MAX_NUM_TOKENS)
        cdef uint64_t first = read_count(first_block, "first_block", 0, MAX_NUM_TOKENS)
        cdef uint32_t group = read_group(kv_cache_group_id)
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        cdef HashBatch rows
        cdef TokenBuffer ends
        cdef BatchSource source = None
        cdef size_t i
        batches.prefetch_first(&self.core, batch.ids, batch.count)
        if self.enable_kv_cache_events or not is_inert(hashes):
            copy_ids(batch)     # what follows may run the caller's code
        rows = read_hashes(hashes, batch.count, self.hash_width)
        if size % self.hash_block_size:
            raise ContractError(
                f"block_size {size} is no multiple of hash_block_size {self.hash_block_size}"
            )
        self.check_batch_width(rows)
        if self.enable_kv_cache_events and batch.count and first and parent_hash is None:
            raise ContractError(
                f"first_block is {first}: with events on parent_hash is needed, the digest "
                "before hashes[0]"
            )
        ends = TokenBuffer.__new__(TokenBuffer, batch.count)
        for i in range(batch.count):
            ends.values[i] = (first + i + 1) * size
        stored = None
        if self.enable_kv_cache_events and batch.count:
            source = self.batch_source(
                batch, rows, parent_hash, token_ids, size, group, extra_keys,
                {"lora_id": lora_id, "lora_name": lora_name, "session_id": session_id},
            )
            stored = source.stored(0, batch.count, parent_hash)
        self.register_full(batch.ids, ends.values, rows, group, size, source, stored)
        self.after()

    def move_block_hashes(self, src_block, dst_block):
        """Re-point all keys of one block to another, which has none. Emits nothing.

        Raises:
            ContractError: ``dst_block`` has a key.
        """
        self.move_run(self.own_id(src_block), self.own_id(dst_block))

    def move_ids(self, src, dst):
        """As `move_block_hashes`, with block ids."""
        self.move_run(self.check_id(src), self.check_id(dst))

    cdef int move_run(self, block_id_t source, block_id_t target) except -1:
        cdef uint8_t digest[MAX_HASH_BYTES]
        cdef Holder holder
        cdef uint64_t parent
        cdef bint as_extra
        batches.prefetch_keys(&self.core, source)
        batches.prefetch_keys(&self.core, target)
        if registry.has_primary(&self.core, target):
            raise ContractError(f"block {target} already has a hash")
        if reverse_index.first(&self.core.index, target) != NO_RECORD:
            raise ContractError(f"block {target} already has extra keys")
        if target == NULL_BLOCK:
            raise ContractError("the null block is never registered")
        if registry.has_primary(&self.core, source):
            if key_at(&self.core.blocks, source).space & LOOSE_FLAG:
                registry.drop_primary(&self.core, source)
            else:
                parent = parents.of(&self.parents, source, NO_RECORD)
                kept = self.detail_to_move(registry.primary(source))
                registry.move_key(&self.core, registry.primary(source), target, digest)
                note_parent(&self.core, &self.parents, target, False, parent)
                if kept is not None:
                    self.note_detail(target, False, kept[0], kept[1])
        holder.block = source
        while True:
            holder.extra = reverse_index.first(&self.core.index, source)
            if holder.extra == NO_RECORD:
                break
            parent = parents.of(&self.parents, source, holder.extra)
            kept = self.detail_to_move(holder)
            as_extra = registry.has_primary(&self.core, target)
            registry.move_key(&self.core, holder, target, digest)
            note_parent(&self.core, &self.parents, target, as_extra, parent)
            if kept is not None:
                self.note_detail(target, as_extra, kept[0], kept[1])
        self.after()
        return 0
