# SPDX-License-Identifier: Apache-2.0
# Keys that several blocks hold: the digest once, the holders in order of registration.
#
# Most keys have one holder, whose slot keeps the digest. When a second block registers the
# same key, the digest moves to a shared key, each holder becomes a member of it, and the slots
# name their members. Adding at the end, removing any and asking for the first are all O(1),
# however many copies of one prompt's last block there are.
from cpool.core cimport memory
from cpool.core.memory cimport Arena
from cpool.core.types cimport (
    block_id_t, record_id_t, ref_t, space_t, uint8_t, uint32_t, NO_RECORD,
)
from libc.string cimport memcpy


cdef packed struct SharedKey:
    record_id_t first       # member that a lookup returns
    record_id_t last
    uint32_t num_members    # at least 2
    space_t space           # no flags
    # the digest follows


cdef struct Member:
    record_id_t prev        # NO_RECORD at the first
    record_id_t next        # NO_RECORD at the last
    record_id_t key         # its shared key
    block_id_t block
    record_id_t extra       # its record in the reverse index, NO_RECORD for a primary key


cdef struct SharedKeys:
    Arena keys
    Arena members


cdef inline void init(SharedKeys* shared, uint32_t stride, uint32_t chunk_shift) noexcept:
    memory.arena_init(&shared.keys, sizeof(SharedKey) + stride, chunk_shift)
    memory.arena_init(&shared.members, sizeof(Member), chunk_shift)


cdef inline SharedKey* key(const SharedKeys* shared, record_id_t id) noexcept:
    return <SharedKey*>memory.record(&shared.keys, id)


cdef inline uint8_t* digest(const SharedKeys* shared, record_id_t id) noexcept:
    return <uint8_t*>memory.record(&shared.keys, id) + sizeof(SharedKey)


cdef inline Member* member(const SharedKeys* shared, record_id_t id) noexcept:
    return <Member*>memory.record(&shared.members, id)


cdef inline record_id_t create(
    SharedKeys* shared, space_t space, const uint8_t* digest_bytes, uint32_t width
) noexcept:
    cdef record_id_t id = memory.take(&shared.keys)
    cdef SharedKey* fresh = key(shared, id)
    fresh.first = NO_RECORD
    fresh.last = NO_RECORD
    fresh.num_members = 0
    fresh.space = space
    memcpy(digest(shared, id), digest_bytes, width)
    return id


cdef inline record_id_t append(
    SharedKeys* shared, record_id_t key_id, block_id_t block, record_id_t extra
) noexcept:
    cdef SharedKey* owner = key(shared, key_id)
    cdef record_id_t id = memory.take(&shared.members)
    cdef Member* fresh = member(shared, id)
    fresh.prev = owner.last
    fresh.next = NO_RECORD
    fresh.key = key_id
    fresh.block = block
    fresh.extra = extra
    if owner.last == NO_RECORD:
        owner.first = id
    else:
        member(shared, owner.last).next = id
    owner.last = id
    owner.num_members += 1
    return id


cdef inline void remove(SharedKeys* shared, record_id_t id) noexcept:
    cdef Member* leaving = member(shared, id)
    cdef SharedKey* owner = key(shared, leaving.key)
    if leaving.prev == NO_RECORD:
        owner.first = leaving.next
    else:
        member(shared, leaving.prev).next = leaving.next
    if leaving.next == NO_RECORD:
        owner.last = leaving.prev
    else:
        member(shared, leaving.next).prev = leaving.prev
    owner.num_members -= 1
    memory.give_back(&shared.members, id)


cdef inline size_t nbytes(const SharedKeys* shared) noexcept:
    return memory.arena_nbytes(&shared.keys) + memory.arena_nbytes(&shared.members)


cdef inline void release(SharedKeys* shared) noexcept:
    memory.arena_release(&shared.keys)
    memory.arena_release(&shared.members)
