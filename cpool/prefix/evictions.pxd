# SPDX-License-Identifier: Apache-2.0
# Which keys were evicted lately, and how long ago: kept only when asked for.
#
# One cell for each place, the latest eviction wins: 12 bytes a cell, no chains, no growth. A
# key is remembered by the table's 32-bit hash alone, so one answer in four thousand million is
# about another key: good enough for an explanation, and used for nothing else.
from cpool.core.types cimport hash_t, uint32_t, uint64_t
from cpython.mem cimport PyMem_Calloc, PyMem_Free


cdef packed struct Eviction:
    hash_t hash             # the table's hash of the key
    uint32_t number         # of the eviction, from 1; 0 in an unused cell
    uint32_t second         # monotonic clock


cdef struct Evictions:
    Eviction* cells         # NULL: nothing is remembered
    uint32_t mask           # number of cells - 1; that is a power of two
    uint64_t number         # evictions so far


cdef inline int init(Evictions* evictions, uint64_t at_least) except -1:
    cdef uint64_t num_cells = 1
    if at_least == 0:
        return 0
    while num_cells < at_least:
        num_cells *= 2
    evictions.cells = <Eviction*>PyMem_Calloc(num_cells, sizeof(Eviction))
    if evictions.cells == NULL:
        raise MemoryError(f"cannot allocate room for {num_cells} evictions")
    evictions.mask = <uint32_t>(num_cells - 1)
    return 0


cdef inline void remember(Evictions* evictions, hash_t hash, uint32_t second) noexcept:
    cdef Eviction* cell = &evictions.cells[hash & evictions.mask]
    cell.hash = hash
    cell.number = <uint32_t>evictions.number
    cell.second = second


cdef inline const Eviction* recall(const Evictions* evictions, hash_t hash) noexcept:
    # NULL if the key was not evicted, or so long ago that others took its cell.
    cdef const Eviction* cell
    if evictions.cells == NULL:
        return NULL
    cell = &evictions.cells[hash & evictions.mask]
    return cell if cell.number and cell.hash == hash else NULL


cdef inline size_t nbytes(const Evictions* evictions) noexcept:
    return 0 if evictions.cells == NULL else (<size_t>evictions.mask + 1) * sizeof(Eviction)


cdef inline void release(Evictions* evictions) noexcept:
    PyMem_Free(evictions.cells)
    evictions.cells = NULL
