# SPDX-License-Identifier: Apache-2.0
# The pool as plain arrays, and a pool from such arrays. The file around them is saving.py's.
#
# Nothing of the table, the arenas or the links is written: a pool is built from the arrays by
# the very steps that register and free, so no file can make one that these could not make.
#
#     ref_cnts        int32 per block, 0 in the free queue
#     queue           uint32 block ids in eviction order
#     spaces          (group, width, tokens in a block as events name them or 0), from 0 on
#     registrations   (num_tokens, block, space, kind), by block; a block's primary key first
#     digests         a row per registration, as wide as the widest space
#     parents         uint64 per registration as parents.pxd keeps them; none with events off
#     copies          for each key of several blocks: how many, then as many numbers of
#                     registrations, in the order in which look-ups prefer them
#     details, tokens, texts      see save_details.pxi
#
# The seed of the table's hash is not written: each pool draws its own.

cdef object SPACE_DTYPE = np.dtype(
    [("group", "<u4"), ("width", "<u4"), ("block_size", "<u4")]
)
cdef object REGISTRATION_DTYPE = np.dtype(
    [("num_tokens", "<u4"), ("block", "<u4"), ("space", "<u2"), ("kind", "<u2")]
)

cdef enum:
    # Kinds of a registration.
    IS_PRIMARY = 1
    IS_LOOSE = 2            # assigned by hand, not in the table
    WITHOUT_TOKENS = 4


cdef struct SavedSpace:
    uint32_t group
    uint32_t width
    uint32_t block_size


cdef struct SavedRegistration:
    uint32_t num_tokens
    block_id_t block
    uint16_t space
    uint16_t kind


cdef size_t count_registrations(const Core* core, size_t* num_copies) noexcept:
    # How many there are, loose ones too, and how long `copies` is.
    cdef Holder holder
    cdef size_t count = 0
    num_copies[0] = core.shared.keys.num_live + core.shared.members.num_live
    for holder.block in range(core.blocks.num_blocks):
        count += registry.has_primary(core, holder.block)
    return count + core.index.extras.num_live


cdef void save_registration(
    const Core* core, Holder holder, SavedRegistration* saved, uint8_t* digest
) noexcept:
    cdef space_t space = registry.flagged_space(core, holder)
    cdef Key key = registry.key_of(core, holder)
    saved.block = holder.block
    saved.num_tokens = registry.num_tokens_of(core, holder)
    saved.space = key.space - 1
    saved.kind = IS_PRIMARY if holder.extra == NO_RECORD else 0
    if space & LOOSE_FLAG:
        saved.kind |= IS_LOOSE
    if space & NO_TOKENS_FLAG:
        saved.kind |= WITHOUT_TOKENS
    memcpy(digest, key.digest, core.spaces[key.space].width)


cdef void save_registrations(
    const Core* core, SavedRegistration* saved, uint8_t* digests, uint32_t width,
    uint32_t* numbers,
) noexcept:
    # numbers[m] becomes the registration that is member m of a shared key.
    cdef Holder holder
    cdef uint32_t i = 0
    for holder.block in range(core.blocks.num_blocks):
        holder.extra = NO_RECORD
        if registry.has_primary(core, holder.block):
            save_registration(core, holder, saved + i, digests + <size_t>i * width)
            if registry.flagged_space(core, holder) & SHARED_FLAG:
                numbers[registry.member_of(core, holder)] = i
            i += 1
        holder.extra = reverse_index.first(&core.index, holder.block)
        while holder.extra != NO_RECORD:
            save_registration(core, holder, saved + i, digests + <size_t>i * width)
            if registry.flagged_space(core, holder) & SHARED_FLAG:
                numbers[registry.member_of(core, holder)] = i
            i += 1
            holder.extra = reverse_index.extra(&core.index, holder.extra).next


cdef void save_parents(const Core* core, const Parents* of, uint64_t* saved) noexcept:
    # In the order of save_registrations.
    cdef Holder holder
    cdef size_t i = 0
    for holder.block in range(core.blocks.num_blocks):
        if registry.has_primary(core, holder.block):
            saved[i] = parents.of(of, holder.block, NO_RECORD)
            i += 1
        holder.extra = reverse_index.first(&core.index, holder.block)
        while holder.extra != NO_RECORD:
            saved[i] = parents.of(of, holder.block, holder.extra)
            i += 1
            holder.extra = reverse_index.extra(&core.index, holder.extra).next


