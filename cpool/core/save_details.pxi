# SPDX-License-Identifier: Apache-2.0
# The details of `detailed_snapshots` in a saved pool; `tokens` and `texts` are saved_details.py's.
#
#     details     (number of the detail + 1, or 0; its block) per registration; none if the
#                 pool has no details

cdef object DETAIL_DTYPE = np.dtype([("number", "<u4"), ("row", "<u4")])


cdef struct SavedDetail:
    uint32_t number
    uint32_t row


cdef list details_in_order(BlockPool pool):
    # (EventDetail, its block) or None of each registration, in the order of save_registrations.
    cdef const Core* core = &pool.core
    cdef list found = []
    cdef Holder holder
    for holder.block in range(core.blocks.num_blocks):
        holder.extra = NO_RECORD
        if registry.has_primary(core, holder.block):
            found.append(pool.detail_of(holder))
        holder.extra = reverse_index.first(&core.index, holder.block)
        while holder.extra != NO_RECORD:
            found.append(pool.detail_of(holder))
            holder.extra = reverse_index.extra(&core.index, holder.extra).next
    return found


cdef dict detail_arrays(BlockPool pool):
    cdef dict numbers = {}
    cdef list fields = []
    cdef list in_order
    cdef EventDetail detail
    cdef SavedDetail* saved
    cdef size_t i
    in_order = [] if pool.details is None else details_in_order(pool)
    if not in_order:
        return {
            "details": np.empty(0, DETAIL_DTYPE),
            "tokens": np.empty(0, np.uint8),
            "texts": np.empty(0, np.uint8),
        }
    rows = np.zeros(len(in_order), DETAIL_DTYPE)
    saved = <SavedDetail*>data_of(rows)
    for i, kept in enumerate(in_order):
        if kept is None:
            continue
        detail, saved[i].row = kept
        saved[i].number = numbers.setdefault(id(detail), len(numbers) + 1)
        if saved[i].number > <size_t>len(fields):
            fields.append(saved_details.Detail(
                detail.token_ids, detail.size, detail.lora_id, detail.lora_name,
                detail.session_id, detail.extra_keys,
            ))
    return {"details": rows, **saved_details.pack(fields)}


cdef int load_details(
    BlockPool pool, const SavedRegistration* saved, const record_id_t* extras, size_t count,
    dict arrays,
) except -1:
    # After the registrations: extras[i] is the record of registration i.
    cdef size_t i
    cdef list details = []
    cdef EventDetail detail
    cdef void* rows = data_of(arrays["details"])
    cdef SavedDetail* row = <SavedDetail*>rows
    if not len(arrays["details"]):
        if len(arrays["tokens"]) or len(arrays["texts"]):
            raise SavedPoolError("there are details of no registration")
        return 0
    if not pool.detailed_snapshots or not pool.enable_kv_cache_events:
        raise SavedPoolError("there are details, but detailed_snapshots or events are off")
    if len(arrays["details"]) != count:
        raise SavedPoolError(f"{len(arrays['details'])} details for {count} keys")
    for fields in saved_details.unpack(arrays["tokens"], arrays["texts"]):
        detail = EventDetail.__new__(EventDetail)
        (
            detail.token_ids, detail.size, detail.lora_id, detail.lora_name, detail.session_id,
            detail.extra_keys,
        ) = fields
        details.append(detail)
    pool.extra_details = {}
    pool.details = [None] * pool.core.blocks.num_blocks
    for i in range(count):
        if row[i].number > <size_t>len(details):
            raise SavedPoolError(
                f"registration {i} names detail {row[i].number} of {len(details)}"
            )
        kept = (details[row[i].number - 1], row[i].row) if row[i].number else None
        if extras[i] == NO_RECORD:
            pool.details[saved[i].block] = kept
        else:
            pool.extra_details[extras[i]] = kept
    return 0
