# SPDX-License-Identifier: Apache-2.0
# Live handles: block id -> the one object that stands for the block.
#
# Few blocks have a handle at a time, as a rule those that requests hold. So the map is a hash
# table of its own size; from two thirds of a pointer per block on it is an array with a place
# for every block, and never takes more than that.
#
#     hashed: place = what multiplication makes of the id, then the next free one (linear
#             probing; what leaves is filled up from behind, so there are no tombstones)
#     direct: place = id
#
# References are borrowed: a handle takes itself out when it dies. The map knows no handle's
# fields, so no object is read in order to find another.
from cpool.core cimport memory
from cpool.core.memory cimport Array, prefetch
from cpool.core.types cimport block_id_t, uint32_t, uint64_t
from cpython.object cimport PyObject

cdef enum:
    FIRST_PLACES = 1024     # of the smallest table
    GROWTH = 4              # between two sizes of a table
    SPARSE = 32             # places a handle from which on a smaller table will do


cdef struct HandleMap:
    PyObject** handles      # num_places, NULL where no handle is
    block_id_t* ids         # of the handles; NULL when direct
    uint32_t num_places     # hashed: a power of two
    uint32_t shift          # hashed: 32 - log2(num_places)
    uint32_t num_live
    uint32_t num_ids        # ids from here on don't exist
    Array array


cdef inline uint32_t home(const HandleMap* map, block_id_t id) noexcept:
    # Fibonacci hashing: ids in a row come to lie far from each other.
    return id if map.ids == NULL else <uint32_t>(id * <uint32_t>2654435769u) >> map.shift


cdef inline void prefetch_home(const HandleMap* map, block_id_t id) noexcept:
    cdef uint32_t place = home(map, id)
    prefetch(&map.handles[place])
    if map.ids != NULL:
        prefetch(&map.ids[place])


cdef inline uint32_t place_of(const HandleMap* map, block_id_t id) noexcept:
    # Where the handle is or would be. The map has places, and a free one.
    cdef uint32_t place = home(map, id)
    if map.ids != NULL:
        while map.handles[place] != NULL and map.ids[place] != id:
            place = (place + 1) & (map.num_places - 1)
    return place


cdef inline PyObject* at_home(const HandleMap* map, block_id_t id) noexcept:
    # A guess at what place_of() will find.
    return map.handles[home(map, id)]


cdef inline PyObject* find(const HandleMap* map, block_id_t id) noexcept:
    return NULL if map.num_places == 0 else map.handles[place_of(map, id)]


cdef inline void put(
    HandleMap* map, uint32_t place, block_id_t id, PyObject* handle
) noexcept:
    # `place` is from place_of(), and free; there is room for one more (reserve).
    map.handles[place] = handle
    if map.ids != NULL:
        map.ids[place] = id
    map.num_live += 1


cdef inline int resize(HandleMap* map, uint32_t num_places) except -1:
    # To a power of two above the number of handles, or to a place for every id.
    cdef HandleMap fresh = map[0]
    cdef bint is_direct = num_places == map.num_ids
    cdef uint32_t i
    cdef block_id_t id
    memory.allocate(
        &fresh.array, num_places,
        sizeof(PyObject*) if is_direct else sizeof(PyObject*) + sizeof(block_id_t),
    )
    # Nothing below can fail.
    fresh.num_places = num_places
    fresh.num_live = 0
    fresh.handles = <PyObject**>fresh.array.data
    fresh.ids = NULL if is_direct else <block_id_t*>(fresh.handles + num_places)
    fresh.shift = 32
    while num_places > 1:
        num_places >>= 1
        fresh.shift -= 1
    for i in range(map.num_places):
        if map.handles[i] != NULL:
            id = i if map.ids == NULL else map.ids[i]
            put(&fresh, place_of(&fresh, id), id, map.handles[i])
    memory.release(&map.array)
    map[0] = fresh
    return 0


cdef inline int reserve(HandleMap* map, uint64_t num_new) except -1:
    # Afterwards there is room for that many more handles. What the handles of better times
    # took is given back here, not when the last of them dies: there nothing may fail.
    cdef uint64_t wanted = map.num_live + num_new
    cdef uint64_t num_places = FIRST_PLACES
    if map.num_places >= 2 * wanted or map.num_places == map.num_ids:
        if map.num_places <= SPARSE * wanted + FIRST_PLACES:
            return 0
    while num_places < 2 * wanted:
        num_places *= GROWTH
    if 3 * num_places >= 2 * <uint64_t>map.num_ids:
        num_places = map.num_ids
    if num_places != map.num_places:
        resize(map, <uint32_t>num_places)
    return 0


cdef inline void remove(HandleMap* map, block_id_t id) noexcept:
    # The handle of that block is there.
    cdef uint32_t mask = map.num_places - 1
    cdef uint32_t hole = place_of(map, id)
    cdef uint32_t place = hole
    map.handles[hole] = NULL
    map.num_live -= 1
    if map.ids == NULL:
        return
    while True:
        place = (place + 1) & mask
        if map.handles[place] == NULL:
            return
        # What is nearer to its home than to the hole stays.
        if ((place - home(map, map.ids[place])) & mask) >= ((place - hole) & mask):
            map.handles[hole] = map.handles[place]
            map.ids[hole] = map.ids[place]
            map.handles[place] = NULL
            hole = place


cdef inline void release(HandleMap* map) noexcept:
    memory.release(&map.array)
    map.handles = NULL
    map.ids = NULL
    map.num_places = 0
    map.num_live = 0
