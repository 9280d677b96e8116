# SPDX-License-Identifier: Apache-2.0
# The reverse index: block -> the extra keys that name it.
#
# One flat array of records; a block's row is a chain of them, in order of registration. A
# contiguous (CSR) row would have to move when it grows and leave holes to compact; a chained
# record never moves, so an extra key costs its digest and ten bytes, holes are reused at once
# and nothing ever stops to tidy up. Rows are short: what is left of one prompt tail or two.
#
# The heads (four bytes a block) and the records exist from the first extra key on.
from cpool.core cimport memory
from cpool.core.memory cimport Arena, Array
from cpool.core.types cimport (
    block_id_t, record_id_t, space_t, uint8_t, uint32_t, NO_RECORD,
)


cdef packed struct Extra:
    record_id_t next        # NO_RECORD at the end of the row
    uint32_t num_tokens     # that the key covers
    space_t space           # with its flags
    # the digest slot follows


cdef struct ReverseIndex:
    Array heads_array
    record_id_t* heads      # first record + 1 of each block, 0 for an empty row; may be NULL
    Arena extras


cdef inline void init(ReverseIndex* index, uint32_t stride, uint32_t chunk_shift) noexcept:
    memory.arena_init(&index.extras, sizeof(Extra) + stride, chunk_shift)


cdef inline Extra* extra(const ReverseIndex* index, record_id_t id) noexcept:
    return <Extra*>memory.record(&index.extras, id)


cdef inline uint8_t* digest_slot(const ReverseIndex* index, record_id_t id) noexcept:
    return <uint8_t*>memory.record(&index.extras, id) + sizeof(Extra)


cdef inline record_id_t first(const ReverseIndex* index, block_id_t block) noexcept:
    if index.heads == NULL:
        return NO_RECORD
    return index.heads[block] - 1   # 0 - 1 is NO_RECORD


cdef inline int reserve(ReverseIndex* index, uint32_t num_blocks, size_t count) except -1:
    if count == 0:
        return 0
    if index.heads == NULL:
        memory.allocate(&index.heads_array, num_blocks, sizeof(record_id_t))
        index.heads = <record_id_t*>index.heads_array.data
    memory.arena_reserve(&index.extras, count)
    return 0


cdef inline record_id_t append(
    ReverseIndex* index, block_id_t block, space_t space, uint32_t num_tokens
) noexcept:
    # After reserve(). The caller fills the digest slot.
    cdef record_id_t id = memory.take(&index.extras)
    cdef record_id_t last = first(index, block)
    cdef Extra* fresh = extra(index, id)
    fresh.next = NO_RECORD
    fresh.num_tokens = num_tokens
    fresh.space = space
    if last == NO_RECORD:
        index.heads[block] = id + 1
        return id
    while extra(index, last).next != NO_RECORD:
        last = extra(index, last).next
    extra(index, last).next = id
    return id


cdef inline void remove(ReverseIndex* index, block_id_t block, record_id_t id) noexcept:
    cdef record_id_t before = first(index, block)
    if before == id:
        index.heads[block] = extra(index, id).next + 1  # NO_RECORD + 1 is 0
    else:
        while extra(index, before).next != id:
            before = extra(index, before).next
        extra(index, before).next = extra(index, id).next
    memory.give_back(&index.extras, id)


cdef inline size_t nbytes(const ReverseIndex* index) noexcept:
    return index.heads_array.nbytes + memory.arena_nbytes(&index.extras)


cdef inline void release(ReverseIndex* index) noexcept:
    memory.release(&index.heads_array)
    index.heads = NULL
    memory.arena_release(&index.extras)
