# SPDX-License-Identifier: Apache-2.0
# The blocks: arrays with one element per block, cut by use. What one operation touches
# together lies together: a state is one read for allocate, touch and free, a key record and a
# digest are one each for register and evict.
#
# The key columns exist from the first registration until the next reset: a pool in which
# nobody registers pays nothing for them. A pool that was told what is to come has them always.
# A digest's slot is `stride` bytes; when SHARED_FLAG is set its first four bytes name the member
# of a shared key instead.
from cpool.core cimport memory
from cpool.core.memory cimport Array
from cpool.core.types cimport BlockState, block_id_t, space_t, uint8_t, uint32_t
from libc.string cimport memcpy, memset


cdef packed struct PrimaryKey:
    uint32_t num_tokens     # that the primary key covers
    space_t space           # of the primary key, with its flags; 0 without a key


cdef struct Blocks:
    uint32_t num_blocks
    uint32_t stride         # bytes of a digest slot, a multiple of 8; 0 without key columns
    BlockState* states      # num_blocks + 1: the last is the free queue's own node
    PrimaryKey* keys        # NULL without key columns
    uint8_t* digest         # of the primary key, num_blocks * stride bytes
    Array state_array
    Array key_array
    Array digest_array


cdef inline int init(Blocks* blocks, uint32_t num_blocks) except -1:
    memory.allocate(&blocks.state_array, <size_t>num_blocks + 1, sizeof(BlockState))
    blocks.states = <BlockState*>blocks.state_array.data
    blocks.num_blocks = num_blocks
    return 0


cdef inline uint8_t* digest_slot(const Blocks* blocks, block_id_t id) noexcept:
    return blocks.digest + <size_t>id * blocks.stride


cdef inline int add_key_columns(Blocks* blocks, uint32_t stride) except -1:
    cdef Array key, digest
    memory.allocate(&key, blocks.num_blocks, sizeof(PrimaryKey))
    try:
        memory.allocate(&digest, blocks.num_blocks, stride)
    except MemoryError:
        memory.release(&key)
        raise
    # Nothing below can fail.
    blocks.key_array = key
    blocks.digest_array = digest
    blocks.keys = <PrimaryKey*>key.data
    blocks.digest = <uint8_t*>digest.data
    blocks.stride = stride
    return 0


cdef inline void copy_slots(
    uint8_t* target, uint32_t target_stride, const uint8_t* source, uint32_t source_stride,
    size_t count,
) noexcept:
    cdef size_t i
    for i in range(count):
        memcpy(target + i * target_stride, source + i * source_stride, source_stride)


cdef inline void drop_key_columns(Blocks* blocks) noexcept:
    memory.release(&blocks.key_array)
    memory.release(&blocks.digest_array)
    blocks.keys = NULL
    blocks.digest = NULL
    blocks.stride = 0


cdef inline int replace_digests(Blocks* blocks, uint32_t stride) except -1:
    # Other slots, of which none has been written.
    cdef Array digest
    memory.allocate(&digest, blocks.num_blocks, stride)
    memory.release(&blocks.digest_array)
    blocks.digest_array = digest
    blocks.digest = <uint8_t*>digest.data
    blocks.stride = stride
    return 0


cdef inline void clear_keys(Blocks* blocks) noexcept:
    # No block has a key; the columns stay.
    if blocks.keys != NULL:
        memset(blocks.keys, 0, blocks.num_blocks * sizeof(PrimaryKey))


cdef inline void touch_key_columns(Blocks* blocks) noexcept:
    memory.touch(&blocks.key_array)
    memory.touch(&blocks.digest_array)


cdef inline size_t nbytes(const Blocks* blocks) noexcept:
    return blocks.state_array.nbytes + blocks.key_array.nbytes + blocks.digest_array.nbytes


cdef inline void release(Blocks* blocks) noexcept:
    drop_key_columns(blocks)
    memory.release(&blocks.state_array)
    blocks.states = NULL
    blocks.num_blocks = 0
