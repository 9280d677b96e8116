# SPDX-License-Identifier: Apache-2.0
# The longest prefix: per kind of attention, then over all groups.
#
# Row r of the request's hashes covers (r + 1) * unit tokens; block b of a group ends at row
# (b + 1) * block_size / unit - 1. Groups of equal kind and size form a set and are looked up
# together: a block counts as found when each of them has it.
#
#   full attention   the longest run of full blocks; matching fine, then the highest
#                    boundary inside the next block
#   Mamba            the highest boundary with a state
#   sliding window   the highest boundary whose window is complete
#   chunked local    the run of blocks from the start of the current chunk
#
# Decisions are those of vLLM 0.32.0's managers and of its hybrid coordinator. Reads the pool
# and changes nothing. 0, the null block, stands for a block that is not needed.
from cpool.core cimport batches, guess, registry, table
from cpool.core.guess cimport Guess
from cpool.core.keys cimport Key
from cpool.core.memory cimport CACHE_LINE, prefetch
from cpool.core.registry cimport Core, Holder
from cpool.core.types cimport (
    block_id_t, hash_t, space_t, uint8_t, uint32_t, uint64_t, NO_BLOCK,
)
from libc.string cimport memset

cdef enum:
    FULL_ATTENTION = 0
    SLIDING_WINDOW = 1
    CHUNKED_LOCAL = 2
    MAMBA = 3

    FIRST_PROBES = 4        # searches from the right end soon, if they end with a hit: they
    MAX_PROBES = 256        # begin with few rows in flight, and with more each round
    FIRST_ROWS = 64         # of a run, asked for at once

    ROWS = 0                # stages of the first probes: what to ask memory for
    CELLS = 1
    HOLDERS = 2


cdef struct GroupSet:
    uint32_t kind
    uint32_t block_size     # tokens
    uint32_t window         # tokens of the sliding window or of a chunk, else 0
    bint eagle              # a hit gives its last unit back, to be computed again
    uint32_t num_members
    uint32_t* members       # kv_cache_group_ids


cdef struct Hit:            # of one set
    uint64_t num_tokens
    size_t num_blocks
    bint known              # looked up at least once


cdef struct Query:
    const Core* core
    const uint8_t* rows
    size_t row_bytes
    uint32_t width          # bytes of a digest
    size_t num_rows
    uint32_t unit           # hash_block_size, tokens
    uint64_t match_unit     # hits end at its multiples, tokens
    const GroupSet* sets
    uint32_t num_sets
    space_t* spaces         # of each group; 0 when nothing was ever registered in it
    Guess* guesses          # of each group, for full attention; or NULL
    block_id_t** found      # of each group: room for one id a block
    block_id_t* tail        # of each group: the block of the last probe that hit


cdef inline bint can_hit(const Query* query, const GroupSet* set) noexcept:
    cdef uint32_t i
    for i in range(set.num_members):
        if query.spaces[set.members[i]] == 0:
            return False
    return query.core.table.num_used != 0


cdef inline block_id_t find_row(const Query* query, uint32_t group, size_t row) noexcept:
    cdef Key key
    cdef Holder holder
    key.digest = query.rows + row * query.row_bytes
    key.space = query.spaces[group]
    return holder.block if registry.find_first(query.core, &key, &holder) else 0


cdef inline void probe(
    const Query* query, uint32_t group, size_t step, size_t low, size_t high, block_id_t* found
) noexcept:
    # found[i]: who holds row (low + i + 1) * step - 1, or NO_BLOCK.
    batches.find_batch(
        query.core, query.rows + ((low + 1) * step - 1) * query.row_bytes,
        step * query.row_bytes, high - low, query.spaces[group], 0, False, found,
    )


# The first probe from the right end, of all sets, is asked for before anything is decided: most
# lookups that hit end there, and then all of them have waited for memory together.