cdef void save_copies(const Core* core, const uint32_t* numbers, uint32_t* copies) noexcept:
    # Every used cell that names a shared key, and the members behind it.
    copies = save_copies_of(core, &core.table.cells, numbers, copies)
    save_copies_of(core, &core.table.leaving, numbers, copies)


cdef uint32_t* save_copies_of(
    const Core* core, const cells.Cells* of, const uint32_t* numbers, uint32_t* copies
) noexcept:
    cdef uint64_t place
    cdef ref_t ref
    cdef record_id_t id
    for place in range(cells.num_cells(of)):
        ref = cells.ref_at(of, place)
        if (ref & ~<ref_t>INDEX_MASK) != <ref_t>SHARED:     # an EMPTY cell's neither
            continue
        copies[0] = shared_keys.key(&core.shared, ref & INDEX_MASK).num_members
        copies += 1
        id = shared_keys.key(&core.shared, ref & INDEX_MASK).first
        while id != NO_RECORD:
            copies[0] = numbers[id]
            copies += 1
            id = shared_keys.member(&core.shared, id).next
    return copies


cdef int refuse_unsavable(const Core* core) except -1:
    # Counts that were written from outside would make a file that load() refuses.
    cdef block_id_t id
    for id in range(1, core.blocks.num_blocks):
        if free_queue.contains(&core.queue, id) != (registry.num_holders(core, id) == 0):
            raise ContractError(
                f"block {id} with ref_cnt {registry.num_holders(core, id)} is "
                f"{'' if free_queue.contains(&core.queue, id) else 'not '}in the free queue: "
                "such a pool cannot be saved"
            )
    return 0


cdef dict arrays_of(const Core* core, const Parents* of):
    # The registrations' part of the arrays.
    cdef size_t num_copies, i
    cdef size_t count = count_registrations(core, &num_copies)
    cdef uint32_t width = 0
    cdef uint32_t num_spaces = max(core.num_spaces, 1) - 1 if count else 0
    cdef IdBuffer numbers = make_buffer(core.shared.members.high_water)
    cdef SavedSpace* saved_spaces
    cdef void* rows
    cdef void* digest_rows
    for i in range(num_spaces):
        width = max(width, core.spaces[i + 1].width)
    spaces = np.empty(num_spaces, SPACE_DTYPE)
    registrations = np.empty(count, REGISTRATION_DTYPE)
    digests = np.zeros((count, width), np.uint8)
    copies = new_array(num_copies, numpy.NPY_UINT32)
    saved_spaces = <SavedSpace*>data_of(spaces)
    for i in range(num_spaces):
        saved_spaces[i].group = core.spaces[i + 1].group
        saved_spaces[i].width = core.spaces[i + 1].width
    rows = data_of(registrations)
    digest_rows = data_of(digests)
    save_registrations(
        core, <SavedRegistration*>rows, <uint8_t*>digest_rows, width, numbers.ids
    )
    save_copies(core, numbers.ids, <uint32_t*>data_of(copies))
    parent_hashes = np.empty(count if of.of_block != NULL else 0, np.uint64)
    if of.of_block != NULL:
        save_parents(core, of, <uint64_t*>data_of(parent_hashes))
    return {
        "spaces": spaces, "registrations": registrations, "digests": digests,
        "parents": parent_hashes, "copies": copies,
    }


# Building -----------------------------------------------------------------------------------

cdef int load_queue(
    Core* core, const int32_t* ref_cnts, const block_id_t* queue, size_t num_free
) except -1:
    # `core` is new: block 0 is outside of the queue, all others are inside.
    cdef size_t i
    cdef block_id_t id
    for id in range(1, core.blocks.num_blocks):
        free_queue.remove(&core.queue, id)
    for id in range(core.blocks.num_blocks):
        if ref_cnts[id] < 0 and id != NULL_BLOCK:
            raise SavedPoolError(f"block {id} has ref_cnt {ref_cnts[id]}")
        state_at(&core.blocks, id).ref_cnt = ref_cnts[id]
    for i in range(num_free):
        id = queue[i]
        if id == NULL_BLOCK or id >= core.blocks.num_blocks:
            raise SavedPoolError(f"place {i} of the free queue has block {id}")
        if free_queue.contains(&core.queue, id) or ref_cnts[id] != 0:
            raise SavedPoolError(
                f"block {id} at place {i} of the free queue is in it twice or is held"
            )
        free_queue.append(&core.queue, id)
    for id in range(1, core.blocks.num_blocks):
        if ref_cnts[id] == 0 and not free_queue.contains(&core.queue, id):
            raise SavedPoolError(f"block {id} is neither held nor in the free queue")
    return 0


