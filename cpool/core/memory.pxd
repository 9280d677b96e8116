# SPDX-License-Identifier: Apache-2.0
# Every byte of the pool comes from here: allocate, grow, free.
#
# PyMem_Raw* is used so that tracemalloc and memray see it. Arrays start on a cache line and
# ask for huge pages when they are large. In debug builds an allocation can be made to fail.
from cpool.core.types cimport record_id_t, uint32_t, NO_RECORD
from libc.string cimport memcpy
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc

cdef extern from * nogil:
    """
    #include <stdint.h>
    #include <sys/mman.h>
    #include <unistd.h>

    /* The empty volatile statement is there because GCC takes a function that only
       prefetches for one without effects, and drops the calls of it. */
    #define CPOOL_ALWAYS_INLINE static inline __attribute__((always_inline))
    CPOOL_ALWAYS_INLINE void cpool_prefetch(const void *address) {
        __builtin_prefetch(address, 0, 3);
        __asm__ volatile("");
    }
    CPOOL_ALWAYS_INLINE void cpool_prefetch_write(const void *address) {
        __builtin_prefetch(address, 1, 3);
        __asm__ volatile("");
    }

    /* Debug builds refuse the allocation that brings the countdown to 0. */
    static long cpool_num_allocations = 0;
    static long cpool_fail_countdown = 0;

    static inline int cpool_refuses_allocation(void) {
        cpool_num_allocations++;
        return CPOOL_DEBUG && cpool_fail_countdown > 0 && --cpool_fail_countdown == 0;
    }

    /* For the pages that lie in the range whole. The kernel rounds the end up to its own pages,
       which are not everywhere of 4 KiB: of what is behind, nothing may go. */
    static inline void cpool_advise(void *data, size_t nbytes, int advice) {
        uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
        uintptr_t start = ((uintptr_t)data + page - 1) & ~(page - 1);
        uintptr_t end = ((uintptr_t)data + nbytes) & ~(page - 1);
        if (end > start) madvise((void *)start, end - start, advice);
    }

    static inline void cpool_advise_huge(void *data, size_t nbytes) {
    #ifdef MADV_HUGEPAGE
        cpool_advise(data, nbytes, MADV_HUGEPAGE);
    #endif
    }

    /* The pages behind the range are there from now on: no later access waits for the system to
       find and clear one. */
    static inline void cpool_touch_pages(void *data, size_t nbytes) {
        enum { SMALLEST_PAGE = 4096 };
        volatile char *bytes = data;
        for (size_t i = 0; i < nbytes; i += SMALLEST_PAGE) bytes[i] = bytes[i];
        if (nbytes) bytes[nbytes - 1] = bytes[nbytes - 1];
    }

    /* Whole pages of the range go back to the system, and read as zeros if they are used again;
       where there is no such call, they stay as they are. */
    static inline void cpool_give_back_pages(void *data, size_t nbytes) {
    #if defined(__linux__) && defined(MADV_DONTNEED)
        cpool_advise(data, nbytes, MADV_DONTNEED);
    #endif
    }
    """
    void prefetch "cpool_prefetch"(const void* address) noexcept
    void prefetch_write "cpool_prefetch_write"(const void* address) noexcept
    bint refuses_allocation "cpool_refuses_allocation"() noexcept
    void advise_huge "cpool_advise_huge"(void* data, size_t nbytes) noexcept
    void touch_pages "cpool_touch_pages"(void* data, size_t nbytes) noexcept
    void give_back_pages "cpool_give_back_pages"(void* data, size_t nbytes) noexcept
    long num_allocations "cpool_num_allocations"
    long fail_countdown "cpool_fail_countdown"

cdef enum:
    CACHE_LINE = 64
    HUGE_FROM_BYTES = 4 << 20   # smaller arrays gain nothing from 2 MiB pages
    SPARE_RECORDS = 4096        # that an arena keeps beyond those in use


cdef struct Array:
    void* raw       # what the allocator returned, NULL when empty
    char* data      # raw, rounded up to a cache line
    size_t nbytes   # what was asked of the allocator


cdef inline int allocate(Array* array, size_t count, size_t size) except -1:
    # Zero-filled. Large arrays come as untouched zero pages: memory follows use.
    return allocate_as(array, count, size, True)


cdef inline int allocate_unfilled(Array* array, size_t count, size_t size) except -1:
    # For what is written before it is read.
    return allocate_as(array, count, size, False)


cdef inline int allocate_as(Array* array, size_t count, size_t size, bint filled) except -1:
    cdef size_t nbytes = count * size + CACHE_LINE
    cdef void* raw = NULL
    if size and count > (<size_t>-1 - CACHE_LINE) // size:
        raise MemoryError(f"{count} elements of {size} bytes do not fit in memory")
    if not refuses_allocation():
        raw = PyMem_RawCalloc(1, nbytes) if filled else PyMem_RawMalloc(nbytes)
    if raw == NULL:
        raise MemoryError(f"cannot allocate {nbytes} bytes")
    array.raw = raw
    array.data = <char*>((<size_t>raw + CACHE_LINE - 1) & ~<size_t>(CACHE_LINE - 1))
    array.nbytes = nbytes
    if nbytes >= HUGE_FROM_BYTES:
        advise_huge(array.data, count * size)
    return 0


