# SPDX-License-Identifier: Apache-2.0
# Many keys at once: what waits for memory overlaps.
#
# One key at a time spends most of its time waiting: for the table's cell, then for the block
# that the cell names. So every batch runs in stages, each IN_FLIGHT keys or a round of so many
# ahead of the next: a stage asks for the memory that the next one reads. A key passes all
# stages in order, and the last stages of all keys run in the order of the batch, as if they
# were alone; what a stage saw before is only ever used as a hint of what to fetch.
from cpool.core cimport blocks, cells, registry, reverse_index, shared_keys, table
from cpool.core.blocks cimport PrimaryKey, key_at
from cpool.core.cells cimport Cells
from cpool.core.keys cimport Key, copy_digest, hash_key, same_digest
from cpool.core.memory cimport prefetch, prefetch_write
from cpool.core.registry cimport Core, Holder
from cpool.core.types cimport (
    block_id_t, hash_t, record_id_t, ref_t, space_t, uint8_t, uint32_t, uint64_t, INDEX_MASK,
    EXTRA, LOOSE_FLAG, NO_BLOCK, NO_RECORD, NULL_BLOCK, PRIMARY, SHARED, SHARED_FLAG,
    SPACE_MASK,
)

cdef enum:
    IN_FLIGHT = 16      # keys between two stages: as many as memory answers at once
    RING = 64           # keys in flight at once, at most: three rounds and a bit, a power of two
    STEADY = 8          # blocks in a row that lie side by side: the next one likely does too
    MAX_HOPS = 8        # records of a block's extra keys that are fetched ahead


# Extra keys -------------------------------------------------------------------------------

cdef inline void prefetch_record(const Core* core, record_id_t id) noexcept:
    cdef const char* record = <const char*>reverse_index.extra(&core.index, id)
    prefetch_write(record)
    prefetch_write(record + core.index.extras.record_bytes - 1)     # most lie in two lines


cdef inline void prefetch_extra(const Core* core, block_id_t id) noexcept:
    # The first extra key of a block whose head is at hand.
    cdef record_id_t first = reverse_index.first(&core.index, id)
    if first != NO_RECORD:
        prefetch_record(core, first)


cdef inline void prefetch_extra_cells(const Core* core, record_id_t id) noexcept:
    # What the removal of an extra key reads, but the other members of a shared one.
    cdef Holder holder
    cdef Key key
    holder.block = NULL_BLOCK   # is not looked at: the key is the record's
    holder.extra = id
    key = registry.key_of(core, holder)
    table.prefetch_search(&core.table, registry.hash_of(core, &key))


cdef inline void prefetch_extras(
    const Core* core, const block_id_t* ids, size_t count, bint with_cells
) noexcept:
    # All extra keys of IN_FLIGHT blocks at most, whose first ones are at hand. Each record names
    # the next: one hop of all blocks at once.
    cdef record_id_t at[IN_FLIGHT]
    cdef record_id_t next
    cdef size_t i, kept, num = 0
    cdef uint32_t hops = MAX_HOPS
    if core.index.heads == NULL:
        return
    for i in range(count):
        at[num] = reverse_index.first(&core.index, ids[i])
        num += at[num] != NO_RECORD
    while num and hops:
        hops -= 1
        kept = 0
        for i in range(num):
            next = reverse_index.extra(&core.index, at[i]).next
            if with_cells:
                prefetch_extra_cells(core, at[i])
            if next != NO_RECORD:
                prefetch_record(core, next)
                at[kept] = next
                kept += 1
        num = kept


# Look-ups ---------------------------------------------------------------------------------

cdef inline void prefetch_holder(const Core* core, ref_t ref) noexcept:
    cdef uint32_t index = ref & INDEX_MASK
    cdef ref_t tag = ref & ~<ref_t>INDEX_MASK
    if tag == PRIMARY:
        prefetch(blocks.digest_slot(&core.blocks, index))
        if core.has_widths:
            prefetch(&key_at(&core.blocks, index).space)
    elif tag == <ref_t>SHARED:
        prefetch(shared_keys.key(&core.shared, index))
    elif tag == <ref_t>EXTRA:
        prefetch(&core.index.heads[index])


