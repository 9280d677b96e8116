# SPDX-License-Identifier: Apache-2.0
from cpool.core cimport batches
from cpool.core.guess cimport Guess
from cpool.core.handle_map cimport HandleMap
from cpool.core.keys cimport Key, Space
from cpool.core.memory cimport Array
from cpool.core.parents cimport Parents
from cpool.core.registry cimport Core, Holder
from cpool.core.types cimport (
    block_id_t, hash_t, int64_t, record_id_t, ref_t, space_t, uint8_t, uint32_t, uint64_t,
)
from cpython.buffer cimport Py_buffer
from cpython.object cimport PyObject


cdef class IdBuffer:
    cdef block_id_t* ids
    cdef size_t count


cdef class HashBatch:
    cdef Py_buffer view
    cdef bint has_view
    cdef object kept
    cdef const uint8_t* rows
    cdef size_t row_bytes
    cdef size_t count
    cdef uint32_t width

    cdef bytes row(self, size_t i)


cdef int check_items(object items, str what, str kind) except -1
cdef HashBatch read_hashes(object hashes, Py_ssize_t expected, uint32_t known_width)


cdef class IdBatch:
    cdef Py_buffer view
    cdef bint has_view
    cdef object kept
    cdef const block_id_t* ids
    cdef size_t count


cdef class TokenBuffer:
    cdef uint64_t* values


cdef class EventRun:
    pass


cdef packed struct RemovedKey:
    uint32_t group
    uint8_t width           # bytes of the digest, which follows


cdef class RemovedRun(EventRun):
    cdef Array array        # empty in a part of another run
    cdef RemovedRun whole   # that other run, which has the rows
    cdef char* rows
    cdef size_t row_bytes
    cdef size_t count
    cdef object fields      # (medium, locality, ownership)

    cdef RemovedKey* row(self, size_t i) noexcept
    cdef RemovedRun part(self, size_t start, size_t stop)


cdef struct StoredSpan:
    uint32_t start          # its first row
    uint32_t count          # rows, one behind the other in their prefix
    uint32_t parent         # row of the parent, NO_RECORD when it is not resident
    uint32_t block_size     # tokens
    space_t space


cdef class SnapshotRun(EventRun):
    cdef Array digest_array     # `stride` bytes a row, parents before their children
    cdef Array span_array
    cdef StoredSpan* spans      # one event each
    cdef size_t num_rows
    cdef size_t num_spans
    cdef uint32_t stride
    cdef list spaces            # (group, width) of each space
    cdef dict descriptions      # group -> further fields of its events
    cdef object medium
    cdef list details           # (EventDetail, its block) or None for each row; or None

    cdef bytes digest(self, size_t row, size_t width)


cdef class StoredRun(EventRun):
    cdef bytes rows         # digests, `width` bytes each
    cdef uint32_t width
    cdef object parent      # digest, or None
    cdef object token_ids   # list, or an array of our own
    cdef object block_size
    cdef object group
    cdef object medium
    cdef dict description   # further fields of the event; None values are left out


cdef class BlockPool


cdef class EventDetail:
    cdef object token_ids   # array, `size` for each block of the registration
    cdef object size
    cdef dict extra_keys    # block of the registration -> keys, where it has some
    cdef object lora_id
    cdef object lora_name
    cdef object session_id

    cdef int describe(self, object event, size_t row) except -1


cdef class EventSource:
    cdef BlockPool pool
    cdef object group
    cdef object size

    cdef object parent_digest(self, size_t i)
    cdef object stored(self, size_t start, size_t stop, object parent)
    cdef EventDetail detail(self, object stored)
    cdef size_t detail_row(self, size_t i) except? 0


cdef class RequestSource(EventSource):
    cdef object request
    cdef object hashes
    cdef Py_ssize_t scale
    cdef list digests
    cdef list positions     # index of each row's block in the request
    cdef object first       # the block with which the event for all rows begins

    cdef object stored_range(self, object first, object last)


cdef class BatchSource(EventSource):
    cdef const block_id_t* ids
    cdef HashBatch rows
    cdef object first_parent
    cdef object token_ids
    cdef dict description
    cdef object extra_keys


cdef class RegistrationLog:
    cdef BlockPool pool
    cdef const block_id_t* ids
    cdef const uint64_t* ends
    cdef HashBatch rows
    cdef uint64_t size
    cdef space_t space
    cdef EventSource source
    cdef TokenBuffer parent_of      # of rows that follow no other, as parents.pxd keeps it
    cdef RemovedRun removed         # has room for all that can be replaced
    cdef EventDetail detail         # to be kept for snapshots, or None
    cdef bint truthful
    cdef list steps                 # truthful: a RemovedRun or (start, stop, parent is resident)
    cdef size_t start, stop         # rows of the run that is open, equal when none is
    cdef bint parent_is_resident
    cdef object failure             # what was raised in the middle of the commit, or None

    cdef bint follows(self, size_t i) noexcept
    cdef int find_parents(self) except -1
    cdef void note_parents(self, size_t first, size_t stop) noexcept
    cdef int reserve_removals(self, size_t num_keyed) except -1
    cdef void replacing(self, size_t i) noexcept
    cdef void registered(self, size_t i, bint is_new) noexcept
    cdef int add_row(self, size_t i, bint is_new) except -1
    cdef void note_row(self, size_t i) noexcept
    cdef bint has_resident_parent(self, size_t i) except -1
    cdef int close(self) except -1
    cdef int finish(self, object stored) except -1


