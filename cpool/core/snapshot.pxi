# SPDX-License-Identifier: Apache-2.0
# Snapshot: the pool's keys as a run of BlockStored events, parents first.
#
#     rows     one for each distinct key, taken from its first holder
#     index    (space, low 64 bits of the digest) -> row, to find parents
#     order    rows by the tokens that they cover: a parent covers fewer than its child
#     spans    chains of rows with equal steps; each becomes one event
#
# A parent is known by the low 64 bits of its digest. Where two resident keys of a space share
# those, none of them is named as a parent: a missing parent is better than a wrong one.

cdef struct SnapshotRow:
    uint64_t low            # the digest's low 64 bits
    uint64_t parent_low     # the parent's, plus one; 0 without a parent
    block_id_t block        # first holder
    record_id_t extra
    uint32_t num_tokens     # that the key covers; 0 when unknown
    uint32_t block_size     # tokens since the parent
    uint32_t parent         # row, or NO_RECORD
    uint32_t next           # row that continues the span, or NO_RECORD
    uint32_t place          # in the run
    space_t space
    uint8_t is_ambiguous
    uint8_t continues       # another row


cdef class SnapshotRun(EventRun):
    """What a pool held at one moment, as `BlockStored` events."""

    def __dealloc__(self):
        memory.release(&self.digest_array)
        memory.release(&self.span_array)

    def __len__(self):
        return self.num_spans

    def __iter__(self):
        from cpool.events import types
        return iter(self.expand(types))

    @property
    def num_events(self):
        return self.num_spans

    cdef bytes digest(self, size_t row, size_t width):
        return PyBytes_FromStringAndSize(self.digest_array.data + row * self.stride, width)

    def expand(self, types):
        cdef size_t i, row
        cdef StoredSpan* span
        cdef list events = []
        external_hash = types.external_hash
        make = types.BlockStored
        for i in range(self.num_spans):
            span = &self.spans[i]
            group, width = self.spaces[span.space]
            event = make(
                [
                    external_hash(self.digest(row, width))
                    for row in range(span.start, span.start + span.count)
                ],
                None if span.parent == NO_RECORD else (
                    external_hash(self.digest(span.parent, width))
                ),
                [],
                span.block_size,
                None,
                self.medium,
                None,
                group_idx=group,
            )
            for name, value in self.descriptions[group].items():
                setattr(event, name, value)
            if self.details is not None and self.details[span.start] is not None:
                detail, block = self.details[span.start]
                (<EventDetail>detail).describe(event, block)
            events.append(event)
        return events

    def encode_run(self, legacy_array=False):
        cdef Writer writer
        cdef StoredSpan* span
        cdef const uint8_t* digests = <const uint8_t*>self.digest_array.data
        cdef size_t i, row
        cdef uint32_t width
        cdef bint as_int
        cdef list frames = []
        cdef bytes before, behind
        from cpool.events import types, wire
        if legacy_array or self.details is not None:
            return EventRun.encode_run(self, True)
        as_int = types.uses_int_hashes()
        for group, _ in self.spaces:
            # All but hashes, parent and size is the same for a group.
            event = types.BlockStored([], None, [], 0, None, self.medium, None, group_idx=group)
            for name, value in self.descriptions.get(group, {}).items():
                setattr(event, name, value)
            frames.append(wire.split_stored(event))
        memset(&writer, 0, sizeof(Writer))
        for i in range(self.num_spans):
            span = &self.spans[i]
            width = self.spaces[span.space][1]
            before, behind = frames[span.space]
            msgpack.put(&writer, PyBytes_AS_STRING(before), PyBytes_GET_SIZE(before))
            msgpack.array_header(&writer, span.count)
            for row in range(span.start, span.start + span.count):
                write_hash(&writer, digests + row * self.stride, width, as_int)
            msgpack.short_text(&writer, "parent_block_hash", 17)
            if span.parent == NO_RECORD:
                msgpack.nil(&writer)
            else:
                write_hash(&writer, digests + span.parent * self.stride, width, as_int)
            msgpack.short_text(&writer, "token_ids", 9)
            msgpack.array_header(&writer, 0)
            msgpack.short_text(&writer, "block_size", 10)
            msgpack.uint(&writer, span.block_size)
            msgpack.put(&writer, PyBytes_AS_STRING(behind), PyBytes_GET_SIZE(behind))
        return written(&writer)


