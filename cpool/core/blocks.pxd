# SPDX-License-Identifier: Apache-2.0
# The blocks: a struct of arrays, one element per block.
#
# ref_cnt exists always. The key columns exist from the first registration until the next
# reset: a pool in which nobody registers pays nothing for them. A digest's slot is `stride`
# bytes; when SHARED_FLAG is set its first four bytes name the member of a shared key instead.
from cpool.core cimport memory
from cpool.core.memory cimport Array
from cpool.core.types cimport (
    block_id_t, int32_t, record_id_t, space_t, uint8_t, uint32_t,
)
from libc.string cimport memcpy


cdef struct Blocks:
    uint32_t num_blocks
    int32_t* ref_cnt        # holders; 0 in the free queue; of the null block: meaningless
    uint32_t* num_tokens    # that the primary key covers
    space_t* space          # of the primary key, with its flags; 0 without a key
    uint8_t* digest         # of the primary key, num_blocks * stride bytes
    uint32_t stride         # bytes of a digest slot, a multiple of 8; 0 without key columns
    Array ref_cnt_array
    Array num_tokens_array
    Array space_array
    Array digest_array


cdef inline int init(Blocks* blocks, uint32_t num_blocks) except -1:
    memory.allocate(&blocks.ref_cnt_array, num_blocks, sizeof(int32_t))
    blocks.ref_cnt = <int32_t*>blocks.ref_cnt_array.data
    blocks.num_blocks = num_blocks
    return 0


cdef inline uint8_t* digest_slot(const Blocks* blocks, block_id_t id) noexcept:
    return blocks.digest + <size_t>id * blocks.stride


cdef inline int add_key_columns(Blocks* blocks, uint32_t stride) except -1:
    cdef Array num_tokens, space, digest
    memory.allocate(&num_tokens, blocks.num_blocks, sizeof(uint32_t))
    try:
        memory.allocate(&space, blocks.num_blocks, sizeof(space_t))
        try:
            memory.allocate(&digest, blocks.num_blocks, stride)
        except MemoryError:
            memory.release(&space)
            raise
    except MemoryError:
        memory.release(&num_tokens)
        raise
    # Nothing below can fail.
    blocks.num_tokens_array = num_tokens
    blocks.space_array = space
    blocks.digest_array = digest
    blocks.num_tokens = <uint32_t*>num_tokens.data
    blocks.space = <space_t*>space.data
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
    memory.release(&blocks.num_tokens_array)
    memory.release(&blocks.space_array)
    memory.release(&blocks.digest_array)
    blocks.num_tokens = NULL
    blocks.space = NULL
    blocks.digest = NULL
    blocks.stride = 0


cdef inline size_t nbytes(const Blocks* blocks) noexcept:
    return (
        blocks.ref_cnt_array.nbytes + blocks.num_tokens_array.nbytes
        + blocks.space_array.nbytes + blocks.digest_array.nbytes
    )


cdef inline void release(Blocks* blocks) noexcept:
    drop_key_columns(blocks)
    memory.release(&blocks.ref_cnt_array)
    blocks.ref_cnt = NULL
