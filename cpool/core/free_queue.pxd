# SPDX-License-Identifier: Apache-2.0
# The free queue: blocks that nobody holds, in the order in which they will be handed out.
#
# A doubly linked ring through block ids. links[num_blocks] is the ring's own node: its next
# is the head, its prev the tail. A block outside the queue has NOT_QUEUED in both fields, so
# "end of queue" and "not in queue" are different values.
#
# The queue knows no ref_cnt and no key: who joins, and at which end, is the pool's decision.
from cpool.core cimport memory
from cpool.core.memory cimport Array
from cpool.core.types cimport block_id_t, uint32_t, NOT_QUEUED


cdef struct Link:
    block_id_t prev
    block_id_t next


cdef struct FreeQueue:
    Array array
    Link* links             # num_blocks + 1 of them
    block_id_t end          # the ring's own node, == num_blocks
    uint32_t num_free


cdef inline int init(FreeQueue* queue, uint32_t num_blocks) except -1:
    # All blocks, in the order of their ids.
    cdef block_id_t id
    memory.allocate(&queue.array, <size_t>num_blocks + 1, sizeof(Link))
    queue.links = <Link*>queue.array.data
    queue.end = num_blocks
    queue.num_free = num_blocks
    for id in range(num_blocks):
        queue.links[id].prev = id - 1
        queue.links[id].next = id + 1
    queue.links[0].prev = num_blocks
    queue.links[num_blocks].prev = num_blocks - 1 if num_blocks else num_blocks
    queue.links[num_blocks].next = 0
    return 0


cdef inline bint contains(const FreeQueue* queue, block_id_t id) noexcept:
    return queue.links[id].next != NOT_QUEUED


cdef inline block_id_t head(const FreeQueue* queue) noexcept:
    return queue.links[queue.end].next


cdef inline block_id_t next_of(const FreeQueue* queue, block_id_t id) noexcept:
    return queue.links[id].next


cdef inline void insert_after(FreeQueue* queue, block_id_t place, block_id_t id) noexcept:
    # `place` is in the queue or is `end`; `id` is not in the queue.
    cdef block_id_t after = queue.links[place].next
    queue.links[id].prev = place
    queue.links[id].next = after
    queue.links[place].next = id
    queue.links[after].prev = id
    queue.num_free += 1


cdef inline void append(FreeQueue* queue, block_id_t id) noexcept:
    insert_after(queue, queue.links[queue.end].prev, id)


cdef inline void remove(FreeQueue* queue, block_id_t id) noexcept:
    cdef Link link = queue.links[id]
    queue.links[link.prev].next = link.next
    queue.links[link.next].prev = link.prev
    queue.links[id].prev = NOT_QUEUED
    queue.links[id].next = NOT_QUEUED
    queue.num_free -= 1


cdef inline void take_head_run(FreeQueue* queue, const block_id_t* ids, size_t count) noexcept:
    # `ids` are the first `count` blocks of the queue: one cut instead of `count` removals.
    cdef size_t i
    cdef block_id_t after
    if count == 0:
        return
    after = queue.links[ids[count - 1]].next
    queue.links[queue.end].next = after
    queue.links[after].prev = queue.end
    for i in range(count):
        queue.links[ids[i]].prev = NOT_QUEUED
        queue.links[ids[i]].next = NOT_QUEUED
    queue.num_free -= <uint32_t>count


cdef inline void release(FreeQueue* queue) noexcept:
    memory.release(&queue.array)
    queue.links = NULL