cdef inline void prefetch_extra_holders(
    const Core* core, const ref_t* refs, size_t first, size_t stop
) noexcept:
    # A round of refs, from a ring: the records of those blocks that hold a key as an extra one.
    cdef block_id_t ids[IN_FLIGHT]
    cdef size_t row, count = 0
    for row in range(first, stop):
        ids[count] = refs[row % RING] & INDEX_MASK
        if (refs[row % RING] & ~<ref_t>INDEX_MASK) == <ref_t>EXTRA:
            prefetch_extra(core, ids[count])
            count += 1
    prefetch_extras(core, ids, count, False)


cdef inline block_id_t find_whole(
    const Core* core, const Key* key, hash_t hash, uint32_t multiple_of
) noexcept:
    # The key's first holder, or with `multiple_of` the first that covers a multiple of that many
    # tokens; else NO_BLOCK.
    cdef Holder holder
    cdef uint64_t place
    cdef ref_t ref = registry.find(core, key, hash, &holder, &place)
    if ref == 0:
        return NO_BLOCK
    if multiple_of and not registry.find_covering(core, ref, multiple_of, &holder):
        return NO_BLOCK
    return holder.block


cdef inline size_t follow(
    const Core* core, const uint8_t* digests, size_t row_bytes, size_t first, size_t count,
    space_t space, uint32_t multiple_of, block_id_t* found,
) noexcept:
    # Rows from `first` on whose blocks go on as the last two did, up or down by one, and hold
    # their keys alone: their cells need not be read. Returns the first row of which that is not
    # so.
    cdef block_id_t step = found[first - 1] - found[first - 2]
    cdef block_id_t id = found[first - 1] + step
    cdef uint32_t width = core.spaces[space].width
    cdef size_t row = first
    while row < count and id < core.blocks.num_blocks:
        if not registry.holds_alone(core, id, space, digests + row * row_bytes, width):
            break
        if multiple_of and not registry.covers_multiple(
            core, registry.primary(id), multiple_of
        ):
            break
        found[row] = id
        row += 1
        id += step
    return row


cdef inline bint is_plain(const Core* core) noexcept:
    # Whether most keys are one block's own, their digests side by side in slots of their width,
    # and the table does not grow: what most pools are, and what look-ups are fastest in.
    return (
        table.exists(&core.table) and core.table.leaving.chunks == NULL
        and core.index.heads == NULL and not core.has_widths
        and core.blocks.stride == core.spaces[1].width
    )


cdef struct Begun:
    # The first stage of a look-up: rows before `hashed` have passed it.
    hash_t hashes[RING]
    size_t hashed


cdef inline void begin(
    const Core* core, const uint8_t* digests, size_t row_bytes, size_t count, space_t space,
    Begun* begun,
) noexcept:
    # What find_begun() reads first is on its way, while its caller does something else.
    cdef uint32_t width = core.spaces[space].width
    begun.hashed = 0
    if row_bytes > 64:
        return
    count = min(count, <size_t>RING)
    if width == 32 and is_plain(core):
        hash_rows(True, core, digests, row_bytes, count, space, 32, begun)
    else:
        hash_rows(False, core, digests, row_bytes, count, space, width, begun)


cdef inline void hash_rows(
    bint plain, const Core* core, const uint8_t* digests, size_t row_bytes, size_t stop,
    space_t space, uint32_t width, Begun* begun,
) noexcept:
    cdef hash_t salt = core.spaces[space].salt
    cdef hash_t hash
    cdef size_t row
    for row in range(begun.hashed, stop):
        hash = hash_key(digests + row * row_bytes, width, salt, core.seed)
        begun.hashes[row % RING] = hash
        cells.prefetch(cells_as(plain, core, hash), hash)
    begun.hashed = max(begun.hashed, stop)


cdef inline size_t find_batch(
    const Core* core, const uint8_t* digests, size_t row_bytes, size_t count, space_t space,
    uint32_t multiple_of, bint stop_at_miss, block_id_t* found,
) noexcept:
    # found[i] = first holder of row i, or NO_BLOCK; returns how many rows were answered: all,
    # or with `stop_at_miss` those before the first that nobody holds. The space exists, and
    # so does the table.
    cdef Begun begun
    begun.hashed = 0
    return find_begun(
        core, digests, row_bytes, count, space, multiple_of, stop_at_miss, found, &begun
    )


