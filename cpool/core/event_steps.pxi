# SPDX-License-Identifier: Apache-2.0
# Steps of the pool with events on: what leaves is logged as it leaves, parents are noted as
# keys come. The truthful stream names a key when its first holder comes and when its last one
# goes; the stream of vLLM names it for every holder.

cdef size_t count_keys(const Core* core, const block_id_t* ids, size_t count) noexcept:
    # How many keys the blocks have, at most: room for the log of their eviction.
    cdef size_t i, found = count
    cdef record_id_t id
    if core.blocks.keys == NULL:
        return 0
    if core.index.heads == NULL:
        return count
    for i in range(count):
        id = reverse_index.first(&core.index, ids[i])
        while id != NO_RECORD:
            found += 1
            id = reverse_index.extra(&core.index, id).next
    return found


cdef inline void log_key(
    const Core* core, Holder holder, RemovedRun run, bint truthful
) noexcept:
    cdef Key key
    if truthful and registry.flagged_space(core, holder) & SHARED_FLAG:
        return
    key = registry.key_of(core, holder)
    append_removed(run, &core.spaces[key.space], key.digest)


cdef void log_keys(const Core* core, block_id_t id, RemovedRun run, bint truthful) noexcept:
    # What registry.drop_keys is about to take away, in its order.
    cdef Holder holder = registry.primary(id)
    if registry.has_primary(core, id) and not key_at(&core.blocks, id).space & LOOSE_FLAG:
        log_key(core, holder, run, truthful)
    holder.extra = reverse_index.first(&core.index, id)
    while holder.extra != NO_RECORD:
        log_key(core, holder, run, truthful)
        holder.extra = reverse_index.extra(&core.index, holder.extra).next


cdef inline void note_parent(
    const Core* core, Parents* of, block_id_t block, bint as_extra, uint64_t parent
) noexcept:
    # Of the registration that the block got last, as an extra key or as its primary one.
    cdef record_id_t extra = NO_RECORD
    cdef record_id_t next
    if of.of_block == NULL:
        return
    if as_extra:
        next = reverse_index.first(&core.index, block)
        while next != NO_RECORD:
            extra = next
            next = reverse_index.extra(&core.index, extra).next
    parents.note(of, block, extra, parent)


cdef class EventSource:
    """What the events of one registration say beside the hashes."""

    cdef object parent_digest(self, size_t i):
        # The digest one block before row i, or None.
        raise NotImplementedError

    cdef object stored(self, size_t start, size_t stop, object parent):
        # One event, or run, for rows start to stop, which follow one another.
        raise NotImplementedError

    cdef EventDetail detail(self, object stored):
        # What `stored`, which is about all rows, carries.
        raise NotImplementedError

    cdef size_t detail_row(self, size_t i) except? 0:
        # Which of the detail's blocks row i is.
        raise NotImplementedError


cdef class RequestSource(EventSource):
    """Rows are blocks of a request, some passed over."""

    cdef object parent_digest(self, size_t i):
        position = self.positions[i]
        return self.hashes[position * self.scale - 1] if position else None

    cdef object stored(self, size_t start, size_t stop, object parent):
        # `start` is before `stop`.
        cdef list positions = self.positions[start:stop]
        return self.pool.make_stored(
            self.request, self.digests[start:stop], parent, positions[0] * self.size,
            (positions[stop - start - 1] + 1) * self.size, self.size, self.group,
            [(position * self.size, (position + 1) * self.size) for position in positions],
        )

    cdef EventDetail detail(self, object stored):
        # `stored` is the event for all rows; a row's number counts from its first token.
        cdef EventDetail detail = make_detail(stored.token_ids, self.size)
        detail.lora_id = stored.lora_id
        detail.lora_name = stored.lora_name
        detail.session_id = stored.session_id
        for i, keys in enumerate(stored.extra_keys or ()):
            if keys is not None:
                detail.extra_keys[self.detail_row(i)] = keys
        return detail

    cdef size_t detail_row(self, size_t i) except? 0:
        return self.positions[i] - self.first

    cdef object stored_range(self, object first, object last):
        # As vLLM: one event for blocks first to last, whichever of them are registered.
        parent = self.hashes[first * self.scale - 1] if first else None
        return self.pool.make_stored(
            self.request, self.digests, parent, first * self.size, last * self.size, self.size,
            self.group,
            [(position * self.size, (position + 1) * self.size) for position in self.positions],
        )


