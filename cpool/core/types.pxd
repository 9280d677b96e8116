# SPDX-License-Identifier: Apache-2.0
# Widths and sentinels. The only place where a width is chosen.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

ctypedef uint32_t block_id_t    # index of a block in the pool
ctypedef uint32_t record_id_t   # index of a record in an arena
ctypedef uint16_t space_t       # a key space and its flags, see keys.pxd
ctypedef uint32_t hash_t        # the table's own hash of a key
ctypedef uint32_t ref_t         # a tag in the two highest bits, an index in the others

cdef enum:
    # A block id and a record id share a word with a two-bit tag.
    MAX_BLOCKS = (1 << 30) - 2
    NULL_BLOCK = 0              # a placeholder: never handed out, freed or registered
    NO_RECORD = 0xFFFFFFFF      # end of a chain of records
    NO_BLOCK = 0xFFFFFFFF       # nobody holds the key
    NOT_QUEUED = 0xFFFFFFFF     # a block that is in no free queue
    MAX_HASH_BYTES = 255        # longest digest
    MAX_NUM_TOKENS = 0xFFFFFFFF
    MAX_REF_CNT = 0x7FFFFFFF

    # Flags of a space_t.
    SPACE_MASK = 0x1FFF         # 0 means "no key"
    SHARED_FLAG = 0x8000        # the digest is in a shared key, the slot names the member
    LOOSE_FLAG = 0x4000         # block_hash was assigned by hand: the table does not know it
    NO_TOKENS_FLAG = 0x2000     # registered without saying how many tokens it covers

    # Tags of a ref_t. No tag is 0, so that no used cell equals EMPTY.
    INDEX_MASK = 0x3FFFFFFF
    PRIMARY = 0x40000000        # the block's own key; index = block id
    EXTRA = 0x80000000          # one of the block's extra keys; index = block id
    SHARED = 0xC0000000         # a key that several blocks hold; index = shared key


# What allocation touches of a block. Links are written by free_queue.pxd alone.
cdef packed struct BlockState:
    block_id_t prev         # neighbours in the free queue, NOT_QUEUED outside of it
    block_id_t next
    # Outside of the free queue: holders (of the null block it means nothing). Inside nobody
    # holds the block, and the field is free for a hint: 0, or -1 - the id of a block that
    # stands LOOKAHEAD places further back.
    int32_t ref_cnt