cdef class KVCacheBlock:
    cdef PyObject* owner            # its BlockPool, borrowed; NULL for a block of its own
    cdef block_id_t index           # in the pool; from num_blocks on: an end of the free queue
    cdef object own                 # OwnState, without a pool

    cdef void become(self, object own) noexcept
    cdef object state(self)
    cdef bint is_end(self) noexcept
    cdef int refuse_links(self) except -1
    cdef int detach(self) except -1


cdef class _PoolState:
    cdef Core core
    cdef HandleMap handles          # of the blocks and, behind them, the two ends of the queue
    cdef uint32_t num_allocating    # calls whose blocks have left the queue and await callbacks
    cdef uint32_t num_exports       # numpy views of the key columns that are alive
    cdef uint32_t hash_width        # of the first key registered; 0 before it and after a reset
    cdef Parents parents            # of registrations, while events are on
    cdef block_id_t last_hit        # of get_cached_block()
    cdef block_id_t next_hit        # beside it, if it lay beside the one before; or NO_BLOCK
    cdef Guess guesses[4]           # the last prefixes found, NUM_GUESSES; a space's is space % 4
    cdef dict group_block_sizes     # group -> tokens in a block, as last registered
    cdef bint is_resetting          # and nothing that happens is to be told
    cdef bint events_lost           # the next batch must be a snapshot
    cdef list details               # (EventDetail, its block) of each primary key; or None
    cdef dict extra_details         # of records of the reverse index
    cdef readonly bint truthful_events
    cdef readonly bint detailed_snapshots
    cdef readonly unsigned long long num_event_batches
    cdef readonly unsigned long long num_evicted_blocks
    cdef readonly object num_gpu_blocks
    cdef readonly uint32_t hash_block_size
    cdef public bint enable_caching
    cdef public bint enable_kv_cache_events
    cdef public object medium
    cdef public object metrics_collector
    cdef public dict event_groups   # group -> GroupDescription, for events
    cdef public dict _reuse_watchers
    cdef dict __dict__
    cdef object __weakref__

    cdef KVCacheBlock handle(self, block_id_t id)
    cdef void forget_prefixes(self) noexcept
    cdef int prepare_handles(self, size_t count) except -1
    cdef KVCacheBlock new_handle(self, uint32_t place, block_id_t id)
    cdef int fill_with_handles(
        self, list result, const block_id_t* ids, size_t start, size_t stop
    ) except -1
    cdef void forget_handle(self, block_id_t id) noexcept
    cdef list handles_of(self, const block_id_t* ids, size_t count)
    cdef block_id_t own_id(self, object block) except? 0xFFFFFFFF
    cdef block_id_t check_id(self, object block_id) except? 0xFFFFFFFF
    cdef object neighbour(self, block_id_t id, bint forward)
    cdef bytes key_bytes(self, Holder holder)
    cdef object primary_key(self, block_id_t id)
    cdef object primary_tokens(self, block_id_t id)
    cdef list extra_keys(self, block_id_t id)
    cdef list keys_of(self, block_id_t id)
    cdef bint look_up(self, object key, Key* wanted, Holder* holder) except -1
    cdef list holders(self, const Key* key)
    cdef int after(self) except -1
    cdef bint read_own(self, list items, block_id_t* ids) noexcept
    cdef object hash_sequence(self, object request, uint64_t block_size, Py_ssize_t* scale)
    cdef void note_width(self, uint32_t width) noexcept
    cdef int check_batch_width(self, HashBatch rows) except -1
    cdef uint64_t check_boundary(self, object num_tokens) except? 0
    cdef void prefetch_key(self, block_id_t id) noexcept
    cdef bint has_primary_key(self, block_id_t id, bytes digest, uint32_t group) noexcept
    cdef bint holds(self, block_id_t id, bytes digest, uint32_t group) except -1
    cdef bint is_resident(self, object digest, uint32_t group) except -1


