# SPDX-License-Identifier: Apache-2.0
# One array of the table's cells: hash -> ref. Open addressing, a cache line at a time.
#
# A *chunk* is one cache line: the hashes of eight cells, then their refs. The home of a hash is
# the chunk hash * num_chunks >> 32. A key is in its home, or, if that was full, in the next chunk
# that was not: linear probing, with chunks for cells. Eight hashes are compared at once, so a
# search hardly ever branches on what nobody can guess: how far from its home a key stands.
#
#   - Each chunk counts the keys that had to pass it. A search, hit or miss, ends where nobody
#     passed: most often it reads one line. The count is in the line, too: hashes are even, and
#     the lowest bits of the eight hashes, used or not, are its bits.
#   - A remove empties the cell and counts back: no tombstones. Where a key had to pass, one
#     comes back (see refill()): else keys would never return to their homes, and searches for
#     what is not there would grow longer with age, five times at 64 % full.
#   - Homes rise with hashes: whoever moves keys to a larger array reads no key, and passes once
#     over both (see table.pxd).
#   - Any size will do, not only powers of two.
#
# A ref of 0 is EMPTY. Behind the last chunk comes the first. A *place* is a cell's number,
# 8 * chunk + cell, and a key's own until the next refill().
from cpool.core cimport memory
from cpool.core.memory cimport Array
from cpool.core.types cimport hash_t, ref_t, uint32_t, uint64_t
from libc.string cimport memset

cdef extern from * nogil:
    """
    #include <stdint.h>
    #ifdef __SSE2__
    #include <emmintrin.h>
    #endif

    enum { CPOOL_CHUNK_CELLS = 8 };

    typedef struct {
        uint32_t hashes[CPOOL_CHUNK_CELLS];
        uint32_t refs[CPOOL_CHUNK_CELLS];
    } cpool_chunk;

    /* Bit i: word i of eight, without the bits of `ignored`, equals `wanted`. */
    static inline uint32_t cpool_equal_words(const uint32_t *words, uint32_t wanted,
                                             uint32_t ignored) {
    #ifdef __SSE2__
        __m128i all = _mm_set1_epi32((int)wanted);
        __m128i drop = _mm_set1_epi32((int)ignored);
        __m128i low = _mm_load_si128((const __m128i *)words);
        __m128i high = _mm_load_si128((const __m128i *)words + 1);
        low = _mm_cmpeq_epi32(_mm_andnot_si128(drop, low), all);
        high = _mm_cmpeq_epi32(_mm_andnot_si128(drop, high), all);
        __m128i both = _mm_packs_epi32(low, high);
        return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(both, _mm_setzero_si128()));
    #else
        uint32_t mask = 0;
        for (int i = 0; i < CPOOL_CHUNK_CELLS; i++)
            mask |= (uint32_t)((words[i] & ~ignored) == wanted) << i;
        return mask;
    #endif
    }

    /* Bit i: the lowest bit of word i of eight. */
    static inline uint32_t cpool_lowest_bits(const uint32_t *words) {
    #ifdef __SSE2__
        __m128i low = _mm_slli_epi32(_mm_load_si128((const __m128i *)words), 31);
        __m128i high = _mm_slli_epi32(_mm_load_si128((const __m128i *)words + 1), 31);
        return (uint32_t)_mm_movemask_ps(_mm_castsi128_ps(low))
             | (uint32_t)_mm_movemask_ps(_mm_castsi128_ps(high)) << 4;
    #else
        uint32_t bits = 0;
        for (int i = 0; i < CPOOL_CHUNK_CELLS; i++) bits |= (words[i] & 1) << i;
        return bits;
    #endif
    }

    /* The lowest bit of word i of eight becomes bit i of `bits`. */
    static inline void cpool_set_lowest_bits(uint32_t *words, uint32_t bits) {
    #ifdef __SSE2__
        __m128i one = _mm_set1_epi32(1);
        __m128i all = _mm_set1_epi32((int)bits);
        for (int i = 0; i < 2; i++) {
            __m128i own = i ? _mm_setr_epi32(16, 32, 64, 128) : _mm_setr_epi32(1, 2, 4, 8);
            __m128i set = _mm_cmpeq_epi32(_mm_and_si128(all, own), own);
            __m128i *four = (__m128i *)words + i;
            __m128i rest = _mm_andnot_si128(one, _mm_load_si128(four));
            _mm_store_si128(four, _mm_or_si128(rest, _mm_and_si128(set, one)));
        }
    #else
        for (int i = 0; i < CPOOL_CHUNK_CELLS; i++)
            words[i] = (words[i] & ~(uint32_t)1) | (bits >> i & 1);
    #endif
    }

    /* Bit i: the home of word i of eight, word * num_chunks >> 32, is `chunk`. */
    static inline uint32_t cpool_at_home(const uint32_t *words, uint32_t ignored,
                                         uint32_t num_chunks, uint32_t chunk) {
    #ifdef __SSE2__
        uint32_t mask = 0;
        __m128i factor = _mm_set1_epi32((int)num_chunks);
        __m128i all = _mm_set1_epi32((int)chunk);
        __m128i drop = _mm_set1_epi32((int)ignored);
        for (int i = 0; i < 2; i++) {
            __m128i four = _mm_andnot_si128(drop, _mm_load_si128((const __m128i *)words + i));
            __m128i even = _mm_srli_epi64(_mm_mul_epu32(four, factor), 32);
            __m128i odd = _mm_mul_epu32(_mm_srli_epi64(four, 32), factor);
            odd = _mm_slli_epi64(_mm_srli_epi64(odd, 32), 32);
            four = _mm_cmpeq_epi32(_mm_or_si128(even, odd), all);
            mask |= (uint32_t)_mm_movemask_ps(_mm_castsi128_ps(four)) << 4 * i;
        }
        return mask;
    #else
        uint32_t mask = 0;
        for (int i = 0; i < CPOOL_CHUNK_CELLS; i++)
            mask |= (uint32_t)((uint64_t)(words[i] & ~ignored) * num_chunks >> 32 == chunk) << i;
        return mask;
    #endif
    }

    static inline uint32_t cpool_lowest_bit(uint32_t mask) {
        return (uint32_t)__builtin_ctz(mask);
    }
    """
    enum:
        CHUNK_CELLS "CPOOL_CHUNK_CELLS"

    ctypedef struct Chunk "cpool_chunk":
        hash_t hashes[8]
        ref_t refs[8]

    uint32_t equal_words "cpool_equal_words"(
        const uint32_t* words, uint32_t wanted, uint32_t ignored
    ) noexcept
    uint32_t lowest_bits "cpool_lowest_bits"(const uint32_t* words) noexcept
    void set_lowest_bits "cpool_set_lowest_bits"(uint32_t* words, uint32_t bits) noexcept
    uint32_t at_home "cpool_at_home"(
        const uint32_t* words, uint32_t ignored, uint32_t num_chunks, uint32_t chunk
    ) noexcept
    uint32_t lowest_bit "cpool_lowest_bit"(uint32_t mask) noexcept

