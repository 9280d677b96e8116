# SPDX-License-Identifier: Apache-2.0
# Parents: registration -> the low 64 bits of the digest one block before it in its prefix.
#
# That is the hash by which events name a parent. Eight bytes a registration, and only while
# events are on; whether the parent is still resident, and under which whole digest, is found
# out when somebody asks for a snapshot. Nothing in the pool's decisions reads this.
#
# A parent is kept plus one, so that the zeroes of a fresh array mean "none known". The one
# digest in 2**64 that ends in all ones is taken for none.
from cpool.core cimport memory
from cpool.core.memory cimport Array
from cpool.core.types cimport block_id_t, record_id_t, uint8_t, uint64_t, NO_RECORD
from libc.string cimport memcpy

cdef extern from * nogil:
    """
    #if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    #define cpool_big_endian(word) __builtin_bswap64(word)
    #else
    #define cpool_big_endian(word) (word)
    #endif
    """
    uint64_t big_endian "cpool_big_endian"(uint64_t word) noexcept


cdef struct Parents:
    uint64_t* of_block      # of each block's primary key; NULL until events need it
    uint64_t* of_extra      # of each record of the reverse index
    size_t num_extra        # room in of_extra
    Array block_array
    Array extra_array


cdef inline uint64_t from_digest(const uint8_t* digest, size_t width) noexcept:
    # The last eight bytes, read as a big-endian number, plus one.
    cdef uint64_t low = 0
    cdef size_t i
    if width >= 8:
        memcpy(&low, digest + width - 8, 8)
        return big_endian(low) + 1
    for i in range(width):
        low = (low << 8) | digest[i]
    return low + 1


cdef inline int reserve(Parents* parents, size_t num_blocks, size_t num_extra) except -1:
    # Afterwards every block and the first `num_extra` records have room.
    cdef Array fresh
    if parents.of_block == NULL:
        memory.allocate(&parents.block_array, num_blocks, sizeof(uint64_t))
        parents.of_block = <uint64_t*>parents.block_array.data
    if num_extra > parents.num_extra:
        num_extra = max(num_extra, 2 * parents.num_extra)
        memory.allocate(&fresh, num_extra, sizeof(uint64_t))
        if parents.num_extra:
            memcpy(fresh.data, parents.of_extra, parents.num_extra * sizeof(uint64_t))
        memory.release(&parents.extra_array)
        parents.extra_array = fresh
        parents.of_extra = <uint64_t*>fresh.data
        parents.num_extra = num_extra
    return 0


cdef inline void note(
    Parents* parents, block_id_t block, record_id_t extra, uint64_t parent
) noexcept:
    if parents.of_block == NULL:
        return
    if extra == NO_RECORD:
        parents.of_block[block] = parent
    elif extra < parents.num_extra:
        parents.of_extra[extra] = parent


cdef inline uint64_t of(const Parents* parents, block_id_t block, record_id_t extra) noexcept:
    # 0 when none is known.
    if parents.of_block == NULL:
        return 0
    if extra == NO_RECORD:
        return parents.of_block[block]
    return parents.of_extra[extra] if extra < parents.num_extra else 0


cdef inline size_t nbytes(const Parents* parents) noexcept:
    return parents.block_array.nbytes + parents.extra_array.nbytes


cdef inline void release(Parents* parents) noexcept:
    memory.release(&parents.block_array)
    memory.release(&parents.extra_array)
    parents.of_block = NULL
    parents.of_extra = NULL
    parents.num_extra = 0