cdef class BatchSource(EventSource):
    """Rows are those of a batch, the null block's among them."""

    cdef object parent_digest(self, size_t i):
        return self.rows.row(i - 1) if i else self.first_parent

    cdef object stored(self, size_t start, size_t stop, object parent):
        cdef StoredRun run = StoredRun.__new__(StoredRun)
        cdef HashBatch rows = self.rows
        cdef uint32_t width = rows.width
        cdef size_t i, count = 0
        cdef char* copied
        for i in range(start, stop):
            count += self.ids[i] != NULL_BLOCK
        run.rows = PyBytes_FromStringAndSize(NULL, count * width)
        copied = PyBytes_AS_STRING(run.rows)
        if count == stop - start and rows.row_bytes == width:
            memcpy(copied, rows.rows + start * width, count * width)
            count = 0
        for i in range(start, stop if count else start):
            if self.ids[i] != NULL_BLOCK:
                memcpy(copied, rows.rows + i * rows.row_bytes, width)
                copied += width
        run.width = width
        run.parent = parent
        run.block_size = self.size
        run.group = self.group
        run.medium = self.pool.medium
        run.token_ids = copy_tokens(self.token_ids, start * self.size, stop * self.size)
        run.description = self.description
        if self.extra_keys is not None:
            run.description = dict(
                self.description or {}, extra_keys=list(self.extra_keys[start:stop])
            )
        return run

    cdef EventDetail detail(self, object stored):
        cdef StoredRun run = stored
        cdef EventDetail detail = make_detail(run.token_ids, self.size)
        detail.lora_id = self.description["lora_id"]
        detail.lora_name = self.description["lora_name"]
        detail.session_id = self.description["session_id"]
        for i, keys in enumerate(self.extra_keys or ()):
            if keys is not None:
                detail.extra_keys[i] = keys
        return detail

    cdef size_t detail_row(self, size_t i) except? 0:
        return i


cdef object copy_tokens(object token_ids, object start, object stop):
    # What the caller may change later is copied: a list, or an array that is not read-only.
    if token_ids is None:
        return []
    if isinstance(token_ids, str) or not hasattr(token_ids, "__len__"):
        raise TypeError(f"token_ids must be integers, not {type(token_ids).__name__}")
    part = token_ids[start:stop]
    if not isinstance(part, np.ndarray):
        return list(part)
    if part.dtype.kind not in "iu" or part.ndim != 1:
        raise TypeError(f"token_ids must be integers, not {part.ndim}-dimensional {part.dtype}")
    return np.array(part) if part.flags.writeable else part