cdef enum:
    NOWHERE = 0xFFFFFFFFFFFFFFFF    # no cell has the hash
    ALL_CELLS = 0xFF                # a bit for each cell of a chunk
    COUNT_BIT = 1                   # of a hash: no part of it, a bit of its chunk's count
    # What glance() answers where it has no ref. No ref is as small.
    UNSURE = 0
    ABSENT = 1
    MANY = 255                      # keys passed a chunk: no longer counted, up or down
    MAX_REFILLS = 2                 # keys that move for one remove; more hardly shorten a search


cdef struct Cells:
    Array array
    Chunk* chunks           # NULL while there are none
    uint64_t num_chunks


cdef inline uint64_t num_cells(const Cells* cells) noexcept:
    return cells.num_chunks * CHUNK_CELLS


cdef inline uint64_t home(const Cells* cells, hash_t hash) noexcept:
    return (<uint64_t>hash * cells.num_chunks) >> 32


cdef inline uint64_t next_chunk(const Cells* cells, uint64_t chunk) noexcept:
    chunk += 1
    return chunk if chunk < cells.num_chunks else 0


cdef inline uint32_t empty_cells(const Chunk* chunk) noexcept:
    # Bit i: cell i is EMPTY.
    return equal_words(chunk.refs, 0, 0)


cdef inline uint32_t used_cells(const Chunk* chunk) noexcept:
    # Bit i: cell i is used.
    return empty_cells(chunk) ^ ALL_CELLS


cdef inline uint32_t matches(const Chunk* chunk, hash_t hash) noexcept:
    # Bit i: cell i is used and has the hash.
    return equal_words(chunk.hashes, hash, COUNT_BIT) & used_cells(chunk)


cdef inline uint32_t num_passed(const Chunk* chunk) noexcept:
    # Keys that had to pass the chunk, up to MANY.
    return lowest_bits(chunk.hashes)


cdef inline void set_num_passed(Chunk* chunk, uint32_t count) noexcept:
    set_lowest_bits(chunk.hashes, count)


cdef inline hash_t hash_at(const Chunk* chunk, uint32_t cell) noexcept:
    return chunk.hashes[cell] & ~<hash_t>COUNT_BIT


cdef inline void fill(Chunk* chunk, uint32_t cell, hash_t hash, ref_t ref) noexcept:
    chunk.hashes[cell] = hash | (chunk.hashes[cell] & COUNT_BIT)
    chunk.refs[cell] = ref


