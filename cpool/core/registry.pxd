# SPDX-License-Identifier: Apache-2.0
# Who holds which key: the one place that joins blocks, table, shared keys and reverse index.
#
# A *registration* makes one block findable under one key. The first one of a block is its
# primary key (in the block's own columns), the rest are extra keys (records of the reverse
# index). A cell of the table names the holder:
#
#     PRIMARY | block   the block's primary key            digest: the block's slot
#     EXTRA | block     one of the block's extra keys      digest: a record in its row
#     SHARED | key      several blocks, in their order     digest: the shared key
#
# Functions that return int may fail and then have changed nothing; all others can't fail once
# reserve() was called for the registrations that they add.
from cpool.core cimport (
    blocks, cells, free_queue, keys, memory, reverse_index, shared_keys, table,
)
from cpool.core.blocks cimport Blocks, key_at, state_at
from cpool.core.free_queue cimport FreeQueue
from cpool.core.keys cimport (
    Key, Space, copy_digest, hash_key, same_digest, MAX_SPACES, NUM_SEED_WORDS,
)
from cpool.core.memory cimport Arena, Array
from cpool.core.reverse_index cimport Extra, ReverseIndex
from cpool.core.shared_keys cimport Member, SharedKeys
from cpool.core.table cimport Table
from cpool.core.types cimport (
    block_id_t, hash_t, int32_t, int64_t, record_id_t, ref_t, space_t, uint8_t, uint32_t, uint64_t,
    EXTRA, INDEX_MASK, LOOSE_FLAG, NO_RECORD, NO_TOKENS_FLAG, PRIMARY, SHARED, SHARED_FLAG,
    SPACE_MASK,
)
from libc.string cimport memcpy

cdef struct Core:
    Blocks blocks
    FreeQueue queue
    Table table
    SharedKeys shared
    ReverseIndex index
    Array spaces_array
    Space* spaces           # spaces[0] is not used
    uint32_t num_spaces     # one past the highest in use; 0 while there is none
    bint has_widths         # digests of more than one width
    bint is_prepared        # for keys to come: what they take is there, also after a reset
    uint64_t num_registrations
    uint64_t num_departures     # registrations that ended, ever
    uint64_t seed[35]       # random words of the table's hash


cdef struct Holder:
    block_id_t block
    record_id_t extra       # its record, NO_RECORD for the block's primary key


cdef inline int init(
    Core* core, uint32_t num_blocks, bint with_keys, uint32_t expected_width
) except -1:
    # `core` is zero-filled, and is again after a failure. Where digests of some width are
    # expected, a key a block takes no memory later on that is not there now.
    shared_keys.init(&core.shared, 0, 0)
    reverse_index.init(&core.index, 0, 0)
    try:
        blocks.init(&core.blocks, num_blocks, with_keys)
        if expected_width:
            prepare_keys(core, expected_width)
            table.prepare(&core.table, num_blocks)
            blocks.touch_key_columns(&core.blocks)
            core.is_prepared = True
    except MemoryError:
        release(core)
        raise
    free_queue.init(
        &core.queue, core.blocks.states, core.blocks.state_bytes, num_blocks
    )
    return 0


cdef inline void forget_keys(Core* core) noexcept:
    # Gives back all that was allocated for keys, except what the pool was prepared with.
    if core.is_prepared:
        # Without a space nothing was written since the last time.
        if core.num_spaces or not table.exists(&core.table):
            blocks.clear_keys(&core.blocks)
            table.clear(&core.table, core.blocks.num_blocks)
    else:
        blocks.drop_key_columns(&core.blocks)
        table.release(&core.table)
    shared_keys.release(&core.shared)
    reverse_index.release(&core.index)
    memory.release(&core.spaces_array)
    core.spaces = NULL
    core.num_spaces = 0
    core.has_widths = False
    core.num_departures += core.num_registrations
    core.num_registrations = 0


cdef inline void release(Core* core) noexcept:
    core.is_prepared = False
    forget_keys(core)
    blocks.release(&core.blocks)


cdef inline size_t nbytes(const Core* core) noexcept:
    return (
        blocks.nbytes(&core.blocks) + table.nbytes(&core.table) + shared_keys.nbytes(&core.shared)
        + reverse_index.nbytes(&core.index) + core.spaces_array.nbytes
    )