cdef int load_spaces(Core* core, const SavedSpace* spaces, size_t count, size_t width) except -1:
    cdef size_t i
    if count > MAX_SPACES:
        raise SavedPoolError(f"{count} spaces; the limit is {MAX_SPACES}")
    for i in range(count):
        if not 1 <= spaces[i].width <= min(width, <size_t>MAX_HASH_BYTES):
            raise SavedPoolError(f"space {i} has hashes of {spaces[i].width} bytes")
        if registry.intern_space(core, spaces[i].group, spaces[i].width) != <int>i + 1:
            raise SavedPoolError(f"space {i} repeats group {spaces[i].group}")
    return 0


cdef int check_registrations(
    const Core* core, const SavedRegistration* saved, size_t count, size_t* num_extra
) except -1:
    cdef size_t i
    cdef block_id_t before = 0
    cdef bint is_first
    num_extra[0] = 0
    for i in range(count):
        is_first = i == 0 or saved[i].block != before
        if saved[i].block >= core.blocks.num_blocks or i and saved[i].block < before:
            raise SavedPoolError(f"registration {i} names block {saved[i].block}")
        if saved[i].space + <uint32_t>1 >= core.num_spaces:
            raise SavedPoolError(f"registration {i} names space {saved[i].space}")
        if (
            saved[i].kind > 7
            or saved[i].kind & IS_PRIMARY and not is_first
            or saved[i].kind & IS_LOOSE and not saved[i].kind & IS_PRIMARY
            or saved[i].block == NULL_BLOCK and not saved[i].kind & IS_PRIMARY
            or saved[i].kind & WITHOUT_TOKENS and saved[i].num_tokens
        ):
            raise SavedPoolError(
                f"registration {i}, of block {saved[i].block}, is of kind {saved[i].kind}"
            )
        before = saved[i].block
        num_extra[0] += not saved[i].kind & IS_PRIMARY
    return 0


cdef int check_copies(
    const uint32_t* copies, size_t length, const SavedRegistration* saved, size_t count,
    uint8_t* is_copy, size_t* num_shared,
) except -1:
    # Marks the registrations that are named.
    cdef size_t i = 0, last
    num_shared[0] = 0
    while i < length:
        last = i + copies[i]
        if copies[i] < 2 or last >= length:
            raise SavedPoolError(f"{copies[i]} copies of a key at place {i} of {length}")
        num_shared[0] += 1
        i += 1
        while i <= last:
            if copies[i] >= count or is_copy[copies[i]] or saved[copies[i]].kind & IS_LOOSE:
                raise SavedPoolError(f"registration {copies[i]} cannot be a copy of a key")
            is_copy[copies[i]] = 1
            i += 1
    return 0


cdef void load_slots(
    Core* core, const SavedRegistration* saved, size_t count, const uint8_t* digests,
    size_t width, record_id_t* extras,
) noexcept:
    # Keys go to their blocks' slots; the table does not know them yet. extras[i] becomes the
    # record of registration i.
    cdef size_t i
    cdef Key key
    cdef space_t flags
    for i in range(count):
        key.digest = digests + i * width
        key.space = saved[i].space + 1
        flags = NO_TOKENS_FLAG if saved[i].kind & WITHOUT_TOKENS else 0
        extras[i] = NO_RECORD
        if saved[i].kind & IS_PRIMARY:
            if saved[i].kind & IS_LOOSE:
                flags |= LOOSE_FLAG
            registry.write_primary(core, saved[i].block, &key, flags, saved[i].num_tokens)
            continue
        extras[i] = reverse_index.append(
            &core.index, saved[i].block, key.space | flags, saved[i].num_tokens
        )
        memcpy(
            reverse_index.digest_slot(&core.index, extras[i]), key.digest,
            core.spaces[key.space].width,
        )