cdef bint is_first_holder(const Core* core, Holder holder) noexcept:
    cdef const shared_keys.Member* member
    cdef record_id_t id
    if not registry.flagged_space(core, holder) & SHARED_FLAG:
        return True
    id = registry.member_of(core, holder)
    member = shared_keys.member(&core.shared, id)
    return shared_keys.key(&core.shared, member.key).first == id


cdef void add_row(
    const Core* core, const Parents* of, Holder holder, SnapshotRow* row
) noexcept:
    cdef Key key = registry.key_of(core, holder)
    row.low = parents.from_digest(key.digest, core.spaces[key.space].width) - 1
    row.parent_low = parents.of(of, holder.block, holder.extra)
    row.block = holder.block
    row.extra = holder.extra
    row.num_tokens = 0
    if not registry.flagged_space(core, holder) & NO_TOKENS_FLAG:
        row.num_tokens = registry.num_tokens_of(core, holder)
    row.parent = NO_RECORD
    row.next = NO_RECORD
    row.space = key.space
    row.is_ambiguous = False
    row.continues = False


cdef size_t fill_rows(const Core* core, const Parents* of, SnapshotRow* rows) noexcept:
    cdef size_t count = 0
    cdef Holder holder
    cdef block_id_t block
    if core.blocks.keys == NULL:
        return 0
    for block in range(core.blocks.num_blocks):
        holder = registry.primary(block)
        if key_at(&core.blocks, block).space and not key_at(&core.blocks, block).space & LOOSE_FLAG:
            if is_first_holder(core, holder):
                add_row(core, of, holder, &rows[count])
                count += 1
        holder.extra = reverse_index.first(&core.index, block)
        while holder.extra != NO_RECORD:
            if is_first_holder(core, holder):
                add_row(core, of, holder, &rows[count])
                count += 1
            holder.extra = reverse_index.extra(&core.index, holder.extra).next
    return count


cdef inline size_t index_home(uint64_t low, space_t space, uint64_t seed, int shift) noexcept:
    return ((low ^ (<uint64_t>space << 48)) * (seed | 1)) >> shift


cdef void fill_index(
    SnapshotRow* rows, size_t count, uint32_t* index, int shift, uint64_t seed
) noexcept:
    # Row + 1 in the cells of an open-addressed table, 0 in an empty one.
    cdef size_t mask = (<size_t>1 << (64 - shift)) - 1
    cdef size_t i, place
    cdef SnapshotRow* other
    for i in range(count):
        if i + AHEAD < count:
            prefetch_write(
                &index[index_home(rows[i + AHEAD].low, rows[i + AHEAD].space, seed, shift)]
            )
        place = index_home(rows[i].low, rows[i].space, seed, shift)
        while index[place]:
            other = &rows[index[place] - 1]
            if other.low == rows[i].low and other.space == rows[i].space:
                other.is_ambiguous = True
                break
            place = (place + 1) & mask
        if index[place] == 0:
            index[place] = <uint32_t>i + 1


