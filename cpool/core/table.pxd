# SPDX-License-Identifier: Apache-2.0
# The table: hash -> one word that says who holds the key. It grows a little at a time.
#
# The keys are in `cells`. When these get too full, a larger array takes their name, and the old
# one becomes `leaving`: each registration that is then made room for moves the keys of a few
# chunks, lowest hashes first. One number, `moved`, tells at any time which array a key is in: a
# look-up reads as many lines as ever, no call waits for all keys to move, and the kernel clears
# the new pages one after the other.
#
# A *place* (see cells.pxd) is in the array that the hash is in, and a key keeps it until the
# next reserve() or remove_at().
#
# The table knows no digest, no block and no ref_cnt. Two keys may share a hash: whoever asks
# compares the digests.
from cpool.core cimport cells, memory
from cpool.core.cells cimport Cells, Chunk, CHUNK_CELLS
from cpool.core.types cimport hash_t, ref_t, uint32_t, uint64_t

cdef enum:
    FILLED = 64             # per cent of the cells that a new table expects to use
    MAX_FILLED = 80         # beyond, many chunks are full, and searches grow long
    # Chunks to move for each key that is to come. While all leave, these are 3 % of the cells
    # that are left, so there is room for them in either array.
    CHUNKS_A_KEY = 4
    STEPS = 16              # in which memory is given back that all keys have left,
    MIN_STEP = 1024         # but so many chunks at least
    ALL_HASHES = 0x100000000


cdef struct Table:
    Cells cells
    Cells leaving           # without chunks, unless the table grows
    uint64_t moved          # hashes below it are in `cells`, all others in `leaving`
    uint64_t num_moved      # chunks of `leaving` that are no home any more
    uint64_t num_given_back     # of these, chunks whose memory is not counted
    uint64_t num_used       # cells, in both


cdef inline bint exists(const Table* table) noexcept:
    # Not before the first key.
    return table.cells.chunks != NULL


cdef inline size_t nbytes(const Table* table) noexcept:
    # In use: while the table grows, neither what all keys have left nor what none has reached.
    cdef uint64_t reached
    if table.leaving.chunks == NULL:
        return table.cells.array.nbytes
    reached = cells.home(&table.cells, <hash_t>table.moved)
    return table.leaving.array.nbytes + (reached - table.num_given_back) * sizeof(Chunk)


cdef inline const Cells* cells_of(const Table* table, hash_t hash) noexcept:
    # Where a key with that hash is, if it is.
    return &table.cells if hash < table.moved else &table.leaving


cdef inline void prefetch(const Table* table, hash_t hash) noexcept:
    cells.prefetch(cells_of(table, hash), hash)


cdef inline void prefetch_write(const Table* table, hash_t hash) noexcept:
    cells.prefetch_write(cells_of(table, hash), hash)


cdef inline void prefetch_search(const Table* table, hash_t hash) noexcept:
    cells.prefetch_search(cells_of(table, hash), hash)


cdef inline void prefetch_passed(const Table* table, hash_t hash) noexcept:
    # Nothing, where no key was ever registered.
    if exists(table):
        cells.prefetch_passed(cells_of(table, hash), hash)


cdef inline ref_t ref_at(const Table* table, hash_t hash, uint64_t place) noexcept:
    return cells.ref_at(cells_of(table, hash), place)


cdef inline void set_ref_at(Table* table, hash_t hash, uint64_t place, ref_t ref) noexcept:
    cells.set_ref_at(<Cells*>cells_of(table, hash), place, ref)


cdef inline uint64_t seek(const Table* table, hash_t hash) noexcept:
    # The first place with that hash, or NOWHERE.
    return cells.seek(cells_of(table, hash), hash)


cdef inline uint64_t seek_next(const Table* table, hash_t hash, uint64_t place) noexcept:
    # The next place with that hash behind one that has it, or NOWHERE.
    return cells.seek_next(cells_of(table, hash), hash, place)


cdef inline ref_t glance(const Table* table, hash_t hash) noexcept:
    # As cells.glance().
    return cells.glance(cells_of(table, hash), hash)


cdef inline uint64_t find_cell(const Table* table, hash_t hash, ref_t ref) noexcept:
    # The place of (hash, ref), which must exist.
    return cells.find_cell(cells_of(table, hash), hash, ref)


cdef inline void insert(Table* table, hash_t hash, ref_t ref) noexcept:
    # After reserve().
    cells.insert(<Cells*>cells_of(table, hash), hash, ref)
    table.num_used += 1


cdef inline bint insert_first(Table* table, hash_t hash, ref_t ref) noexcept:
    # After reserve(): as insert(), unless a cell has the hash. Whether none had.
    cdef bint done = cells.insert_first(<Cells*>cells_of(table, hash), hash, ref)
    table.num_used += done
    return done


