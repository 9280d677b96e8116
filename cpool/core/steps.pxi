# SPDX-License-Identifier: Apache-2.0
# The steps on queue and counts, for whole batches. Each checks, or can undo, before it commits.

cdef enum:
    # How far ahead of the work a batch fetches: a few hundred nanoseconds' worth.
    AHEAD = 16


cdef int head_run(Core* core, block_id_t* ids, size_t count) except -1:
    # The first `count` blocks of the free queue, which must have as many; nothing changes.
    cdef block_id_t id = core.queue.end
    cdef size_t i
    free_queue.prefetch_near(&core.queue, count)
    for i in range(count):
        id = free_queue.next_of(&core.queue, id)
        ids[i] = id
        free_queue.prefetch_ahead(&core.queue, id, i)
        if i < batches.RING:
            batches.prefetch_keys(core, id)
    for i in range(count):
        if state_at(&core.blocks, ids[i]).ref_cnt > 0:
            raise ContractError(
                f"block {ids[i]} is in the free queue with ref_cnt "
                f"{state_at(&core.blocks, ids[i]).ref_cnt}"
            )
    return 0


cdef void put_back(Core* core, const block_id_t* ids, size_t count) noexcept:
    # Undoes an allocation: to the front of the queue, in order. What a hook freed is there
    # already, and what it touched stays its own.
    cdef block_id_t place = core.queue.end
    cdef size_t i
    for i in range(count):
        if free_queue.contains(&core.queue, ids[i]):
            continue
        if state_at(&core.blocks, ids[i]).ref_cnt > 1:
            state_at(&core.blocks, ids[i]).ref_cnt -= 1
            continue
        state_at(&core.blocks, ids[i]).ref_cnt = 0
        free_queue.insert_after(&core.queue, place, ids[i])
        place = ids[i]


cdef size_t evict_run(
    Core* core, const block_id_t* ids, size_t count, size_t asked, RemovedRun removed,
    bint truthful,
) noexcept:
    # All keys of the blocks leave; each is appended to `removed`, if that is not None, which
    # has room. The keys of the first `asked` blocks are on their way. Returns how many blocks
    # the table knew.
    cdef batches.Evictions batch
    cdef space_t space
    cdef size_t i, evicted = 0
    if core.num_spaces == 0:
        return 0
    if removed is None and batches.is_plain(core):
        if core.blocks.stride == 32:
            return batches.evict_plain(core, ids, count, asked, 32)
        if core.blocks.stride == 16:
            return batches.evict_plain(core, ids, count, asked, 16)
    batch.ids = ids
    batch.count = count
    for i in range(count):
        batches.fetch_keys(core, &batch, i)
        if not batches.has_own_key_only(core, ids[i]):
            if removed is not None:
                log_keys(core, ids[i], removed, truthful)
            evicted += registry.drop_keys(core, ids[i]) != 0
            continue
        if removed is not None:
            space = key_at(&core.blocks, ids[i]).space
            append_removed(
                removed, &core.spaces[space & SPACE_MASK], digest_slot(&core.blocks, ids[i])
            )
        batches.drop_own_key(core, &batch, i)
        evicted += 1
    return evicted


cdef inline void prefetch_state(const Core* core, block_id_t id) noexcept:
    # Most are in one line.
    prefetch_write(state_at(&core.blocks, id))
    prefetch_write(&state_at(&core.blocks, id).ref_cnt)


cdef int check_touch(Core* core, const block_id_t* ids, size_t count) except -1:
    cdef size_t i
    cdef block_id_t id
    cdef int32_t held
    for i in range(min(AHEAD, count)):
        prefetch_state(core, ids[i])
    for i in range(count):
        if i + AHEAD < count:
            prefetch_state(core, ids[i + AHEAD])
        id = ids[i]
        if id == NULL_BLOCK:
            continue
        held = registry.num_holders(core, id)
        if held == 0 and not free_queue.contains(&core.queue, id):
            raise ContractError(
                f"block {id} at position {i} has no holder and is not in the free queue"
            )
        if <uint64_t>held + count > MAX_REF_CNT:
            raise ContractError(
                f"ref_cnt of block {id} is {held}; {count} more would pass {MAX_REF_CNT}"
            )
    return 0


cdef inline void count_null(Core* core, int32_t step) noexcept:
    # The null block's count means nothing, and whoever frees more of it than it took is right to:
    # at its ends it stays.
    cdef int64_t count = <int64_t>state_at(&core.blocks, NULL_BLOCK).ref_cnt + step
    if -<int64_t>MAX_REF_CNT <= count <= MAX_REF_CNT:
        state_at(&core.blocks, NULL_BLOCK).ref_cnt = <int32_t>count


