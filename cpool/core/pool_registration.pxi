# SPDX-License-Identifier: Apache-2.0
# Blocks become findable: full, partial, and moved to others.

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
            num_full_blocks: Index behind the last one.
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
            raise ContractError(f"num_full_blocks is {last}; there are {len(blocks)} blocks")
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
                raise
            self.note_width(batch.width)
            self.register_step(ids + start, ends + start, batch, start, count, group, log)
            start += count
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
            parent_hash: For events only: the digest before ``hashes[0]``, as bytes.
            token_ids: For events only: the n * block_size tokens of the blocks, an array or
                a sequence of int. Copied, unless it is an array that is read-only.
            lora_id: For events only: the adapter's number.
            lora_name: For events only: the adapter's name.
            extra_keys: For events only: per block None or a tuple of what beside tokens went
                into its hash.
            session_id: For events only: the request's session.

        Raises:
            ContractError: A block has a key that is not shorter, or a number is out of range;
                nothing was changed.
            ValueError: The hashes do not have the width of the pool's others.
        """
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        cdef uint64_t size = read_count(block_size, "block_size", 1, MAX_NUM_TOKENS)
        cdef uint64_t first = read_count(first_block, "first_block", 0, MAX_NUM_TOKENS)
        cdef uint32_t group = read_group(kv_cache_group_id)
        cdef HashBatch rows = read_hashes(hashes, batch.count, self.hash_width)
        cdef TokenBuffer ends
        cdef BatchSource source = None
        cdef size_t i
        if size % self.hash_block_size:
            raise ContractError(
                f"block_size {size} is no multiple of hash_block_size {self.hash_block_size}"
            )
        self.check_batch_width(rows)
        ends = TokenBuffer.__new__(TokenBuffer, batch.count)
        for i in range(batch.count):
            ends.values[i] = (first + i + 1) * size
        stored = None
        if self.enable_kv_cache_events and batch.count:
            copy_ids(batch)     # what follows may run the caller's code
            source = self.batch_source(
                batch, rows, parent_hash, token_ids, size, group, extra_keys,
                {"lora_id": lora_id, "lora_name": lora_name, "session_id": session_id},
            )
            stored = source.stored(0, batch.count, parent_hash)
        self.register_full(batch.ids, ends.values, rows, group, size, source, stored)
        self.after()

    def cache_partial_block(
        self,
        request,
        block,
        num_tokens,
        kv_cache_group_id,
        block_size,
        replace_existing_hashes=False,
    ):
        """Make a block findable at a boundary inside it.

        The key is the request's hash at that boundary. On a block with a shorter key it
        replaces that; on a block with a longer one it becomes an extra key; the same key
        again changes nothing.

        Args:
            request: Object with ``block_hashes``; with events on see `cache_full_blocks`.
            block: This pool's block.
            num_tokens: Prefix tokens that the key covers: a positive multiple of
                ``hash_block_size`` for which the request has a hash.
            kv_cache_group_id: Group that owns the key.
            block_size: Tokens in a block of that group, a multiple of ``hash_block_size``.
            replace_existing_hashes: The block's contents were replaced: all its keys leave.

        Returns:
            The key (digest and group), or None for the null block.

        Raises:
            ContractError: ``num_tokens`` or ``block_size`` is not such a number.
        """
        cdef block_id_t id = self.own_id(block)
        cdef uint64_t tokens, size, boundary
        cdef uint32_t group
        if id == NULL_BLOCK:
            return None
        self.prefetch_key(id)
        size = read_count(block_size, "block_size", 1, MAX_NUM_TOKENS)
        if size % self.hash_block_size:
            raise ContractError(
                f"block_size {size} is no multiple of hash_block_size {self.hash_block_size}"
            )
        group = read_group(kv_cache_group_id)
        tokens = self.check_boundary(num_tokens)
        boundary = tokens // self.hash_block_size
        hashes = request.block_hashes
        if boundary > <uint64_t>len(hashes):
            raise ContractError(
                f"num_tokens is {tokens}; the request has hashes up to "
                f"{len(hashes) * self.hash_block_size} tokens"
            )
        digest = hash_at(hashes, boundary - 1)
        if not isinstance(digest, bytes):
            raise TypeError(f"a block hash must be bytes, not {type(digest).__name__}")
        if not replace_existing_hashes and self.has_primary_key(id, digest, group):
            return make_key(
                <const uint8_t*>PyBytes_AS_STRING(digest), <uint32_t>len(digest), group
            )
        stored = parent = detail = None
        if self.enable_kv_cache_events and (
            replace_existing_hashes or not self.holds(id, digest, group)
        ):
            # The parent is the last boundary at which whole blocks end; vLLM's events name
            # the one before, which it need not have published.
            start = (tokens - 1) // size * size
            parent = hashes[start // self.hash_block_size - 1] if start else None
            named = parent
            if self.detailed_snapshots:
                detail = self.request_detail(request, start, tokens)
            if not self.truthful_events:
                named = hashes[boundary - 2] if boundary > 1 else None
                start = tokens - self.hash_block_size
            stored = self.make_stored(
                request, [digest], named, start, tokens, tokens - start, group,
                [(start, tokens)],
            )
            self.group_block_sizes[group] = size
        key = make_key(
            <const uint8_t*>PyBytes_AS_STRING(digest), <uint32_t>len(digest), group
        )
        self.register_partial(
            id, digest, tokens, group, replace_existing_hashes, parent, stored, detail, False
        )
        self.after()
        return key

    def cache_partial_id(
        self,
        block_id,
        block_hash,
        num_tokens,
        kv_cache_group_id,
        replace_existing_hashes=False,
        *,
        parent_hash=None,
        token_ids=None,
    ):
        """As `cache_partial_block`, with a block id and the digest at the boundary.

        Args:
            block_id: The block; 0 is passed over.
            block_hash: Digest, bytes, of the width of the pool's others.
            num_tokens: Prefix tokens that it covers, a multiple of ``hash_block_size``.
            kv_cache_group_id: Group that owns the key.
            replace_existing_hashes: All keys that the block has leave.
            parent_hash: For events only: the digest where the block before it ends, bytes.
            token_ids: For events only: the tokens since then.
        """
        cdef block_id_t id = self.check_id(block_id)
        cdef uint32_t group = read_group(kv_cache_group_id)
        cdef uint64_t tokens = self.check_boundary(num_tokens)
        if not isinstance(block_hash, bytes):
            raise TypeError(f"a block hash must be bytes, not {type(block_hash).__name__}")
        check_width(len(block_hash))
        if self.hash_width and <uint32_t>len(block_hash) != self.hash_width:
            raise ValueError(
                f"hash of {len(block_hash)} bytes in a pool of {self.hash_width}-byte hashes"
            )
        if id == NULL_BLOCK:
            return
        stored = detail = None
        if replace_existing_hashes or not self.holds(id, block_hash, group):
            _, _, _, stored, detail = self.partial_row(
                0, block_hash, group, parent_hash, token_ids
            )
        self.register_partial(
            id, block_hash, tokens, group, replace_existing_hashes, parent_hash, stored, detail,
            True,
        )
        self.after()

    def cache_partial_ids(
        self,
        ids,
        hashes,
        num_tokens,
        kv_cache_group_id,
        *,
        parent_hashes=None,
        token_ids=None,
    ):
        """As `cache_partial_id` for each of many blocks, in order.

        An engine that registers the tail of every running request in each step repeats most
        of them: what a block holds already costs as much as a look-up.

        Args:
            ids: (n,) integer buffer or sequence of block ids; 0 is passed over.
            hashes: n digests, as in `cache_full_ids`.
            num_tokens: (n,) integer array or sequence: prefix tokens that each digest covers,
                multiples of ``hash_block_size``.
            kv_cache_group_id: Group that owns the keys.
            parent_hashes: For events only: n digests, bytes or None, where the block before
                ends.
            token_ids: For events only: for each block the tokens since then, or None.

        Raises:
            ContractError: A number is out of range; nothing was changed.
        """
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        cdef HashBatch rows = read_hashes(hashes, batch.count, self.hash_width)
        cdef uint32_t group = read_group(kv_cache_group_id)
        cdef TokenBuffer ends = read_boundaries(num_tokens, batch.count, self.hash_block_size)
        cdef IdBuffer found = make_buffer(batch.count)
        cdef space_t space
        cdef size_t i, num_new = 0
        self.check_batch_width(rows)
        parents_of = check_length(parent_hashes, batch.count, "parent_hashes")
        tokens_of = check_length(token_ids, batch.count, "token_ids")
        for parent in parents_of or ():
            low_bits(parent)
        space = registry.find_space(&self.core, group, rows.width)
        if space and batch.count and table.exists(&self.core.table):
            batches.find_batch(
                &self.core, rows.rows, rows.row_bytes, batch.count, space, 0, False, found.ids
            )
        else:
            for i in range(batch.count):
                found.ids[i] = NO_BLOCK
        # What remains is new, or held behind other blocks or as a key assigned by hand.
        for i in range(batch.count):
            num_new += batch.ids[i] != NULL_BLOCK and found.ids[i] != batch.ids[i]
        if num_new:
            copy_ids(batch)     # what follows may run the caller's code
            # All that rows may say is made before the first of them is registered. A new key can
            # take others of its block away: also from a row behind it that was held.
            said = []
            changed = set()
            for i in range(batch.count):
                if batch.ids[i] == NULL_BLOCK:
                    continue
                if batch.ids[i] not in changed:
                    if found.ids[i] == batch.ids[i] or self.holds(
                        batch.ids[i], rows.row(i), group
                    ):
                        continue
                    changed.add(batch.ids[i])
                said.append(self.partial_row(
                    i, rows.row(i), group,
                    parents_of[i] if parents_of is not None else None,
                    tokens_of[i] if tokens_of is not None else None,
                ))
            self.register_partial_rows(batch, ends, rows.width, group, said)
        self.after()

    cdef tuple partial_row(
        self, size_t i, bytes digest, uint32_t group, object parent, object token_ids
    ):
        stored = detail = None
        if self.enable_kv_cache_events:
            stored = self.partial_run(digest, parent, token_ids, group)
            if self.detailed_snapshots and token_ids is not None:
                detail = make_detail(copy_tokens(token_ids, 0, None), len(token_ids))
        return i, digest, parent, stored, detail

    cdef int register_partial_rows(
        self, IdBatch batch, TokenBuffer ends, uint32_t width, uint32_t group, list said
    ) except -1:
        # `said` is of partial_row(). Once the first is registered, only events can fail.
        cdef size_t i
        cdef size_t count = len(said)
        cdef bint is_begun = False
        cdef bint collects = PyGC_Disable()     # a __del__ could use up what is reserved
        try:
            registry.reserve(&self.core, group, width, count, count)
            self.reserve_parents()
            for i, digest, parent, stored, detail in said:
                self.register_partial(
                    batch.ids[i], digest, ends.values[i], group, False, parent, stored, detail,
                    True, is_begun,
                )
                is_begun = True
        finally:
            if collects:
                PyGC_Enable()
        return 0

    cdef int register_partial(
        self, block_id_t id, bytes digest, uint64_t tokens, uint32_t group, bint replace,
        object parent, object stored, EventDetail detail, bint compact, bint is_begun=False,
    ) except -1:
        # `parent` is the digest before the block, `stored` the event or run, or None. Once the
        # call that this is a part of `is_begun`, all that may still fail are its events.
        cdef Key key
        cdef RemovedRun removed = None
        cdef uint32_t width = <uint32_t>PyBytes_GET_SIZE(digest)
        cdef bint drops = replace
        cdef bint as_extra, as_new, collects
        cdef uint64_t num_keys
        cdef uint64_t noted = low_bits(parent)
        if not replace:
            if self.holds(id, digest, group):
                return 0
            drops = (
                registry.has_primary(&self.core, id)
                and not self.core.blocks.keys[id].space & NO_TOKENS_FLAG
                and self.core.blocks.keys[id].num_tokens < tokens
            )
        key.digest = <const uint8_t*>PyBytes_AS_STRING(digest)
        check_width(width)
        # The log is an object; a collection could run a __del__ that uses what is reserved.
        collects = self.enable_kv_cache_events and PyGC_Disable()
        try:
            key.space = registry.reserve(
                &self.core, group, width, 1, not drops and registry.has_primary(&self.core, id)
            )
            self.reserve_parents()
            if drops:
                try:
                    removed = self.log_for(&id, 1)
                except MemoryError as error:
                    if not is_begun:
                        raise
                    self.lose_events(error)
        finally:
            if collects:
                PyGC_Enable()
        self.note_width(width)
        if drops:
            if removed is not None:
                log_keys(&self.core, id, removed, self.truthful_events)
            registry.drop_keys(&self.core, id)
        as_extra = registry.has_primary(&self.core, id)
        num_keys = self.core.table.num_used
        registry.register(
            &self.core, id, &key, registry.hash_of(&self.core, &key), 0, <uint32_t>tokens
        )
        note_parent(&self.core, &self.parents, id, as_extra, noted)
        self.note_detail(id, as_extra, detail, 0)
        as_new = self.core.table.num_used != num_keys
        self.emit_removed(removed, compact)
        if stored is not None:
            try:
                self.report_partial(stored, parent, group, as_new, compact)
            except BaseException as error:
                self.lose_events(error)
        return 0

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
        if registry.has_primary(&self.core, target):
            raise ContractError(f"block {target} already has a hash")
        if reverse_index.first(&self.core.index, target) != NO_RECORD:
            raise ContractError(f"block {target} already has extra keys")
        if target == NULL_BLOCK:
            raise ContractError("the null block is never registered")
        if registry.has_primary(&self.core, source):
            if self.core.blocks.keys[source].space & LOOSE_FLAG:
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
