# SPDX-License-Identifier: Apache-2.0
# The free queue: blocks that nobody holds, in the order in which they will be handed out.
#
# A doubly linked ring through block ids. states[num_blocks] is the ring's own node: its next
# is the head, its prev the tail. A block outside the queue has NOT_QUEUED in both fields, so
# "end of queue" and "not in queue" are different values.
#
# A walk along scattered blocks waits for memory at each step, unless it knows where it will be
# some steps later. So a block that joins the tail is noted in the one that joined LOOKAHEAD
# places before it, in the count that a free block does not need. Blocks leave the middle and
# notes grow old: they only say what to prefetch, never where to go. Whose note left with the
# block that had it is asked for by its neighbours, as soon as these are at hand.
#
# The queue knows no key: who joins, and at which end, is the pool's decision.
from cpool.core cimport memory
from cpool.core.types cimport BlockState, block_id_t, int32_t, uint32_t, NOT_QUEUED

cdef enum:
    LOOKAHEAD = 32          # steps of a walk that take as long as one read of memory, and more
    ARRIVED = 12            # steps after which what a note asked for is at hand


cdef struct FreeQueue:
    char* states            # num_blocks + 1 of them, borrowed from the blocks,
    size_t state_bytes      # so far apart
    block_id_t end          # the ring's own node, == num_blocks
    uint32_t num_free
    uint32_t turn           # place in `recent` of the oldest
    block_id_t recent[32]   # the last LOOKAHEAD that joined the tail, or `end`
    uint32_t first_near     # place in `near` of the head
    block_id_t near[32]     # about the first LOOKAHEAD from the head on, or `end`: notes too


cdef inline BlockState* state_at(const FreeQueue* queue, block_id_t id) noexcept:
    return <BlockState*>(queue.states + id * queue.state_bytes)


cdef inline void init(
    FreeQueue* queue, char* states, size_t state_bytes, uint32_t num_blocks
) noexcept:
    # All blocks, in the order of their ids.
    cdef block_id_t id
    queue.states = states
    queue.state_bytes = state_bytes
    queue.end = num_blocks
    queue.num_free = num_blocks
    queue.turn = 0
    queue.first_near = 0
    for id in range(LOOKAHEAD):
        queue.recent[id] = num_blocks
        queue.near[id] = num_blocks
    for id in range(num_blocks):
        state_at(queue, id).prev = id - 1
        state_at(queue, id).next = id + 1
    state_at(queue, 0).prev = num_blocks
    state_at(queue, num_blocks).prev = num_blocks - 1
    state_at(queue, num_blocks).next = 0


cdef inline bint contains(const FreeQueue* queue, block_id_t id) noexcept:
    return state_at(queue, id).next != NOT_QUEUED


cdef inline block_id_t head(const FreeQueue* queue) noexcept:
    return state_at(queue, queue.end).next


cdef inline block_id_t next_of(const FreeQueue* queue, block_id_t id) noexcept:
    return state_at(queue, id).next


cdef inline void insert_after(FreeQueue* queue, block_id_t place, block_id_t id) noexcept:
    # `place` is in the queue or is `end`; `id` is not in the queue and has no holder.
    cdef block_id_t after = state_at(queue, place).next
    state_at(queue, id).prev = place
    state_at(queue, id).next = after
    state_at(queue, place).next = id
    state_at(queue, after).prev = id
    queue.num_free += 1


cdef inline void append(FreeQueue* queue, block_id_t id) noexcept:
    cdef block_id_t noted_in = queue.recent[queue.turn]
    insert_after(queue, state_at(queue, queue.end).prev, id)
    if contains(queue, noted_in):
        state_at(queue, noted_in).ref_cnt = -1 - <int32_t>id
    queue.recent[queue.turn] = id
    queue.turn = (queue.turn + 1) % LOOKAHEAD


cdef inline void prefetch_near(const FreeQueue* queue, size_t count) noexcept:
    # The first blocks of a walk from the head, which no note was read for in this walk.
    cdef size_t i
    for i in range(min(count, <size_t>LOOKAHEAD)):
        memory.prefetch_write(state_at(queue, queue.near[(queue.first_near + i) % LOOKAHEAD]))


cdef inline void prefetch_beside(const FreeQueue* queue, block_id_t id) noexcept:
    if contains(queue, id):
        memory.prefetch_write(state_at(queue, state_at(queue, id).prev))
        memory.prefetch_write(state_at(queue, state_at(queue, id).next))


cdef inline void prefetch_ahead(FreeQueue* queue, block_id_t id, size_t i) noexcept:
    # At step `i` of a walk from the head.
    cdef int32_t note = state_at(queue, id).ref_cnt
    cdef block_id_t ahead = queue.end
    if note < 0:
        ahead = -1 - note
        memory.prefetch_write(state_at(queue, ahead))
    queue.near[(queue.first_near + i) % LOOKAHEAD] = ahead
    prefetch_beside(
        queue, queue.near[(queue.first_near + i + LOOKAHEAD - ARRIVED) % LOOKAHEAD]
    )


cdef inline void remove(FreeQueue* queue, block_id_t id) noexcept:
    cdef block_id_t before = state_at(queue, id).prev
    cdef block_id_t after = state_at(queue, id).next
    state_at(queue, before).next = after
    state_at(queue, after).prev = before
    state_at(queue, id).prev = NOT_QUEUED
    state_at(queue, id).next = NOT_QUEUED
    state_at(queue, id).ref_cnt = 0
    queue.num_free -= 1


cdef inline void take_head_run(
    FreeQueue* queue, const block_id_t* ids, size_t count, int32_t ref_cnt
) noexcept:
    # `ids` are the first `count` blocks of the queue: one cut instead of `count` removals. Each
    # gets `ref_cnt` holders.
    cdef size_t i
    cdef block_id_t after
    if count == 0:
        return
    after = state_at(queue, ids[count - 1]).next
    state_at(queue, queue.end).next = after
    state_at(queue, after).prev = queue.end
    for i in range(count):
        state_at(queue, ids[i]).prev = NOT_QUEUED
        state_at(queue, ids[i]).next = NOT_QUEUED
        state_at(queue, ids[i]).ref_cnt = ref_cnt
    queue.num_free -= <uint32_t>count
    queue.first_near = (queue.first_near + <uint32_t>count) % LOOKAHEAD
