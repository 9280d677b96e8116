# SPDX-License-Identifier: Apache-2.0
# Many keys at once: what waits for memory overlaps.
#
# One key at a time spends most of its time waiting: for the table's cell, then for the block
# that the cell names. So every batch runs in stages, each IN_FLIGHT keys or a round of so many
# ahead of the next: a stage asks for the memory that the next one reads. A key passes all
# stages in order, and the last stages of all keys run in the order of the batch, as if they
# were alone; what a stage saw before is only ever used as a hint of what to fetch.
from cpool.core cimport blocks, cells, registry, reverse_index, shared_keys, table
from cpool.core.keys cimport Key, hash_key
from cpool.core.memory cimport prefetch, prefetch_write
from cpool.core.registry cimport Core, Holder
from cpool.core.types cimport (
    block_id_t, hash_t, record_id_t, ref_t, space_t, uint8_t, uint32_t, uint64_t, INDEX_MASK,
    EXTRA, LOOSE_FLAG, NO_BLOCK, NO_RECORD, NULL_BLOCK, PRIMARY, SHARED, SHARED_FLAG,
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
            prefetch(&core.blocks.keys[index])
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


cdef inline size_t find_batch(
    const Core* core, const uint8_t* digests, size_t row_bytes, size_t count, space_t space,
    uint32_t multiple_of, bint stop_at_miss, block_id_t* found,
) noexcept:
    # found[i] = first holder of row i, or NO_BLOCK; returns how many rows were answered: all,
    # or with `stop_at_miss` those before the first that nobody holds. The space exists, and
    # so does the table.
    cdef hash_t hashes[RING]
    cdef ref_t refs[RING]
    cdef size_t hashed = 0      # rows before it have passed the first stage
    cdef size_t sought = 0      # ... and the second
    cdef size_t asked = 0       # ... have been asked for themselves, where they lie far apart
    cdef size_t row = 0
    cdef size_t stop
    cdef size_t steady = 0
    cdef Key key
    cdef block_id_t id
    cdef block_id_t last = NO_BLOCK
    cdef ref_t ref
    cdef uint32_t width = core.spaces[space].width
    cdef hash_t salt = core.spaces[space].salt
    key.space = space
    while row < count:
        stop = min(count, row + 4 * IN_FLIGHT)
        while row_bytes > 64 and asked < stop:
            prefetch(digests + asked * row_bytes)
            asked += 1
        stop = min(count, row + 3 * IN_FLIGHT)
        while hashed < stop:
            hashes[hashed % RING] = hash_key(
                digests + hashed * row_bytes, width, salt, core.seed
            )
            table.prefetch(&core.table, hashes[hashed % RING])
            hashed += 1
        stop = min(count, row + 2 * IN_FLIGHT)
        while sought < stop:
            ref = table.glance(&core.table, hashes[sought % RING])
            prefetch_holder(core, ref)
            refs[sought % RING] = ref
            sought += 1
        stop = min(count, row + IN_FLIGHT)
        if core.index.heads != NULL:
            prefetch_extra_holders(core, refs, row, stop)
        while row < stop:
            key.digest = digests + row * row_bytes
            ref = refs[row % RING]
            id = ref & INDEX_MASK
            if ref == cells.ABSENT:
                id = NO_BLOCK
            elif (ref & ~<ref_t>INDEX_MASK) == PRIMARY and (
                registry.is_own_key(core, id, &key, width)
            ):
                # Most keys are one block's own primary one.
                if multiple_of and not registry.covers_multiple(
                    core, registry.primary(id), multiple_of
                ):
                    id = NO_BLOCK
            else:
                id = find_whole(core, &key, hashes[row % RING], multiple_of)
            if id == NO_BLOCK and stop_at_miss:
                return row
            found[row] = id
            row += 1
            # Whether it lies beside the one before: up or down by one.
            if ((id - last + 1) & ~<block_id_t>2) != 0 or id == NO_BLOCK:
                steady = 0
            else:
                steady += 1
            last = id
            if steady >= STEADY and id - found[row - 2] == found[row - 2] - found[row - 3]:
                row = follow(core, digests, row_bytes, row, count, space, multiple_of, found)
                last = found[row - 1]
                steady = 0
                hashed = max(hashed, row)
                sought = max(sought, row)
    return count


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
    if core.blocks.keys[id].space:
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
        prefetch_write(&core.blocks.keys[batch.ids[i]])
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
    if core.blocks.keys[id].space == 0 and reverse_index.first(&core.index, id) == NO_RECORD:
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
        prefetch_write(&core.blocks.keys[block])
        prefetch(blocks.digest_slot(&core.blocks, block))
        if core.index.heads != NULL:
            prefetch_write(&core.index.heads[block])


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
        if core.blocks.keys[id].space:
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


cdef inline bint has_own_key_only(const Core* core, block_id_t id) noexcept:
    # Whether a block has one key, which the table knows and no other block holds.
    cdef space_t space = core.blocks.keys[id].space
    return space != 0 and not space & (LOOSE_FLAG | SHARED_FLAG) and (
        reverse_index.first(&core.index, id) == NO_RECORD
    )


cdef inline void drop_own_key(Core* core, Evictions* batch, size_t i) noexcept:
    # After fetch_keys(), of a block that has_own_key_only(). Nobody registered it since: only
    # then is the hash its key's.
    cdef block_id_t id = batch.ids[i]
    registry.unlink_alone(core, registry.primary(id), batch.hashes[i % RING])
    core.blocks.keys[id].space = 0
    core.blocks.keys[id].num_tokens = 0
