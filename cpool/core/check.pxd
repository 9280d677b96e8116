# SPDX-License-Identifier: Apache-2.0
# Every invariant, written once. Raises AssertionError, which means a bug of ours (or counts
# and links that were written from outside); changes nothing.
from cpool.core cimport blocks, cells, memory, registry, reverse_index, shared_keys, table
from cpool.core.blocks cimport key_at, state_at
from cpool.core.cells cimport CHUNK_CELLS
from cpool.core.keys cimport Key
from cpool.core.registry cimport Core, Holder
from cpool.core.types cimport (
    BlockState, block_id_t, hash_t, record_id_t, ref_t, uint32_t, uint64_t,
    INDEX_MASK, LOOSE_FLAG, NO_RECORD, NOT_QUEUED, PRIMARY, EXTRA, SHARED, SHARED_FLAG,
    SPACE_MASK,
)


cdef inline int require(bint condition, object text) except -1:
    if not condition:
        raise AssertionError(text)
    return 0


cdef inline int check_queue(const Core* core) except -1:
    # The ring visits num_free blocks, each link has its counterpart, a queued block has no
    # holder, an unqueued one has some. The null block is never in the queue.
    cdef block_id_t end = core.queue.end
    cdef block_id_t id = end
    cdef block_id_t after
    cdef const BlockState* state
    cdef uint32_t seen = 0
    require(end == core.blocks.num_blocks, "the queue's end is not behind the last block")
    require(
        state_at(&core.blocks, 0).next == NOT_QUEUED, "the null block is in the free queue"
    )
    while True:
        after = state_at(&core.blocks, id).next
        require(after <= end, f"block {id} in the free queue links to {after}")
        require(
            state_at(&core.blocks, after).prev == id, f"links of {id} and {after} differ"
        )
        id = after
        if id == end:
            break
        seen += 1
        require(seen <= core.queue.num_free, f"more than {core.queue.num_free} blocks queued")
        require(
            state_at(&core.blocks, id).ref_cnt <= 0,
            f"block {id} is in the free queue with ref_cnt {state_at(&core.blocks, id).ref_cnt}",
        )
    require(seen == core.queue.num_free, f"{seen} blocks queued, {core.queue.num_free} counted")
    for id in range(1, end):
        state = state_at(&core.blocks, id)
        require(
            state.next != NOT_QUEUED or state.ref_cnt > 0,
            f"block {id} with ref_cnt {state.ref_cnt} is not in the free queue",
        )
        require(
            (state.next == NOT_QUEUED) == (state.prev == NOT_QUEUED),
            f"block {id} is half in the free queue",
        )
    return 0


cdef inline int check_table(const Core* core) except -1:
    # Used cells are counted, and so is each key in every chunk that it had to pass (behind MANY,
    # nobody counts). Every cell names a holder whose key hashes to it.
    cdef const table.Table* t = &core.table
    cdef uint64_t used = check_cells(core, &t.cells) + check_cells(core, &t.leaving)
    require(used == t.num_used, f"{used} cells used, {t.num_used} counted")
    if t.leaving.chunks == NULL:
        require(
            not table.exists(t) or t.moved == table.ALL_HASHES,
            f"keys with hashes from {t.moved} on are in cells that do not exist",
        )
    else:
        require(t.num_moved < t.leaving.num_chunks, "nothing is left to leave, and is kept")
        require(
            t.moved == cells.first_hash(&t.leaving, t.num_moved),
            f"{t.num_moved} chunks left, hashes below {t.moved} moved",
        )
    return 0


cdef inline uint64_t check_cells(const Core* core, const cells.Cells* c) except <uint64_t>-1:
    # Returns how many are used.
    cdef uint64_t i, passed, used = 0
    cdef uint32_t cell
    cdef hash_t hash
    cdef list counted
    if c.chunks == NULL:
        require(c.num_chunks == 0, "chunks are counted that do not exist")
        return 0
    counted = [0] * c.num_chunks
    for i in range(c.num_chunks):
        for cell in range(CHUNK_CELLS):
            if c.chunks[i].refs[cell] == 0:
                continue
            used += 1
            hash = cells.hash_at(&c.chunks[i], cell)
            require(
                table.cells_of(&core.table, hash) == c,
                f"hash {hash} is where those below {core.table.moved} should not be, or the others",
            )
            passed = cells.home(c, hash)
            while passed != i:
                counted[passed] += 1
                passed = cells.next_chunk(c, passed)
            check_cell(core, hash, c.chunks[i].refs[cell])
    for i in range(c.num_chunks):
        passed = cells.num_passed(&c.chunks[i])
        require(
            passed == counted[i] or passed == cells.MANY,
            f"{counted[i]} keys passed chunk {i}, {passed} counted",
        )
    require(used < cells.num_cells(c), "no cell is EMPTY")
    return used


