# SPDX-License-Identifier: Apache-2.0
# What commit registers: full blocks, and the last boundary of the prompt.

cdef uint64_t num_cacheable(PrefixCache cache, uint32_t g, uint64_t num_tokens) noexcept:
    # The tokens from the left whose blocks a later hit could use.
    cdef uint64_t aligned
    if cache.is_single or cache.is_fine:
        return num_tokens
    aligned = num_tokens - num_tokens % cache.scheduler_block_size
    if cache.kinds[g].eagle and aligned:
        # A drafter's set matches one block more and gives it back.
        return min(num_tokens, aligned + cache.kinds[g].block_size)
    return aligned


cdef uint64_t last_boundary(PrefixCache cache, uint32_t g, Request request) noexcept:
    # The last boundary of the prompt at which the same prompt, sent again, can hit: one token
    # is always computed again. A drafter gives a unit back, so that attention may be read up
    # to the end and a state is needed one unit earlier.
    cdef uint64_t unit = cache.pool.hash_block_size
    cdef uint64_t n = request.num_prompt_tokens
    if cache.kinds[g].kind == MAMBA:
        return state_boundary(n, unit, cache.has_eagle)
    if not cache.kinds[g].eagle:
        n = n - 1 if n else 0
    return n - n % unit


cdef uint64_t due_tail(
    PrefixCache cache, uint32_t g, Request request, uint64_t num_tokens
) noexcept:
    # The boundary inside a block that this commit has to keep, or 0.
    cdef Kind* kind = &cache.kinds[g]
    cdef Row* row = &request.rows[g]
    cdef uint64_t boundary
    cdef size_t block
    if kind.kind != FULL_ATTENTION and kind.kind != MAMBA:
        return 0
    boundary = last_boundary(cache, g, request)
    if boundary == 0 or boundary > num_tokens:
        return 0
    if kind.kind == MAMBA:
        # A state is that of one moment: when the prompt was computed just that far.
        block = (boundary - 1) // kind.block_size
        if boundary != num_tokens or block >= row.count or row.ids[block] == 0:
            return 0
        return boundary
    block = boundary // kind.block_size
    if boundary % kind.block_size == 0 or block >= row.count or row.ids[block] == 0:
        return 0
    if row.keeps_tail and registry.has_primary(&cache.pool.core, row.ids[block]):
        return 0
    return boundary


cdef bytes key_of_row(object digests, size_t row, uint32_t g):
    return digests[row].tobytes() + int(g).to_bytes(4, "big")


cdef int register_full(
    PrefixCache cache, Request request, uint32_t g, size_t num_full, object digests
) except -1:
    cdef Row* row = &request.rows[g]
    cdef Kind* kind = &cache.kinds[g]
    cdef size_t first = row.num_cached
    cdef size_t step = kind.block_size // cache.pool.hash_block_size
    cdef size_t i
    cdef IdBuffer ids
    if first >= num_full:
        return 0
    if kind.kind == MAMBA:
        # Nobody starts from a state before the step that computes it is over.
        for i in range(first, num_full):
            if row.ids[i]:
                cache.new_states[g].add(key_of_row(digests, (i + 1) * step - 1, g))
    ids = make_buffer(num_full - first)
    for i in range(first, num_full):
        if rows.is_worth_keeping(kind, cache.match_unit_tokens, i):
            ids.ids[i - first] = row.ids[i]
    cache.pool.cache_full_ids(
        ids_array(ids.ids, ids.count), digests[(first + 1) * step - 1:num_full * step:step], g,
        kind.block_size, first,
        parent_hash=digests[first * step - 1].tobytes() if first else None,
    )
    row.num_cached = num_full
    # A promoted block has lost its partial entry.
    row.keeps_tail = False
    return 0


cdef int register_tail(
    PrefixCache cache, Request request, uint32_t g, uint64_t boundary, object digests
) except -1:
    cdef Row* row = &request.rows[g]
    cdef uint64_t size = cache.kinds[g].block_size
    cdef bint is_state = cache.kinds[g].kind == MAMBA
    cdef size_t block = (boundary - 1) // size
    cdef size_t last = boundary // cache.pool.hash_block_size - 1
    cdef bytes digest = digests[last].tobytes()
    if is_state:
        cache.new_states[g].add(key_of_row(digests, last, g))
    if block:
        # For events: where the block before ends.
        parent = digests[block * (size // cache.pool.hash_block_size) - 1].tobytes()
        cache.pool.cache_partial_id(row.ids[block], digest, boundary, g, parent_hash=parent)
    else:
        # A prefix does begin here, which cache_partial_id() cannot know.
        cache.pool.register_partial_id(row.ids[0], digest, boundary, g, False, None, None)
    row.keeps_tail = True
    if is_state and boundary % size:
        row.tail = block
        row.num_cached = block
    return 0


cdef int commit(PrefixCache cache, Request request, uint64_t num_tokens) except -1:
    cdef uint64_t cacheable, needed = 0, size
    cdef uint64_t boundary
    cdef uint32_t g
    for g in range(cache.num_groups):
        cacheable = num_cacheable(cache, g, num_tokens)
        size = cache.kinds[g].block_size
        if request.rows[g].num_cached < cacheable // size:
            needed = max(needed, cacheable - cacheable % size)
        needed = max(needed, due_tail(cache, g, request, cacheable))
    if needed == 0:
        return 0
    digests = rows_of(request.hashes, cache.pool.hash_width)
    if <uint64_t>len(digests) * cache.pool.hash_block_size < needed:
        raise ValueError(
            f"the request has hashes for {len(digests) * cache.pool.hash_block_size} tokens; "
            f"committing {num_tokens} needs them for {needed}"
        )
    for g in range(cache.num_groups):
        cacheable = num_cacheable(cache, g, num_tokens)
        register_full(cache, request, g, cacheable // cache.kinds[g].block_size, digests)
        boundary = due_tail(cache, g, request, cacheable)
        if boundary:
            register_tail(cache, request, g, boundary, digests)
    return 0
