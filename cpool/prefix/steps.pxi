# SPDX-License-Identifier: Apache-2.0
# What admit, append and finish do to the pool: count first, take afterwards.

cdef enum:
    AHEAD = 16              # blocks whose counts are fetched before they are needed


cdef IdBuffer make_buffer(size_t count):
    cdef IdBuffer buffer = IdBuffer.__new__(IdBuffer)
    buffer.ids = <block_id_t*>room(count + 1, sizeof(block_id_t))
    buffer.count = count
    return buffer


cdef int check_chunk(PrefixCache cache, uint64_t start, uint64_t end) except -1:
    # A Mamba block keeps the state after its last token. Going past a boundary from inside a
    # block would leave an older state there, to be registered as that of the boundary.
    cdef uint32_t g
    cdef uint64_t size
    for g in range(cache.num_groups):
        size = cache.kinds[g].block_size
        if cache.kinds[g].kind == MAMBA and start % size and end > start - start % size + size:
            raise ValueError(
                f"tokens {start} to {end} pass the Mamba boundary at "
                f"{start - start % size + size}: the chunk has to stop there (see chunk_end)"
            )
    return 0


cdef inline bint is_full(const Core* core, block_id_t id) noexcept:
    # Whether the block has as many holders as can be counted.
    return registry.num_holders(core, id) == MAX_REF_CNT


cdef int refuse_full(block_id_t id) except -1:
    if id != NO_BLOCK:
        raise ContractError(
            f"ref_cnt of block {id} is {MAX_REF_CNT}; 1 more would pass {MAX_REF_CNT}"
        )
    return 0


cdef block_id_t full_state(PrefixCache cache, Request request) noexcept:
    # A copy that saves a state holds the block that it is of: the first that is full, or NO_BLOCK.
    cdef uint32_t g
    cdef Row* row
    for g in range(cache.num_groups):
        row = &request.rows[g]
        if row.tail >= 0 and is_full(&cache.pool.core, row.ids[row.tail]):
            return row.ids[row.tail]
    return NO_BLOCK


cdef inline uint64_t state_boundary(
    uint64_t num_tokens, uint64_t unit, bint gives_back
) noexcept:
    # The last multiple of `unit` at which the same tokens, sent again, can start from a state:
    # one token is always computed again, and a drafter gives a whole unit back.
    cdef uint64_t n = num_tokens
    if not gives_back:
        n = n - 1 if n else 0
    n -= n % unit
    if gives_back:
        n = n - unit if n > unit else 0
    return n


cdef inline uint64_t nearer(uint64_t stop, uint64_t start, uint64_t end) noexcept:
    return stop if start < stop < end else end


