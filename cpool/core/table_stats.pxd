# SPDX-License-Identifier: Apache-2.0
# How far the table's keys stand from their homes. Reads every cell: for tests and reports.
from cpool.core cimport table
from cpool.core.table cimport Chunk, Table
from cpool.core.types cimport hash_t, uint32_t, uint64_t


cdef struct TableStats:
    uint64_t total_distance     # chunks between home and place, summed over all keys
    uint64_t max_distance       # of any key: what the longest search for one reads, but for one
    uint64_t max_run            # full chunks in a row, not round the end


cdef inline uint64_t distance_of(const Table* t, hash_t hash, uint64_t chunk) noexcept:
    cdef uint64_t home = table.home(t, hash)
    return chunk - home if chunk >= home else chunk + t.num_chunks - home


cdef inline TableStats stats_of(const Table* t) noexcept:
    cdef TableStats stats
    cdef const Chunk* chunk
    cdef uint64_t i, distance, run = 0
    cdef uint32_t cell
    stats.total_distance = 0
    stats.max_distance = 0
    stats.max_run = 0
    for i in range(t.num_chunks):
        chunk = &t.chunks[i]
        run = 0 if table.empty_cells(chunk) else run + 1
        stats.max_run = max(stats.max_run, run)
        for cell in range(table.CHUNK_CELLS):
            if chunk.refs[cell]:
                distance = distance_of(t, table.hash_at(chunk, cell), i)
                stats.total_distance += distance
                stats.max_distance = max(stats.max_distance, distance)
    return stats
