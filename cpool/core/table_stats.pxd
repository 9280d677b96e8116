# SPDX-License-Identifier: Apache-2.0
# How far the table's keys stand from their homes. Reads every cell: for tests and reports.
from cpool.core cimport cells
from cpool.core.cells cimport Cells, Chunk, CHUNK_CELLS
from cpool.core.table cimport Table
from cpool.core.types cimport hash_t, uint32_t, uint64_t


cdef struct TableStats:
    uint64_t total_distance     # chunks between home and place, summed over all keys
    uint64_t max_distance       # of any key: what the longest search for one reads, but for one
    uint64_t max_run            # full chunks in a row, not round the end
    # Chunks behind its home that a search for nothing reads, summed over all homes; not round
    # the end.
    uint64_t total_miss


cdef inline uint64_t distance_of(const Cells* c, hash_t hash, uint64_t chunk) noexcept:
    cdef uint64_t home = cells.home(c, hash)
    return chunk - home if chunk >= home else chunk + c.num_chunks - home


cdef inline TableStats stats_of(const Table* t) noexcept:
    cdef TableStats stats
    stats.total_distance = 0
    stats.max_distance = 0
    stats.max_run = 0
    stats.total_miss = 0
    add_stats_of(&t.cells, &stats)
    add_stats_of(&t.leaving, &stats)
    return stats


cdef inline void add_stats_of(const Cells* c, TableStats* stats) noexcept:
    cdef const Chunk* chunk
    cdef uint64_t i, distance, run = 0, passed = 0
    cdef uint32_t cell
    for i in range(c.num_chunks):
        chunk = &c.chunks[i]
        run = 0 if cells.empty_cells(chunk) else run + 1
        stats.max_run = max(stats.max_run, run)
        passed = passed + 1 if cells.num_passed(chunk) else 0
        stats.total_miss += passed      # one for each home from which a search goes on here
        for cell in range(CHUNK_CELLS):
            if chunk.refs[cell]:
                distance = distance_of(c, cells.hash_at(chunk, cell), i)
                stats.total_distance += distance
                stats.max_distance = max(stats.max_distance, distance)