cdef inline size_t probe_step(const Query* query, const GroupSet* set) noexcept:
    # Rows between two probes from the right end; 0 for a set that is only read from the left.
    if set.kind == MAMBA:
        return query.match_unit // query.unit
    if set.kind == SLIDING_WINDOW:
        return set.block_size // query.unit
    return 1 if set.kind == FULL_ATTENTION and query.match_unit < set.block_size else 0


cdef inline void fetch_row(const Query* query, size_t row) noexcept:
    # It may lie across two cache lines.
    prefetch(query.rows + row * query.row_bytes)
    prefetch(query.rows + row * query.row_bytes + query.width - 1)


cdef inline void fetch_probe(const Query* query, uint32_t group, size_t row, int stage) noexcept:
    cdef Key key
    cdef hash_t hash
    if stage == ROWS:
        fetch_row(query, row)
        return
    key.digest = query.rows + row * query.row_bytes
    key.space = query.spaces[group]
    if key.space == 0:
        return
    hash = registry.hash_of(query.core, &key)
    if stage == CELLS:
        table.prefetch(&query.core.table, hash)
        return
    batches.prefetch_holder(query.core, table.glance(&query.core.table, hash))


cdef inline void fetch_probes(const Query* query, uint64_t max_tokens, int stage) noexcept:
    cdef uint64_t num_rows = min(max_tokens // query.unit, <uint64_t>query.num_rows)
    cdef const GroupSet* set
    cdef size_t step
    cdef uint32_t s, i
    if stage != ROWS and query.core.table.num_used == 0:
        return
    for s in range(query.num_sets):
        set = &query.sets[s]
        step = probe_step(query, set)
        if step and num_rows >= step:
            for i in range(set.num_members):
                fetch_probe(query, set.members[i], num_rows // step * step - 1, stage)


cdef inline void fetch_rows(const Query* query, uint64_t max_tokens) noexcept:
    # The rows that are read first. Where they lie side by side, the processor guesses the next.
    cdef uint64_t num_rows = min(max_tokens // query.unit, <uint64_t>query.num_rows)
    cdef size_t step, i
    cdef uint32_t s
    for s in range(query.num_sets):
        step = query.sets[s].block_size // query.unit
        if query.sets[s].kind == FULL_ATTENTION and step * query.row_bytes > CACHE_LINE:
            for i in range(min(num_rows // step, <uint64_t>FIRST_ROWS)):
                fetch_row(query, (i + 1) * step - 1)
    fetch_probes(query, max_tokens, ROWS)


cdef inline bint hold(
    const Query* query, const GroupSet* set, uint32_t first, size_t row
) noexcept:
    # Whether the set's members from `first` on have the row; their blocks go to `tail`.
    cdef uint32_t i
    for i in range(first, set.num_members):
        query.tail[set.members[i]] = find_row(query, set.members[i], row)
        if query.tail[set.members[i]] == 0:
            return False
    return True


cdef inline size_t find_run(
    const Query* query, const GroupSet* set, size_t first, size_t count
) noexcept:
    # Blocks first, first + 1, ... up to `count` or the first that a member misses.
    cdef uint32_t i, group
    cdef size_t step = set.block_size // query.unit
    cdef const uint8_t* digests = query.rows + ((first + 1) * step - 1) * query.row_bytes
    cdef bint has_guess = set.kind == FULL_ATTENTION and query.guesses != NULL
    if not can_hit(query, set):
        return 0
    for i in range(set.num_members):
        group = set.members[i]
        count = guess.find_run(
            query.core, digests, step * query.row_bytes, count, query.spaces[group],
            &query.guesses[group] if has_guess else NULL, query.found[group] + first,
        )
    return count


cdef inline size_t find_highest(
    const Query* query, const GroupSet* set, size_t step, size_t low, size_t high
) noexcept:
    # The highest i in (low, high] whose row i * step - 1 every member has, or 0. The blocks
    # go to `tail`.
    cdef block_id_t found[MAX_PROBES]
    cdef size_t width = FIRST_PROBES, bottom, i
    if high <= low or not can_hit(query, set):
        return 0
    if hold(query, set, 0, high * step - 1):
        return high
    high -= 1
    while high > low:
        bottom = high - min(high - low, width)
        probe(query, set.members[0], step, bottom, high, found)
        i = high
        while i > bottom:
            if found[i - 1 - bottom] != NO_BLOCK:
                query.tail[set.members[0]] = found[i - 1 - bottom]
                if hold(query, set, 1, i * step - 1):
                    return i
            i -= 1
        high = bottom
        width = min(4 * width, <size_t>MAX_PROBES)
    return 0


cdef inline void put_nulls(
    const Query* query, const GroupSet* set, size_t first, size_t last
) noexcept:
    cdef uint32_t i
    if last > first:
        for i in range(set.num_members):
            memset(query.found[set.members[i]] + first, 0, (last - first) * sizeof(block_id_t))


cdef inline void put_tail(const Query* query, const GroupSet* set, size_t block) noexcept:
    cdef uint32_t i
    for i in range(set.num_members):
        query.found[set.members[i]][block] = query.tail[set.members[i]]


cdef inline void match_full_attention(
    const Query* query, const GroupSet* set, uint64_t max_tokens, bint drop, Hit* hit
) noexcept:
    cdef size_t size = set.block_size
    cdef size_t step = size // query.unit
    cdef uint64_t limit = min(max_tokens, <uint64_t>query.num_rows * query.unit)
    cdef size_t run = find_run(query, set, 0, limit // size)
    cdef size_t boundary
    hit.num_tokens = <uint64_t>run * size
    fetch_probes(query, max_tokens, HOLDERS)
    if query.match_unit < size:
        boundary = find_highest(
            query, set, 1, run * step, min(run * step + step - 1, limit // query.unit)
        )
        if boundary:
            put_tail(query, set, run)
            hit.num_tokens = <uint64_t>boundary * query.unit
    if drop and hit.num_tokens:
        # The last block still covers the shorter prefix: rows are only appended to it.
        hit.num_tokens -= min(query.match_unit, <uint64_t>size)
    hit.num_tokens -= hit.num_tokens % query.match_unit
    hit.num_blocks = (hit.num_tokens + size - 1) // size


cdef inline void match_mamba(
    const Query* query, const GroupSet* set, uint64_t max_tokens, Hit* hit
) noexcept:
    # A state cannot be cut back: only a boundary at which one was kept will do.
    cdef uint64_t limit = min(max_tokens, <uint64_t>query.num_rows * query.unit)
    cdef size_t boundary = find_highest(
        query, set, query.match_unit // query.unit, 0, limit // query.match_unit
    )
    hit.num_tokens = <uint64_t>boundary * query.match_unit
    hit.num_blocks = (hit.num_tokens + set.block_size - 1) // set.block_size
    if boundary:
        put_nulls(query, set, 0, hit.num_blocks - 1)
        put_tail(query, set, hit.num_blocks - 1)


cdef inline size_t window_blocks(uint64_t window, uint64_t block_size) noexcept:
    # Blocks that the next token sees, at most, before its own.
    return (window - 1 + block_size - 1) // block_size


cdef inline void match_sliding_window(
    const Query* query, const GroupSet* set, uint64_t max_tokens, bint drop, Hit* hit
) noexcept:
    cdef block_id_t found[MAX_PROBES]
    cdef size_t size = set.block_size
    cdef size_t step = size // query.unit
    cdef size_t needed = window_blocks(set.window, size) + (1 if drop else 0)
    cdef size_t high = min(max_tokens, <uint64_t>query.num_rows * query.unit) // size
    cdef size_t width = FIRST_PROBES, bottom, i, end
    cdef size_t run = 0     # blocks found in a row, the lowest of them being block i
    cdef bint complete = False
    if not can_hit(query, set):
        high = 0
    i = high
    while high and not complete:
        bottom = high - min(high, width)
        probe(query, set.members[0], step, bottom, high, found)
        while i > bottom and not complete:
            i -= 1
            if found[i - bottom] == NO_BLOCK:
                run = 0
                continue
            query.tail[set.members[0]] = found[i - bottom]
            if not hold(query, set, 1, (i + 1) * step - 1):
                run = 0
                continue
            if run == 0 and ((i if drop else i + 1) * size) % query.match_unit:
                continue
            put_tail(query, set, i)
            run += 1
            complete = run >= needed
        high = bottom
        width = min(2 * width, <size_t>MAX_PROBES)
    # Incomplete: the blocks from the very first one on still are a prefix.
    end = i + run if complete else run
    if complete:
        put_nulls(query, set, 0, i)
    else:
        while (end * size) % query.match_unit:
            end -= 1
    if drop and end:
        end -= 1
        while (end * size) % query.match_unit:
            end -= 1
    hit.num_blocks = end
    hit.num_tokens = <uint64_t>end * size


cdef inline void match_chunked_local(
    const Query* query, const GroupSet* set, uint64_t max_tokens, Hit* hit
) noexcept:
    cdef size_t size = set.block_size
    cdef size_t start = max_tokens // set.window * set.window // size
    cdef size_t last = min(max_tokens, <uint64_t>query.num_rows * query.unit) // size
    put_nulls(query, set, 0, start)
    hit.num_blocks = start
    if last > start:
        hit.num_blocks += find_run(query, set, start, last - start)
    hit.num_tokens = <uint64_t>hit.num_blocks * size


cdef inline void match_set(
    const Query* query, const GroupSet* set, uint64_t max_tokens, bint drop, Hit* hit
) noexcept:
    if set.kind == FULL_ATTENTION:
        match_full_attention(query, set, max_tokens, drop, hit)
    elif set.kind == SLIDING_WINDOW:
        match_sliding_window(query, set, max_tokens, drop, hit)
    elif set.kind == CHUNKED_LOCAL:
        match_chunked_local(query, set, max_tokens, hit)
    else:
        match_mamba(query, set, max_tokens, hit)
    hit.known = True


cdef inline uint64_t eagle_margin(const Query* query, const GroupSet* set) noexcept:
    # Tokens that a set matches beyond the candidate, to give them back.
    if query.match_unit < set.block_size:
        return query.unit
    return set.block_size


cdef inline uint64_t match_all(
    const Query* query, const GroupSet* sets, uint32_t num_sets, uint64_t max_tokens, Hit* hits,
    uint64_t* longest,
) noexcept:
    # The longest prefix on which all sets agree: each accepts the candidate or lowers it,
    # until a round changes nothing. `longest`: the longest that a single set had.
    cdef uint64_t length = max_tokens
    cdef uint64_t current, allowed
    cdef uint64_t verified = 0      # bit s: set s has given back its unit at this length
    cdef uint32_t s
    cdef bint drop
    # Two sets, full attention first: what the second accepts, the first has already.
    cdef bint one_round = num_sets == 2 and sets[0].kind == FULL_ATTENTION
    longest[0] = 0
    fetch_probes(query, max_tokens, CELLS)
    while True:
        current = length
        for s in range(num_sets):
            if sets[s].kind == FULL_ATTENTION and hits[s].known:
                # It has every shorter prefix too.
                current = min(current, hits[s].num_tokens)
                continue
            drop = sets[s].eagle and not verified >> s & 1
            allowed = current
            if drop and sets[s].kind != MAMBA:
                allowed = min(
                    current + eagle_margin(query, &sets[s]),
                    <uint64_t>query.num_rows * query.unit,
                )
            match_set(query, &sets[s], allowed, drop, &hits[s])
            if drop:
                verified |= <uint64_t>1 << s
            elif hits[s].num_tokens < current:
                verified = 0
            current = hits[s].num_tokens
            longest[0] = max(longest[0], current)
        if current >= length:
            break
        length = current
        if one_round:
            break
    for s in range(num_sets):
        if sets[s].kind == FULL_ATTENTION:
            hits[s].num_tokens = length
            hits[s].num_blocks = min(
                hits[s].num_blocks, (length + sets[s].block_size - 1) // sets[s].block_size
            )
    return length