cdef inline size_t find_begun(
    const Core* core, const uint8_t* digests, size_t row_bytes, size_t count, space_t space,
    uint32_t multiple_of, bint stop_at_miss, block_id_t* found, Begun* begun,
) noexcept:
    # As find_batch(), after begin().
    cdef uint32_t width = core.spaces[space].width
    if width == 32 and multiple_of == 0 and is_plain(core):
        return find_as(
            True, core, digests, row_bytes, count, space, 32, 0, stop_at_miss, found, begun
        )
    if width == 16 and multiple_of == 0 and is_plain(core):
        return find_as(
            True, core, digests, row_bytes, count, space, 16, 0, stop_at_miss, found, begun
        )
    return find_as(
        False, core, digests, row_bytes, count, space, width, multiple_of, stop_at_miss, found,
        begun,
    )


cdef inline size_t find_as(
    bint plain, const Core* core, const uint8_t* digests, size_t row_bytes, size_t count,
    space_t space, uint32_t width, uint32_t multiple_of, bint stop_at_miss, block_id_t* found,
    Begun* begun,
) noexcept:
    # find_begun(), compiled once for each kind of pool: there `plain` and `width` are constants.
    cdef ref_t refs[RING]
    cdef size_t sought = 0      # rows before it have passed the second stage
    cdef size_t asked = 0       # ... have been asked for themselves, where they lie far apart
    cdef size_t row = 0
    cdef size_t stop
    cdef Key key
    cdef hash_t hash
    cdef block_id_t id
    cdef ref_t ref
    key.space = space
    while row < count:
        stop = min(count, row + 5 * IN_FLIGHT)
        while row_bytes > 64 and asked < stop:
            prefetch(digests + asked * row_bytes)
            asked += 1
        hash_rows(
            plain, core, digests, row_bytes, min(count, row + 4 * IN_FLIGHT), space, width, begun
        )
        stop = min(count, row + 3 * IN_FLIGHT)
        while sought < stop:
            hash = begun.hashes[sought % RING]
            ref = cells.glance(cells_as(plain, core, hash), hash)
            if plain:
                # Wherever that is: most refs are PRIMARY.
                prefetch(core.blocks.digest + <size_t>(ref & INDEX_MASK) * width)
            else:
                prefetch_holder(core, ref)
            refs[sought % RING] = ref
            sought += 1
        stop = min(count, row + IN_FLIGHT)
        if not plain and core.index.heads != NULL:
            prefetch_extra_holders(core, refs, row, stop)
        while row < stop:
            key.digest = digests + row * row_bytes
            ref = refs[row % RING]
            id = ref & INDEX_MASK
            if (ref & ~<ref_t>INDEX_MASK) == PRIMARY and is_own_key_as(
                plain, core, id, &key, width
            ):
                # Most keys are one block's own primary one.
                if multiple_of and not registry.covers_multiple(
                    core, registry.primary(id), multiple_of
                ):
                    id = NO_BLOCK
            elif ref == cells.ABSENT:
                id = NO_BLOCK
            else:
                id = find_whole(core, &key, begun.hashes[row % RING], multiple_of)
            if id == NO_BLOCK and stop_at_miss:
                return row
            found[row] = id
            row += 1
        if row < count and row > STEADY and lie_in_order(found + row - 1):
            row = follow(core, digests, row_bytes, row, count, space, multiple_of, found)
            begun.hashed = max(begun.hashed, row)
            sought = max(sought, row)
    return count


cdef inline const Cells* cells_as(bint plain, const Core* core, hash_t hash) noexcept:
    return &core.table.cells if plain else table.cells_of(&core.table, hash)


cdef inline bint is_own_key_as(
    bint plain, const Core* core, block_id_t id, const Key* key, uint32_t width
) noexcept:
    if plain:
        return same_digest(core.blocks.digest + <size_t>id * width, key.digest, width)
    return registry.is_own_key(core, id, key, width)