cdef int load_link(Core* core, Holder holder, hash_t hash, const Holder* first) except -1:
    # The table learns of a key: of a new one, or of the one that `first` has.
    cdef Key key = registry.key_of(core, holder)
    cdef Key expected
    cdef Holder other, held
    cdef uint64_t place
    cdef ref_t ref
    cdef bint is_held
    # All keys are in their rows already, so that a cell of another extra key of the block, with
    # the same hash, would be taken for this one's: meanwhile this one is hidden.
    cdef space_t space = registry.flagged_space(core, holder)
    registry.set_flagged_space(core, holder, 0)
    ref = registry.find(core, &key, hash, &other, &place)
    is_held = registry.find_held_by(core, &key, holder.block, &held)
    registry.set_flagged_space(core, holder, space)
    if first == NULL:
        if ref != 0:
            raise SavedPoolError(
                f"blocks {other.block} and {holder.block} have a key of which no order is known"
            )
    else:
        expected = registry.key_of(core, first[0])
        if (
            key.space != expected.space
            or not keys.same_digest(key.digest, expected.digest, core.spaces[key.space].width)
            or is_held
        ):
            raise SavedPoolError(
                f"blocks {first.block} and {holder.block} are no holders of one key"
            )
    registry.attach(core, holder, hash, ref, other, place)
    return 0


cdef int load_copies(
    Core* core, const SavedRegistration* saved, const record_id_t* extras,
    const uint32_t* copies, size_t length,
) except -1:
    cdef size_t i = 0, last
    cdef Holder holder, first
    cdef Key key
    while i < length:
        last = i + copies[i]
        i += 1
        first.block = saved[copies[i]].block
        first.extra = extras[copies[i]]
        key = registry.key_of(core, first)
        load_link(core, first, registry.hash_of(core, &key), NULL)
        i += 1
        while i <= last:
            holder.block = saved[copies[i]].block
            holder.extra = extras[copies[i]]
            key = registry.key_of(core, holder)
            load_link(core, holder, registry.hash_of(core, &key), &first)
            i += 1
    return 0


cdef int load_singles(
    Core* core, const SavedRegistration* saved, const record_id_t* extras, size_t count,
    const uint8_t* is_copy,
) except -1:
    cdef hash_t hashes[batches.RING]
    cdef size_t start = 0, width, i
    cdef Holder holder
    cdef Key key
    while start < count:
        width = min(count - start, <size_t>batches.RING)
        for i in range(start, start + width):
            holder.block = saved[i].block
            holder.extra = extras[i]
            if is_copy[i] == 0:
                key = registry.key_of(core, holder)
                hashes[i - start] = registry.hash_of(core, &key)
                table.prefetch_write(&core.table, hashes[i - start])
        for i in range(start, start + width):
            holder.block = saved[i].block
            holder.extra = extras[i]
            if is_copy[i] == 0 and not saved[i].kind & IS_LOOSE:
                load_link(core, holder, hashes[i - start], NULL)
        start += width
    return 0


cdef int load_keys(
    Core* core, const SavedRegistration* saved, size_t count, const uint8_t* digests,
    size_t width, const uint32_t* copies, size_t num_copies, record_id_t* extras,
    uint8_t* is_copy,
) except -1:
    # `core` has no keys, but the spaces. `extras` and `is_copy` have room for `count`;
    # `is_copy` is zero-filled. After a failure `core` is fit for release() only.
    cdef size_t num_extra, num_shared
    check_registrations(core, saved, count, &num_extra)
    check_copies(copies, num_copies, saved, count, is_copy, &num_shared)
    if count == 0:
        return 0
    registry.prepare_keys(core, <uint32_t>width)
    table.reserve(&core.table, count, core.blocks.num_blocks)
    reverse_index.reserve(&core.index, core.blocks.num_blocks, num_extra)
    memory.arena_reserve(&core.shared.keys, num_shared)
    memory.arena_reserve(&core.shared.members, num_copies - num_shared)
    load_slots(core, saved, count, digests, width, extras)
    load_copies(core, saved, extras, copies, num_copies)
    load_singles(core, saved, extras, count, is_copy)
    return 0


cdef void load_parents(
    Parents* of, const SavedRegistration* saved, const record_id_t* extras, size_t count,
    const uint64_t* hashes,
) noexcept:
    # After parents.reserve() for all blocks and extra keys. Only events read them.
    cdef size_t i
    for i in range(count):
        parents.note(of, saved[i].block, extras[i], hashes[i])
