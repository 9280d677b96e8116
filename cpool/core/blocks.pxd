# SPDX-License-Identifier: Apache-2.0
# The blocks: arrays with one element per block, cut by use. What one operation touches
# together lies together: a *state* is all that touching reads, a *key record* says what a free
# block is to be found by, a *digest* is read by look-ups.
#
# In a pool with caching each state and key record are one row: 18 bytes, most often in one cache
# line, which is all that freeing reads and half of what an eviction does. Without caching the rows
# are states alone, and whoever registers all the same gets key records as an array of their own.
#
# The key columns exist from the first registration until the next reset, a pool that was told
# what is to come has them always. A digest's slot is `stride` bytes; when SHARED_FLAG is set its
# first four bytes name the member of a shared key instead.
from cpool.core cimport memory
from cpool.core.memory cimport Array
from cpool.core.types cimport BlockState, block_id_t, space_t, uint8_t, uint32_t
from libc.string cimport memcpy


cdef packed struct PrimaryKey:
    uint32_t num_tokens     # that the primary key covers
    space_t space           # of the primary key, with its flags; 0 without a key


cdef struct Blocks:
    uint32_t num_blocks
    uint32_t stride         # bytes of a digest slot, a multiple of 8; 0 without key columns
    uint32_t state_bytes    # from one block's state to the next one's
    uint32_t key_bytes      # from one block's key record to the next one's
    char* states            # num_blocks + 1: the last is the free queue's own node
    char* keys              # NULL without key columns
    uint8_t* digest         # of the primary key, num_blocks * stride bytes
    Array state_array
    Array key_array         # without memory where states and key records are one row
    Array digest_array


cdef inline int init(Blocks* blocks, uint32_t num_blocks, bint with_keys) except -1:
    blocks.state_bytes = sizeof(BlockState) + (sizeof(PrimaryKey) if with_keys else 0)
    blocks.key_bytes = blocks.state_bytes if with_keys else sizeof(PrimaryKey)
    memory.allocate(&blocks.state_array, <size_t>num_blocks + 1, blocks.state_bytes)
    blocks.states = blocks.state_array.data
    blocks.num_blocks = num_blocks
    return 0


cdef inline bint has_rows(const Blocks* blocks) noexcept:
    # Whether states and key records are one row.
    return blocks.state_bytes != sizeof(BlockState)


cdef inline BlockState* state_at(const Blocks* blocks, block_id_t id) noexcept:
    return <BlockState*>(blocks.states + <size_t>id * blocks.state_bytes)


cdef inline PrimaryKey* key_at(const Blocks* blocks, block_id_t id) noexcept:
    # Only with key columns.
    return <PrimaryKey*>(blocks.keys + <size_t>id * blocks.key_bytes)


cdef inline uint8_t* digest_slot(const Blocks* blocks, block_id_t id) noexcept:
    return blocks.digest + <size_t>id * blocks.stride


cdef inline int add_key_columns(Blocks* blocks, uint32_t stride) except -1:
    cdef Array key, digest
    memory.allocate(&digest, blocks.num_blocks, stride)
    if has_rows(blocks):
        blocks.keys = blocks.states + sizeof(BlockState)
    else:
        try:
            memory.allocate(&key, blocks.num_blocks, sizeof(PrimaryKey))
        except MemoryError:
            memory.release(&digest)
            raise
        blocks.key_array = key
        blocks.keys = key.data
    # Nothing below can fail.
    blocks.digest_array = digest
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
    if has_rows(blocks):
        clear_keys(blocks)
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
    cdef block_id_t id
    if blocks.keys == NULL:
        return
    for id in range(blocks.num_blocks):
        key_at(blocks, id).space = 0
        key_at(blocks, id).num_tokens = 0


cdef inline void touch_key_columns(Blocks* blocks) noexcept:
    if not has_rows(blocks):
        memory.touch(&blocks.key_array)
    memory.touch(&blocks.digest_array)


cdef inline size_t nbytes(const Blocks* blocks) noexcept:
    return blocks.state_array.nbytes + blocks.key_array.nbytes + blocks.digest_array.nbytes


cdef inline void release(Blocks* blocks) noexcept:
    blocks.keys = NULL      # nothing to clear
    drop_key_columns(blocks)
    memory.release(&blocks.state_array)
    blocks.states = NULL
    blocks.num_blocks = 0
