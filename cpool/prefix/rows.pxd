# SPDX-License-Identifier: Apache-2.0
# The blocks that one request holds in one group, in the order of its tokens.
#
# Block b of a row holds tokens b * block_size to (b + 1) * block_size - 1; for a Mamba group it
# is the state after the last of them that was computed. 0 stands for a block that the request
# does not need (any more). A row knows no pool: whoever puts an id in holds the block.
#
# A Mamba row's tail has a partial entry for a boundary inside the block; the next token changes
# the state, so the entry must go to a copy before.
from cpool.core.types cimport block_id_t, int64_t, uint32_t, uint64_t
from cpool.prefix.lookup cimport CHUNKED_LOCAL, MAMBA, SLIDING_WINDOW
from cpython.mem cimport PyMem_Realloc


cdef struct Row:
    block_id_t* ids
    size_t count
    size_t capacity
    size_t num_cached       # blocks from the left that need not be registered any more
    size_t num_retired      # Mamba: blocks from the left that are all 0
    int64_t tail            # Mamba: the block whose state has to be saved first, -1 without
    bint keeps_tail         # the prompt's last boundary has its partial entry


cdef struct Kind:           # of a group: what decides about its rows
    uint32_t kind
    uint32_t block_size     # tokens
    uint32_t window         # tokens of the sliding window or of a chunk, else 0
    bint eagle              # of the group's set


cdef inline int reserve(Row* row, size_t count) except -1:
    cdef size_t capacity
    cdef void* fresh
    if count <= row.capacity:
        return 0
    capacity = max(count, row.capacity + row.capacity // 2) + 4
    fresh = PyMem_Realloc(row.ids, capacity * sizeof(block_id_t))
    if fresh == NULL:
        raise MemoryError(f"cannot allocate a row of {capacity} block ids")
    row.ids = <block_id_t*>fresh
    row.capacity = capacity
    return 0


cdef inline void push(Row* row, block_id_t id) noexcept:
    # After reserve().
    row.ids[row.count] = id
    row.count += 1


cdef inline uint64_t blocks_for(uint64_t num_tokens, uint64_t block_size) noexcept:
    return (num_tokens + block_size - 1) // block_size


cdef inline size_t num_skipped(const Kind* kind, uint64_t num_computed_tokens) noexcept:
    # Whole blocks from the left that no later token reads.
    cdef uint64_t n = num_computed_tokens
    if kind.kind == MAMBA:
        n = n - 1 if n else 0
    elif kind.kind == SLIDING_WINDOW:
        n = n + 1 - kind.window if n + 1 > kind.window else 0
    elif kind.kind == CHUNKED_LOCAL:
        n -= n % kind.window
    else:
        n = 0
    return n // kind.block_size


cdef inline size_t take_skipped(
    Row* row, const Kind* kind, uint64_t num_computed_tokens, block_id_t* left
) noexcept:
    # Blocks that are not needed any more leave the row, the last first; they go to `left`,
    # which has room for the whole row. Returns how many.
    cdef size_t last = min(num_skipped(kind, num_computed_tokens), row.count)
    cdef size_t first = row.num_retired if kind.kind == MAMBA else 0
    cdef size_t num_left = 0
    cdef size_t i = last
    while i > first:
        i -= 1
        if row.ids[i] == 0:
            # States have gaps between them; the blocks of a window have none.
            if kind.kind == MAMBA:
                continue
            break
        left[num_left] = row.ids[i]
        num_left += 1
        row.ids[i] = 0
    if kind.kind == MAMBA and last > first:
        row.num_retired = last
    return num_left


cdef inline bint is_worth_keeping(
    const Kind* kind, uint64_t match_unit, size_t block
) noexcept:
    # Whether a hit can ever need block `block` of a sliding window: only the window before a
    # multiple of the match unit (with a drafter, also the block after it).
    cdef size_t blocks_per_unit, needed, shift
    if kind.kind != SLIDING_WINDOW or match_unit % kind.block_size:
        return True
    blocks_per_unit = match_unit // kind.block_size
    shift = 1 if kind.eagle else 0
    needed = blocks_for(kind.window - 1, kind.block_size) + shift
    if needed >= blocks_per_unit:
        return True
    return block >= shift and (block - shift) % blocks_per_unit >= blocks_per_unit - needed