cdef void find_parents(
    SnapshotRow* rows, size_t count, const uint32_t* index, int shift, uint64_t seed
) noexcept:
    cdef size_t mask = (<size_t>1 << (64 - shift)) - 1
    cdef size_t i, place
    cdef uint64_t low
    cdef SnapshotRow* row
    cdef const SnapshotRow* other
    for i in range(count):
        if i + AHEAD < count:
            prefetch(&index[index_home(
                rows[i + AHEAD].parent_low - 1, rows[i + AHEAD].space, seed, shift
            )])
        row = &rows[i]
        if row.parent_low == 0:
            continue
        low = row.parent_low - 1
        place = index_home(low, row.space, seed, shift)
        while index[place]:
            other = &rows[index[place] - 1]
            if other.low == low and other.space == row.space:
                if not other.is_ambiguous and other.num_tokens < row.num_tokens:
                    row.parent = index[place] - 1
                break
            place = (place + 1) & mask


cdef void sort_by_tokens(
    const SnapshotRow* rows, size_t count, uint64_t* order, uint64_t* scratch
) noexcept:
    # Three stable passes over 11 bits each. An entry of `order` is num_tokens << 32 | row, so
    # that no pass but the first reads the rows.
    cdef size_t starts[2048]
    cdef size_t i, total, found
    cdef int digit, shift
    cdef uint64_t* source = scratch
    cdef uint64_t* target = order
    for i in range(count):
        source[i] = (<uint64_t>rows[i].num_tokens << 32) | i
    for digit in range(3):
        shift = 32 + 11 * digit
        memset(starts, 0, sizeof(starts))
        for i in range(count):
            starts[(source[i] >> shift) & 2047] += 1
        total = 0
        for i in range(2048):
            found = starts[i]
            starts[i] = total
            total += found
        for i in range(count):
            found = (source[i] >> shift) & 2047
            target[starts[found]] = source[i]
            starts[found] += 1
        source, target = target, source


cdef void link_spans(
    SnapshotRow* rows, size_t count, const uint64_t* order, const uint32_t* sizes,
    uint32_t smallest, bint chained,
) noexcept:
    # sizes[space]: tokens in a block, 0 when unknown. Not `chained`: one row a span.
    cdef size_t i
    cdef SnapshotRow* row
    cdef SnapshotRow* before
    cdef uint32_t size
    for i in range(count):
        if i + AHEAD < count:
            prefetch_write(&rows[<uint32_t>order[i + AHEAD]])
        row = &rows[<uint32_t>order[i]]
        if row.parent == NO_RECORD:
            size = sizes[row.space] if sizes[row.space] else smallest
            row.block_size = (row.num_tokens - 1) % size + 1 if row.num_tokens else smallest
            continue
        before = &rows[row.parent]
        row.block_size = row.num_tokens - before.num_tokens
        if chained and before.next == NO_RECORD and before.block_size == row.block_size:
            before.next = <uint32_t>order[i]
            row.continues = True


cdef void write_spans(
    const Core* core, SnapshotRow* rows, size_t count, const uint64_t* order, SnapshotRun run
) noexcept:
    cdef size_t i, place = 0
    cdef uint32_t id
    cdef StoredSpan* span
    cdef SnapshotRow* row
    cdef Holder holder
    cdef Key key
    for i in range(count):
        if i + AHEAD < count:
            prefetch(&rows[<uint32_t>order[i + AHEAD]])
        row = &rows[<uint32_t>order[i]]
        if row.continues:
            continue
        span = &run.spans[run.num_spans]
        run.num_spans += 1
        span.start = <uint32_t>place
        # The parent's span starts at fewer tokens than this one, so it was written.
        span.parent = NO_RECORD if row.parent == NO_RECORD else rows[row.parent].place
        span.block_size = row.block_size
        span.space = row.space
        id = <uint32_t>order[i]
        while id != NO_RECORD:
            row = &rows[id]
            row.place = <uint32_t>place
            holder.block = row.block
            holder.extra = row.extra
            key = registry.key_of(core, holder)
            memcpy(
                run.digest_array.data + place * run.stride, key.digest,
                core.spaces[key.space].width,
            )
            place += 1
            id = row.next
        span.count = <uint32_t>place - span.start
    run.num_rows = place