cdef inline int32_t num_holders(const Core* core, block_id_t id) noexcept:
    # In the free queue the count holds a note of the queue's; above 0 only if it was written
    # from outside.
    cdef int32_t count = state_at(&core.blocks, id).ref_cnt
    if count < 0 and free_queue.contains(&core.queue, id):
        return 0
    return count


# Spaces -----------------------------------------------------------------------------------

cdef inline space_t find_space(const Core* core, uint32_t group, uint32_t width) noexcept:
    # 0 when nothing was ever registered there.
    cdef uint32_t i
    for i in range(1, core.num_spaces):
        if core.spaces[i].group == group and core.spaces[i].width == width:
            return <space_t>i
    return 0


cdef inline int intern_space(Core* core, uint32_t group, uint32_t width) except -1:
    # The space of (group, width), above 0.
    cdef space_t known = find_space(core, group, width)
    cdef uint32_t capacity
    cdef Array fresh
    if known:
        return known
    capacity = 0
    if core.spaces != NULL:
        capacity = <uint32_t>((core.spaces_array.nbytes - memory.CACHE_LINE) // sizeof(Space))
    if core.num_spaces > MAX_SPACES:
        raise ValueError(
            f"kv_cache_group_id {group} would be pair {core.num_spaces} of group and hash "
            f"width in this pool; it can tell {MAX_SPACES} apart"
        )
    if max(core.num_spaces, 1) >= capacity:
        memory.allocate(&fresh, 2 * capacity if capacity else 8, sizeof(Space))
        if core.num_spaces:
            memcpy(fresh.data, core.spaces, core.num_spaces * sizeof(Space))
        memory.release(&core.spaces_array)
        core.spaces_array = fresh
        core.spaces = <Space*>fresh.data
    if core.num_spaces == 0:
        core.num_spaces = 1
    core.spaces[core.num_spaces].group = group
    core.spaces[core.num_spaces].width = width
    core.spaces[core.num_spaces].salt = keys.salt_of(<space_t>core.num_spaces, core.seed)
    core.has_widths = core.has_widths or width != core.spaces[1].width
    core.num_spaces += 1
    return core.num_spaces - 1


cdef inline hash_t hash_of(const Core* core, const Key* key) noexcept:
    cdef const Space* space = &core.spaces[key.space]
    return hash_key(key.digest, space.width, space.salt, core.seed)


# Digests and their slots ------------------------------------------------------------------

cdef inline uint8_t* slot_of(const Core* core, Holder holder) noexcept:
    if holder.extra == NO_RECORD:
        return blocks.digest_slot(&core.blocks, holder.block)
    return reverse_index.digest_slot(&core.index, holder.extra)


cdef inline space_t flagged_space(const Core* core, Holder holder) noexcept:
    if holder.extra == NO_RECORD:
        return key_at(&core.blocks, holder.block).space if core.blocks.keys != NULL else 0
    return reverse_index.extra(&core.index, holder.extra).space


cdef inline void set_flagged_space(Core* core, Holder holder, space_t space) noexcept:
    if holder.extra == NO_RECORD:
        key_at(&core.blocks, holder.block).space = space
    else:
        reverse_index.extra(&core.index, holder.extra).space = space


cdef inline uint32_t num_tokens_of(const Core* core, Holder holder) noexcept:
    if holder.extra == NO_RECORD:
        return key_at(&core.blocks, holder.block).num_tokens
    return reverse_index.extra(&core.index, holder.extra).num_tokens


cdef inline record_id_t member_of(const Core* core, Holder holder) noexcept:
    # Only where SHARED_FLAG is set.
    cdef record_id_t id
    memcpy(&id, slot_of(core, holder), sizeof(record_id_t))
    return id


cdef inline Key key_of(const Core* core, Holder holder) noexcept:
    # The holder's key; its space is 0 when the block has no primary key.
    cdef Key key
    cdef space_t space = flagged_space(core, holder)
    key.space = space & SPACE_MASK
    if space & SHARED_FLAG:
        key.digest = shared_keys.digest(
            &core.shared, shared_keys.member(&core.shared, member_of(core, holder)).key
        )
    else:
        key.digest = slot_of(core, holder)
    return key


cdef inline ref_t ref_of(Holder holder) noexcept:
    return (PRIMARY if holder.extra == NO_RECORD else <ref_t>EXTRA) | holder.block


cdef inline Holder primary(block_id_t block) noexcept:
    cdef Holder holder
    holder.block = block
    holder.extra = NO_RECORD
    return holder


cdef inline bint has_primary(const Core* core, block_id_t block) noexcept:
    return core.blocks.keys != NULL and key_at(&core.blocks, block).space != 0


# Look-ups ---------------------------------------------------------------------------------

cdef inline bint is_own_key(
    const Core* core, block_id_t block, const Key* key, uint32_t width
) noexcept:
    # Whether `key` is the primary one of a block whose cell has the key's hash. With hash and
    # digest the space is the same, too, among digests of one width (see keys.pxd).
    return same_digest(blocks.digest_slot(&core.blocks, block), key.digest, width) and (
        not core.has_widths or (key_at(&core.blocks, block).space & SPACE_MASK) == key.space
    )


cdef inline bint holds_alone(
    const Core* core, block_id_t block, space_t space, const uint8_t* digest, uint32_t width
) noexcept:
    # Whether that is the block's primary key, known to the table and held by no other block:
    # then the block is what the table would answer.
    return (key_at(&core.blocks, block).space & ~<space_t>NO_TOKENS_FLAG) == space and same_digest(
        blocks.digest_slot(&core.blocks, block), digest, width
    )


cdef inline bint names(const Core* core, ref_t ref, const Key* key, Holder* holder) noexcept:
    # Whether the cell `ref`, whose hash is the key's, is that of `key`; its first holder if so.
    # Keys are compared whole.
    cdef uint32_t index = ref & INDEX_MASK
    cdef uint32_t width = core.spaces[key.space].width
    cdef ref_t tag = ref & ~<ref_t>INDEX_MASK
    cdef const Member* member
    cdef record_id_t id
    cdef const Extra* extra
    if tag == PRIMARY:
        holder.block = index
        holder.extra = NO_RECORD
        return is_own_key(core, index, key, width)
    if tag == <ref_t>SHARED:
        if shared_keys.key(&core.shared, index).space != key.space or not same_digest(
            shared_keys.digest(&core.shared, index), key.digest, width
        ):
            return False
        member = shared_keys.member(&core.shared, shared_keys.key(&core.shared, index).first)
        holder.block = member.block
        holder.extra = member.extra
        return True
    id = reverse_index.first(&core.index, index)
    while id != NO_RECORD:
        extra = reverse_index.extra(&core.index, id)
        if (extra.space & (SPACE_MASK | SHARED_FLAG)) == key.space and same_digest(
            reverse_index.digest_slot(&core.index, id), key.digest, width
        ):
            holder.block = index
            holder.extra = id
            return True
        id = extra.next
    return False


cdef inline ref_t find(
    const Core* core, const Key* key, hash_t hash, Holder* holder, uint64_t* place
) noexcept:
    # What the key's cell says, its place and the key's first holder; 0 if nobody holds it.
    cdef ref_t ref
    if not table.exists(&core.table):
        return 0
    place[0] = table.seek(&core.table, hash)
    while place[0] != cells.NOWHERE:
        ref = table.ref_at(&core.table, hash, place[0])
        if names(core, ref, key, holder):
            return ref
        place[0] = table.seek_next(&core.table, hash, place[0])
    return 0


cdef inline bint find_first(const Core* core, const Key* key, Holder* holder) noexcept:
    cdef uint64_t place
    return key.space != 0 and find(core, key, hash_of(core, key), holder, &place) != 0


cdef inline bint is_member(const Core* core, record_id_t key_id, Holder holder) noexcept:
    return (flagged_space(core, holder) & SHARED_FLAG) != 0 and (
        shared_keys.member(&core.shared, member_of(core, holder)).key == key_id
    )


cdef inline bint find_held_by(
    const Core* core, const Key* key, block_id_t block, Holder* holder
) noexcept:
    # Whether the table maps `key` to `block`, first or not; through which registration.
    cdef uint64_t place
    cdef ref_t ref
    if key.space == 0:
        return False
    ref = find(core, key, hash_of(core, key), holder, &place)
    if ref == 0:
        return False
    if (ref & ~<ref_t>INDEX_MASK) != <ref_t>SHARED:
        return holder.block == block
    holder[0] = primary(block)
    if is_member(core, ref & INDEX_MASK, holder[0]):
        return True
    holder.extra = reverse_index.first(&core.index, block)
    while holder.extra != NO_RECORD:
        if is_member(core, ref & INDEX_MASK, holder[0]):
            return True
        holder.extra = reverse_index.extra(&core.index, holder.extra).next
    return False


cdef inline bint holds(const Core* core, const Key* key, block_id_t block) noexcept:
    # Whether `key`, of an existing space, is the block's primary one, though the table may not
    # know it, or the table maps it to the block.
    cdef Key own = key_of(core, primary(block))
    cdef Holder holder
    if own.space == key.space and same_digest(
        own.digest, key.digest, core.spaces[key.space].width
    ):
        return True
    if own.space == 0 and reverse_index.first(&core.index, block) == NO_RECORD:
        return False
    return find_held_by(core, key, block, &holder)


cdef inline bint covers_multiple(const Core* core, Holder holder, uint32_t tokens) noexcept:
    cdef uint32_t covered = num_tokens_of(core, holder)     # 0 with NO_TOKENS_FLAG
    return covered != 0 and covered % tokens == 0


cdef inline bint find_covering(
    const Core* core, ref_t ref, uint32_t tokens, Holder* holder
) noexcept:
    # The first holder, from `holder` on, that covers a multiple of that many tokens.
    cdef record_id_t id
    cdef const Member* member
    if (ref & ~<ref_t>INDEX_MASK) != <ref_t>SHARED:
        return covers_multiple(core, holder[0], tokens)
    id = shared_keys.key(&core.shared, ref & INDEX_MASK).first
    while id != NO_RECORD:
        member = shared_keys.member(&core.shared, id)
        holder.block = member.block
        holder.extra = member.extra
        if covers_multiple(core, holder[0], tokens):
            return True
        id = member.next
    return False


# Changes ----------------------------------------------------------------------------------

cdef inline int widen(Core* core, uint32_t stride) except -1:
    # Makes room in every slot for longer digests.
    cdef Array digest
    cdef Arena shared, extras
    memory.allocate(&digest, core.blocks.num_blocks, stride)
    try:
        memory.arena_widen(&shared, &core.shared.keys, sizeof(shared_keys.SharedKey) + stride)
        try:
            memory.arena_widen(&extras, &core.index.extras, sizeof(Extra) + stride)
        except MemoryError:
            memory.arena_release(&shared)
            raise
    except MemoryError:
        memory.release(&digest)
        raise
    # Nothing below can fail.
    blocks.copy_slots(
        <uint8_t*>digest.data, stride, core.blocks.digest, core.blocks.stride,
        core.blocks.num_blocks,
    )
    memory.release(&core.blocks.digest_array)
    core.blocks.digest_array = digest
    core.blocks.digest = <uint8_t*>digest.data
    core.blocks.stride = stride
    memory.arena_release(&core.shared.keys)
    core.shared.keys = shared
    memory.arena_release(&core.index.extras)
    core.index.extras = extras
    return 0


cdef inline uint32_t chunk_shift_for(uint32_t num_blocks) noexcept:
    # Chunks of 1/128 of the pool, from 16 to 4,096 records: the first of each arena is there as
    # soon as anything is registered.
    cdef uint32_t shift = 4
    while shift < 12 and (<uint32_t>128 << shift) < num_blocks:
        shift += 1
    return shift


cdef inline int prepare_keys(Core* core, uint32_t width) except -1:
    # Afterwards slots for digests of `width` bytes exist.
    cdef uint32_t stride = (width + 7) & ~<uint32_t>7
    cdef uint32_t shift
    if stride < 8:
        stride = 8
    if core.blocks.stride == 0:
        blocks.add_key_columns(&core.blocks, stride)
    elif stride < core.blocks.stride and core.num_spaces == 0:
        blocks.replace_digests(&core.blocks, stride)
        blocks.touch_key_columns(&core.blocks)
    elif stride > core.blocks.stride:
        widen(core, stride)
        return 0
    else:
        return 0
    shift = chunk_shift_for(core.blocks.num_blocks)
    shared_keys.init(&core.shared, stride, shift)
    reverse_index.init(&core.index, stride, shift)
    return 0


cdef inline int reserve(
    Core* core, uint32_t group, uint32_t width, size_t count, size_t num_extra
) except -1:
    # Afterwards `count` registrations in that space can't fail, `num_extra` of them as extra
    # keys. Returns the space. At worst each of them is the second holder of a key.
    cdef int space
    prepare_keys(core, width)
    space = intern_space(core, group, width)
    table.reserve(&core.table, count, core.blocks.num_blocks)
    reverse_index.reserve(&core.index, core.blocks.num_blocks, num_extra)
    memory.arena_reserve(&core.shared.keys, count)
    memory.arena_reserve(&core.shared.members, 2 * count)
    return space


cdef inline void trim_excess(Core* core) noexcept:
    # Whatever reserve() made room for is registered, or will not be.
    memory.arena_trim_excess(&core.index.extras)
    memory.arena_trim_excess(&core.shared.keys)
    memory.arena_trim_excess(&core.shared.members)


cdef inline void join_shared(Core* core, record_id_t key_id, Holder holder) noexcept:
    cdef record_id_t id = shared_keys.append(&core.shared, key_id, holder.block, holder.extra)
    memcpy(slot_of(core, holder), &id, sizeof(record_id_t))
    set_flagged_space(core, holder, flagged_space(core, holder) | SHARED_FLAG)


cdef inline void link(Core* core, Holder holder, hash_t hash) noexcept:
    # The table learns that `holder`, whose slot has the digest, holds its key.
    cdef Key key = key_of(core, holder)
    cdef Holder other
    cdef uint64_t place
    cdef ref_t ref = find(core, &key, hash, &other, &place)
    attach(core, holder, hash, ref, other, place)


cdef inline void add_cell(Core* core, Holder holder, hash_t hash) noexcept:
    # The table learns of the first holder of a key.
    core.num_registrations += 1
    table.insert(&core.table, hash, ref_of(holder))


cdef inline bint add_first_cell(Core* core, Holder holder, hash_t hash) noexcept:
    # As add_cell(), unless there may be a holder: a cell has the hash. Whether there was none.
    cdef bint done = table.insert_first(&core.table, hash, ref_of(holder))
    core.num_registrations += done
    return done


cdef inline void attach(
    Core* core, Holder holder, hash_t hash, ref_t ref, Holder other, uint64_t place
) noexcept:
    # As link(), with what find() answered for the key.
    cdef Key key = key_of(core, holder)
    cdef record_id_t shared_id
    if ref == 0:
        add_cell(core, holder, hash)
        return
    core.num_registrations += 1
    if (ref & ~<ref_t>INDEX_MASK) == <ref_t>SHARED:
        join_shared(core, ref & INDEX_MASK, holder)
        return
    shared_id = shared_keys.create(
        &core.shared, key.space, key.digest, core.spaces[key.space].width
    )
    join_shared(core, shared_id, other)
    join_shared(core, shared_id, holder)
    table.set_ref_at(&core.table, hash, place, <ref_t>SHARED | shared_id)


cdef inline void unlink(Core* core, Holder holder) noexcept:
    cdef Key key = key_of(core, holder)
    unlink_hashed(core, holder, hash_of(core, &key))


cdef inline void unlink_alone(Core* core, Holder holder, hash_t hash) noexcept:
    # As unlink_hashed(), of the only holder of its key.
    core.num_registrations -= 1
    core.num_departures += 1
    table.remove_at(&core.table, hash, table.find_cell(&core.table, hash, ref_of(holder)))


cdef inline void unlink_hashed(Core* core, Holder holder, hash_t hash) noexcept:
    # The table forgets `holder`, whose key has that hash; its slot has the digest again.
    cdef Key key = key_of(core, holder)
    cdef space_t space = flagged_space(core, holder)
    cdef record_id_t id, shared_id
    cdef Holder heir
    cdef uint32_t width = core.spaces[key.space].width
    if not space & SHARED_FLAG:
        unlink_alone(core, holder, hash)
        return
    core.num_registrations -= 1
    core.num_departures += 1
    id = member_of(core, holder)
    shared_id = shared_keys.member(&core.shared, id).key
    memcpy(slot_of(core, holder), key.digest, width)
    set_flagged_space(core, holder, space & ~<space_t>SHARED_FLAG)
    shared_keys.remove(&core.shared, id)
    if shared_keys.key(&core.shared, shared_id).num_members > 1:
        return
    # One holder is left: it takes the key back into its own slot.
    id = shared_keys.key(&core.shared, shared_id).first
    heir.block = shared_keys.member(&core.shared, id).block
    heir.extra = shared_keys.member(&core.shared, id).extra
    memcpy(slot_of(core, heir), key.digest, width)
    set_flagged_space(core, heir, flagged_space(core, heir) & ~<space_t>SHARED_FLAG)
    table.set_ref_at(
        &core.table, hash, table.find_cell(&core.table, hash, <ref_t>SHARED | shared_id),
        ref_of(heir),
    )
    shared_keys.remove(&core.shared, id)
    memory.give_back(&core.shared.keys, shared_id)


cdef inline void write_primary(
    Core* core, block_id_t block, const Key* key, space_t flags, uint32_t num_tokens
) noexcept:
    copy_digest(
        blocks.digest_slot(&core.blocks, block), key.digest, core.spaces[key.space].width
    )
    key_at(&core.blocks, block).space = key.space | flags
    key_at(&core.blocks, block).num_tokens = num_tokens


cdef inline void register(
    Core* core, block_id_t block, const Key* key, hash_t hash, space_t flags,
    uint32_t num_tokens,
) noexcept:
    # After reserve(); the table does not map `key` to `block` yet. The block's first key
    # becomes its primary key.
    cdef Holder holder = primary(block)
    cdef Holder other
    cdef uint64_t place
    # Asked before the key is in the block's row: a cell of another of its extra keys with the
    # same hash would be taken for this one's.
    cdef ref_t ref = find(core, key, hash, &other, &place)
    if key_at(&core.blocks, block).space == 0:
        write_primary(core, block, key, flags, num_tokens)
    else:
        holder.extra = reverse_index.append(&core.index, block, key.space | flags, num_tokens)
        copy_digest(slot_of(core, holder), key.digest, core.spaces[key.space].width)
    attach(core, holder, hash, ref, other, place)


cdef inline void drop_extra(Core* core, Holder holder) noexcept:
    unlink(core, holder)
    reverse_index.remove(&core.index, holder.block, holder.extra)


cdef inline void drop_primary(Core* core, block_id_t block) noexcept:
    if not key_at(&core.blocks, block).space & LOOSE_FLAG:
        unlink(core, primary(block))
    key_at(&core.blocks, block).space = 0
    key_at(&core.blocks, block).num_tokens = 0


cdef inline bint is_known(const Core* core, block_id_t block) noexcept:
    # Whether the table has a key of the block.
    return reverse_index.first(&core.index, block) != NO_RECORD or (
        has_primary(core, block) and not key_at(&core.blocks, block).space & LOOSE_FLAG
    )


cdef inline bint is_shorter(const Core* core, block_id_t block, uint64_t num_tokens) noexcept:
    # Whether the block's primary key is known to cover less.
    return has_primary(core, block) and not key_at(&core.blocks, block).space & NO_TOKENS_FLAG and (
        key_at(&core.blocks, block).num_tokens < num_tokens
    )


cdef inline uint32_t drop_keys(Core* core, block_id_t block) noexcept:
    # All keys of a block leave, the primary one first. Returns how many the table knew.
    cdef uint64_t before = core.num_registrations
    cdef Holder holder
    if has_primary(core, block):
        drop_primary(core, block)
    holder.block = block
    while True:
        holder.extra = reverse_index.first(&core.index, block)
        if holder.extra == NO_RECORD:
            break
        drop_extra(core, holder)
    return <uint32_t>(before - core.num_registrations)


cdef inline bint move_key(
    Core* core, Holder source, block_id_t target, uint8_t* digest
) noexcept:
    # One registration goes from one block to another, behind the key's other holders.
    # `digest` has room for MAX_HASH_BYTES. Needs no memory: it gives back what it takes.
    cdef Key key = key_of(core, source)
    cdef space_t flags = flagged_space(core, source) & NO_TOKENS_FLAG
    cdef uint32_t num_tokens = num_tokens_of(core, source)
    cdef hash_t hash = hash_of(core, &key)
    memcpy(digest, key.digest, core.spaces[key.space].width)
    key.digest = digest
    if source.extra == NO_RECORD:
        drop_primary(core, source.block)
    else:
        drop_extra(core, source)
    register(core, target, &key, hash, flags, num_tokens)
    return True