@cython.final
cdef class RegistrationLog:
    """What one batch of registrations changes for a consumer of events, in order.

    vLLM's stream: what was replaced, then one event for all rows. The truthful one: a run of
    rows that follow one another and whose keys are new is one event, cut where something was
    replaced in between.
    """

    cdef bint follows(self, size_t i) noexcept:
        return i > 0 and self.ends[i] == self.ends[i - 1] + self.size

    cdef int find_parents(self) except -1:
        # Of rows that follow no other; what the others' parents are is in the rows.
        cdef size_t i
        self.parent_of = TokenBuffer.__new__(TokenBuffer, self.rows.count)
        for i in range(self.rows.count):
            if not self.follows(i):
                self.parent_of.values[i] = low_bits(self.source.parent_digest(i))
        return 0

    cdef void note_parents(self, size_t first, size_t stop) noexcept:
        # A loop of its own: nothing waits for these writes, so they overlap by themselves.
        cdef uint64_t* of_block = self.pool.parents.of_block
        cdef size_t i
        for i in range(first, stop):
            if self.ids[i] == NULL_BLOCK:
                continue
            if self.follows(i):
                of_block[self.ids[i]] = parents.from_digest(
                    self.rows.rows + (i - 1) * self.rows.row_bytes, self.rows.width
                )
            else:
                of_block[self.ids[i]] = self.parent_of.values[i]

    cdef int reserve_removals(self, size_t num_keyed) except -1:
        # A block that is named twice is replaced by this very batch.
        cdef Core* core = &self.pool.core
        cdef size_t num_replaced = num_keyed
        if core.index.heads != NULL:
            num_replaced += count_keys(core, self.ids, self.rows.count)
        self.space = registry.find_space(core, self.source.group, self.rows.width)
        self.removed = RemovedRun.__new__(RemovedRun)
        self.removed.fields = self.pool.place_fields()
        reserve_removed(
            self.removed,
            num_replaced + self.rows.count,
            core.blocks.stride,
        )
        return 0

    cdef void replacing(self, size_t i) noexcept:
        # Before a registration that takes a block's keys away.
        cdef size_t before = self.removed.count
        log_keys(&self.pool.core, self.ids[i], self.removed, self.truthful)
        if self.truthful and self.removed.count > before and self.failure is None:
            try:
                self.close()
                self.steps.append(self.removed.part(before, self.removed.count))
            except BaseException as error:
                self.failure = error

    cdef void registered(self, size_t i, bint is_new) noexcept:
        # For the truthful stream only.
        if is_new and self.start < self.stop and self.stop == i and self.follows(i):
            self.stop = i + 1
        elif self.failure is None:
            try:
                self.add_row(i, is_new)
            except BaseException as error:
                self.failure = error

    cdef int add_row(self, size_t i, bint is_new) except -1:
        # A row that does not go on with the run before it.
        self.close()
        if is_new:
            self.start = i
            self.stop = i + 1
            self.parent_is_resident = self.has_resident_parent(i)
        return 0

    cdef void note_row(self, size_t i) noexcept:
        # Keeps for snapshots what the events say of a row.
        try:
            self.pool.note_detail(self.ids[i], False, self.detail, self.source.detail_row(i))
        except MemoryError:
            self.pool.forget_details()

    cdef bint has_resident_parent(self, size_t i) except -1:
        cdef Key key
        cdef Holder holder
        key.space = self.space
        if self.follows(i):
            key.digest = self.rows.rows + (i - 1) * self.rows.row_bytes
            return registry.find_first(&self.pool.core, &key, &holder)
        return self.pool.is_resident(self.source.parent_digest(i), self.source.group)

    cdef int close(self) except -1:
        if self.start < self.stop:
            self.steps.append((self.start, self.stop, self.parent_is_resident))
        self.start = self.stop
        return 0

    cdef int finish(self, object stored) except -1:
        # Emits. `stored` is the event for all rows.
        cdef bint compact = isinstance(self.source, BatchSource)
        if self.failure is not None:
            raise self.failure
        if not self.truthful:
            self.pool.emit_removed(self.removed, compact)
            if stored is not None:
                self.pool.emit(stored, compact)
            return 0
        self.close()
        for step in self.steps:
            if isinstance(step, RemovedRun):
                self.pool.emit_removed(step, compact)
                continue
            start, stop, parent_is_resident = step
            parent = self.source.parent_digest(start) if parent_is_resident else None
            if start == 0 and stop == self.rows.count:
                self.pool.set_parent(stored, parent)
                self.pool.emit(stored, compact)
            else:
                self.pool.emit(self.source.stored(start, stop, parent), compact)
        return 0


cdef uint64_t low_bits(object digest) except? 0:
    # A parent as parents.pxd keeps it, from bytes or None.
    if digest is None:
        return 0
    if not isinstance(digest, bytes):
        raise TypeError(f"a block hash must be bytes, not {type(digest).__name__}")
    return parents.from_digest(
        <const uint8_t*>PyBytes_AS_STRING(digest), PyBytes_GET_SIZE(digest)
    )


cdef class EventDetail:
    """What the events of one registration carried beside hashes; kept for snapshots."""

    cdef int describe(self, object event, size_t row) except -1:
        # `event` is about one block of the registration.
        size = self.size
        event.token_ids = self.token_ids[row * size:(row + 1) * size].tolist()
        if event.token_ids:
            event.block_size = size
        event.lora_id = self.lora_id
        event.lora_name = self.lora_name
        event.session_id = self.session_id
        event.extra_keys = [self.extra_keys.get(row)]
        return 0


cdef EventDetail make_detail(object token_ids, object size):
    cdef EventDetail detail = EventDetail.__new__(EventDetail)
    detail.token_ids = np.asarray(token_ids)
    if detail.token_ids.dtype.kind not in "iu":
        detail.token_ids = detail.token_ids.astype(np.int32)
    if detail.token_ids.dtype.itemsize > 4 and not isinstance(token_ids, np.ndarray):
        detail.token_ids = detail.token_ids.astype(np.int32)
    detail.size = size
    detail.extra_keys = {}
    return detail