cdef class _PoolEvents(_PoolState):
    cdef object types_of_events(self)
    cdef object make_stored(
        self, object request, list digests, object parent, object start, object end,
        object block_size, object group, list ranges
    )
    cdef dict describe(self, object group)
    cdef tuple place_fields(self)
    cdef BatchSource batch_source(
        self, IdBatch batch, HashBatch rows, object parent, object token_ids, uint64_t size,
        uint32_t group, object extra_keys, dict fields,
    )
    cdef StoredRun partial_run(
        self, bytes digest, object parent, object token_ids, uint32_t group
    )
    cdef RegistrationLog start_log(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch rows, uint32_t group,
        uint64_t size, EventSource source,
    )
    cdef int reserve_parents(self) except -1
    cdef RemovedRun log_for(self, const block_id_t* ids, size_t count)
    cdef int set_parent(self, object stored, object parent) except -1
    cdef int emit(self, object event, bint compact) except -1
    cdef int report(self, object event, bint compact) except -1
    cdef int lose_events(self, object error) except -1
    cdef int emit_removed(self, RemovedRun removed, bint compact) except -1
    cdef int emit_arrival(self, bytes key) except -1
    cdef int make_arrival(self, bytes key) except -1
    cdef int report_partial(
        self, object stored, object parent, uint32_t group, bint is_new, bint compact
    ) except -1
    cdef RemovedRun departure_log(self)
    cdef void log_departure(self, Holder holder, RemovedRun removed) noexcept
    cdef void forget_details(self) noexcept
    cdef int note_detail(
        self, block_id_t id, bint as_extra, EventDetail detail, size_t row
    ) except -1
    cdef EventDetail request_detail(self, object request, object start, object end)
    cdef object detail_of(self, Holder holder)
    cdef object detail_to_move(self, Holder holder)
    cdef record_id_t last_extra(self, block_id_t id) noexcept
    cdef SnapshotRun take_snapshot(self)


cdef class _PoolLookup(_PoolEvents):
    cdef int assign_primary(self, block_id_t id, object key, object num_tokens) except -1
    cdef int assign_primary_tokens(self, block_id_t id, object num_tokens) except -1
    cdef int link_primary(self, block_id_t id) except -1
    cdef int insert_key(self, object key, block_id_t id, object num_tokens) except -1
    cdef void prefetch_answer(self, ref_t ref) noexcept
    cdef void prefetch_handle(self, block_id_t id) noexcept
    cdef bint is_next_hit(self, const Key* key) noexcept
    cdef void note_hit(self, block_id_t id) noexcept
    cdef size_t find_prefix(
        self, HashBatch batch, size_t count, space_t space, block_id_t* found
    ) noexcept
    cdef object find_rows(self, object hashes, object group, uint32_t multiple_of, bint prefix)
    cdef object registration(self, Holder holder, bint is_primary)


cdef class _PoolAllocation(_PoolLookup):
    cdef int check_available(self, int64_t count) except -1
    cdef bint is_observed(self)
    cdef int allocate(self, block_id_t* ids, size_t count, bint compact) except -1
    cdef int announce_allocation(self, list taken, const block_id_t* ids, size_t count) except -1
    cdef int notify_reuse(self, list taken) except -1
    cdef bint evict(self, block_id_t id) except -1
    cdef int touch_run(self, const block_id_t* ids, size_t count) except -1
    cdef IdBuffer buffer_of(self, object blocks)
    cdef int release(self, IdBuffer buffer, bint hashed_last, bint all_last) except -1
    cdef int release_in_turn(self, dict by_pool) except -1
    cdef object count_known(self, const block_id_t* ids, size_t count)
    cdef int evict_all(self, const block_id_t* ids, size_t count, bint compact) except -1
    cdef size_t evict_quietly(
        self, const block_id_t* ids, size_t count, size_t asked, RemovedRun removed
    ) noexcept


cdef class _PoolRegistration(_PoolAllocation):
    cdef int register_full(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, uint32_t group,
        uint64_t size, EventSource source, object stored,
    ) except -1
    cdef int register_steps(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, uint32_t group,
        size_t step, size_t num_keyed, RegistrationLog log,
    ) except -1
    cdef int register_step(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, size_t first,
        size_t total, uint32_t group, RegistrationLog log,
    ) except -1
    cdef void register_logged(
        self, batches.Registrations* rows, size_t first, RegistrationLog log
    ) noexcept
    cdef int move_run(self, block_id_t source, block_id_t target) except -1


cdef class _PoolPartials(_PoolRegistration):
    cdef int check_partial_parent(
        self, uint64_t tokens, object parent, object token_ids
    ) except -1
    cdef int register_partial_id(
        self, block_id_t id, bytes block_hash, uint64_t tokens, uint32_t group,
        bint replace_existing_hashes, object parent_hash, object token_ids,
    ) except -1
    cdef int register_unreported(
        self, IdBatch batch, HashBatch rows, TokenBuffer ends, uint32_t group,
        const block_id_t* found,
    ) except -1
    cdef tuple partial_row(
        self, size_t i, bytes digest, uint32_t group, object parent, object token_ids
    )
    cdef int register_partial_rows(
        self, IdBatch batch, TokenBuffer ends, uint32_t width, uint32_t group, list said
    ) except -1
    cdef int register_partial(
        self, block_id_t id, bytes digest, uint64_t tokens, uint32_t group, bint replace,
        object parent, object stored, EventDetail detail, bint compact, bint is_begun=*,
    ) except -1


cdef class BlockPool(_PoolPartials):
    cdef int forget_keys(self) except -1
    cdef int finish_reset(self) except -1
    cdef dict settings(self)
    cdef int load_arrays(self, dict settings, dict arrays) except -1