cdef inline bint lie_in_order(const block_id_t* last) noexcept:
    # Whether the blocks from STEADY places before `last` on most likely lie side by side, up or
    # down by one.
    cdef block_id_t step = last[0] - last[-1]
    return ((step + 1) & ~<block_id_t>2) == 0 and last[0] - last[-STEADY] == step * STEADY


# Registration -----------------------------------------------------------------------------

cdef struct Registrations:
    # Row i is a key for ids[i] that covers ends[i] tokens; memory for all is reserved.
    const block_id_t* ids
    const uint64_t* ends
    const uint8_t* rows
    size_t row_bytes
    size_t count
    space_t space
    size_t fetched          # rows before it have passed the first stage
    size_t sought           # ... and the second
    hash_t hashes[RING]


cdef inline void prefetch_old_keys(const Core* core, block_id_t id) noexcept:
    # Of a block that is registered anew: they may have to leave.
    cdef Key key
    if key_at(&core.blocks, id).space:
        key = registry.key_of(core, registry.primary(id))
        table.prefetch_write(&core.table, registry.hash_of(core, &key))
    prefetch_extra(core, id)


cdef inline void fetch_rows(Core* core, Registrations* batch, size_t row) noexcept:
    # Once a round, both stages for the rounds ahead.
    cdef uint32_t width = core.spaces[batch.space].width
    cdef hash_t salt = core.spaces[batch.space].salt
    cdef hash_t hash
    cdef size_t i = batch.fetched
    cdef size_t stop = min(batch.count, row + 3 * IN_FLIGHT)
    if row % IN_FLIGHT:
        return
    while i < stop:
        hash = hash_key(batch.rows + i * batch.row_bytes, width, salt, core.seed)
        batch.hashes[i % RING] = hash
        table.prefetch_write(&core.table, hash)
        prefetch_write(&key_at(&core.blocks, batch.ids[i]).space)
        prefetch_write(blocks.digest_slot(&core.blocks, batch.ids[i]))
        if core.index.heads != NULL:
            prefetch_write(&core.index.heads[batch.ids[i]])
        i += 1
    batch.fetched = i
    i = batch.sought
    stop = min(batch.count, row + 2 * IN_FLIGHT)
    while i < stop:
        table.glance(&core.table, batch.hashes[i % RING])
        prefetch_old_keys(core, batch.ids[i])
        i += 1
    batch.sought = i
    prefetch_extras(core, batch.ids + row, min(batch.count - row, <size_t>IN_FLIGHT), False)


cdef inline bint register_row(Core* core, Registrations* batch, size_t row) noexcept:
    # After fetch_rows(). What the block had as its primary key goes, and all its extra keys
    # with it. Whether the table did not have the key.
    cdef block_id_t id = batch.ids[row]
    cdef hash_t hash = batch.hashes[row % RING]
    cdef uint64_t num_keys
    cdef Holder holder
    cdef Key key
    key.space = batch.space
    key.digest = batch.rows + row * batch.row_bytes
    if key_at(&core.blocks, id).space == 0 and reverse_index.first(&core.index, id) == NO_RECORD:
        if registry.add_first_cell(core, registry.primary(id), hash):
            # A new key for a block without one: most are.
            registry.write_primary(core, id, &key, 0, <uint32_t>batch.ends[row])
            return True
    elif registry.has_primary(core, id):
        registry.drop_keys(core, id)
    elif registry.find_held_by(core, &key, id, &holder):
        return False    # as one of its extra keys
    num_keys = core.table.num_used
    registry.register(core, id, &key, hash, 0, <uint32_t>batch.ends[row])
    return core.table.num_used != num_keys


