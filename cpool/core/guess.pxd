# SPDX-License-Identifier: Apache-2.0
# The longest run of registered rows, and the run of the last look-up as a guess for the next: a
# request that waits is looked up in each step, and requests share what stands at their beginning.
#
# A block that holds a row's key alone is what the table would answer, so the table is not read
# where the guess is right. It is never believed: it may be of another prompt, and its blocks may
# have lost their keys or taken others since.
from cpool.core cimport batches, blocks, registry
from cpool.core.blocks cimport key_at
from cpool.core.memory cimport prefetch
from cpool.core.registry cimport Core
from cpool.core.types cimport block_id_t, space_t, uint8_t, uint32_t
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.string cimport memcpy

cdef enum:
    AHEAD = 32              # blocks whose memory is asked for before they are compared
    NUM_GUESSES = 4         # of a pool: the spaces take turns, and most pools have one or two


cdef struct Guess:          # of one group; zero-filled when there is none
    block_id_t* ids
    size_t count
    size_t capacity
    uint8_t start           # first byte of the first row's digest


cdef inline size_t nbytes(const Guess* guess) noexcept:
    return guess.capacity * sizeof(block_id_t)


cdef inline void forget(Guess* guess) noexcept:
    PyMem_Free(guess.ids)
    guess.ids = NULL
    guess.count = 0
    guess.capacity = 0


cdef inline void remember(
    Guess* guess, const uint8_t* digests, const block_id_t* ids, size_t num_right, size_t count
) noexcept:
    # The run was `ids`; the guess was right for the first `num_right` of them. Where that is
    # all, it may well be right beyond. Without memory there is no guess.
    cdef void* fresh
    if count == num_right:
        return
    if count > guess.capacity:
        fresh = PyMem_Realloc(guess.ids, count * sizeof(block_id_t))
        if fresh == NULL:
            forget(guess)
            return
        guess.ids = <block_id_t*>fresh
        guess.capacity = count
    memcpy(guess.ids + num_right, ids + num_right, (count - num_right) * sizeof(block_id_t))
    guess.count = count
    guess.start = digests[0]


cdef inline void prefetch_block(const Core* core, block_id_t id) noexcept:
    prefetch(&key_at(&core.blocks, id).space)
    prefetch(blocks.digest_slot(&core.blocks, id))


cdef inline size_t confirm(
    const Guess* guess, const Core* core, const uint8_t* digests, size_t row_bytes,
    size_t count, space_t space, block_id_t* found,
) noexcept:
    # Rows from the left for which the guess is right; `found` gets their blocks.
    cdef uint32_t width = core.spaces[space].width
    cdef size_t row, stop = min(count, guess.count)
    if stop == 0 or guess.start != digests[0]:
        # Another prompt's: no block is read for it.
        return 0
    for row in range(min(stop, <size_t>AHEAD)):
        prefetch_block(core, guess.ids[row])
    for row in range(stop):
        if row + AHEAD < stop:
            prefetch_block(core, guess.ids[row + AHEAD])
        if not registry.holds_alone(
            core, guess.ids[row], space, digests + row * row_bytes, width
        ):
            return row
        found[row] = guess.ids[row]
    return stop


cdef inline size_t find_run(
    const Core* core, const uint8_t* digests, size_t row_bytes, size_t count, space_t space,
    Guess* guess, block_id_t* found,
) noexcept:
    # Rows before the first that nobody holds; `found` gets their first holders. The space
    # exists, and so does the table. `guess` may be NULL.
    cdef size_t right = 0
    if guess != NULL:
        right = confirm(guess, core, digests, row_bytes, count, space, found)
    if right < count:
        count = right + batches.find_batch(
            core, digests + right * row_bytes, row_bytes, count - right, space, 0, True,
            found + right,
        )
    if guess != NULL:
        remember(guess, digests, found, right, count)
    return count