cdef inline int check_cell(const Core* core, hash_t hash, ref_t ref) except -1:
    cdef uint32_t index = ref & INDEX_MASK
    cdef ref_t tag = ref & ~<ref_t>INDEX_MASK
    cdef Holder holder
    cdef Key key
    cdef bint found = False
    holder.block = index
    holder.extra = NO_RECORD
    if tag == <ref_t>SHARED:
        require(index < core.shared.keys.high_water, f"a cell names shared key {index}")
        key.space = shared_keys.key(&core.shared, index).space
        key.digest = shared_keys.digest(&core.shared, index)
        require(registry.hash_of(core, &key) == hash, f"shared key {index} is in a wrong cell")
        return check_shared(core, index)
    require(index < core.blocks.num_blocks, f"a cell names block {index}")
    if tag == PRIMARY:
        key = registry.key_of(core, holder)
        require(
            key.space != 0 and not key_at(&core.blocks, index).space & (LOOSE_FLAG | SHARED_FLAG),
            f"a cell names the primary key of block {index}, which has none of its own",
        )
        require(registry.hash_of(core, &key) == hash, f"block {index} is in a wrong cell")
        return 0
    require(tag == <ref_t>EXTRA, f"cell with reference {ref}")
    require(index != 0, "the null block has an extra key")
    holder.extra = reverse_index.first(&core.index, index)
    while holder.extra != NO_RECORD and not found:
        key = registry.key_of(core, holder)
        found = (
            not registry.flagged_space(core, holder) & SHARED_FLAG
            and registry.hash_of(core, &key) == hash
        )
        holder.extra = reverse_index.extra(&core.index, holder.extra).next
    require(found, f"a cell names an extra key of block {index} that it does not have")
    return 0


cdef inline int check_shared(const Core* core, record_id_t key_id) except -1:
    # At least two members, linked both ways, whose slots name them.
    cdef record_id_t before = NO_RECORD
    cdef record_id_t id = shared_keys.key(&core.shared, key_id).first
    cdef const shared_keys.Member* member
    cdef Holder holder
    cdef uint32_t count = 0
    while id != NO_RECORD:
        member = shared_keys.member(&core.shared, id)
        require(member.key == key_id and member.prev == before, f"member {id} is misplaced")
        holder.block = member.block
        holder.extra = member.extra
        require(
            (registry.flagged_space(core, holder) & (SPACE_MASK | SHARED_FLAG))
            == (shared_keys.key(&core.shared, key_id).space | SHARED_FLAG)
            and registry.member_of(core, holder) == id,
            f"block {holder.block} does not know that it is member {id}",
        )
        count += 1
        before = id
        id = member.next
    require(before == shared_keys.key(&core.shared, key_id).last, "the last member is another")
    require(
        count == shared_keys.key(&core.shared, key_id).num_members and count > 1,
        f"shared key {key_id} has {count} members",
    )
    return 0


cdef inline int check_registrations(const Core* core) except -1:
    # Every key of every block is found in the table; nothing else is counted.
    cdef uint64_t registrations = 0
    cdef uint32_t extras = 0
    cdef Holder holder, found
    cdef Key key
    for holder.block in range(core.blocks.num_blocks):
        holder.extra = NO_RECORD
        if registry.has_primary(core, holder.block):
            key = registry.key_of(core, holder)
            require(key.space < core.num_spaces, f"block {holder.block} has space {key.space}")
            if not key_at(&core.blocks, holder.block).space & LOOSE_FLAG:
                registrations += 1
                require(
                    registry.find_held_by(core, &key, holder.block, &found)
                    and found.extra == NO_RECORD,
                    f"block {holder.block} is not found under its primary key",
                )
        holder.extra = reverse_index.first(&core.index, holder.block)
        while holder.extra != NO_RECORD:
            extras += 1
            registrations += 1
            require(extras <= core.index.extras.num_live, "rows of extra keys form a ring")
            key = registry.key_of(core, holder)
            require(
                registry.find_held_by(core, &key, holder.block, &found)
                and found.extra == holder.extra,
                f"block {holder.block} is not found under an extra key",
            )
            holder.extra = reverse_index.extra(&core.index, holder.extra).next
    require(
        registrations == core.num_registrations,
        f"{registrations} registrations, {core.num_registrations} counted",
    )
    require(
        extras == core.index.extras.num_live,
        f"{extras} extra keys in rows, {core.index.extras.num_live} records taken",
    )
    return 0


cdef inline int check_arena(const memory.Arena* arena) except -1:
    # Records given back and records taken make up all that were ever taken.
    cdef record_id_t id = arena.free_head
    cdef uint32_t count = 0
    while id != NO_RECORD:
        count += 1
        require(id < arena.high_water, f"free record {id} was never taken")
        require(count <= arena.high_water, "free records form a ring")
        memory.memcpy(&id, memory.record(arena, id), sizeof(record_id_t))
    require(
        count + arena.num_live == arena.high_water,
        f"{count} free and {arena.num_live} live of {arena.high_water} records",
    )
    return 0


cdef inline int check_slots(const Core* core) except -1:
    # Slots of blocks, shared keys and extra keys are equally long: a digest moves between them.
    cdef size_t stride = core.blocks.stride
    require(
        (stride != 0) == (core.blocks.keys != NULL) == (core.blocks.digest != NULL),
        f"key columns are there in part, with slots of {stride} bytes",
    )
    require(
        stride != 0 or not core.is_prepared, "a pool that is prepared for keys has no columns"
    )
    require(
        stride == 0
        or core.shared.keys.record_bytes == sizeof(shared_keys.SharedKey) + stride
        and core.index.extras.record_bytes == sizeof(reverse_index.Extra) + stride,
        f"slots of {stride} bytes in blocks are of another length elsewhere",
    )
    return 0


cdef inline int check(const Core* core) except -1:
    check_slots(core)
    check_queue(core)
    check_table(core)
    check_registrations(core)
    check_arena(&core.shared.keys)
    check_arena(&core.shared.members)
    check_arena(&core.index.extras)
    return 0