cdef inline void touch(const Array* array) noexcept:
    # Memory that follows use otherwise is taken now.
    touch_pages(array.raw, array.nbytes)


cdef inline void release(Array* array) noexcept:
    PyMem_RawFree(array.raw)
    array.raw = NULL
    array.data = NULL
    array.nbytes = 0


# An arena holds equally long records under stable ids. Records never move: it grows by whole
# chunks, so growing copies nothing and never pauses the caller. A given-back record keeps the
# id of the next free one in its first four bytes.
#
# reserve() may fail; take() after it may not. Whoever takes a record writes it before it is
# read: chunks come unfilled.
cdef struct Arena:
    Array chunks            # Array per chunk
    uint32_t num_chunks
    uint32_t chunk_shift    # log2 of the records in a chunk
    size_t record_bytes
    uint32_t num_live       # records taken and not given back
    uint32_t high_water     # ids from here on were never taken
    record_id_t free_head   # first record given back, or NO_RECORD
    size_t nbytes           # of all chunks


cdef inline void arena_init(Arena* arena, size_t record_bytes, uint32_t chunk_shift) noexcept:
    arena.num_chunks = 0
    arena.chunk_shift = chunk_shift
    arena.record_bytes = record_bytes
    arena.num_live = 0
    arena.high_water = 0
    arena.free_head = NO_RECORD
    arena.nbytes = 0


cdef inline char* record(const Arena* arena, record_id_t id) noexcept:
    cdef uint32_t within = id & ((<uint32_t>1 << arena.chunk_shift) - 1)
    return (<Array*>arena.chunks.data)[id >> arena.chunk_shift].data + within * arena.record_bytes


cdef inline int arena_reserve(Arena* arena, size_t count) except -1:
    # Afterwards `count` calls of take() succeed. On failure nothing has changed that matters.
    cdef size_t needed = arena.num_live + count
    cdef Array fresh
    cdef size_t capacity, slots
    while (<size_t>arena.num_chunks << arena.chunk_shift) < needed:
        slots = 0
        if arena.chunks.raw != NULL:
            slots = (arena.chunks.nbytes - CACHE_LINE) // sizeof(Array)
        if arena.num_chunks == slots:
            capacity = 2 * slots if slots else 4
            allocate(&fresh, capacity, sizeof(Array))
            if slots:
                memcpy(fresh.data, arena.chunks.data, slots * sizeof(Array))
            release(&arena.chunks)
            arena.chunks = fresh
        # Not zero-filled: what a large batch reserves and gives back unused is never touched.
        allocate_unfilled(&fresh, <size_t>1 << arena.chunk_shift, arena.record_bytes)
        (<Array*>arena.chunks.data)[arena.num_chunks] = fresh
        arena.num_chunks += 1
        arena.nbytes += fresh.nbytes
    return 0


cdef inline record_id_t take(Arena* arena) noexcept:
    cdef record_id_t id = arena.free_head
    arena.num_live += 1
    if id == NO_RECORD:
        id = arena.high_water
        arena.high_water += 1
    else:
        memcpy(&arena.free_head, record(arena, id), sizeof(record_id_t))
        if arena.free_head != NO_RECORD:
            prefetch_write(record(arena, arena.free_head))
    return id


cdef inline void give_back(Arena* arena, record_id_t id) noexcept:
    memcpy(record(arena, id), &arena.free_head, sizeof(record_id_t))
    arena.free_head = id
    arena.num_live -= 1


cdef inline void arena_trim_to(Arena* arena, size_t num_spare) noexcept:
    # Chunks that were reserved and then not needed go back to the system, but for those of that
    # many records.
    cdef Array* chunk
    while arena.num_chunks and (
        (<size_t>(arena.num_chunks - 1) << arena.chunk_shift) >= arena.high_water + num_spare
    ):
        arena.num_chunks -= 1
        chunk = &(<Array*>arena.chunks.data)[arena.num_chunks]
        arena.nbytes -= chunk.nbytes
        release(chunk)


cdef inline void arena_trim(Arena* arena) noexcept:
    arena_trim_to(arena, 0)


cdef inline void arena_trim_excess(Arena* arena) noexcept:
    # What was reserved for the worst case of a large batch. What a batch of the usual size may
    # need stays, so that it is not allocated again and again.
    arena_trim_to(arena, SPARE_RECORDS)


cdef inline int arena_widen(Arena* fresh, const Arena* old, size_t record_bytes) except -1:
    # `fresh` becomes `old` with longer records, ids kept. On failure it owns nothing.
    cdef record_id_t id
    arena_init(fresh, record_bytes, old.chunk_shift)
    fresh.chunks.raw = NULL
    fresh.chunks.nbytes = 0
    try:
        arena_reserve(fresh, <size_t>old.num_chunks << old.chunk_shift)
    except MemoryError:
        arena_release(fresh)
        raise
    for id in range(old.high_water):
        memcpy(record(fresh, id), record(old, id), old.record_bytes)
    fresh.num_live = old.num_live
    fresh.high_water = old.high_water
    fresh.free_head = old.free_head
    return 0


cdef inline void arena_release(Arena* arena) noexcept:
    arena.high_water = 0
    arena_trim(arena)
    release(&arena.chunks)
    arena.num_live = 0
    arena.free_head = NO_RECORD


cdef inline size_t arena_nbytes(const Arena* arena) noexcept:
    return arena.nbytes + arena.chunks.nbytes
