# SPDX-License-Identifier: Apache-2.0
# Runs: what one call of the batch interface did, as one compact object instead of one event
# for each block. They wait in `kv_event_queue` among ordinary events. `expand` makes the
# events, `encode_run` writes their msgpack bytes without making them; both are for whoever
# takes events, not for the call that caused them.

cdef class EventRun:
    """Several events in one compact object.

    Attributes:
        num_events: Number of events that it stands for.
    """

    @property
    def num_events(self):
        raise NotImplementedError

    def expand(self, types):
        """List of the events, of the classes in the module ``types``."""
        raise NotImplementedError

    def encode_run(self, legacy_array=False):
        """msgpack bytes of the events, one behind the other."""
        from cpool.events import types, wire
        return b"".join(
            [wire.encode_event(event, legacy_array) for event in self.expand(types)]
        )


cdef inline void append_removed(
    RemovedRun run, const Space* space, const uint8_t* digest
) noexcept:
    # There is room: whoever made the run counted the keys.
    cdef char* row = run.rows + run.count * run.row_bytes
    (<RemovedKey*>row).group = space.group
    (<RemovedKey*>row).width = <uint8_t>space.width
    copy_digest(<uint8_t*>row + sizeof(RemovedKey), digest, space.width)
    run.count += 1


cdef class RemovedRun(EventRun):
    """Keys that left, in order; each is one `BlockRemoved`."""

    def __dealloc__(self):
        memory.release(&self.array)

    cdef RemovedKey* row(self, size_t i) noexcept:
        return <RemovedKey*>(self.rows + i * self.row_bytes)

    cdef RemovedRun part(self, size_t start, size_t stop):
        cdef RemovedRun run = RemovedRun.__new__(RemovedRun)
        run.whole = self
        run.rows = self.rows + start * self.row_bytes
        run.row_bytes = self.row_bytes
        run.count = stop - start
        run.fields = self.fields
        return run

    @property
    def num_events(self):
        return self.count

    def expand(self, types):
        cdef size_t i
        cdef RemovedKey* row
        cdef list events = []
        external_hash = types.external_hash
        make = types.BlockRemoved
        medium, locality, ownership = self.fields
        described = locality is not None or ownership is not None
        for i in range(self.count):
            row = self.row(i)
            event = make(
                [external_hash(PyBytes_FromStringAndSize(
                    <const char*>row + sizeof(RemovedKey), row.width
                ))],
                medium,
                row.group,
            )
            if described:
                event.locality = locality
                event.ownership = ownership
            events.append(event)
        return events

    def encode_run(self, legacy_array=False):
        cdef Writer writer
        cdef RemovedKey* row
        cdef size_t i
        cdef bytes before, behind
        cdef bint as_int
        cdef uint32_t group = 0
        from cpool.events import types, wire
        as_int = types.uses_int_hashes()
        memset(&writer, 0, sizeof(Writer))
        for i in range(self.count):
            row = self.row(i)
            if i == 0 or row.group != group:
                # All but the hash is the same for a group: written once, by the encoder.
                group = row.group
                before, behind = wire.split_removed(types.BlockRemoved(
                    [0], self.fields[0], group, self.fields[1], self.fields[2]
                ), legacy_array)
            msgpack.put(&writer, PyBytes_AS_STRING(before), PyBytes_GET_SIZE(before))
            write_hash(&writer, <uint8_t*>row + sizeof(RemovedKey), row.width, as_int)
            msgpack.put(&writer, PyBytes_AS_STRING(behind), PyBytes_GET_SIZE(behind))
        return written(&writer)


cdef int reserve_removed(RemovedRun run, size_t count, uint32_t stride) except -1:
    # Room for `count` keys of up to `stride` bytes.
    run.row_bytes = sizeof(RemovedKey) + stride
    memory.allocate_unfilled(&run.array, count, run.row_bytes)
    run.rows = run.array.data
    return 0


cdef class StoredRun(EventRun):
    """Blocks that one call registered one after the other; one `BlockStored`."""

    @property
    def num_events(self):
        return 1

    def expand(self, types):
        cdef Py_ssize_t i, count = len(self.rows) // self.width if self.width else 0
        cdef Py_ssize_t width = self.width
        external_hash = types.external_hash
        event = types.BlockStored(
            block_hashes=[
                external_hash(self.rows[i * width:(i + 1) * width]) for i in range(count)
            ],
            parent_block_hash=None if self.parent is None else external_hash(self.parent),
            token_ids=(
                self.token_ids if type(self.token_ids) is list else self.token_ids.tolist()
            ),
            block_size=self.block_size,
            lora_id=None,
            medium=self.medium,
            lora_name=None,
            extra_keys=types.event_extra_keys([None] * count),
            group_idx=self.group,
        )
        if self.description is not None:
            for name, value in self.description.items():
                if value is not None:
                    setattr(event, name, value)
        return [event]


cdef void write_hash(
    Writer* writer, const uint8_t* digest, uint32_t width, bint as_int
) noexcept:
    if as_int:
        msgpack.uint(writer, parents.from_digest(digest, width) - 1)
    else:
        msgpack.binary(writer, digest, <uint8_t>width)


cdef bytes written(Writer* writer):
    cdef bytes result
    try:
        if writer.failed:
            raise MemoryError(f"cannot allocate room for {writer.size} bytes of events")
        result = PyBytes_FromStringAndSize(<const char*>writer.data, writer.size)
    finally:
        msgpack.release(writer)
    return result


cdef list expand_runs(list events, object types):
    # The same events, the runs among them expanded.
    cdef list result
    for event in events:
        if isinstance(event, EventRun):
            break
    else:
        return events
    result = []
    for event in events:
        if isinstance(event, EventRun):
            result.extend(event.expand(types))
        else:
            result.append(event)
    return result