cdef void commit_touch(Core* core, const block_id_t* ids, size_t count) noexcept:
    cdef size_t i
    cdef block_id_t id
    cdef BlockState state
    for i in range(count):
        if i + AHEAD < count:
            state = state_at(&core.blocks, ids[i + AHEAD])[0]
            if state.next != NOT_QUEUED:
                prefetch_write(state_at(&core.blocks, state.prev))
                prefetch_write(state_at(&core.blocks, state.next))
        id = ids[i]
        if id == NULL_BLOCK:
            count_null(core, 1)
            continue
        if registry.num_holders(core, id) == 0:
            free_queue.remove(&core.queue, id)
        state_at(&core.blocks, id).ref_cnt += 1


cdef inline void undo_release(Core* core, const block_id_t* ids, size_t count) noexcept:
    cdef size_t i = count
    while i:
        i -= 1
        if ids[i] == NULL_BLOCK:
            count_null(core, 1)
            continue
        if free_queue.contains(&core.queue, ids[i]):
            free_queue.remove(&core.queue, ids[i])
        state_at(&core.blocks, ids[i]).ref_cnt += 1


cdef inline void prefetch_release(const Core* core, block_id_t id) noexcept:
    prefetch_write(state_at(&core.blocks, id))
    if core.blocks.keys != NULL:
        prefetch(&key_at(&core.blocks, id).space)


cdef int release_run(
    Core* core, const block_id_t* ids, size_t count, bint hashed_last, bint all_last
) except -1:
    # One holder of each block leaves; at 0 it joins the queue. Without a key it goes to the
    # front (of this batch's, in order), with one to the tail, if `hashed_last`; with
    # `all_last` every block goes to the tail. A bad id undoes what the ones before it did.
    cdef block_id_t front = core.queue.end
    cdef block_id_t id
    cdef int32_t held
    cdef size_t i
    for i in range(min(AHEAD, count)):
        prefetch_release(core, ids[i])
    for i in range(count):
        if i + AHEAD < count:
            prefetch_release(core, ids[i + AHEAD])
        id = ids[i]
        if id == NULL_BLOCK:
            count_null(core, -1)
            continue
        held = state_at(&core.blocks, id).ref_cnt
        if held <= 0 or free_queue.contains(&core.queue, id):
            undo_release(core, ids, i)
            held = registry.num_holders(core, id)
            if held <= 0 or free_queue.contains(&core.queue, id):
                raise ContractError(f"block {id} at position {i} is already free")
            raise ContractError(
                f"block {id} at position {i} is freed more often than it is held: "
                f"its ref_cnt is {held}"
            )
        state_at(&core.blocks, id).ref_cnt = held - 1
        if held > 1:
            continue
        if all_last or (hashed_last and registry.has_primary(core, id)):
            free_queue.append(&core.queue, id)
        else:
            free_queue.insert_after(&core.queue, front, id)
            front = id
    return 0


cdef int64_t check_new_keys(
    Core* core, const block_id_t* ids, const uint64_t* num_tokens, size_t count
) except -1:
    # A full block may already have a key only if that key is shorter: then it is promoted.
    # Returns how many of the blocks have a primary key.
    cdef size_t i, found = 0
    cdef uint32_t held
    for i in range(count):
        if num_tokens[i] > MAX_NUM_TOKENS:
            raise ContractError(
                f"{num_tokens[i]} tokens at position {i}; the limit is {<uint32_t>MAX_NUM_TOKENS}"
            )
        if not registry.has_primary(core, ids[i]):
            continue
        found += 1
        held = key_at(&core.blocks, ids[i]).num_tokens
        if key_at(&core.blocks, ids[i]).space & NO_TOKENS_FLAG:
            raise ContractError(f"block {ids[i]} has a key of unknown length")
        if held >= num_tokens[i]:
            raise ContractError(
                f"block {ids[i]} at position {i} has a key for {held} tokens: one for "
                f"{num_tokens[i]} cannot replace it"
            )
    return found


cdef size_t count_extra(Core* core, const block_id_t* ids, size_t count) noexcept:
    # Full blocks register as primary keys, unless a block has extra keys but no primary one.
    cdef size_t i, found = 0
    if core.index.heads == NULL or core.blocks.keys == NULL:
        return 0
    for i in range(count):
        found += core.index.heads[ids[i]] != 0 and key_at(&core.blocks, ids[i]).space == 0
    return found


cdef bint any_has_extra_keys(Core* core, const block_id_t* ids, size_t count) noexcept:
    cdef size_t i
    if core.index.heads == NULL:
        return False
    for i in range(count):
        if core.index.heads[ids[i]]:
            return True
    return False


cdef void drop_all(Core* core, const block_id_t* ids, size_t count) noexcept:
    # Undoes the registration of blocks that had no keys.
    cdef size_t i
    for i in range(count):
        if ids[i] != NULL_BLOCK:
            registry.drop_keys(core, ids[i])