cdef inline void register_plain(Core* core, Registrations* batch, uint32_t width) noexcept:
    # All rows, in a pool that is_plain(); `width` is a constant. As fetch_rows() and
    # register_row() would, with what most blocks need in one loop for each stage.
    cdef hash_t hash
    cdef Key key
    cdef PrimaryKey* record
    cdef block_id_t id
    cdef size_t i, stop
    cdef size_t row = 0
    cdef size_t count = batch.count
    cdef hash_t salt = core.spaces[batch.space].salt
    cdef Cells* of = &core.table.cells
    key.space = batch.space
    while row < count:
        i = batch.fetched
        stop = min(count, row + 3 * IN_FLIGHT)
        while i < stop:
            hash = hash_key(batch.rows + i * batch.row_bytes, width, salt, core.seed)
            batch.hashes[i % RING] = hash
            cells.prefetch_write(of, hash)
            prefetch_write(&key_at(&core.blocks, batch.ids[i]).space)
            prefetch_write(core.blocks.digest + <size_t>batch.ids[i] * width)
            i += 1
        batch.fetched = i
        i = batch.sought
        stop = min(count, row + 2 * IN_FLIGHT)
        while i < stop:
            cells.prefetch_passed(of, batch.hashes[i % RING])
            prefetch_old_keys(core, batch.ids[i])
            i += 1
        batch.sought = i
        stop = min(count, row + IN_FLIGHT)
        while row < stop:
            id = batch.ids[row]
            if id != NULL_BLOCK:
                record = key_at(&core.blocks, id)
                hash = batch.hashes[row % RING]
                key.digest = batch.rows + row * batch.row_bytes
                if record.space or not cells.insert_first(of, hash, PRIMARY | id):
                    register_row(core, batch, row)
                else:
                    core.table.num_used += 1
                    core.num_registrations += 1
                    copy_digest(core.blocks.digest + <size_t>id * width, key.digest, width)
                    record.space = batch.space
                    record.num_tokens = <uint32_t>batch.ends[row]
            row += 1


cdef inline size_t max_partials(
    const Core* core, const Registrations* batch, const block_id_t* found
) noexcept:
    # How many of the partial entries may have to be registered; found[i] is who holds row i now.
    # None that is held: unless a new one, of more tokens or the first primary key of a block with
    # extra ones, takes these from its block.
    cdef size_t i, num_rows = 0, num_new = 0
    cdef bint takes_keys = False
    cdef block_id_t id
    for i in range(batch.count):
        id = batch.ids[i]
        if id == NULL_BLOCK:
            continue
        num_rows += 1
        if found[i] != id:
            num_new += 1
            takes_keys = takes_keys or registry.is_shorter(core, id, batch.ends[i]) or (
                not registry.has_primary(core, id)
                and reverse_index.first(&core.index, id) != NO_RECORD
            )
    return num_rows if takes_keys else num_new


cdef inline void register_partial_row(Core* core, Registrations* batch, size_t row) noexcept:
    # After fetch_rows(). As the primary key, in the place of all others, if they cover less.
    cdef block_id_t id = batch.ids[row]
    cdef Key key
    key.space = batch.space
    key.digest = batch.rows + row * batch.row_bytes
    if id == NULL_BLOCK or registry.holds(core, &key, id):
        return
    if registry.is_shorter(core, id, batch.ends[row]):
        registry.drop_keys(core, id)
    registry.register(
        core, id, &key, batch.hashes[row % RING], 0, <uint32_t>batch.ends[row]
    )


# Eviction ---------------------------------------------------------------------------------

cdef struct Evictions:
    # All keys of the blocks are about to leave. Key columns exist.
    const block_id_t* ids
    size_t count
    hash_t hashes[RING]     # of the round's primary keys


cdef inline void prefetch_keys(const Core* core, block_id_t block) noexcept:
    if core.blocks.keys != NULL:
        prefetch_write(&key_at(&core.blocks, block).space)
        prefetch(blocks.digest_slot(&core.blocks, block))
        if core.index.heads != NULL:
            prefetch_write(&core.index.heads[block])


cdef inline void prefetch_first(const Core* core, const block_id_t* ids, size_t count) noexcept:
    # What a registration reads and writes of its first blocks, while its caller does other things.
    cdef size_t i
    if core.blocks.keys != NULL:
        for i in range(min(count, <size_t>RING)):
            prefetch_write(&key_at(&core.blocks, ids[i]).space)


