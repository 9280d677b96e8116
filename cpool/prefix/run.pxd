# SPDX-License-Identifier: Apache-2.0
# The run of blocks that a group holds from the left of a prompt: most of what a lookup reads.
#
# A request that waits is looked up again in each step, and requests share what stands at their
# beginning. So the run of the last lookup is the guess for the next: a block that alone holds a
# row's key, and as its primary one, is what the table would answer, and the table is not read.
# The guess is never believed: it may be of another prompt, and its blocks may have lost their
# keys or taken others since.
#
# The other rows pass in stages, STRETCH rows at a time: each stage asks for the memory that the
# next one reads, one stretch later.
from cpool.core cimport batches, blocks, registry, table
from cpool.core.keys cimport Key, same_digest
from cpool.core.memory cimport prefetch
from cpool.core.registry cimport Core, Holder
from cpool.core.types cimport (
    block_id_t, hash_t, ref_t, space_t, uint8_t, uint32_t, uint64_t, NO_TOKENS_FLAG,
)
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.string cimport memcpy

cdef enum:
    STRETCH = 32        # rows; a power of two
    RING = 128          # rows in flight at once, at most: three stretches; a power of two
    STEADY = 8          # blocks in a row that lie side by side: the next one likely does too
    ONE_LINE = 64       # bytes: rows further apart are in cache lines of their own


cdef struct Guess:      # of one group
    block_id_t* ids     # the run of the last lookup
    size_t count
    size_t capacity
    uint8_t start       # the first byte of its first row


cdef inline void forget(Guess* guess) noexcept:
    PyMem_Free(guess.ids)
    guess.ids = NULL
    guess.count = 0
    guess.capacity = 0


cdef inline void remember(
    Guess* guess, const uint8_t* digests, const block_id_t* ids, size_t first, size_t count
) noexcept:
    # The run is `count` blocks, and the guess was right before `first`. Without memory for it
    # there is no guess.
    cdef void* fresh
    if count == first:
        return
    if count > guess.capacity:
        fresh = PyMem_Realloc(guess.ids, count * sizeof(block_id_t))
        if fresh == NULL:
            forget(guess)
            return
        guess.ids = <block_id_t*>fresh
        guess.capacity = count
    memcpy(guess.ids + first, ids + first, (count - first) * sizeof(block_id_t))
    guess.count = count
    guess.start = digests[0]


cdef inline bint holds_alone(
    const Core* core, block_id_t id, space_t space, const uint8_t* digest, uint32_t width
) noexcept:
    # Any other flag: the key is shared, or the table does not know it.
    return (core.blocks.keys[id].space & ~<space_t>NO_TOKENS_FLAG) == space and same_digest(
        blocks.digest_slot(&core.blocks, id), digest, width
    )


cdef inline void prefetch_row(const uint8_t* digest, uint32_t width) noexcept:
    # It may lie across two cache lines.
    prefetch(digest)
    prefetch(digest + width - 1)


cdef inline void prefetch_block(const Core* core, block_id_t id) noexcept:
    prefetch(&core.blocks.keys[id])
    prefetch(blocks.digest_slot(&core.blocks, id))


cdef inline size_t confirm(
    const Core* core, const uint8_t* digests, size_t row_bytes, size_t count, space_t space,
    const Guess* guess, block_id_t* found,
) noexcept:
    # Rows from the left for which the guess is right; `found` gets their blocks.
    cdef uint32_t width = core.spaces[space].width
    cdef size_t row, stop = min(count, guess.count)
    if stop == 0 or digests[0] != guess.start:
        # Another prompt's: nothing is read for it.
        return 0
    for row in range(min(stop, <size_t>STRETCH)):
        prefetch_block(core, guess.ids[row])
    for row in range(stop):
        if row + STRETCH < stop:
            prefetch_block(core, guess.ids[row + STRETCH])
        if not holds_alone(core, guess.ids[row], space, digests + row * row_bytes, width):
            return row
        found[row] = guess.ids[row]
    return stop


cdef inline ref_t first_ref(const Core* core, hash_t hash) noexcept:
    # What the first cell with that hash says, 0 when there is none.
    cdef uint64_t place = table.seek(&core.table, hash)
    return <ref_t>core.table.cells[place] if table.holds(&core.table, place, hash) else 0


cdef inline bint is_steady(const block_id_t* found, size_t row) noexcept:
    # Whether the last blocks before `row` lie side by side, up or down.
    cdef block_id_t distance
    if row <= STEADY:
        return False
    distance = found[row - 1] - found[row - 2]
    return distance + 1 <= 2 and found[row - 1] - found[row - 1 - STEADY] == STEADY * distance


cdef inline size_t find_staged(
    const Core* core, const uint8_t* digests, size_t row_bytes, size_t first, size_t count,
    space_t space, block_id_t* found,
) noexcept:
    # The first row from `first` on that nobody holds, or `count`; `found` gets the others'
    # first holders. The space exists, and so does the table.
    cdef hash_t hashes[RING]
    cdef ref_t refs[RING]
    cdef size_t asked = first   # rows before it have been asked for, where they lie far apart
    cdef size_t hashed = first  # ... have passed the first stage
    cdef size_t sought = first  # ... and the second
    cdef size_t row = first
    cdef uint32_t width = core.spaces[space].width
    cdef size_t i, stop
    cdef Holder holder
    cdef Key key
    key.space = space
    while row < count:
        if row_bytes > ONE_LINE:
            stop = min(count, row + 4 * STRETCH)
            for i in range(asked, stop):
                prefetch_row(digests + i * row_bytes, width)
            asked = stop
        stop = min(count, row + 3 * STRETCH)
        for i in range(hashed, stop):
            key.digest = digests + i * row_bytes
            hashes[i % RING] = registry.hash_of(core, &key)
            table.prefetch_home(&core.table, hashes[i % RING])
        hashed = stop
        stop = min(count, row + 2 * STRETCH)
        for i in range(sought, stop):
            refs[i % RING] = first_ref(core, hashes[i % RING])
            batches.prefetch_holder(core, refs[i % RING])
        sought = stop
        stop = min(count, row + STRETCH)
        while row < stop:
            key.digest = digests + row * row_bytes
            if not refs[row % RING]:
                return row
            # Of two keys with one hash the second one's cell is further on.
            if not registry.names(core, refs[row % RING], &key, &holder) and (
                not registry.find_first(core, &key, &holder)
            ):
                return row
            found[row] = holder.block
            row += 1
        if is_steady(found, row):
            row = batches.follow(core, digests, row_bytes, row, count, space, 0, found)
            asked = max(asked, row)
            hashed = max(hashed, row)
            sought = max(sought, row)
    return row


cdef inline size_t find_run(
    const Core* core, const uint8_t* digests, size_t row_bytes, size_t count, space_t space,
    Guess* guess, block_id_t* found,
) noexcept:
    # Rows from the left that have a holder; `found` gets the first one of each. Without a guess
    # (NULL) none is used and none kept.
    cdef size_t right = 0
    if guess == NULL:
        return find_staged(core, digests, row_bytes, 0, count, space, found)
    right = confirm(core, digests, row_bytes, count, space, guess, found)
    count = find_staged(core, digests, row_bytes, right, count, space, found)
    remember(guess, digests, found, right, count)
    return count