cdef uint64_t chunk_end(
    PrefixCache cache, uint64_t size, uint64_t start, uint64_t end, uint64_t num_prompt_tokens,
    uint64_t num_tokens, uint64_t junction,
) noexcept:
    cdef uint64_t tail, last, chunk = end
    if start >= max(num_prompt_tokens, num_tokens - 1):
        return end
    if end < max(num_prompt_tokens, num_tokens - 1) and end - end % size > start:
        # A block wider than the chunk is passed in steps.
        end -= end % size
    last = state_boundary(num_tokens, size, cache.has_eagle)
    chunk = nearer(last, start, end)
    if start % size:
        chunk = min(chunk, nearer(start - start % size + size, start, end))
    if cache.is_fine:
        tail = state_boundary(num_prompt_tokens, cache.pool.hash_block_size, cache.has_eagle)
        if last < tail < num_prompt_tokens:
            chunk = min(chunk, nearer(tail, start, end))
    if start < junction < end:
        chunk = min(chunk, nearer(start + (junction - start) // size * size, start, end))
    return chunk


cdef bint waits_for_step(PrefixCache cache, PrefixMatch match) except -1:
    # Whether the match starts from a state that the current step only computes.
    cdef uint32_t g
    for g in range(cache.num_groups):
        if cache.new_states[g] and match.num_blocks(g) and (
            cache.pool.primary_key(match.rows[g][match.num_blocks(g) - 1])
            in cache.new_states[g]
        ):
            return True
    return False


cdef inline size_t num_unheld(const Core* core, const block_id_t* ids, size_t count) noexcept:
    # Blocks that are in the free queue and will leave it when they are touched.
    cdef size_t i, found = 0
    for i in range(count):
        if i + AHEAD < count:
            prefetch(&state_at(&core.blocks, ids[i + AHEAD]).ref_cnt)
        found += ids[i] != 0 and state_at(&core.blocks, ids[i]).ref_cnt <= 0
    return found


cdef size_t plan_admission(PrefixCache cache, PrefixMatch match, uint64_t num_tokens) noexcept:
    # Fills cache.needs; returns how many blocks have to leave the free queue.
    cdef size_t total = 0, num_found, held, required
    cdef Kind* kind
    cdef Need* need
    cdef uint32_t g
    for g in range(cache.num_groups):
        kind = &cache.kinds[g]
        need = &cache.needs[g]
        num_found = match.num_blocks(g)
        need.num_nulls = rows.num_skipped(kind, match.num_tokens)
        need.num_hits = num_found - need.num_nulls if num_found > need.num_nulls else 0
        need.copies = match.is_partial(g)
        required = rows.blocks_for(num_tokens, kind.block_size)
        held = need.num_nulls + need.num_hits
        if kind.kind == MAMBA:
            held = max(held, required - 1)
        need.num_new = required - held if required > held else 0
        total += need.num_new + need.copies + num_unheld(
            &cache.pool.core, match.rows[g] + need.num_nulls, need.num_hits
        )
    return total


cdef size_t plan_append(PrefixCache cache, Request request, uint64_t num_tokens) noexcept:
    cdef size_t total = 0, held, required
    cdef Need* need
    cdef Row* row
    cdef uint32_t g
    for g in range(cache.num_groups):
        need = &cache.needs[g]
        row = &request.rows[g]
        required = rows.blocks_for(num_tokens, cache.kinds[g].block_size)
        held = row.count
        if cache.kinds[g].kind == MAMBA:
            held = max(held, required - 1)
        need.copies = row.tail >= 0
        need.num_new = required - held if required > held else 0
        total += need.num_new + need.copies
    return total


cdef size_t num_to_take(PrefixCache cache) noexcept:
    cdef size_t total = 0
    cdef uint32_t g
    for g in range(cache.num_groups):
        total += cache.needs[g].num_new + cache.needs[g].copies
    return total


cdef int reserve_rows(PrefixCache cache, Request request, uint64_t num_tokens) except -1:
    # Afterwards nothing that this step adds needs memory.
    cdef size_t num_copies = 0
    cdef uint32_t g
    for g in range(cache.num_groups):
        rows.reserve(
            &request.rows[g], rows.blocks_for(num_tokens, cache.kinds[g].block_size)
        )
        num_copies += cache.needs[g].copies
    cache.copies.reserve(num_copies)
    return 0


cdef void remember_head(PrefixCache cache, size_t count) noexcept:
    # The keys of the blocks that are handed out next.
    cdef const Core* core = &cache.pool.core
    cdef block_id_t id = core.queue.end
    cdef uint32_t second = <uint32_t>seconds()
    cdef Holder holder
    cdef Key key
    cdef size_t i
    for i in range(count):
        id = free_queue.next_of(&core.queue, id)
        if not registry.has_primary(core, id):
            continue
        cache.history.number += 1
        holder = registry.primary(id)
        key = registry.key_of(core, holder)
        evictions.remember(&cache.history, registry.hash_of(core, &key), second)
        holder.extra = reverse_index.first(&core.index, id)
        while holder.extra != NO_RECORD:
            key = registry.key_of(core, holder)
            evictions.remember(&cache.history, registry.hash_of(core, &key), second)
            holder.extra = reverse_index.extra(&core.index, holder.extra).next


cdef int take_blocks(PrefixCache cache, IdBuffer fresh) except -1:
    # Fills `fresh`. Without observers in the pool nothing can fail.
    if fresh.count:
        if cache.history.cells != NULL:
            remember_head(cache, fresh.count)
        cache.pool.allocate(fresh.ids, fresh.count, True)
    return 0


cdef int check_again(PrefixCache cache, Request request, IdBuffer fresh) except -1:
    # After take_blocks(): hooks of the pool may have written the counts of the blocks that
    # copies will hold. On failure the new blocks go back.
    cdef block_id_t full = full_state(cache, request)
    cdef size_t placed = 0
    cdef uint32_t g
    for g in range(cache.num_groups):
        if cache.needs[g].copies and is_full(&cache.pool.core, fresh.ids[placed]):
            full = fresh.ids[placed]
        placed += cache.needs[g].copies + cache.needs[g].num_new
    if full != NO_BLOCK:
        cache.pool.release(fresh, cache.pool.enable_caching, False)
    return refuse_full(full)


cdef inline size_t put_new(
    Row* row, const Kind* kind, const Need* need, uint64_t num_tokens, const block_id_t* fresh
) noexcept:
    # The new blocks go to the end of the row; before a new state all is null.
    cdef size_t required = rows.blocks_for(num_tokens, kind.block_size)
    cdef size_t i
    if kind.kind == MAMBA:
        while row.count + 1 < required:
            rows.push(row, 0)
    for i in range(need.num_new):
        rows.push(row, fresh[i])
    return need.num_new


cdef Request admit(
    PrefixCache cache, PrefixMatch match, uint64_t num_tokens, uint64_t num_prompt_tokens,
    uint64_t reserve,
):
    cdef Core* core = &cache.pool.core
    cdef size_t needed, num_hits = 0, placed = 0, i
    cdef IdBuffer touched, fresh
    cdef Request request
    cdef Need* need
    cdef Row* row
    cdef uint32_t g
    needed = plan_admission(cache, match, num_tokens)
    if needed + reserve > core.queue.num_free:
        return None
    request = make_request(cache, match.hashes, num_prompt_tokens)
    reserve_rows(cache, request, num_tokens)
    for g in range(cache.num_groups):
        num_hits += cache.needs[g].num_hits
    touched = make_buffer(num_hits)
    fresh = make_buffer(num_to_take(cache))
    for g in range(cache.num_groups):
        need = &cache.needs[g]
        memcpy(
            touched.ids + placed, match.rows[g] + need.num_nulls,
            need.num_hits * sizeof(block_id_t),
        )
        placed += need.num_hits
    # All hits are held before a block is taken: taking evicts.
    cache.pool.touch_run(touched.ids, touched.count)
    try:
        take_blocks(cache, fresh)
        check_again(cache, request, fresh)
    except BaseException:
        cache.pool.release(touched, cache.pool.enable_caching, False)
        raise
    # Nothing below can fail.
    placed = 0
    for g in range(cache.num_groups):
        need = &cache.needs[g]
        row = &request.rows[g]
        for i in range(need.num_nulls):
            rows.push(row, 0)
        for i in range(need.num_hits):
            rows.push(row, match.rows[g][need.num_nulls + i])
        row.num_cached = row.count
        if need.copies:
            # The shared tail keeps its holder until the copy ran; the copy has two.
            row.num_cached = row.count - 1
            cache.copies.push(g, row.ids[row.count - 1], fresh.ids[placed])
            state_at(&core.blocks, fresh.ids[placed]).ref_cnt += 1
            row.ids[row.count - 1] = fresh.ids[placed]
            placed += 1
        placed += put_new(row, &cache.kinds[g], need, num_tokens, fresh.ids + placed)
    request.cache = cache
    request.num_cached_tokens = match.num_tokens
    request.num_tokens = num_tokens
    cache.num_steps += 1
    return request


cdef int free_skipped(PrefixCache cache, Request request, uint64_t num_computed) except -1:
    # Blocks that no later token reads, group by group.
    cdef IdBuffer left
    cdef uint32_t g
    for g in range(cache.num_groups):
        if rows.num_skipped(&cache.kinds[g], num_computed) == 0:
            continue
        left = make_buffer(request.rows[g].count)
        left.count = rows.take_skipped(
            &request.rows[g], &cache.kinds[g], num_computed, left.ids
        )
        if left.count:
            cache.num_steps += 1
            cache.pool.release(left, cache.pool.enable_caching, False)
    return 0


cdef int save_state(PrefixCache cache, Row* row, uint32_t g, block_id_t target) except -1:
    # The request goes on in its block, so the partial entry moves to a copy of the state. The
    # copy's only holder is the pending copy: it is free, and findable, once that ran.
    cdef block_id_t source = row.ids[row.tail]
    cache.pool.move_run(source, target)
    cache.copies.push(g, source, target)
    state_at(&cache.pool.core.blocks, source).ref_cnt += 1
    row.tail = -1
    return 0


cdef list prepare_append(PrefixCache cache, Request request, uint64_t num_tokens):
    # All that can fail: memory, and an array for what each group's row will grow by.
    cdef list added = []
    cdef Row* row
    cdef uint32_t g
    reserve_rows(cache, request, num_tokens)
    for g in range(cache.num_groups):
        row = &request.rows[g]
        if row.tail >= 0 and registry.has_primary(&cache.pool.core, row.ids[row.tail]):
            # The copy that will hold this key is filled in this step only.
            cache.new_states[g].add(cache.pool.primary_key(row.ids[row.tail]))
        added.append(np.empty(
            max(row.count, rows.blocks_for(num_tokens, cache.kinds[g].block_size)) - row.count,
            dtype=np.uint32,
        ))
    return added


cdef object append(PrefixCache cache, Request request, uint64_t num_tokens, uint64_t reserve):
    cdef size_t needed, placed = 0, before
    cdef IdBuffer fresh
    cdef Need* need
    cdef Row* row
    cdef uint32_t g
    cdef list added
    needed = plan_append(cache, request, num_tokens)
    if needed + reserve > cache.pool.core.queue.num_free:
        return None
    if needed == 0:
        request.num_tokens = num_tokens
        return cache.nothing
    fresh = make_buffer(num_to_take(cache))
    added = prepare_append(cache, request, num_tokens)
    result = tuple(added)
    take_blocks(cache, fresh)
    check_again(cache, request, fresh)
    for g in range(cache.num_groups):
        need = &cache.needs[g]
        row = &request.rows[g]
        before = row.count
        if need.copies:
            save_state(cache, row, g, fresh.ids[placed])
            placed += 1
        placed += put_new(row, &cache.kinds[g], need, num_tokens, fresh.ids + placed)
        fill_array(added[g], row.ids + before, row.count - before)
    request.num_tokens = num_tokens
    cache.num_steps += 1
    cache.pool.after()
    return result


cdef int release_rows(PrefixCache cache, Request request) except -1:
    # Group by group, the last block first, so that the end of a prefix is evicted before its
    # beginning.
    cdef IdBuffer left
    cdef Row* row
    cdef uint32_t g
    cdef size_t i
    for g in range(cache.num_groups):
        row = &request.rows[g]
        left = make_buffer(row.count)
        left.count = 0
        i = row.count
        while i:
            i -= 1
            if row.ids[i]:
                left.ids[left.count] = row.ids[i]
                left.count += 1
        cache.pool.release(left, cache.pool.enable_caching, False)
        row.count = 0
    request.cache = None
    cache.num_steps += 1
    return 0