cdef inline void fetch_keys(Core* core, Evictions* batch, size_t i) noexcept:
    # Once a round: what the removal of its blocks' keys reads, and the keys of the next round.
    # Each kind of read is a loop of its own. Between them nothing is computed, so that addresses
    # are translated side by side, too: that takes as long as the reads. Where blocks have extra
    # keys a round of RING would be more than the cache takes.
    cdef Key key
    cdef block_id_t id
    cdef size_t row
    cdef size_t size = RING if core.index.heads == NULL else IN_FLIGHT
    cdef size_t stop = min(batch.count, i + size)
    if i % size:
        return
    if i == 0:
        for row in range(stop):
            prefetch_keys(core, batch.ids[row])
    for row in range(i, stop):
        id = batch.ids[row]
        if key_at(&core.blocks, id).space:
            key = registry.key_of(core, registry.primary(id))
            batch.hashes[row % RING] = registry.hash_of(core, &key)
            table.prefetch_write(&core.table, batch.hashes[row % RING])
        else:
            batch.hashes[row % RING] = 0
        prefetch_extra(core, id)
    for row in range(stop, min(batch.count, stop + size)):
        prefetch_keys(core, batch.ids[row])
    prefetch_extras(core, batch.ids + i, min(stop - i, <size_t>IN_FLIGHT), True)
    for row in range(i, stop):
        table.prefetch_passed(&core.table, batch.hashes[row % RING])


cdef inline size_t evict_plain(
    Core* core, const block_id_t* ids, size_t count, size_t asked, uint32_t width
) noexcept:
    # All keys of the blocks leave, in a pool that is_plain(); `width` is a constant, and of the
    # first `asked` blocks the keys are on their way. Returns how many blocks the table knew. In
    # rounds as fetch_keys().
    cdef hash_t hashes[RING]
    cdef Cells* of = &core.table.cells
    cdef PrimaryKey* record
    cdef Key key
    cdef block_id_t id
    cdef space_t space
    cdef size_t stop
    cdef size_t first = 0, row = 0, num_own = 0, num_other = 0
    while first < count:
        stop = min(count, first + RING)
        for row in range(max(asked, first), stop):
            prefetch_keys(core, ids[row])
        for row in range(first, stop):
            space = key_at(&core.blocks, ids[row]).space
            key.digest = core.blocks.digest + <size_t>ids[row] * width
            if space & SHARED_FLAG:
                # Whoever is the last of its holders has it alone, when its turn comes.
                key = registry.key_of(core, registry.primary(ids[row]))
            # Of a block without a key it is some hash: nothing is looked for with it.
            hashes[row % RING] = hash_key(
                key.digest, width, core.spaces[space & SPACE_MASK].salt, core.seed
            )
            cells.prefetch_write(of, hashes[row % RING])
        asked = min(count, stop + RING)
        for row in range(stop, asked):
            prefetch_keys(core, ids[row])
        for row in range(first, stop):
            cells.prefetch_passed(of, hashes[row % RING])
        for row in range(first, stop):
            id = ids[row]
            record = key_at(&core.blocks, id)
            space = record.space
            if space == 0:
                continue
            if space & (LOOSE_FLAG | SHARED_FLAG):
                num_other += registry.drop_keys(core, id) != 0
                continue
            table.remove_at(
                &core.table, hashes[row % RING],
                cells.find_ref(of, hashes[row % RING], PRIMARY | id),
            )
            record.space = 0
            record.num_tokens = 0
            num_own += 1
        first = stop
    core.num_registrations -= num_own
    core.num_departures += num_own
    return num_own + num_other


cdef inline bint has_own_key_only(const Core* core, block_id_t id) noexcept:
    # Whether a block has one key, which the table knows and no other block holds.
    cdef space_t space = key_at(&core.blocks, id).space
    return space != 0 and not space & (LOOSE_FLAG | SHARED_FLAG) and (
        reverse_index.first(&core.index, id) == NO_RECORD
    )


cdef inline void drop_own_key(Core* core, Evictions* batch, size_t i) noexcept:
    # After fetch_keys(), of a block that has_own_key_only(). Nobody registered it since: only
    # then is the hash its key's.
    cdef block_id_t id = batch.ids[i]
    registry.unlink_alone(core, registry.primary(id), batch.hashes[i % RING])
    key_at(&core.blocks, id).space = 0
    key_at(&core.blocks, id).num_tokens = 0
