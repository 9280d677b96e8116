# SPDX-License-Identifier: Apache-2.0
# What consumers of events are told, and snapshots for those who come late.

cdef class _PoolEvents(_PoolState):
    """A part of `BlockPool`, see there."""

    cdef int report_partial(
        self, object stored, object parent, uint32_t group, bint is_new, bint compact
    ) except -1:
        if self.truthful_events:
            if not is_new:
                return 0
            if not self.is_resident(parent, group):
                self.set_parent(stored, None)
        return self.emit(stored, compact)

    cdef object types_of_events(self):
        if self.event_types is not None:
            return self.event_types
        from cpool.events import types
        return types

    cdef object make_stored(
        self, object request, list digests, object parent, object start, object end,
        object block_size, object group, list ranges,
    ):
        types = self.types_of_events()
        extra_keys = []
        mm_index = 0
        if start and getattr(request, "mm_features", None):
            mm_index = types.first_mm_index(request, start, end)
        for block_start, block_end in ranges:
            block_keys, mm_index = types.block_extra_keys(
                request, block_start, block_end, mm_index
            )
            extra_keys.append(block_keys)
        lora = request.lora_request
        stored = types.BlockStored(
            block_hashes=[types.external_hash(digest) for digest in digests],
            parent_block_hash=None if parent is None else types.external_hash(parent),
            token_ids=request.all_token_ids[start:end],
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=self.medium,
            lora_name=lora.name if lora else None,
            extra_keys=types.event_extra_keys(extra_keys),
            group_idx=group,
            session_id=getattr(request, "session_id", None),
        )
        for name, value in self.describe(group).items():
            setattr(stored, name, value)
        return stored

    cdef dict describe(self, object group):
        # What events say about a group and the place of its blocks; mostly nothing.
        cdef dict fields = {}
        if self.event_groups:
            kind, window = self.event_groups.get(group, (None, None))
            if kind is not None:
                fields["kv_cache_spec_kind"] = kind
            if window is not None:
                fields["kv_cache_spec_sliding_window"] = window
        if self.event_locality is not None:
            fields["locality"] = self.event_locality
        if self.event_ownership is not None:
            fields["ownership"] = self.event_ownership
        return fields

    cdef tuple place_fields(self):
        # What removals say beside hash and group.
        return (self.medium, self.event_locality, self.event_ownership)

    cdef BatchSource batch_source(
        self, IdBatch batch, HashBatch rows, object parent, object token_ids, uint64_t size,
        uint32_t group, object extra_keys, dict fields,
    ):
        cdef BatchSource source = BatchSource.__new__(BatchSource)
        low_bits(parent)
        if token_ids is not None and <uint64_t>len(token_ids) != batch.count * size:
            raise ContractError(
                f"{len(token_ids)} token_ids for {batch.count} blocks of {size} tokens"
            )
        if extra_keys is not None and <size_t>len(extra_keys) != batch.count:
            raise ContractError(f"{len(extra_keys)} extra_keys for {batch.count} blocks")
        source.pool = <BlockPool>self
        source.group = group
        source.size = size
        source.ids = batch.ids
        source.rows = rows
        source.first_parent = parent
        source.token_ids = token_ids
        source.extra_keys = extra_keys
        fields.update(self.describe(group))
        source.description = fields
        return source

    cdef StoredRun partial_run(
        self, bytes digest, object parent, object token_ids, uint32_t group
    ):
        cdef StoredRun run = StoredRun.__new__(StoredRun)
        low_bits(parent)
        run.rows = digest
        run.width = <uint32_t>len(digest)
        run.parent = parent
        run.token_ids = copy_tokens(token_ids, 0, None)
        run.block_size = len(run.token_ids) or self.hash_block_size
        run.group = group
        run.medium = self.medium
        run.description = self.describe(group)
        return run

    cdef RegistrationLog start_log(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch rows, uint32_t group,
        uint64_t size, EventSource source,
    ):
        cdef RegistrationLog log = RegistrationLog.__new__(RegistrationLog)
        log.pool = <BlockPool>self
        log.ids = ids
        log.ends = ends
        log.rows = rows
        log.size = size
        log.source = source
        log.truthful = self.truthful_events
        log.steps = []
        log.find_parents()
        return log

    cdef int reserve_parents(self) except -1:
        # Before a registration: room to note its parent, while somebody may ask for it.
        if self.enable_kv_cache_events or self.parents.of_block != NULL:
            parents.reserve(
                &self.parents, self.core.blocks.num_blocks,
                <size_t>self.core.index.extras.num_chunks << self.core.index.extras.chunk_shift,
            )
        return 0

    cdef RemovedRun log_for(self, const block_id_t* ids, size_t count):
        # Room for all keys of the blocks; None when no event will be due. Nothing that could
        # run other code stands between the count and what the caller does next.
        cdef RemovedRun run
        if not self.enable_kv_cache_events or self.core.blocks.keys == NULL:
            return None
        run = RemovedRun.__new__(RemovedRun)
        run.fields = self.place_fields()
        reserve_removed(run, count_keys(&self.core, ids, count), self.core.blocks.stride)
        return run

    cdef int set_parent(self, object stored, object parent) except -1:
        if isinstance(stored, StoredRun):
            (<StoredRun>stored).parent = parent
        else:
            stored.parent_block_hash = (
                None if parent is None else self.types_of_events().external_hash(parent)
            )
        return 0

    cdef int emit(self, object event, bint compact) except -1:
        # An event, or a run that is expanded at once unless `compact`.
        if self.is_resetting:
            return 0
        queue = self.kv_event_queue
        if compact or not isinstance(event, EventRun):
            queue.append(event)
        else:
            for single in event.expand(self.types_of_events()):
                queue.append(single)
        return 0

    cdef int report(self, object event, bint compact) except -1:
        # As emit(), of a change that has been made.
        try:
            self.emit(event, compact)
        except BaseException as error:
            self.lose_events(error)
        return 0

    cdef int lose_events(self, object error) except -1:
        # A change that has been made could not be told: memory ran out, or the event classes
        # failed. The call has not failed for that; the next batch will be a clear and a
        # snapshot, which tell all. Only an interrupt goes on to the caller.
        self.events_lost = True
        if not isinstance(error, Exception):
            raise error
        return 0

    cdef int emit_removed(self, RemovedRun removed, bint compact) except -1:
        if removed is not None and removed.count:
            self.report(removed, compact)
        return 0

    cdef int emit_arrival(self, bytes key) except -1:
        # A key that was registered by itself, without its request.
        if not self.enable_kv_cache_events or not self.truthful_events:
            return 0
        if not self.reports_inserted_keys:
            return 0
        try:
            self.make_arrival(key)
        except BaseException as error:
            self.lose_events(error)
        return 0

    cdef int make_arrival(self, bytes key) except -1:
        types = self.types_of_events()
        width = len(key) - 4
        group = int.from_bytes(key[width:], "big")
        stored = types.BlockStored(
            block_hashes=[types.external_hash(key[:width])],
            parent_block_hash=None,
            token_ids=[],
            block_size=self.hash_block_size,
            lora_id=None,
            medium=self.medium,
            lora_name=None,
            group_idx=group,
        )
        for name, value in self.describe(group).items():
            setattr(stored, name, value)
        return self.emit(stored, False)

    cdef RemovedRun departure_log(self):
        # Room for a key that is taken away by itself; None when no event will be due. Made
        # before the key is looked for, because making it may run other code.
        cdef RemovedRun removed
        if not self.enable_kv_cache_events or not self.truthful_events:
            return None
        removed = RemovedRun.__new__(RemovedRun)
        removed.fields = self.place_fields()
        reserve_removed(removed, 1, MAX_HASH_BYTES)
        return removed

    cdef void log_departure(self, Holder holder, RemovedRun removed) noexcept:
        if removed is not None and not registry.flagged_space(&self.core, holder) & LOOSE_FLAG:
            log_key(&self.core, holder, removed, True)

    def emit_cached_block_events(
        self, request, num_cached_blocks, block_size, kv_cache_group_id
    ):
        """Report blocks that a request reuses as stored, without changing anything.

        With truthful events there is nothing to report: consumers know of these blocks.

        Args:
            request: As in `cache_full_blocks`.
            num_cached_blocks: Number of blocks from the start that were hits.
            block_size: Tokens in a block.
            kv_cache_group_id: Group of the blocks.
        """
        cdef int64_t count = read_count(
            num_cached_blocks, "num_cached_blocks", 0, MAX_NUM_TOKENS
        )
        cdef uint64_t size = read_count(block_size, "block_size", 1, MAX_NUM_TOKENS)
        cdef Py_ssize_t scale
        if not self.enable_kv_cache_events or count == 0 or self.truthful_events:
            return
        hashes = self.hash_sequence(request, size, &scale)
        self.emit(
            self.make_stored(
                request, [hashes[(i + 1) * scale - 1] for i in range(count)], None, 0,
                count * size, size, read_group(kv_cache_group_id),
                [(i * size, (i + 1) * size) for i in range(count)],
            ),
            False,
        )

    def take_events(self):
        """All events since the last call, as a list of the caller's own; [] with events off.

        If an event could not be made, because memory ran out after the change that it was to
        tell of, the list is `AllBlocksCleared` and a snapshot of what the pool holds now.
        """
        events = self.take_event_runs()
        try:
            return expand_runs(events, self.types_of_events())
        except BaseException:
            self.events_lost = True
            raise

    def take_event_runs(self, *, snapshot=False):
        """As `take_events`, but what the batch interface did stays compact.

        Args:
            snapshot: Whether to take, instead of what happened, a clear and a snapshot of
                what the pool holds now: a batch for consumers that missed some.

        Returns:
            List of events and of runs, which stand for several events each: see
            ``run.num_events`` and ``run.expand``. `cpool.events.wire` encodes both.
        """
        if not self.enable_kv_cache_events:
            return []
        events = self.kv_event_queue
        fresh = []
        if snapshot or self.events_lost:
            events = [self.types_of_events().AllBlocksCleared(), self.take_snapshot()]
        self.kv_event_queue = fresh
        self.events_lost = False
        if events:
            self.num_event_batches += 1
        return events

    def snapshot_events(self):
        """All that the pool holds now, for a consumer that comes late or lost events.

        A consumer that forgets all it knows, applies these events and then every batch from
        ``sequence`` on, holds what one does that saw everything. Events that wait for
        `take_events` are part of that next batch and of the snapshot both: applying them
        again changes nothing. Batches are those that `take_events` or `take_event_runs`
        handed out, empty ones not counted, from 0.

        Takes time in proportion to the pool. Token ids, LoRA, extra keys and session are part
        of a snapshot only with ``detailed_snapshots``; otherwise those fields are empty.

        Returns:
            `EventSnapshot` with ``events`` and ``sequence``.

        Raises:
            ValueError: Events are off, so parents are not known.
        """
        if not self.enable_kv_cache_events:
            raise ValueError("a pool knows the parents of blocks only with events on")
        return EventSnapshot(self.take_snapshot(), self.num_event_batches)

    cdef EventDetail request_detail(self, object request, object start, object end):
        cdef EventDetail detail = make_detail(request.all_token_ids[start:end], end - start)
        types = self.types_of_events()
        mm_index = 0
        if start and getattr(request, "mm_features", None):
            mm_index = types.first_mm_index(request, start, end)
        extra, _ = types.block_extra_keys(request, start, end, mm_index)
        if extra is not None:
            detail.extra_keys[0] = types.event_extra_keys([extra])[0]
        lora = request.lora_request
        detail.lora_id = lora.adapter_id if lora else None
        detail.lora_name = lora.name if lora else None
        detail.session_id = getattr(request, "session_id", None)
        return detail

    cdef record_id_t last_extra(self, block_id_t id) noexcept:
        cdef record_id_t extra = NO_RECORD
        cdef record_id_t next = reverse_index.first(&self.core.index, id)
        while next != NO_RECORD:
            extra = next
            next = reverse_index.extra(&self.core.index, extra).next
        return extra

    cdef int note_detail(
        self, block_id_t id, bint as_extra, EventDetail detail, size_t row
    ) except -1:
        # Of the registration that the block got last, as an extra key or as its primary one.
        if not self.detailed_snapshots or not self.enable_kv_cache_events:
            return 0
        try:
            if self.details is None:
                self.extra_details = {}
                self.details = [None] * self.core.blocks.num_blocks
            kept = None if detail is None else (detail, row)
            if as_extra:
                self.extra_details[self.last_extra(id)] = kept
            else:
                self.details[id] = kept
        except MemoryError:
            # The detail of a former key must not stay.
            self.forget_details()
        return 0

    cdef void forget_details(self) noexcept:
        self.details = None
        self.extra_details = None

    cdef object detail_to_move(self, Holder holder):
        # In the middle of a move, which must not fail.
        try:
            return self.detail_of(holder)
        except MemoryError:
            self.forget_details()
            return None

    cdef object detail_of(self, Holder holder):
        if self.details is None:
            return None
        if holder.extra == NO_RECORD:
            return self.details[holder.block]
        return self.extra_details.get(holder.extra)

    cdef SnapshotRun take_snapshot(self):
        cdef SnapshotRun run = SnapshotRun.__new__(SnapshotRun)
        cdef Core* core = &self.core
        cdef size_t count = core.table.num_used
        cdef Array rows, index, order, scratch, sizes
        cdef Holder holder
        cdef uint32_t i
        cdef size_t row
        cdef int shift = 63
        run.medium = self.medium
        run.stride = core.blocks.stride
        run.spaces = [(0, 0)]
        for i in range(1, core.num_spaces):
            run.spaces.append((core.spaces[i].group, core.spaces[i].width))
        run.descriptions = {group: self.describe(group) for group, _ in run.spaces}
        if count == 0:
            return run
        while <size_t>1 << (64 - shift) < 2 * count:
            shift -= 1
        memset(&rows, 0, sizeof(Array))
        index = order = scratch = sizes = rows
        try:
            memory.allocate(&run.digest_array, count, run.stride)
            memory.allocate(&run.span_array, count, sizeof(StoredSpan))
            memory.allocate(&rows, count, sizeof(SnapshotRow))
            memory.allocate(&index, <size_t>1 << (64 - shift), sizeof(uint32_t))
            memory.allocate(&order, count, sizeof(uint64_t))
            memory.allocate(&scratch, count, sizeof(uint64_t))
            memory.allocate(&sizes, len(run.spaces), sizeof(uint32_t))
            for i in range(1, core.num_spaces):
                (<uint32_t*>sizes.data)[i] = self.group_block_sizes.get(core.spaces[i].group, 0)
            run.spans = <StoredSpan*>run.span_array.data
            fill_rows(core, &self.parents, <SnapshotRow*>rows.data)
            fill_index(
                <SnapshotRow*>rows.data, count, <uint32_t*>index.data, shift, core.seed[0]
            )
            find_parents(
                <SnapshotRow*>rows.data, count, <uint32_t*>index.data, shift, core.seed[0]
            )
            sort_by_tokens(
                <SnapshotRow*>rows.data, count, <uint64_t*>order.data, <uint64_t*>scratch.data
            )
            link_spans(
                <SnapshotRow*>rows.data, count, <uint64_t*>order.data, <uint32_t*>sizes.data,
                self.hash_block_size, self.details is None,
            )
            write_spans(core, <SnapshotRow*>rows.data, count, <uint64_t*>order.data, run)
            if self.details is not None:
                run.details = [None] * count
                for row in range(count):
                    holder.block = (<SnapshotRow*>rows.data)[row].block
                    holder.extra = (<SnapshotRow*>rows.data)[row].extra
                    run.details[(<SnapshotRow*>rows.data)[row].place] = self.detail_of(holder)
        finally:
            memory.release(&rows)
            memory.release(&index)
            memory.release(&order)
            memory.release(&scratch)
            memory.release(&sizes)
        return run
