# SPDX-License-Identifier: Apache-2.0
from cpool.core.keys cimport Key
from cpool.core.memory cimport Array
from cpool.core.registry cimport Core, Holder
from cpool.core.types cimport block_id_t, hash_t, int64_t, space_t, uint8_t, uint32_t, uint64_t
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


cdef enum:
    PAGE_HANDLES = 64


cdef struct HandlePage:
    PyObject* handles[PAGE_HANDLES]     # the live handle of each block, borrowed, or NULL
    uint32_t num_live


cdef class KVCacheBlock:
    cdef PyObject* owner            # its BlockPool, borrowed; NULL for a block of its own
    cdef block_id_t index           # in the pool; from num_blocks on: an end of the free queue
    cdef object own_block_id        # without a pool
    cdef object own                 # OwnState, without a pool

    cdef object state(self)
    cdef bint is_end(self) noexcept
    cdef int refuse_links(self) except -1
    cdef int detach(self) except -1


cdef class BlockPool:
    cdef Core core
    cdef Array pages_array          # HandlePage* per 64 blocks, from the first handle on
    cdef HandlePage** pages         # NULL where no handle lives
    cdef uint32_t num_pages
    cdef uint32_t num_exports       # numpy views of the key columns that are alive
    cdef uint32_t hash_width        # of the first key registered; 0 before it and after a reset
    cdef readonly unsigned long long num_evicted_blocks
    cdef readonly object num_gpu_blocks
    cdef readonly uint32_t hash_block_size
    cdef public bint enable_caching
    cdef public bint enable_kv_cache_events
    cdef public object medium
    cdef public object metrics_collector
    cdef public dict _reuse_watchers
    cdef dict __dict__
    cdef object __weakref__

    cdef KVCacheBlock handle(self, block_id_t id)
    cdef HandlePage* page_of(self, block_id_t id) except NULL
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
    cdef int assign_primary(self, block_id_t id, object key, object num_tokens) except -1
    cdef int assign_primary_tokens(self, block_id_t id, object num_tokens) except -1
    cdef int link_primary(self, block_id_t id) except -1
    cdef int insert_key(self, object key, block_id_t id, object num_tokens) except -1
    cdef bint look_up(self, object key, Key* wanted, Holder* holder) except -1
    cdef list holders(self, const Key* key)
    cdef int after(self) except -1
    cdef object find_rows(self, object hashes, object group, uint32_t multiple_of, bint prefix)
    cdef object registration(self, Holder holder, bint is_primary)
    cdef int check_available(self, int64_t count) except -1
    cdef bint is_observed(self)
    cdef int allocate(self, block_id_t* ids, size_t count) except -1
    cdef int announce_allocation(self, list taken, const block_id_t* ids, size_t count) except -1
    cdef int notify_reuse(self, list taken) except -1
    cdef bint evict(self, block_id_t id) except -1
    cdef int touch_run(self, const block_id_t* ids, size_t count) except -1
    cdef IdBuffer buffer_of(self, object blocks)
    cdef int release(self, IdBuffer buffer, bint hashed_last, bint all_last) except -1
    cdef int release_in_turn(self, dict by_pool) except -1
    cdef object hash_sequence(self, object request, uint64_t block_size, Py_ssize_t* scale)
    cdef int register_full(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, uint32_t group
    ) except -1
    cdef int register_step(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, size_t first,
        size_t total, uint32_t group
    ) except -1
    cdef int register_one(
        self, block_id_t id, const Key* key, hash_t hash, uint32_t num_tokens
    ) except -1
    cdef void note_width(self, uint32_t width) noexcept
    cdef uint32_t num_page_slots(self) noexcept
    cdef int check_batch_width(self, HashBatch rows) except -1
    cdef uint64_t check_boundary(self, object num_tokens) except? 0
    cdef bint holds(self, block_id_t id, bytes digest, uint32_t group) except -1
    cdef int register_partial(
        self, block_id_t id, bytes digest, uint64_t tokens, uint32_t group, bint replace
    ) except -1
    cdef int move_run(self, block_id_t source, block_id_t target) except -1
    cdef int forget_keys(self) except -1
    cdef object types_of_events(self)
    cdef object make_stored(
        self, object request, list digests, object parent, object start, object end,
        object block_size, object group, list ranges
    )
    cdef object make_stored_batch(
        self, list digests, object parent, object token_ids, object block_size, object group
    )
    cdef int emit_removed(self, list removed) except -1
    cdef dict settings(self)
    cdef int load_arrays(self, dict settings, dict arrays) except -1