cdef inline void prefetch(const Cells* cells, hash_t hash) noexcept:
    memory.prefetch(&cells.chunks[home(cells, hash)])


cdef inline void prefetch_write(const Cells* cells, hash_t hash) noexcept:
    memory.prefetch_write(&cells.chunks[home(cells, hash)])


cdef inline void prefetch_search(const Cells* cells, hash_t hash) noexcept:
    # Where the table is more than 64 % full, every other search goes on to the next chunk.
    cdef uint64_t chunk = home(cells, hash)
    memory.prefetch_write(&cells.chunks[chunk])
    memory.prefetch_write(&cells.chunks[next_chunk(cells, chunk)])


cdef inline ref_t ref_at(const Cells* cells, uint64_t place) noexcept:
    return cells.chunks[place // CHUNK_CELLS].refs[place % CHUNK_CELLS]


cdef inline void set_ref_at(Cells* cells, uint64_t place, ref_t ref) noexcept:
    cells.chunks[place // CHUNK_CELLS].refs[place % CHUNK_CELLS] = ref


cdef inline uint64_t seek_behind(const Cells* cells, hash_t hash, uint64_t chunk) noexcept:
    # The first cell with that hash behind `chunk`, or NOWHERE. At most round to the home.
    cdef uint64_t start = home(cells, hash)
    cdef uint32_t found
    while num_passed(&cells.chunks[chunk]):
        chunk = next_chunk(cells, chunk)
        if chunk == start:
            break
        found = matches(&cells.chunks[chunk], hash)
        if found:
            return chunk * CHUNK_CELLS + lowest_bit(found)
    return NOWHERE


cdef inline uint64_t seek(const Cells* cells, hash_t hash) noexcept:
    # The first cell with that hash, or NOWHERE.
    cdef uint64_t chunk = home(cells, hash)
    cdef uint32_t found = matches(&cells.chunks[chunk], hash)
    if found:
        return chunk * CHUNK_CELLS + lowest_bit(found)
    return seek_behind(cells, hash, chunk)


cdef inline ref_t glance(const Cells* cells, hash_t hash) noexcept:
    # What a search for the hash will most likely find, from its home alone: a ref, or ABSENT if
    # no cell has the hash. Anything else (see UNSURE) is for seek() to say; the chunk that it
    # will read next is asked for.
    cdef uint64_t chunk = home(cells, hash)
    cdef uint32_t found = equal_words(cells.chunks[chunk].hashes, hash, COUNT_BIT)
    if found:
        # An EMPTY cell may have it, too: UNSURE.
        return cells.chunks[chunk].refs[lowest_bit(found)]
    if num_passed(&cells.chunks[chunk]):
        memory.prefetch(&cells.chunks[next_chunk(cells, chunk)])
        return UNSURE
    return ABSENT


cdef inline uint64_t seek_next(const Cells* cells, hash_t hash, uint64_t place) noexcept:
    # The next cell with that hash behind one that has it, or NOWHERE.
    cdef uint64_t chunk = place // CHUNK_CELLS
    cdef uint32_t found = matches(&cells.chunks[chunk], hash) >> (place % CHUNK_CELLS) >> 1
    if found:
        return place + 1 + lowest_bit(found)
    return seek_behind(cells, hash, chunk)


cdef inline uint64_t find_cell(const Cells* cells, hash_t hash, ref_t ref) noexcept:
    # The cell of (hash, ref), which must exist.
    cdef uint64_t chunk = home(cells, hash)
    cdef uint32_t found
    while True:
        found = equal_words(cells.chunks[chunk].hashes, hash, COUNT_BIT)
        found &= equal_words(cells.chunks[chunk].refs, ref, 0)
        if found:
            return chunk * CHUNK_CELLS + lowest_bit(found)
        chunk = next_chunk(cells, chunk)


cdef inline uint64_t find_ref(const Cells* cells, hash_t hash, ref_t ref) noexcept:
    # As find_cell(), of a ref that no other cell has: no hash is compared.
    cdef uint64_t chunk = home(cells, hash)
    cdef uint32_t found = equal_words(cells.chunks[chunk].refs, ref, 0)
    while not found:
        chunk = next_chunk(cells, chunk)
        found = equal_words(cells.chunks[chunk].refs, ref, 0)
    return chunk * CHUNK_CELLS + lowest_bit(found)


cdef inline void insert(Cells* cells, hash_t hash, ref_t ref) noexcept:
    # There must be an EMPTY cell.
    cdef uint64_t chunk = home(cells, hash)
    cdef uint32_t empty = empty_cells(&cells.chunks[chunk])
    cdef uint32_t count
    while empty == 0:
        count = num_passed(&cells.chunks[chunk])
        if count != MANY:
            set_num_passed(&cells.chunks[chunk], count + 1)
        chunk = next_chunk(cells, chunk)
        empty = empty_cells(&cells.chunks[chunk])
    fill(&cells.chunks[chunk], lowest_bit(empty), hash, ref)


cdef inline bint insert_first(Cells* cells, hash_t hash, ref_t ref) noexcept:
    # As insert(), unless a cell has the hash. Whether none had.
    cdef uint64_t chunk = home(cells, hash)
    cdef uint32_t used = used_cells(&cells.chunks[chunk])
    if equal_words(cells.chunks[chunk].hashes, hash, COUNT_BIT) & used:
        return False
    if seek_behind(cells, hash, chunk) != NOWHERE:
        return False
    if used == ALL_CELLS:
        insert(cells, hash, ref)
    else:
        fill(&cells.chunks[chunk], lowest_bit(used ^ ALL_CELLS), hash, ref)
    return True


cdef inline void clear(Chunk* chunk, uint32_t cell) noexcept:
    chunk.refs[cell] = 0
    # Of another home now, so that a glance is not led here.
    chunk.hashes[cell] ^= ~<hash_t>COUNT_BIT


cdef inline void count_back(Chunk* chunk) noexcept:
    # A key does not pass the chunk any more.
    cdef uint32_t count = num_passed(chunk)
    if count != MANY:
        set_num_passed(chunk, count - 1)


cdef inline void remove_at(Cells* cells, hash_t hash, uint64_t place) noexcept:
    # `place` has that hash. No other key moves.
    cdef uint64_t chunk = home(cells, hash)
    clear(&cells.chunks[place // CHUNK_CELLS], place % CHUNK_CELLS)
    while chunk != place // CHUNK_CELLS:
        count_back(&cells.chunks[chunk])
        chunk = next_chunk(cells, chunk)


cdef inline uint32_t strangers(const Cells* cells, uint64_t chunk) noexcept:
    # Bit i: cell i has a key whose home is another chunk.
    return used_cells(&cells.chunks[chunk]) & ~at_home(
        cells.chunks[chunk].hashes, COUNT_BIT, <uint32_t>cells.num_chunks, <uint32_t>chunk
    )


cdef inline void refill(Cells* cells, uint64_t place) noexcept:
    # The cell was emptied. A stranger in the next chunk passed this one: it comes back, and
    # leaves a cell there in the same way. Most often nobody passed, or who did stands there.
    cdef uint64_t chunk = place // CHUNK_CELLS
    cdef uint64_t behind
    cdef uint32_t cell, found
    cdef uint32_t empty = place % CHUNK_CELLS
    cdef uint32_t left = MAX_REFILLS
    while left and num_passed(&cells.chunks[chunk]):
        left -= 1
        behind = next_chunk(cells, chunk)
        found = strangers(cells, behind)
        if not found:
            return
        cell = lowest_bit(found)
        fill(
            &cells.chunks[chunk], empty, hash_at(&cells.chunks[behind], cell),
            cells.chunks[behind].refs[cell],
        )
        clear(&cells.chunks[behind], cell)
        count_back(&cells.chunks[chunk])
        chunk = behind
        empty = cell


cdef inline void prefetch_passed(const Cells* cells, hash_t hash) noexcept:
    # What a remove of the hash, or a search that does not find it in its home, reads beside that,
    # if anything: whatever passed it.
    cdef uint64_t chunk = home(cells, hash)
    if num_passed(&cells.chunks[chunk]):
        memory.prefetch_write(&cells.chunks[next_chunk(cells, chunk)])


cdef inline uint64_t first_hash(const Cells* cells, uint64_t chunk) noexcept:
    # Hashes from there on have their homes in `chunk` or behind it. Behind the last: 1 << 32.
    return ((chunk << 32) + cells.num_chunks - 1) // cells.num_chunks


cdef inline uint64_t num_chunks_for(uint64_t wanted_cells) noexcept:
    # A cell more than are wanted, at least.
    return wanted_cells // CHUNK_CELLS + 1


cdef inline int allocate(Cells* cells, uint64_t wanted_cells) except -1:
    # Fills in all fields.
    cells.num_chunks = num_chunks_for(wanted_cells)
    memory.allocate(&cells.array, cells.num_chunks, sizeof(Chunk))
    cells.chunks = <Chunk*>cells.array.data
    return 0


cdef inline void clear_all(Cells* cells) noexcept:
    memset(cells.chunks, 0, cells.num_chunks * sizeof(Chunk))


cdef inline void release(Cells* cells) noexcept:
    memory.release(&cells.array)
    cells.chunks = NULL
    cells.num_chunks = 0
