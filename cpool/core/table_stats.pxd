# SPDX-License-Identifier: Apache-2.0
# How far the table's keys stand from their homes. Reads every cell: for tests and reports.
from cpool.core cimport table
from cpool.core.table cimport Table
from cpool.core.types cimport hash_t, uint64_t


cdef struct TableStats:
    uint64_t total_distance     # cells between home and place, summed over all keys
    uint64_t max_distance       # of any key: what the longest search reads
    uint64_t max_run            # used cells in a row: what the longest insert may move


cdef inline TableStats stats_of(const Table* t) noexcept:
    cdef TableStats stats
    cdef uint64_t place, distance, run = 0
    stats.total_distance = 0
    stats.max_distance = 0
    stats.max_run = 0
    for place in range(t.num_cells):
        if t.cells[place] == 0:
            run = 0
            continue
        run += 1
        stats.max_run = max(stats.max_run, run)
        distance = place - table.home(t, <hash_t>(t.cells[place] >> 32))
        if place < t.num_wrapped:
            distance += t.num_cells
        stats.total_distance += distance
        stats.max_distance = max(stats.max_distance, distance)
    return stats
