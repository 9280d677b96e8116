# SPDX-License-Identifier: Apache-2.0
# The table: hash -> one word that says who holds the key. Open addressing, ordered.
#
# A cell is hash << 32 | ref. The home of a hash is hash * num_cells >> 32, so homes rise with
# hashes and a run of used cells is sorted by hash (linear probing kept in order: Amble and
# Knuth, 1974). That gives three things:
#   - a search, hit or miss, ends at the first larger hash;
#   - a rehash is one pass over the old array and one over the new, no key is read again;
#   - any size will do, not only powers of two.
# Cells: EMPTY (0) -> used on insert, used -> EMPTY on remove (later cells of the run shift
# back, so there are no tombstones). At least one cell stays EMPTY, or a search never ends.
#
# A run that reaches the end goes on at cell 0: the first `num_wrapped` cells belong to homes at
# the end. cells[num_cells] is a guard that is always EMPTY.
#
# The table knows no digest, no block and no ref_cnt. Two keys may share a hash: whoever asks
# compares the digests.
from cpool.core cimport memory
from cpool.core.memory cimport Array
from cpool.core.types cimport cell_t, hash_t, ref_t, uint64_t


cdef struct Table:
    Array array
    cell_t* cells           # num_cells + 1 of them, NULL while nothing is registered
    uint64_t num_cells
    uint64_t num_used
    uint64_t num_wrapped


cdef inline cell_t make_cell(hash_t hash, ref_t ref) noexcept:
    return (<cell_t>hash << 32) | ref


cdef inline uint64_t home(const Table* table, hash_t hash) noexcept:
    return (<uint64_t>hash * table.num_cells) >> 32


cdef inline uint64_t seek(const Table* table, hash_t hash) noexcept:
    # The first cell that is EMPTY or whose hash is not smaller: where `hash` is or would go.
    cdef uint64_t place = home(table, hash)
    cdef const cell_t* cells = table.cells
    if place < table.num_wrapped:
        place = table.num_wrapped
    while cells[place] and <hash_t>(cells[place] >> 32) < hash:
        place += 1
    if place == table.num_cells:
        place = 0
        while place < table.num_wrapped and <hash_t>(cells[place] >> 32) < hash:
            place += 1
    return place


cdef inline void prefetch_home(const Table* table, hash_t hash) noexcept:
    memory.prefetch(&table.cells[home(table, hash)])


cdef inline void prefetch_run(const Table* table, hash_t hash) noexcept:
    # For a change: it moves the cells behind, often into the next line.
    cdef uint64_t place = home(table, hash)
    memory.prefetch_write(&table.cells[place])
    memory.prefetch_write(&table.cells[min(place + 4, table.num_cells)])


cdef inline uint64_t following(const Table* table, uint64_t place) noexcept:
    place += 1
    return place if place < table.num_cells else 0


cdef inline bint holds(const Table* table, uint64_t place, hash_t hash) noexcept:
    return table.cells[place] != 0 and <hash_t>(table.cells[place] >> 32) == hash


cdef inline uint64_t find_cell(const Table* table, hash_t hash, ref_t ref) noexcept:
    # The cell of (hash, ref), which must exist.
    cdef uint64_t place = seek(table, hash)
    while table.cells[place] != make_cell(hash, ref):
        place = following(table, place)
    return place


cdef inline void insert_at(Table* table, uint64_t place, hash_t hash, ref_t ref) noexcept:
    # `place` is where seek() and the equal hashes behind it end. There must be two EMPTY
    # cells (reserve). Equal hashes stay in order of insertion.
    cdef cell_t carried = make_cell(hash, ref)
    cdef cell_t displaced
    if home(table, hash) > place:
        table.num_wrapped += 1
    while True:
        displaced = table.cells[place]
        table.cells[place] = carried
        if displaced == 0:
            break
        carried = displaced
        place += 1
        if place == table.num_cells:
            place = 0
            table.num_wrapped += 1
    table.num_used += 1


cdef inline void insert(Table* table, hash_t hash, ref_t ref) noexcept:
    cdef uint64_t place = seek(table, hash)
    while holds(table, place, hash):
        place = following(table, place)
    insert_at(table, place, hash, ref)


cdef inline void remove_at(Table* table, uint64_t place) noexcept:
    cdef uint64_t after
    cdef cell_t cell
    if place < table.num_wrapped:
        table.num_wrapped -= 1
    while True:
        after = following(table, place)
        cell = table.cells[after]
        if cell == 0 or home(table, <hash_t>(cell >> 32)) == after:
            break
        if after == 0:
            table.num_wrapped -= 1
        table.cells[place] = cell
        place = after
    table.cells[place] = 0
    table.num_used -= 1


cdef inline void fill_from(Table* table, const Table* old) noexcept:
    # One pass over both arrays. What would pass the end is put in at the front afterwards.
    # An EMPTY cell is written too, to where the next used one goes: no branch, for a third of
    # the cells are EMPTY and nobody can guess which.
    cdef uint64_t next_free = 0
    cdef uint64_t place, i
    cdef cell_t cell
    for i in range(old.num_cells):
        # In order of hash: the wrapped cells come last.
        place = i + old.num_wrapped
        if place >= old.num_cells:
            place -= old.num_cells
        cell = old.cells[place]
        place = home(table, <hash_t>(cell >> 32))
        place = next_free if place < next_free else place
        if place >= table.num_cells:
            if cell:
                insert(table, <hash_t>(cell >> 32), <ref_t>cell)
            continue
        table.cells[place] = cell
        table.num_used += cell != 0
        next_free = place + (cell != 0)


cdef inline uint64_t wanted_cells(uint64_t num_keys) noexcept:
    # 70 % full. On average a hit then reads 2.2 cells and an insert moves 3.
    return num_keys + num_keys * 3 // 7 + 2


cdef inline uint64_t max_keys(uint64_t num_cells) noexcept:
    # 85 % full at most: beyond, runs grow quickly.
    return num_cells * 85 // 100 - 1 if num_cells > 4 else 0


cdef inline int resize(Table* table, uint64_t num_cells) except -1:
    cdef Table fresh
    fresh.num_cells = num_cells
    fresh.num_used = 0
    fresh.num_wrapped = 0
    memory.allocate(&fresh.array, num_cells + 1, sizeof(cell_t))
    # Nothing below can fail.
    fresh.cells = <cell_t*>fresh.array.data
    if table.num_used:
        fill_from(&fresh, table)
    memory.release(&table.array)
    table[0] = fresh
    return 0


cdef inline int reserve(Table* table, uint64_t num_new, uint64_t num_expected) except -1:
    # Afterwards `num_new` inserts succeed. The first call sizes the table for `num_expected`
    # keys, so that a pool with one key a block never rehashes.
    cdef uint64_t needed = table.num_used + num_new
    if table.cells == NULL:
        resize(table, wanted_cells(max(needed, num_expected)))
    elif needed > max_keys(table.num_cells):
        resize(table, max(table.num_cells + table.num_cells // 10, needed * 5 // 4) + 8)
    return 0


cdef inline void release(Table* table) noexcept:
    memory.release(&table.array)
    table.cells = NULL
    table.num_cells = 0
    table.num_used = 0
    table.num_wrapped = 0