cdef inline void remove_at(Table* table, hash_t hash, uint64_t place) noexcept:
    cdef Cells* of = <Cells*>cells_of(table, hash)
    cells.remove_at(of, hash, place)
    cells.refill(of, place)
    table.num_used -= 1


# Growth -----------------------------------------------------------------------------------

cdef inline uint64_t max_used(const Table* table) noexcept:
    return cells.num_cells(&table.cells) * MAX_FILLED // 100


cdef inline void move_home(Table* table) noexcept:
    # The keys leave whose home is the next chunk of `leaving`. Those of the chunks before it have
    # left, so these have the lowest hashes; what stands here from behind the last chunk has
    # higher ones.
    cdef Cells* old = &table.leaving
    cdef uint64_t home = table.num_moved
    cdef uint64_t at = home
    cdef uint32_t used, cell
    cdef hash_t hash
    table.num_moved += 1
    table.moved = cells.first_hash(old, table.num_moved)
    while True:
        used = cells.used_cells(&old.chunks[at])
        while used:
            cell = cells.lowest_bit(used)
            used &= used - 1
            hash = cells.hash_at(&old.chunks[at], cell)
            if hash < table.moved:
                cells.insert(&table.cells, hash, old.chunks[at].refs[cell])
                cells.remove_at(old, hash, at * CHUNK_CELLS + cell)
        # Each that stands further on had to pass its home and all between.
        if not cells.num_passed(&old.chunks[home]) or not cells.num_passed(&old.chunks[at]):
            return
        at = cells.next_chunk(old, at)
        if at == home:
            return


cdef inline void give_back(Table* table) noexcept:
    # Memory of chunks that are no home any more. Where keys from behind the last chunk stand in
    # them, the first ones were passed by these; behind one that was not, all are empty.
    cdef uint64_t first = 0
    while first < table.num_moved and cells.num_passed(&table.leaving.chunks[first]):
        first += 1
    first = max(first + 1, table.num_given_back)
    if first < table.num_moved:
        memory.give_back_pages(
            &table.leaving.chunks[first], (table.num_moved - first) * sizeof(Chunk)
        )
    table.num_given_back = table.num_moved


cdef inline void move(Table* table, uint64_t num_chunks) noexcept:
    # The keys of so many chunks, if the table grows and as many are left.
    if table.leaving.chunks == NULL:
        return
    num_chunks = min(num_chunks, table.leaving.num_chunks - table.num_moved)
    while num_chunks:
        move_home(table)
        num_chunks -= 1
    if table.num_moved == table.leaving.num_chunks:
        cells.release(&table.leaving)
        table.num_given_back = 0
        table.moved = ALL_HASHES
    elif table.num_moved - table.num_given_back >= max(
        MIN_STEP, table.leaving.num_chunks // STEPS
    ):
        give_back(table)


cdef inline int grow(Table* table, uint64_t wanted_cells) except -1:
    cdef Cells fresh
    cells.allocate(&fresh, wanted_cells)
    table.leaving = table.cells
    table.cells = fresh
    table.num_moved = 0
    table.moved = ALL_HASHES if table.leaving.chunks == NULL else 0
    return 0


cdef inline uint64_t first_size(uint64_t num_expected) noexcept:
    # Cells that a new table has at least.
    return num_expected * 100 // FILLED


cdef inline int reserve(Table* table, uint64_t num_new, uint64_t num_expected) except -1:
    # Afterwards `num_new` inserts succeed. The first call sizes the table for `num_expected`
    # keys, so that a pool with one key a block never grows it.
    cdef uint64_t needed = table.num_used + num_new
    if not exists(table):
        grow(table, first_size(max(needed, num_expected)))
    elif needed > max_used(table):
        move(table, table.leaving.num_chunks)
        grow(table, max(cells.num_cells(&table.cells) * 53 // 50, needed * 4 // 3))
    move(table, num_new * CHUNKS_A_KEY)
    return 0


cdef inline void release(Table* table) noexcept:
    cells.release(&table.cells)
    cells.release(&table.leaving)
    table.num_given_back = 0
    table.num_used = 0


cdef inline void touch(const Table* table) noexcept:
    memory.touch(&table.cells.array)


cdef inline int prepare(Table* table, uint64_t num_expected) except -1:
    # The memory for that many keys is taken now, where there is no table yet.
    reserve(table, 0, num_expected)
    touch(table)
    return 0


cdef inline void clear(Table* table, uint64_t num_expected) noexcept:
    # No key is left. As prepare() made it, the table stays; one that is larger goes, and another
    # takes its place. If there is no memory for that, the next reserve() asks again.
    if table.leaving.chunks == NULL and exists(table) and (
        table.cells.num_chunks == cells.num_chunks_for(first_size(num_expected))
    ):
        cells.clear_all(&table.cells)
        table.num_used = 0
        return
    release(table)
    try:
        prepare(table, num_expected)
    except MemoryError:
        pass
