# SPDX-License-Identifier: Apache-2.0
# Partial prefix entries: keys of blocks that are not full yet.

cdef class _PoolPartials(_PoolRegistration):
    """A part of `BlockPool`, see there."""

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
        hashes = hashes_of(request)
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
                None in the first block.
            token_ids: For events only: the tokens since then.

        Raises:
            ContractError: A number is out of range, or events are on and ``parent_hash`` is
                missing: beyond the first boundary it is needed unless ``token_ids`` are all
                ``num_tokens``, from the start. Nothing was changed.
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
        self.check_partial_parent(tokens, parent_hash, token_ids)
        self.register_partial_id(
            id, block_hash, tokens, group, replace_existing_hashes, parent_hash, token_ids
        )

    cdef int check_partial_parent(
        self, uint64_t tokens, object parent, object token_ids
    ) except -1:
        # An event without a parent says that a prefix begins there, so the entry must be the
        # first boundary's or come with all of its tokens.
        if (
            not self.enable_kv_cache_events or parent is not None
            or tokens == self.hash_block_size
            or token_ids is not None and <uint64_t>len(token_ids) == tokens
        ):
            return 0
        raise ContractError(
            f"num_tokens is {tokens}: with events on parent_hash is needed, the digest where the "
            f"block before ends, or in the first block all {tokens} token_ids"
        )

    cdef int register_partial_id(
        self, block_id_t id, bytes block_hash, uint64_t tokens, uint32_t group,
        bint replace_existing_hashes, object parent_hash, object token_ids,
    ) except -1:
        # Of checked arguments. Without a parent the block is the first of its request.
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
        return 0

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
                ends. Needed as by `cache_partial_id`, for what a block holds already, too.
            token_ids: For events only: for each block the tokens since then, or None.

        Raises:
            ContractError: A number is out of range, or events are on and a parent is missing;
                nothing was changed.
        """
        cdef uint32_t group = read_group(kv_cache_group_id)
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        cdef IdBuffer found = make_buffer(batch.count)
        cdef HashBatch rows
        cdef TokenBuffer ends
        cdef space_t space
        cdef size_t i, num_new = 0
        if self.enable_kv_cache_events or not (
            is_inert(hashes) and is_inert(num_tokens)
            and parent_hashes is None and token_ids is None
        ):
            copy_ids(batch)     # what follows may run the caller's code
        rows = read_hashes(hashes, batch.count, self.hash_width)
        ends = read_boundaries(num_tokens, batch.count, self.hash_block_size)
        self.check_batch_width(rows)
        parents_of = check_length(parent_hashes, batch.count, "parent_hashes")
        tokens_of = check_length(token_ids, batch.count, "token_ids")
        for parent in parents_of or ():
            low_bits(parent)
        if self.enable_kv_cache_events:
            for i in range(batch.count):
                if batch.ids[i] != NULL_BLOCK:
                    self.check_partial_parent(
                        ends.values[i],
                        parents_of[i] if parents_of is not None else None,
                        tokens_of[i] if tokens_of is not None else None,
                    )
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
        if num_new and not self.enable_kv_cache_events and self.parents.of_block == NULL:
            self.register_unreported(batch, rows, ends, group, found.ids)
        elif num_new:
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

    cdef int register_unreported(
        self, IdBatch batch, HashBatch rows, TokenBuffer ends, uint32_t group,
        const block_id_t* found,
    ) except -1:
        # Partial entries of which nobody is told. Runs no code of the caller's.
        cdef batches.Registrations partials
        cdef size_t i, num_rows
        partials.ids = batch.ids
        partials.ends = ends.values
        partials.rows = rows.rows
        partials.row_bytes = rows.row_bytes
        partials.count = batch.count
        partials.fetched = 0
        partials.sought = 0
        num_rows = batches.max_partials(&self.core, &partials, found)
        try:
            partials.space = registry.reserve(&self.core, group, rows.width, num_rows, num_rows)
        except MemoryError:
            registry.trim_excess(&self.core)
            raise
        self.note_width(rows.width)
        for i in range(batch.count):
            batches.fetch_rows(&self.core, &partials, i)
            batches.register_partial_row(&self.core, &partials, i)
        registry.trim_excess(&self.core)
        return 0

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
            registry.trim_excess(&self.core)
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
            drops = registry.is_shorter(&self.core, id, tokens)
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
