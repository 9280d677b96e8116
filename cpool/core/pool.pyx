# SPDX-License-Identifier: Apache-2.0
"""The block pool: hands blocks out, counts references, finds them by prefix hash, evicts.

Data flows one way: hashes -> table -> block -> free queue -> events. The parts (``*.pxd``)
each know one structure; this file alone changes several in one step, always in the same
order: read the arguments, check them, reserve memory, commit. Nothing after the reservation
can fail, so no call leaves a half-change behind.

Decisions are those of vLLM 0.32.0's ``vllm/v1/core/block_pool.py``, op for op; where that
class would corrupt itself (double free, negative count, foreign id) this one raises first.
"""
cimport cython
cimport numpy
from cpool.core cimport (
    batches, check, free_queue, keys, memory, msgpack, parents, registry, reverse_index,
    shared_keys, table, table_stats,
)
from cpool.core.blocks cimport PrimaryKey, digest_slot
from cpool.core.keys cimport Key, Space, copy_digest, MAX_SPACES
from cpool.core.memory cimport Array, prefetch, prefetch_write
from cpool.core.msgpack cimport Writer
from cpool.core.parents cimport Parents
from cpool.core.registry cimport Core, Holder
from cpool.core.types cimport (
    BlockState, block_id_t, hash_t, int32_t, int64_t, record_id_t, ref_t, space_t, uint8_t,
    uint16_t, uint32_t, uint64_t, INDEX_MASK, LOOSE_FLAG, MAX_BLOCKS, MAX_HASH_BYTES,
    MAX_NUM_TOKENS, NO_BLOCK, NO_RECORD,
    NO_TOKENS_FLAG, NOT_QUEUED, SHARED, SHARED_FLAG, SPACE_MASK,
)
from cpython.buffer cimport (
    Py_buffer, PyBUF_FORMAT, PyBUF_STRIDED_RO, PyBuffer_FillInfo,
    PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_RawCalloc, PyMem_RawFree
from cpython.object cimport PyObject
from libc.string cimport memcpy, memset

import logging
import os
from collections.abc import Mapping

import numpy as np

from cpool.core import saving
from cpool.core.contract import (
    BlockIdError, ContractError, EventSnapshot, Registration, SavedPoolError,
)
from cpool.core.standalone import BlockHashToBlockMap, FreeKVCacheBlockQueue

cdef extern from *:
    bint CPOOL_DEBUG
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    PyObject* PyList_GET_ITEM(list items, Py_ssize_t index) noexcept
    PyObject* Py_TYPE(PyObject* object) noexcept
    void PyObject_GC_UnTrack(void* object)
    # Objects made between a check and its commit could start the garbage collector, and then
    # the __del__ of anything could call the pool. So there it is off.
    int PyGC_Disable()
    int PyGC_Enable()

cdef enum:
    NULL_BLOCK = 0
    MAX_REF_CNT = 0x7FFFFFFF
    STEP = 1024                     # registrations that memory is reserved for at once
    FEW = 128                       # block ids for which a call has room of its own
    CHECKED_UP_TO_BLOCKS = 4096     # debug builds check pools of this size after each operation

cdef object STATE_DTYPE = np.dtype([("prev", "<u4"), ("next", "<u4"), ("ref_cnt", "<i4")])
cdef object KEY_DTYPE = np.dtype([("num_tokens", "<u4"), ("space", "<u2")])

numpy.import_array()

include "arguments.pxi"
include "steps.pxi"
include "event_runs.pxi"
include "event_steps.pxi"
include "snapshot.pxi"
include "handles.pxi"
include "views.pxi"
include "save.pxi"


cdef inline object hash_at(object hashes, Py_ssize_t index):
    if type(hashes) is list and index < len(<list>hashes):
        return (<list>hashes)[index]
    return hashes[index]


cdef inline object new_array(Py_ssize_t count, int type_number):
    # As numpy.empty, in a tenth of the time.
    cdef numpy.npy_intp shape = count
    return numpy.PyArray_EMPTY(1, &shape, type_number, False)


cdef inline void* data_of(object array) noexcept:
    # The memory of a numpy array that we made and still hold.
    return numpy.PyArray_DATA(<numpy.ndarray>array)


cdef class Column:
    """A read-only, zero-copy view of one column; keeps the pool alive."""
    cdef BlockPool pool
    cdef void* data
    cdef Py_ssize_t nbytes
    cdef bint is_key_column

    def __getbuffer__(self, Py_buffer* view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.nbytes, 1, flags)

    def __dealloc__(self):
        if self.is_key_column and self.pool is not None:
            self.pool.num_exports -= 1


cdef object view_column(BlockPool pool, void* data, Py_ssize_t nbytes, dtype, bint is_key_column):
    cdef Column column = Column.__new__(Column)
    column.pool = pool
    column.data = data
    column.nbytes = nbytes
    column.is_key_column = is_key_column
    if is_key_column:
        pool.num_exports += 1
    return np.frombuffer(column, dtype=dtype)


cdef class BlockPool:
    """A pool of KV-cache blocks with a prefix cache.

    Block 0 is the null block: a placeholder that is never handed out, freed or cached.
    Blocks are numbered 0 to ``num_gpu_blocks - 1`` and handed out in that order at first,
    later in the order of the free queue: blocks without a key first, then the least recently
    used. Methods with vLLM's names take and return `KVCacheBlock` handles; methods that end
    in ``_ids`` take and return arrays of block ids and do a whole batch in one call.

    Not safe to call from a thread while another call is inside a callback (``on_reuse``,
    metrics hooks); otherwise each call holds the GIL and is atomic.

    Args:
        num_gpu_blocks: Number of blocks, the null block included; 1 to 2**30 - 2.
        enable_caching: Whether freed blocks stay findable by hash until they are reused.
        hash_block_size: Tokens between two boundaries at which hashes exist.
        enable_kv_cache_events: Whether to collect events for `take_events`.
        metrics_collector: Object with ``on_block_allocated``, ``on_block_accessed``,
            ``on_block_evicted`` (each called with a block) and ``reset``.
        medium: Storage medium that events report.
        truthful_events: Whether a consumer of the events that keeps a set of (group, hash)
            holds exactly the pool's keys after each batch. Off, the events are those of
            vLLM, whose consumers forget keys that are still resident, among other things.
        detailed_snapshots: Whether snapshots carry token ids, LoRA, extra keys and session, as
            the events did. With events on that keeps the tokens of every resident block in
            memory, four bytes each as a rule, and one small object a block.

    Raises:
        ContractError: A size is not an integer in its range.
        MemoryError: The columns do not fit.
    """

    logger = logging.getLogger("cpool")
    # Event classes and converters; None: those of cpool.events. A subclass may set others.
    event_types = None
    # What events say about where the blocks are; None is left out.
    event_locality = None
    event_ownership = None
    # Whether the truthful stream tells of keys that come through `_insert_block_hash`. False in
    # a subclass whose callers report those themselves.
    reports_inserted_keys = True

    def __cinit__(self, *args, **kwargs):
        self._reuse_watchers = {}

    def __init__(
        self,
        num_gpu_blocks,
        enable_caching,
        hash_block_size,
        enable_kv_cache_events=False,
        metrics_collector=None,
        medium="GPU",
        *,
        truthful_events=False,
        detailed_snapshots=False,
    ):
        if self.core.blocks.num_blocks:
            raise ContractError("a pool cannot be initialised twice")
        num_blocks = read_count(num_gpu_blocks, "num_gpu_blocks", 1, MAX_BLOCKS)
        self.hash_block_size = <uint32_t>read_count(
            hash_block_size, "hash_block_size", 1, MAX_NUM_TOKENS
        )
        seed = os.urandom(8 * keys.NUM_SEED_WORDS)
        memcpy(self.core.seed, PyBytes_AS_STRING(seed), 8 * keys.NUM_SEED_WORDS)
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.medium = medium
        self.truthful_events = truthful_events
        self.detailed_snapshots = detailed_snapshots
        self.event_groups = {}
        self.group_block_sizes = {}
        self.kv_event_queue = []
        registry.init(&self.core, <uint32_t>num_blocks)
        free_queue.remove(&self.core.queue, NULL_BLOCK)

    def __dealloc__(self):
        cdef uint32_t i, j
        cdef HandlePage* page
        cdef bint collects = PyGC_Disable()
        for i in range(self.num_page_slots()):
            page = self.pages[i]
            if page == NULL:
                continue
            for j in range(PAGE_HANDLES):
                if page.handles[j] != NULL:
                    (<KVCacheBlock>page.handles[j]).detach()
            PyMem_RawFree(page)
        if collects:
            PyGC_Enable()
        memory.release(&self.pages_array)
        parents.release(&self.parents)
        registry.release(&self.core)

    def __reduce__(self):
        raise TypeError("a BlockPool cannot be pickled or copied: its blocks are device memory")

    # Handles and keys ---------------------------------------------------------------------

    cdef uint32_t num_page_slots(self) noexcept:
        # Behind the blocks come the two ends of the free queue.
        return 0 if self.pages == NULL else (self.core.blocks.num_blocks + 1) // PAGE_HANDLES + 1

    cdef HandlePage* page_of(self, block_id_t id) except NULL:
        if self.pages == NULL:
            if self.core.blocks.num_blocks == 0:
                raise ContractError("the pool was never initialised")
            memory.allocate(
                &self.pages_array, (self.core.blocks.num_blocks + 1) // PAGE_HANDLES + 1,
                sizeof(HandlePage*),
            )
            self.pages = <HandlePage**>self.pages_array.data
        if self.pages[id // PAGE_HANDLES] == NULL:
            if not memory.refuses_allocation():
                self.pages[id // PAGE_HANDLES] = <HandlePage*>PyMem_RawCalloc(
                    1, sizeof(HandlePage)
                )
            if self.pages[id // PAGE_HANDLES] == NULL:
                raise MemoryError(f"cannot allocate {sizeof(HandlePage)} bytes")
            self.num_pages += 1
        return self.pages[id // PAGE_HANDLES]

    cdef KVCacheBlock handle(self, block_id_t id):
        cdef HandlePage* page = NULL
        cdef PyObject** place
        cdef KVCacheBlock block
        if self.pages != NULL:
            page = self.pages[id // PAGE_HANDLES]
            if page != NULL and page.handles[id % PAGE_HANDLES] != NULL:
                return <KVCacheBlock>page.handles[id % PAGE_HANDLES]
        block = KVCacheBlock.__new__(KVCacheBlock)
        # Only now: a collection for the new object may have freed the page.
        page = self.page_of(id)
        place = &page.handles[id % PAGE_HANDLES]
        if place[0] != NULL:
            return <KVCacheBlock>place[0]   # or a __del__ asked for the same block
        # A pool's handle refers to no object, so the collector need not look at it.
        PyObject_GC_UnTrack(<void*>block)
        block.owner = <PyObject*>self
        block.index = id
        place[0] = <PyObject*>block
        page.num_live += 1
        return block

    cdef void forget_handle(self, block_id_t id) noexcept:
        cdef HandlePage* page = self.pages[id // PAGE_HANDLES]
        page.handles[id % PAGE_HANDLES] = NULL
        page.num_live -= 1
        if page.num_live == 0:
            self.pages[id // PAGE_HANDLES] = NULL
            self.num_pages -= 1
            PyMem_RawFree(page)

    cdef list handles_of(self, const block_id_t* ids, size_t count):
        cdef list result = [None] * count
        cdef size_t i
        for i in range(count):
            result[i] = self.handle(ids[i])
        return result

    cdef block_id_t own_id(self, object block) except? 0xFFFFFFFF:
        if type(block) is not KVCacheBlock:
            raise TypeError(f"expected a KVCacheBlock, not {type(block).__name__}")
        if (<KVCacheBlock>block).owner != <PyObject*>self or (<KVCacheBlock>block).is_end():
            raise ContractError(f"block {block.block_id} does not belong to this pool")
        return (<KVCacheBlock>block).index

    cdef block_id_t check_id(self, object block_id) except? 0xFFFFFFFF:
        cdef uint32_t num_blocks = self.core.blocks.num_blocks
        cdef int overflow = 0
        cdef long long small
        if type(block_id) is int:
            small = PyLong_AsLongLongAndOverflow(block_id, &overflow)
            if not overflow and 0 <= small < num_blocks:
                return <block_id_t>small
        if isinstance(block_id, (bool, float)) or not hasattr(block_id, "__index__"):
            raise TypeError(f"a block id must be an integer, not {type(block_id).__name__}")
        id = block_id.__index__()
        if id < 0:
            raise BlockIdError(
                f"Invalid block_id {id} < 0: the pool has blocks 0 to {num_blocks - 1}"
            )
        if id >= num_blocks:
            raise BlockIdError(
                f"Invalid block_id {id} >= {num_blocks}. This indicates a bug in the KV "
                "connector - workers should only report block IDs that were allocated by the "
                "scheduler."
            )
        return id

    cdef object neighbour(self, block_id_t id, bint forward):
        cdef block_id_t end = self.core.queue.end
        cdef block_id_t other
        if id == end + 1 and not forward or id == end and forward:
            return None
        other = self.core.queue.states[min(id, end)].next if forward else (
            self.core.queue.states[min(id, end)].prev
        )
        if other == NOT_QUEUED:
            return None
        if other == end and not forward:
            other = end + 1
        return self.handle(other)

    cdef bytes key_bytes(self, Holder holder):
        cdef Key key = registry.key_of(&self.core, holder)
        cdef keys.Space* space = &self.core.spaces[key.space]
        return make_key(key.digest, space.width, space.group)

    cdef object primary_key(self, block_id_t id):
        if not registry.has_primary(&self.core, id):
            return None
        return self.key_bytes(registry.primary(id))

    cdef object primary_tokens(self, block_id_t id):
        if not registry.has_primary(&self.core, id):
            return None
        if self.core.blocks.keys[id].space & NO_TOKENS_FLAG:
            return None
        return self.core.blocks.keys[id].num_tokens

    cdef list extra_keys(self, block_id_t id):
        cdef list found = []
        cdef Holder holder
        holder.block = id
        holder.extra = reverse_index.first(&self.core.index, id)
        while holder.extra != NO_RECORD:
            found.append(self.key_bytes(holder))
            holder.extra = reverse_index.extra(&self.core.index, holder.extra).next
        return found

    cdef list keys_of(self, block_id_t id):
        # The keys under which the table knows the block, the primary one first.
        cdef list found = []
        if (
            registry.has_primary(&self.core, id)
            and not self.core.blocks.keys[id].space & LOOSE_FLAG
        ):
            found.append(self.key_bytes(registry.primary(id)))
        if self.core.index.heads != NULL:
            found += self.extra_keys(id)
        return found

    cdef int assign_primary(self, block_id_t id, object key, object num_tokens) except -1:
        # As code outside the pool assigns it: the table does not learn of it.
        cdef Key wanted
        cdef uint32_t group
        cdef int width
        cdef space_t flags = LOOSE_FLAG
        cdef uint32_t tokens = 0
        cdef RemovedRun removed
        if id >= self.core.blocks.num_blocks:
            raise ContractError("the end of a free queue has no block hash")
        removed = self.departure_log()
        if key is None:
            if registry.has_primary(&self.core, id):
                self.log_departure(registry.primary(id), removed)
                registry.drop_primary(&self.core, id)
            return self.emit_removed(removed, False)
        width = read_key(key, &wanted.digest, &group)
        if num_tokens is None:
            flags |= NO_TOKENS_FLAG
        else:
            tokens = read_count(num_tokens, "num_tokens", 0, MAX_NUM_TOKENS)
        registry.prepare_keys(&self.core, width)
        wanted.space = registry.intern_space(&self.core, group, width)
        if registry.has_primary(&self.core, id):
            self.log_departure(registry.primary(id), removed)
            registry.drop_primary(&self.core, id)
        registry.write_primary(&self.core, id, &wanted, flags, tokens)
        note_parent(&self.core, &self.parents, id, False, 0)
        self.note_detail(id, False, None, 0)
        return self.emit_removed(removed, False)

    cdef int assign_primary_tokens(self, block_id_t id, object num_tokens) except -1:
        if id >= self.core.blocks.num_blocks or not registry.has_primary(&self.core, id):
            if num_tokens is None:
                return 0
            raise ContractError(f"block {id} has no hash whose tokens could be counted")
        if num_tokens is None:
            self.core.blocks.keys[id].space |= NO_TOKENS_FLAG
            self.core.blocks.keys[id].num_tokens = 0
            return 0
        self.core.blocks.keys[id].num_tokens = read_count(
            num_tokens, "num_tokens", 0, MAX_NUM_TOKENS
        )
        self.core.blocks.keys[id].space &= ~<space_t>NO_TOKENS_FLAG
        return 0

    cdef int link_primary(self, block_id_t id) except -1:
        # The table learns of a primary key that was assigned by hand. This is the one way in
        # which the null block, too, can be registered: whoever does so twice said what it wants.
        cdef Key key
        cdef keys.Space space
        cdef Holder other
        cdef uint64_t num_keys
        if not self.core.blocks.keys[id].space & LOOSE_FLAG:
            return 0
        key = registry.key_of(&self.core, registry.primary(id))
        space = self.core.spaces[key.space]
        registry.reserve(&self.core, space.group, space.width, 1, 0)
        key = registry.key_of(&self.core, registry.primary(id))
        if registry.find_held_by(&self.core, &key, id, &other):
            return 0
        self.core.blocks.keys[id].space &= ~<space_t>LOOSE_FLAG
        num_keys = self.core.table.num_used
        registry.link(&self.core, registry.primary(id), registry.hash_of(&self.core, &key))
        if self.core.table.num_used != num_keys:
            self.emit_arrival(self.key_bytes(registry.primary(id)))
        return 0

    cdef int insert_key(self, object key, block_id_t id, object num_tokens) except -1:
        # Registers unless the table maps the key to the block already.
        cdef Key wanted
        cdef Holder holder
        cdef uint32_t group
        cdef uint32_t tokens = 0
        cdef space_t flags = 0
        cdef bint as_extra
        cdef uint64_t num_keys
        cdef int width = read_key(key, &wanted.digest, &group)
        if id == NULL_BLOCK:
            raise ContractError("the null block is never registered")
        if num_tokens is None:
            flags = NO_TOKENS_FLAG
        else:
            tokens = read_count(num_tokens, "num_tokens", 0, MAX_NUM_TOKENS)
        if self.primary_key(id) == key:
            return 0
        wanted.space = registry.find_space(&self.core, group, width)
        if registry.find_held_by(&self.core, &wanted, id, &holder):
            return 0
        as_extra = registry.has_primary(&self.core, id)
        wanted.space = registry.reserve(&self.core, group, width, 1, as_extra)
        self.reserve_parents()
        num_keys = self.core.table.num_used
        registry.register(
            &self.core, id, &wanted, registry.hash_of(&self.core, &wanted), flags, tokens
        )
        note_parent(&self.core, &self.parents, id, as_extra, 0)
        self.note_detail(id, as_extra, None, 0)
        if self.core.table.num_used != num_keys:
            self.emit_arrival(key)
        return 0

    cdef bint look_up(self, object key, Key* wanted, Holder* holder) except -1:
        # Fills `wanted`, whose digest is borrowed from `key`, and its first holder.
        cdef uint32_t group
        cdef int width = read_key(key, &wanted.digest, &group)
        wanted.space = registry.find_space(&self.core, group, width)
        return registry.find_first(&self.core, wanted, holder)

    cdef list holders(self, const Key* key):
        # Ids of all blocks under a key, in order of registration.
        cdef Holder holder
        cdef uint64_t place
        cdef ref_t ref = 0
        cdef record_id_t id
        cdef list found = []
        if key.space:
            ref = registry.find(
                &self.core, key, registry.hash_of(&self.core, key), &holder, &place
            )
        if ref == 0:
            return found
        if (ref & ~<ref_t>INDEX_MASK) != <ref_t>SHARED:
            return [holder.block]
        id = shared_keys.key(&self.core.shared, ref & INDEX_MASK).first
        while id != NO_RECORD:
            found.append(shared_keys.member(&self.core.shared, id).block)
            id = shared_keys.member(&self.core.shared, id).next
        return found

    cdef int after(self) except -1:
        # Debug builds look at everything after each operation.
        if CPOOL_DEBUG and self.num_allocating == 0 and (
            self.core.blocks.num_blocks <= CHECKED_UP_TO_BLOCKS
        ):
            try:
                check.check(&self.core)
            except MemoryError:
                pass    # none for the check's messages: the operation has succeeded all the same
        return 0

    # What vLLM reads ----------------------------------------------------------------------

    @property
    def blocks(self):
        """All blocks, by id: ``len``, index, slice, iterate."""
        cdef BlockList result = BlockList.__new__(BlockList)
        result.pool = self
        return result

    @property
    def null_block(self):
        """The placeholder block, id 0."""
        return self.handle(NULL_BLOCK)

    @property
    def free_block_queue(self):
        """The free queue, as a view with vLLM's methods."""
        return PoolFreeQueue(self)

    @property
    def cached_block_hash_to_block(self):
        """The table, as a view with vLLM's methods."""
        return PoolHashMap(self)

    @property
    def cached_block_hashes_by_block(self):
        """Block id -> set of its extra keys, for blocks that have some."""
        return PoolRows(self)

    # Look-up ------------------------------------------------------------------------------

    def get_cached_block(self, block_hash, kv_cache_group_ids):
        """The first block registered under a hash in each group, or None if one has none.

        Args:
            block_hash: The digest, as bytes, without group.
            kv_cache_group_ids: Sequence of group ids.

        Returns:
            One block per group, or None.
        """
        cdef Key key
        cdef Holder holder
        cdef list found = []
        cdef Py_ssize_t width
        if not isinstance(block_hash, bytes):
            raise TypeError(f"a block hash must be bytes, not {type(block_hash).__name__}")
        width = PyBytes_GET_SIZE(block_hash)
        check_width(width)
        key.digest = <const uint8_t*>PyBytes_AS_STRING(block_hash)
        for group in kv_cache_group_ids:
            key.space = registry.find_space(&self.core, read_group(group), <uint32_t>width)
            if not registry.find_first(&self.core, &key, &holder):
                return None
            found.append(self.handle(holder.block))
        return found

    cdef object find_rows(self, object hashes, object group, uint32_t multiple_of, bint prefix):
        cdef HashBatch batch = read_hashes(hashes, -1, self.hash_width)
        cdef uint32_t group_id = read_group(group)
        cdef size_t count = batch.count
        cdef space_t space
        cdef block_id_t* ids
        cdef int64_t* answers
        cdef size_t i
        self.check_batch_width(batch)
        space = registry.find_space(&self.core, group_id, batch.width)
        if space == 0 or count == 0 or self.core.table.cells == NULL:
            if prefix:
                return new_array(0, numpy.NPY_UINT32)
            found = new_array(count, numpy.NPY_INT64)
            found.fill(-1)
            return found
        found = new_array(count, numpy.NPY_UINT32 if prefix else numpy.NPY_INT64)
        ids = <block_id_t*>data_of(found)
        if prefix:
            count = batches.find_batch(
                &self.core, batch.rows, batch.row_bytes, count, space, multiple_of, True, ids
            )
            return found[:count]
        # The ids come in the upper half of the answers, which are then written from below.
        answers = <int64_t*>ids
        ids += count
        batches.find_batch(
            &self.core, batch.rows, batch.row_bytes, count, space, multiple_of, False, ids
        )
        for i in range(count):
            answers[i] = -1 if ids[i] == NO_BLOCK else <int64_t>ids[i]
        return found

    def find_ids(self, hashes, kv_cache_group_id):
        """The first block registered under each hash.

        Args:
            hashes: (n, width) uint8 array, bytes-like of n * width, or sequence of bytes.
            kv_cache_group_id: Group to look in.

        Returns:
            (n,) int64 array of block ids, -1 where nothing is registered.
        """
        return self.find_rows(hashes, kv_cache_group_id, 0, False)

    def find_full_ids(self, hashes, kv_cache_group_id, block_size):
        """As `find_ids`, but only blocks whose registration covers whole blocks.

        A partially filled block is never returned: the registration that answers must cover
        a multiple of ``block_size`` tokens.
        """
        return self.find_rows(
            hashes, kv_cache_group_id,
            <uint32_t>read_count(block_size, "block_size", 1, MAX_NUM_TOKENS), False,
        )

    def find_prefix_ids(self, hashes, kv_cache_group_id):
        """The blocks of the longest run of hashes, from the first, that are registered.

        Args:
            hashes: As in `find_ids`.
            kv_cache_group_id: Group to look in.

        Returns:
            (m,) uint32 array of block ids, m <= n.
        """
        return self.find_rows(hashes, kv_cache_group_id, 0, True)

    def find_prefix_blocks(self, hashes, kv_cache_group_ids):
        """The blocks of the longest prefix of hashes that are all registered in every group.

        Args:
            hashes: As for `find_ids`, from the first block on.
            kv_cache_group_ids: Sequence of group ids.

        Returns:
            A list of as many blocks for each group.
        """
        cdef HashBatch batch = read_hashes(hashes, -1, self.hash_width)
        cdef size_t count = batch.count
        cdef space_t space
        cdef IdBuffer buffer
        cdef list buffers = []
        self.check_batch_width(batch)
        for group in kv_cache_group_ids:
            buffer = make_buffer(count)
            buffers.append(buffer)
            space = registry.find_space(&self.core, read_group(group), batch.width)
            if space == 0 or self.core.table.cells == NULL:
                count = 0
            if count:
                count = batches.find_batch(
                    &self.core, batch.rows, batch.row_bytes, count, space, 0, True, buffer.ids
                )
        return [self.handles_of((<IdBuffer>buffer).ids, count) for buffer in buffers]

    def registrations(self, block):
        """Each key under which a block is registered, the primary one first.

        Args:
            block: A block of this pool, or a block id.

        Returns:
            List of `Registration`, which says how many tokens each key covers.
        """
        cdef Holder holder
        cdef list found = []
        holder = registry.primary(
            self.own_id(block) if isinstance(block, KVCacheBlock) else self.check_id(block)
        )
        if registry.has_primary(&self.core, holder.block):
            if not self.core.blocks.keys[holder.block].space & LOOSE_FLAG:
                found.append(self.registration(holder, True))
        holder.extra = reverse_index.first(&self.core.index, holder.block)
        while holder.extra != NO_RECORD:
            found.append(self.registration(holder, False))
            holder.extra = reverse_index.extra(&self.core.index, holder.extra).next
        return found

    cdef object registration(self, Holder holder, bint is_primary):
        cdef Key key = registry.key_of(&self.core, holder)
        cdef keys.Space* space = &self.core.spaces[key.space]
        cdef bint unknown = registry.flagged_space(&self.core, holder) & NO_TOKENS_FLAG
        return Registration(
            PyBytes_FromStringAndSize(<const char*>key.digest, space.width),
            space.group,
            None if unknown else registry.num_tokens_of(&self.core, holder),
            is_primary,
        )

    # Allocation ---------------------------------------------------------------------------

    cdef int check_available(self, int64_t count) except -1:
        if count > self.core.queue.num_free:
            raise ValueError(f"Cannot get {count} free blocks from the pool")
        return 0

    cdef bint is_observed(self):
        # Whether allocation has to call back for every block.
        return bool(self._reuse_watchers or self.metrics_collector is not None)

    cdef int allocate(self, block_id_t* ids, size_t count, bint compact) except -1:
        # Takes the first `count` blocks out of the queue into `ids`.
        cdef size_t i
        cdef RemovedRun removed = None
        cdef bint collects
        # A collection between check and commit could run a __del__ that changes the queue.
        if self.is_observed():
            collects = PyGC_Disable()
            try:
                self.check_available(count)
                head_run(&self.core, ids, count)
                blocks_taken = self.handles_of(ids, count)
                free_queue.take_head_run(&self.core.queue, ids, count)
            finally:
                if collects:
                    PyGC_Enable()
            self.num_allocating += 1
            try:
                self.announce_allocation(blocks_taken, ids, count)
            except BaseException:
                put_back(&self.core, ids, count)
                raise
            finally:
                self.num_allocating -= 1
            return 0
        collects = self.enable_kv_cache_events and PyGC_Disable()
        try:
            self.check_available(count)
            head_run(&self.core, ids, count)
            if self.enable_caching:
                removed = self.log_for(ids, count)
            free_queue.take_head_run(&self.core.queue, ids, count)
        finally:
            if collects:
                PyGC_Enable()
        if self.enable_caching:
            self.num_evicted_blocks += self.evict_quietly(ids, count, removed)
        for i in range(count):
            self.core.blocks.states[ids[i]].ref_cnt = 1
        try:
            self.emit_removed(removed, compact)
        except BaseException:
            # An interrupt: nobody will know of these blocks.
            put_back(&self.core, ids, count)
            raise
        return 0

    cdef int announce_allocation(self, list taken, const block_id_t* ids, size_t count) except -1:
        # Block by block, in vLLM's order: watchers of all; then evict, count, tell metrics.
        cdef size_t i
        self.notify_reuse(taken)
        for i in range(count):
            if self.enable_caching:
                self.evict(ids[i])
            if self.core.blocks.states[ids[i]].ref_cnt != 0:
                raise ContractError(f"block {ids[i]} was touched while it was handed out")
            self.core.blocks.states[ids[i]].ref_cnt = 1
            if self.metrics_collector is not None:
                self.metrics_collector.on_block_allocated(taken[i])
        return 0

    cdef int notify_reuse(self, list taken) except -1:
        if not self._reuse_watchers:
            return 0
        for block in taken:
            watcher = self._reuse_watchers.pop(block.block_id, None)
            if watcher is not None:
                watcher(block)
        return 0

    cdef bint evict(self, block_id_t id) except -1:
        # All keys of a block leave, with hooks and events. Whether the table knew it.
        cdef RemovedRun removed
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(self.handle(id))
        removed = self.log_for(&id, 1)
        if removed is not None:
            log_keys(&self.core, id, removed, self.truthful_events)
        if registry.drop_keys(&self.core, id) == 0:
            return False
        self.num_evicted_blocks += 1
        self.emit_removed(removed, False)
        return True

    def get_new_blocks(self, num_blocks):
        """Take blocks from the head of the free queue; their keys leave the prefix cache.

        Args:
            num_blocks: How many.

        Returns:
            List of blocks, each with a ref_cnt of 1.

        Raises:
            ValueError: Fewer are free; nothing was changed.
        """
        cdef int64_t count = read_count(num_blocks, "num_blocks", 0, (1 << 62))
        cdef block_id_t few[2 * FEW]
        cdef block_id_t* ids = few
        cdef block_id_t* taken
        cdef IdBuffer buffer
        cdef list result
        cdef int64_t i
        self.check_available(count)
        if count == 0:
            return []
        if count > FEW:
            buffer = make_buffer(2 * count)
            ids = buffer.ids
        taken = ids + count
        head_run(&self.core, ids, count)
        result = self.handles_of(ids, count)
        self.allocate(taken, count, False)
        # The same blocks, unless making their handles ran a __del__ that changed the queue.
        for i in range(count):
            if taken[i] != ids[i]:
                result[i] = self.handle(taken[i])
        self.after()
        return result

    def get_new_block_ids(self, n):
        """As `get_new_blocks`, with ids.

        Returns:
            (n,) uint32 array of block ids.
        """
        cdef int64_t count = read_count(n, "num_blocks", 0, (1 << 62))
        self.check_available(count)
        result = new_array(count, numpy.NPY_UINT32)
        if count:
            self.allocate(<block_id_t*>data_of(result), count, True)
        self.after()
        return result

    def touch(self, blocks):
        """Add a holder to each block; a free one leaves the free queue.

        Args:
            blocks: Sequence of this pool's blocks.

        Raises:
            ContractError: A block belongs to another pool; nothing was changed.
        """
        cdef list items = blocks if type(blocks) is list else list(blocks)
        cdef block_id_t few[FEW]
        cdef block_id_t* ids = few
        cdef IdBuffer buffer
        if len(items) > FEW:
            buffer = make_buffer(len(items))
            ids = buffer.ids
        if not self.read_own(items, ids):
            self.buffer_of(items)   # says what is wrong
        self.touch_run(ids, len(items))

    def touch_ids(self, ids):
        """As `touch`, with an array of block ids."""
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        if self.metrics_collector is not None:
            copy_ids(batch)
        self.touch_run(batch.ids, batch.count)

    cdef int touch_run(self, const block_id_t* ids, size_t count) except -1:
        # With a collector the caller's array was copied: what it calls may write to it.
        cdef size_t i
        collector = self.metrics_collector
        check_touch(&self.core, ids, count)
        if collector is None:
            commit_touch(&self.core, ids, count)
        else:
            for i in range(count):
                check_touch(&self.core, ids + i, 1)
                commit_touch(&self.core, ids + i, 1)
                collector.on_block_accessed(self.handle(ids[i]))
        self.after()
        return 0

    cdef IdBuffer buffer_of(self, object blocks):
        # The ids of this pool's blocks. A batch is read to its end before anything changes.
        cdef list items = blocks if type(blocks) is list else list(blocks)
        cdef IdBuffer buffer = make_buffer(len(items))
        cdef size_t i
        for i in range(buffer.count):
            buffer.ids[i] = self.own_id(items[i])
        return buffer

    def free_blocks(self, ordered_blocks):
        """Take one holder from each block; at 0 it joins the free queue.

        A block without a key goes to the front of the queue, to be reused first; one with a
        key to the tail. Blocks of other pools go to their pools.

        Args:
            ordered_blocks: Blocks in the order in which they may be evicted.

        Raises:
            ContractError: A block is already free, or is named more often than it is held;
                nothing was changed.
        """
        cdef list items = (
            ordered_blocks if type(ordered_blocks) is list else list(ordered_blocks)
        )
        cdef block_id_t few[FEW]
        cdef block_id_t* ids = few
        cdef IdBuffer buffer
        if len(items) > FEW:
            buffer = make_buffer(len(items))
            ids = buffer.ids
        if self.read_own(items, ids):
            release_run(&self.core, ids, len(items), self.enable_caching, False)
            self.after()
        else:
            self._free_of_any_pool(items)

    cdef bint read_own(self, list items, block_id_t* ids) noexcept:
        # The ids of blocks that are all this pool's; false if one is not.
        cdef Py_ssize_t i
        cdef PyObject* block
        for i in range(len(items)):
            block = PyList_GET_ITEM(items, i)
            if (
                Py_TYPE(block) != <PyObject*>KVCacheBlock
                or (<KVCacheBlock>block).owner != <PyObject*>self
                or (<KVCacheBlock>block).index >= self.core.blocks.num_blocks
            ):
                return False
            ids[i] = (<KVCacheBlock>block).index
        return True

    def _free_of_any_pool(self, blocks):
        # free_blocks() for blocks that are not all this pool's.
        cdef dict by_pool = {}
        for block in blocks:
            if type(block) is not KVCacheBlock:
                raise TypeError(f"expected a KVCacheBlock, not {type(block).__name__}")
            pool = block.pool
            if pool is None:
                raise ContractError(f"block {block.block_id} does not belong to a pool")
            by_pool.setdefault(pool, []).append(block)
        self.release_in_turn(by_pool)

    cdef int release_in_turn(self, dict by_pool) except -1:
        # Pool after pool, this one first. When one refuses, the ones before it take back.
        cdef list done = []
        cdef BlockPool pool
        cdef IdBuffer buffer
        own = by_pool.pop(self, None)
        try:
            if own is not None:
                buffer = self.buffer_of(own)
                self.release(buffer, self.enable_caching, False)
                done.append((self, buffer))
            for other, blocks_of_other in by_pool.items():
                if isinstance(other, BlockPool):
                    pool = <BlockPool>other
                    buffer = pool.buffer_of(blocks_of_other)
                    pool.release(buffer, pool.enable_caching, False)
                    done.append((pool, buffer))
            for other, blocks_of_other in by_pool.items():
                if not isinstance(other, BlockPool):
                    other.free_blocks(blocks_of_other)
        except BaseException:
            for pool, buffer in reversed(done):
                undo_release(&pool.core, buffer.ids, buffer.count)
            raise
        return 0

    def free_ids(self, ids):
        """As `free_blocks`, with an array of block ids."""
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        release_run(&self.core, batch.ids, batch.count, self.enable_caching, False)
        self.after()

    cdef int release(self, IdBuffer buffer, bint hashed_last, bint all_last) except -1:
        release_run(&self.core, buffer.ids, buffer.count, hashed_last, all_last)
        self.after()
        return 0

    def unpin_blocks(self, blocks, on_reuse):
        """Take one holder from each block, whose contents are still read until it is reused.

        The blocks join the tail of the free queue, with or without a key.

        Args:
            blocks: This pool's blocks, each held, none the null block.
            on_reuse: Called with the block when it is handed out again or the cache is reset.

        Raises:
            ContractError: A block is free or the null block; nothing was changed.
        """
        cdef IdBuffer buffer = self.buffer_of(blocks)
        cdef list buffer_ids = []
        cdef size_t i
        if not callable(on_reuse):
            raise TypeError(f"on_reuse must be callable, not {type(on_reuse).__name__}")
        for i in range(buffer.count):
            if buffer.ids[i] == NULL_BLOCK:
                raise ContractError("the null block cannot be unpinned")
            buffer_ids.append(buffer.ids[i])
        # Whoever reads the blocks must hear of their reuse, so the callbacks come first.
        watched = [(block_id, self._reuse_watchers.get(block_id)) for block_id in buffer_ids]
        try:
            for block_id in buffer_ids:
                self._reuse_watchers[block_id] = on_reuse
            self.release(buffer, False, True)
        except BaseException:
            for block_id, watcher in watched:
                if watcher is None:
                    self._reuse_watchers.pop(block_id, None)
                else:
                    self._reuse_watchers[block_id] = watcher
            raise

    def is_block_writable(self, block):
        """Whether a block has one holder and no key, so that its holder may change it."""
        cdef block_id_t id = self.own_id(block)
        return (
            id != NULL_BLOCK
            and self.core.blocks.states[id].ref_cnt == 1
            and not registry.has_primary(&self.core, id)
        )

    def get_num_free_blocks(self):
        """Number of blocks in the free queue."""
        return self.core.queue.num_free

    def get_usage(self):
        """Share of the blocks that are held, 0.0 to 1.0; the null block does not count."""
        cdef uint32_t usable = self.core.blocks.num_blocks - 1
        if usable == 0:
            return 0
        return 1.0 - (<double>self.core.queue.num_free / usable)

    # Registration -------------------------------------------------------------------------

    cdef object hash_sequence(self, object request, uint64_t block_size, Py_ssize_t* scale):
        # The request's hashes, and how many of them make up one block.
        hashes = request.block_hashes
        scale[0] = block_size // self.hash_block_size
        if block_size == self.hash_block_size:
            return hashes
        if hasattr(hashes, "scale_factor"):
            if hashes.scale_factor != scale[0]:
                raise ContractError(
                    f"the hashes are a view of {hashes.scale_factor} boundaries a block; "
                    f"block_size {block_size} needs {scale[0]}"
                )
            scale[0] = 1
        elif block_size % self.hash_block_size:
            raise ContractError(
                f"block_size {block_size} is no multiple of hash_block_size "
                f"{self.hash_block_size}"
            )
        return hashes

    def cache_full_blocks(
        self,
        request,
        blocks,
        num_cached_blocks,
        num_full_blocks,
        block_size,
        kv_cache_group_id,
        block_mask=None,
    ):
        """Register full blocks of a request under the hashes at their ends.

        A block that has a shorter key (a partial entry) is promoted: all its keys leave and
        the full block's key takes their place. Null and masked-out blocks are passed over.

        Args:
            request: Object with ``block_hashes``: one digest per boundary. With events on,
                also ``all_token_ids``, ``lora_request``, ``session_id`` and what extra keys
                need.
            blocks: All blocks of the request.
            num_cached_blocks: Index of the first block to register.
            num_full_blocks: Index behind the last one.
            block_size: Tokens in a block; a multiple of ``hash_block_size``.
            kv_cache_group_id: Group that owns the keys.
            block_mask: Sequence of bool, one for each block of the range, or None.

        Raises:
            ContractError: A block has a key that is not shorter, or an argument is out of
                range; nothing was changed.
            IndexError: The request has too few hashes; nothing was changed.
        """
        cdef int64_t first = read_count(num_cached_blocks, "num_cached_blocks", 0, 1 << 40)
        cdef int64_t last = read_count(num_full_blocks, "num_full_blocks", 0, 1 << 40)
        cdef uint64_t size = read_count(block_size, "block_size", 1, MAX_NUM_TOKENS)
        cdef uint32_t group = read_group(kv_cache_group_id)
        cdef Py_ssize_t scale
        cdef list digests = []
        cdef IdBuffer buffer
        cdef TokenBuffer ends
        cdef RequestSource source = None
        cdef size_t count = 0
        cdef Py_ssize_t i
        cdef list selected
        cdef block_id_t id
        if first >= last:
            return
        if last > len(blocks):
            raise ContractError(f"num_full_blocks is {last}; there are {len(blocks)} blocks")
        selected = list(blocks[first:last])
        if block_mask is not None and len(block_mask) != len(selected):
            raise ContractError(
                f"block_mask has {len(block_mask)} entries for {len(selected)} blocks"
            )
        hashes = self.hash_sequence(request, size, &scale)
        buffer = make_buffer(len(selected))
        if not self.read_own(selected, buffer.ids):
            self._cache_of_no_pool(
                request, blocks, first, last, size, group, block_mask
            )
            return
        ends = TokenBuffer.__new__(TokenBuffer, len(selected))
        positions = [] if self.enable_kv_cache_events else None
        for i in range(len(selected)):
            id = buffer.ids[i]
            if id == NULL_BLOCK or (block_mask is not None and not block_mask[i]):
                continue
            digests.append(hash_at(hashes, (first + i + 1) * scale - 1))
            buffer.ids[count] = id
            ends.values[count] = <uint64_t>(first + i + 1) * size
            if positions is not None:
                positions.append(first + i)
            count += 1
        buffer.count = count
        batch = read_hashes(digests, count, 0)
        stored = None
        if positions is not None:
            source = RequestSource.__new__(RequestSource)
            source.pool = self
            source.group = group
            source.size = size
            source.request = request
            source.hashes = hashes
            source.scale = scale
            source.digests = digests
            source.positions = positions
            source.first = positions[0] if self.truthful_events and count else first
            if not self.truthful_events:
                stored = source.stored_range(first, last)
            elif count:
                stored = source.stored(0, count, None)
        self.register_full(buffer.ids, ends.values, batch, group, size, source, stored)
        self.after()

    def _cache_of_no_pool(
        self, request, blocks, num_cached_blocks, num_full_blocks, block_size,
        kv_cache_group_id, block_mask,
    ):
        # cache_full_blocks() for blocks that are not all this pool's: says which is not.
        self.buffer_of(blocks[num_cached_blocks:num_full_blocks])

    cdef int register_full(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, uint32_t group,
        uint64_t size, EventSource source, object stored,
    ) except -1:
        # The check and the commit of both grains. Registers row i for ids[i]. With events on
        # `source` describes the rows and `stored` is the event for all of them.
        # Memory is reserved for the worst case: every key is already another block's. For a
        # large batch that is much, so it goes step by step where steps can be undone.
        cdef RegistrationLog log = None
        cdef size_t step = batch.count
        cdef size_t num_keyed
        cdef bint collects
        if source is not None:
            log = self.start_log(ids, ends, batch, group, size, source)
            if self.detailed_snapshots and stored is not None:
                log.detail = source.detail(stored)
        # From here on no code of the caller's runs: not even a __del__, which a collection
        # for one of the log's objects could call.
        collects = log is not None and PyGC_Disable()
        try:
            num_keyed = check_new_keys(&self.core, ids, ends, batch.count)
            if log is not None:
                self.group_block_sizes[group] = size
            if num_keyed == 0 and not any_has_extra_keys(&self.core, ids, batch.count):
                step = min(step, <size_t>STEP)
            self.register_steps(ids, ends, batch, group, step, num_keyed, log)
        finally:
            if collects:
                PyGC_Enable()
        if log is not None:
            try:
                log.finish(stored)
            except BaseException as error:
                self.lose_events(error)
        return 0

    cdef int register_steps(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, uint32_t group,
        size_t step, size_t num_keyed, RegistrationLog log,
    ) except -1:
        # `num_keyed` of the blocks have a primary key.
        cdef size_t start = 0, count
        while start < batch.count:
            count = min(step, batch.count - start)
            try:
                registry.reserve(
                    &self.core, group, batch.width, count,
                    count_extra(&self.core, ids + start, count),
                )
                if log is not None and start == 0:
                    self.reserve_parents()
                    log.reserve_removals(num_keyed)
            except (MemoryError, ValueError):
                drop_all(&self.core, ids, start)
                raise
            self.note_width(batch.width)
            self.register_step(ids + start, ends + start, batch, start, count, group, log)
            start += count
        return 0

    cdef int register_step(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch batch, size_t first,
        size_t total, uint32_t group, RegistrationLog log,
    ) except -1:
        # After reserve(). Row `first` belongs to ids[0].
        cdef batches.Registrations rows
        cdef size_t i
        rows.ids = ids
        rows.ends = ends
        rows.rows = batch.rows + first * batch.row_bytes
        rows.row_bytes = batch.row_bytes
        rows.count = total
        rows.space = registry.find_space(&self.core, group, batch.width)
        rows.fetched = 0
        if log is not None:
            self.register_logged(&rows, first, log)
            return 0
        for i in range(total):
            batches.fetch_rows(&self.core, &rows, i)
            if ids[i] != NULL_BLOCK:
                batches.register_row(&self.core, &rows, i)
        return 0

    cdef void register_logged(
        self, batches.Registrations* rows, size_t first, RegistrationLog log
    ) noexcept:
        cdef block_id_t id
        cdef bint is_new
        cdef size_t i
        for i in range(rows.count):
            batches.fetch_rows(&self.core, rows, i)
            id = rows.ids[i]
            if id == NULL_BLOCK:
                continue
            if registry.has_primary(&self.core, id):
                log.replacing(first + i)
            is_new = batches.register_row(&self.core, rows, i)
            if log.truthful:
                log.registered(first + i, is_new)
            if self.detailed_snapshots:
                log.note_row(first + i)
        log.note_parents(first, first + rows.count)

    def cache_full_ids(
        self,
        ids,
        hashes,
        kv_cache_group_id,
        block_size,
        first_block=0,
        *,
        parent_hash=None,
        token_ids=None,
        lora_id=None,
        lora_name=None,
        extra_keys=None,
        session_id=None,
    ):
        """Register full blocks: ``ids[i]`` under ``hashes[i]``.

        Block ids that are 0 are passed over. Promotion is that of `cache_full_blocks`.

        Args:
            ids: (n,) integer buffer or sequence of block ids.
            hashes: n digests: (n, width) uint8, bytes-like of n * width, or sequence of bytes.
            kv_cache_group_id: Group that owns the keys.
            block_size: Tokens in a block; a multiple of ``hash_block_size``.
            first_block: Index of ``ids[0]`` in its request, so that ``hashes[i]`` covers
                ``(first_block + i + 1) * block_size`` tokens.
            parent_hash: For events only: the digest before ``hashes[0]``, as bytes.
            token_ids: For events only: the n * block_size tokens of the blocks, an array or
                a sequence of int. Copied, unless it is an array that is read-only.
            lora_id: For events only: the adapter's number.
            lora_name: For events only: the adapter's name.
            extra_keys: For events only: per block None or a tuple of what beside tokens went
                into its hash.
            session_id: For events only: the request's session.

        Raises:
            ContractError: A block has a key that is not shorter, or a number is out of range;
                nothing was changed.
            ValueError: The hashes do not have the width of the pool's others.
        """
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        cdef uint64_t size = read_count(block_size, "block_size", 1, MAX_NUM_TOKENS)
        cdef uint64_t first = read_count(first_block, "first_block", 0, MAX_NUM_TOKENS)
        cdef uint32_t group = read_group(kv_cache_group_id)
        cdef HashBatch rows = read_hashes(hashes, batch.count, self.hash_width)
        cdef TokenBuffer ends
        cdef BatchSource source = None
        cdef size_t i
        if size % self.hash_block_size:
            raise ContractError(
                f"block_size {size} is no multiple of hash_block_size {self.hash_block_size}"
            )
        self.check_batch_width(rows)
        ends = TokenBuffer.__new__(TokenBuffer, batch.count)
        for i in range(batch.count):
            ends.values[i] = (first + i + 1) * size
        stored = None
        if self.enable_kv_cache_events and batch.count:
            copy_ids(batch)     # what follows may run the caller's code
            source = self.batch_source(
                batch, rows, parent_hash, token_ids, size, group, extra_keys,
                {"lora_id": lora_id, "lora_name": lora_name, "session_id": session_id},
            )
            stored = source.stored(0, batch.count, parent_hash)
        self.register_full(batch.ids, ends.values, rows, group, size, source, stored)
        self.after()

    cdef void note_width(self, uint32_t width) noexcept:
        if self.hash_width == 0:
            self.hash_width = width

    cdef int check_batch_width(self, HashBatch rows) except -1:
        if self.hash_width and rows.count and rows.width != self.hash_width:
            raise ValueError(
                f"hashes of {rows.width} bytes in a pool of {self.hash_width}-byte hashes"
            )
        return 0

    def cache_partial_block(
        self,
        request,
        block,
        num_tokens,
        kv_cache_group_id,
        block_size,
        replace_existing_hashes=False,
    ):
        """Make a block findable at a boundary inside it.

        The key is the request's hash at that boundary. On a block with a shorter key it
        replaces that; on a block with a longer one it becomes an extra key; the same key
        again changes nothing.

        Args:
            request: Object with ``block_hashes``; with events on see `cache_full_blocks`.
            block: This pool's block.
            num_tokens: Prefix tokens that the key covers: a positive multiple of
                ``hash_block_size`` for which the request has a hash.
            kv_cache_group_id: Group that owns the key.
            block_size: Tokens in a block of that group, a multiple of ``hash_block_size``.
            replace_existing_hashes: The block's contents were replaced: all its keys leave.

        Returns:
            The key (digest and group), or None for the null block.

        Raises:
            ContractError: ``num_tokens`` or ``block_size`` is not such a number.
        """
        cdef block_id_t id = self.own_id(block)
        cdef uint64_t tokens, size, boundary
        cdef uint32_t group
        if id == NULL_BLOCK:
            return None
        size = read_count(block_size, "block_size", 1, MAX_NUM_TOKENS)
        if size % self.hash_block_size:
            raise ContractError(
                f"block_size {size} is no multiple of hash_block_size {self.hash_block_size}"
            )
        group = read_group(kv_cache_group_id)
        tokens = self.check_boundary(num_tokens)
        boundary = tokens // self.hash_block_size
        hashes = request.block_hashes
        if boundary > <uint64_t>len(hashes):
            raise ContractError(
                f"num_tokens is {tokens}; the request has hashes up to "
                f"{len(hashes) * self.hash_block_size} tokens"
            )
        digest = hash_at(hashes, boundary - 1)
        if not isinstance(digest, bytes):
            raise TypeError(f"a block hash must be bytes, not {type(digest).__name__}")
        stored = parent = detail = None
        if self.enable_kv_cache_events and (
            replace_existing_hashes or not self.holds(id, digest, group)
        ):
            # The parent is the last boundary at which whole blocks end; vLLM's events name
            # the one before, which it need not have published.
            start = (tokens - 1) // size * size
            parent = hashes[start // self.hash_block_size - 1] if start else None
            named = parent
            if self.detailed_snapshots:
                detail = self.request_detail(request, start, tokens)
            if not self.truthful_events:
                named = hashes[boundary - 2] if boundary > 1 else None
                start = tokens - self.hash_block_size
            stored = self.make_stored(
                request, [digest], named, start, tokens, tokens - start, group,
                [(start, tokens)],
            )
            self.group_block_sizes[group] = size
        key = make_key(
            <const uint8_t*>PyBytes_AS_STRING(digest), <uint32_t>len(digest), group
        )
        self.register_partial(
            id, digest, tokens, group, replace_existing_hashes, parent, stored, detail, False
        )
        self.after()
        return key

    def cache_partial_id(
        self,
        block_id,
        block_hash,
        num_tokens,
        kv_cache_group_id,
        replace_existing_hashes=False,
        *,
        parent_hash=None,
        token_ids=None,
    ):
        """As `cache_partial_block`, with a block id and the digest at the boundary.

        Args:
            block_id: The block; 0 is passed over.
            block_hash: Digest, bytes, of the width of the pool's others.
            num_tokens: Prefix tokens that it covers, a multiple of ``hash_block_size``.
            kv_cache_group_id: Group that owns the key.
            replace_existing_hashes: All keys that the block has leave.
            parent_hash: For events only: the digest where the block before it ends, bytes.
            token_ids: For events only: the tokens since then.
        """
        cdef block_id_t id = self.check_id(block_id)
        cdef uint32_t group = read_group(kv_cache_group_id)
        cdef uint64_t tokens = self.check_boundary(num_tokens)
        if not isinstance(block_hash, bytes):
            raise TypeError(f"a block hash must be bytes, not {type(block_hash).__name__}")
        check_width(len(block_hash))
        if self.hash_width and <uint32_t>len(block_hash) != self.hash_width:
            raise ValueError(
                f"hash of {len(block_hash)} bytes in a pool of {self.hash_width}-byte hashes"
            )
        if id == NULL_BLOCK:
            return
        self.register_partial_id(
            id, block_hash, tokens, group, replace_existing_hashes, parent_hash, token_ids
        )
        self.after()

    def cache_partial_ids(
        self,
        ids,
        hashes,
        num_tokens,
        kv_cache_group_id,
        *,
        parent_hashes=None,
        token_ids=None,
    ):
        """As `cache_partial_id` for each of many blocks, in order.

        An engine that registers the tail of every running request in each step repeats most
        of them: what a block holds already costs as much as a look-up.

        Args:
            ids: (n,) integer buffer or sequence of block ids; 0 is passed over.
            hashes: n digests, as in `cache_full_ids`.
            num_tokens: (n,) integer array or sequence: prefix tokens that each digest covers,
                multiples of ``hash_block_size``.
            kv_cache_group_id: Group that owns the keys.
            parent_hashes: For events only: n digests, bytes or None, where the block before
                ends.
            token_ids: For events only: for each block the tokens since then, or None.

        Raises:
            ContractError: A number is out of range; nothing was changed.
        """
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        cdef HashBatch rows = read_hashes(hashes, batch.count, self.hash_width)
        cdef uint32_t group = read_group(kv_cache_group_id)
        cdef TokenBuffer ends = read_boundaries(num_tokens, batch.count, self.hash_block_size)
        cdef IdBuffer found = make_buffer(batch.count)
        cdef space_t space
        cdef size_t i, num_new = 0
        self.check_batch_width(rows)
        parents_of = check_length(parent_hashes, batch.count, "parent_hashes")
        tokens_of = check_length(token_ids, batch.count, "token_ids")
        for parent in parents_of or ():
            low_bits(parent)
        space = registry.find_space(&self.core, group, rows.width)
        if space and batch.count and self.core.table.cells != NULL:
            batches.find_batch(
                &self.core, rows.rows, rows.row_bytes, batch.count, space, 0, False, found.ids
            )
        else:
            for i in range(batch.count):
                found.ids[i] = NO_BLOCK
        # What remains is new, or held behind other blocks or as a key assigned by hand.
        for i in range(batch.count):
            num_new += batch.ids[i] != NULL_BLOCK and found.ids[i] != batch.ids[i]
        if num_new:
            copy_ids(batch)     # what follows may run the caller's code
            registry.reserve(&self.core, group, rows.width, num_new, num_new)
            for i in range(batch.count):
                if batch.ids[i] != NULL_BLOCK and found.ids[i] != batch.ids[i]:
                    self.register_partial_id(
                        batch.ids[i], rows.row(i), ends.values[i], group, False,
                        parents_of[i] if parents_of is not None else None,
                        tokens_of[i] if tokens_of is not None else None,
                    )
        self.after()

    cdef int register_partial_id(
        self, block_id_t id, bytes digest, uint64_t tokens, uint32_t group, bint replace,
        object parent, object token_ids,
    ) except -1:
        stored = detail = None
        if self.enable_kv_cache_events and (replace or not self.holds(id, digest, group)):
            stored = self.partial_run(digest, parent, token_ids, group)
            if self.detailed_snapshots and token_ids is not None:
                detail = make_detail(copy_tokens(token_ids, 0, None), len(token_ids))
        return self.register_partial(
            id, digest, tokens, group, replace, parent, stored, detail, True
        )

    cdef uint64_t check_boundary(self, object num_tokens) except? 0:
        cdef uint64_t tokens = read_count(num_tokens, "num_tokens", 1, MAX_NUM_TOKENS)
        if tokens % self.hash_block_size:
            raise ContractError(
                f"num_tokens is {tokens}; it must be a multiple of hash_block_size "
                f"{self.hash_block_size}"
            )
        return tokens

    cdef bint holds(self, block_id_t id, bytes digest, uint32_t group) except -1:
        # Whether that is the block's primary key or the table maps it to the block.
        cdef Key key, own
        cdef Holder holder
        cdef uint32_t width = <uint32_t>PyBytes_GET_SIZE(digest)
        check_width(width)
        key.digest = <const uint8_t*>PyBytes_AS_STRING(digest)
        key.space = registry.find_space(&self.core, group, width)
        if key.space == 0:
            return False
        own = registry.key_of(&self.core, registry.primary(id))
        if own.space == key.space and keys.same_digest(own.digest, key.digest, width):
            return True
        if own.space == 0 and reverse_index.first(&self.core.index, id) == NO_RECORD:
            return False
        return registry.find_held_by(&self.core, &key, id, &holder)

    cdef int register_partial(
        self, block_id_t id, bytes digest, uint64_t tokens, uint32_t group, bint replace,
        object parent, object stored, EventDetail detail, bint compact,
    ) except -1:
        # `parent` is the digest before the block, `stored` the event or run, or None.
        cdef Key key
        cdef RemovedRun removed = None
        cdef uint32_t width = <uint32_t>PyBytes_GET_SIZE(digest)
        cdef bint drops = replace
        cdef bint as_extra, as_new, collects
        cdef uint64_t num_keys
        cdef uint64_t noted = low_bits(parent)
        if not replace:
            if self.holds(id, digest, group):
                return 0
            drops = (
                registry.has_primary(&self.core, id)
                and not self.core.blocks.keys[id].space & NO_TOKENS_FLAG
                and self.core.blocks.keys[id].num_tokens < tokens
            )
        key.digest = <const uint8_t*>PyBytes_AS_STRING(digest)
        check_width(width)
        # The log is an object; a collection could run a __del__ that uses what is reserved.
        collects = self.enable_kv_cache_events and PyGC_Disable()
        try:
            key.space = registry.reserve(
                &self.core, group, width, 1, not drops and registry.has_primary(&self.core, id)
            )
            self.reserve_parents()
            if drops:
                removed = self.log_for(&id, 1)
        finally:
            if collects:
                PyGC_Enable()
        self.note_width(width)
        if drops:
            if removed is not None:
                log_keys(&self.core, id, removed, self.truthful_events)
            registry.drop_keys(&self.core, id)
        as_extra = registry.has_primary(&self.core, id)
        num_keys = self.core.table.num_used
        registry.register(
            &self.core, id, &key, registry.hash_of(&self.core, &key), 0, <uint32_t>tokens
        )
        note_parent(&self.core, &self.parents, id, as_extra, noted)
        self.note_detail(id, as_extra, detail, 0)
        as_new = self.core.table.num_used != num_keys
        self.emit_removed(removed, compact)
        if stored is not None:
            try:
                self.report_partial(stored, parent, group, as_new, compact)
            except BaseException as error:
                self.lose_events(error)
        return 0

    cdef int report_partial(
        self, object stored, object parent, uint32_t group, bint is_new, bint compact
    ) except -1:
        if self.truthful_events:
            if not is_new:
                return 0
            if not self.is_resident(parent, group):
                self.set_parent(stored, None)
        return self.emit(stored, compact)

    def move_block_hashes(self, src_block, dst_block):
        """Re-point all keys of one block to another, which has none. Emits nothing.

        Raises:
            ContractError: ``dst_block`` has a key.
        """
        self.move_run(self.own_id(src_block), self.own_id(dst_block))

    def move_ids(self, src, dst):
        """As `move_block_hashes`, with block ids."""
        self.move_run(self.check_id(src), self.check_id(dst))

    cdef int move_run(self, block_id_t source, block_id_t target) except -1:
        cdef uint8_t digest[MAX_HASH_BYTES]
        cdef Holder holder
        cdef uint64_t parent
        cdef bint as_extra
        if registry.has_primary(&self.core, target):
            raise ContractError(f"block {target} already has a hash")
        if reverse_index.first(&self.core.index, target) != NO_RECORD:
            raise ContractError(f"block {target} already has extra keys")
        if target == NULL_BLOCK:
            raise ContractError("the null block is never registered")
        if registry.has_primary(&self.core, source):
            if self.core.blocks.keys[source].space & LOOSE_FLAG:
                registry.drop_primary(&self.core, source)
            else:
                parent = parents.of(&self.parents, source, NO_RECORD)
                kept = self.detail_to_move(registry.primary(source))
                registry.move_key(&self.core, registry.primary(source), target, digest)
                note_parent(&self.core, &self.parents, target, False, parent)
                if kept is not None:
                    self.note_detail(target, False, kept[0], kept[1])
        holder.block = source
        while True:
            holder.extra = reverse_index.first(&self.core.index, source)
            if holder.extra == NO_RECORD:
                break
            parent = parents.of(&self.parents, source, holder.extra)
            kept = self.detail_to_move(holder)
            as_extra = registry.has_primary(&self.core, target)
            registry.move_key(&self.core, holder, target, digest)
            note_parent(&self.core, &self.parents, target, as_extra, parent)
            if kept is not None:
                self.note_detail(target, as_extra, kept[0], kept[1])
        self.after()
        return 0

    def _insert_block_hash(self, block_hash_with_group_id, block, num_tokens):
        """Register a block under a key (digest and group); nothing if it already is."""
        self.insert_key(block_hash_with_group_id, self.own_id(block), num_tokens)
        self.after()

    # Eviction and reset -------------------------------------------------------------------

    def _maybe_evict_cached_block(self, block):
        """Take all keys of a block away. Whether there were any."""
        cdef bint evicted = self.evict(self.own_id(block))
        self.after()
        return evicted

    def evict_blocks(self, block_ids):
        """Take all keys of some blocks away; blocks that are held stay held.

        Args:
            block_ids: Iterable of block ids.

        Raises:
            BlockIdError: An id is out of range; nothing was changed.
        """
        cdef list ids = [self.check_id(id) for id in block_ids]
        cdef IdBuffer buffer = make_buffer(len(ids))
        cdef size_t i
        for i in range(buffer.count):
            buffer.ids[i] = ids[i]
        self.evict_all(buffer.ids, buffer.count, False)
        self.after()

    def evict_ids(self, ids):
        """As `evict_blocks`, with an array of block ids.

        Returns:
            Number of blocks that had keys.
        """
        cdef IdBatch batch = read_ids(ids, self.core.blocks.num_blocks)
        cdef unsigned long long before = self.num_evicted_blocks
        if self.metrics_collector is not None:
            copy_ids(batch)
        self.evict_all(batch.ids, batch.count, True)
        self.after()
        return self.num_evicted_blocks - before

    cdef int evict_all(self, const block_id_t* ids, size_t count, bint compact) except -1:
        cdef RemovedRun removed
        cdef size_t i
        if self.metrics_collector is not None:
            for i in range(count):
                self.evict(ids[i])
            return 0
        removed = self.log_for(ids, count)
        self.num_evicted_blocks += self.evict_quietly(ids, count, removed)
        return self.emit_removed(removed, compact)

    cdef size_t evict_quietly(
        self, const block_id_t* ids, size_t count, RemovedRun removed
    ) noexcept:
        # `removed` is from log_for(). Returns how many of the blocks the table knew.
        return evict_run(&self.core, ids, count, removed, self.truthful_events)

    def reset_prefix_cache(self):
        """Forget all keys, and give back the memory that they took.

        Returns:
            False, with a warning in the log, while a block other than the null block is held.
        """
        cdef uint32_t held = self.core.blocks.num_blocks - self.core.queue.num_free
        if held != 1:
            self.logger.warning(
                "Failed to reset prefix cache because some blocks (%d) are not freed yet",
                held - 1,
            )
            return False
        self.forget_keys()
        # A consumer learns of the reset at its end: of what watchers do meanwhile nothing
        # survives, so the truthful stream does not mention it.
        self.is_resetting = self.truthful_events
        try:
            if self._reuse_watchers:
                self.notify_reuse([self.handle(id) for id in list(self._reuse_watchers)])
        finally:
            # A watcher may have registered something: nothing of it survives the reset.
            self.is_resetting = False
            self.forget_keys()
            if self.metrics_collector is not None:
                self.metrics_collector.reset()
            self.logger.info("Successfully reset prefix cache")
            if self.enable_kv_cache_events:
                try:
                    self.emit(self.types_of_events().AllBlocksCleared(), False)
                except BaseException as error:
                    self.lose_events(error)
        self.after()
        return True

    cdef int forget_keys(self) except -1:
        if self.num_exports and self.core.blocks.stride:
            # Somebody looks at the key columns, which would go.
            raise BufferError(
                f"{self.num_exports} numpy views of the key columns are alive: "
                "delete them before the reset"
            )
        registry.drop_key_storage(&self.core)
        parents.release(&self.parents)
        self.forget_details()
        self.hash_width = 0
        return 0

    # Events -------------------------------------------------------------------------------

    cdef object types_of_events(self):
        if self.event_types is not None:
            return self.event_types
        from cpool.events import types
        return types

    cdef object make_stored(
        self, object request, list digests, object parent, object start, object end,
        object block_size, object group, list ranges,
    ):
        types = self.types_of_events()
        extra_keys = []
        mm_index = 0
        if start and getattr(request, "mm_features", None):
            mm_index = types.first_mm_index(request, start, end)
        for block_start, block_end in ranges:
            block_keys, mm_index = types.block_extra_keys(
                request, block_start, block_end, mm_index
            )
            extra_keys.append(block_keys)
        lora = request.lora_request
        stored = types.BlockStored(
            block_hashes=[types.external_hash(digest) for digest in digests],
            parent_block_hash=None if parent is None else types.external_hash(parent),
            token_ids=request.all_token_ids[start:end],
            block_size=block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=self.medium,
            lora_name=lora.name if lora else None,
            extra_keys=types.event_extra_keys(extra_keys),
            group_idx=group,
            session_id=getattr(request, "session_id", None),
        )
        for name, value in self.describe(group).items():
            setattr(stored, name, value)
        return stored

    cdef dict describe(self, object group):
        # What events say about a group and the place of its blocks; mostly nothing.
        cdef dict fields = {}
        if self.event_groups:
            kind, window = self.event_groups.get(group, (None, None))
            if kind is not None:
                fields["kv_cache_spec_kind"] = kind
            if window is not None:
                fields["kv_cache_spec_sliding_window"] = window
        if self.event_locality is not None:
            fields["locality"] = self.event_locality
        if self.event_ownership is not None:
            fields["ownership"] = self.event_ownership
        return fields

    cdef tuple place_fields(self):
        # What removals say beside hash and group.
        return (self.medium, self.event_locality, self.event_ownership)

    cdef BatchSource batch_source(
        self, IdBatch batch, HashBatch rows, object parent, object token_ids, uint64_t size,
        uint32_t group, object extra_keys, dict fields,
    ):
        cdef BatchSource source = BatchSource.__new__(BatchSource)
        low_bits(parent)
        if token_ids is not None and <uint64_t>len(token_ids) != batch.count * size:
            raise ContractError(
                f"{len(token_ids)} token_ids for {batch.count} blocks of {size} tokens"
            )
        if extra_keys is not None and <size_t>len(extra_keys) != batch.count:
            raise ContractError(f"{len(extra_keys)} extra_keys for {batch.count} blocks")
        source.pool = self
        source.group = group
        source.size = size
        source.ids = batch.ids
        source.rows = rows
        source.first_parent = parent
        source.token_ids = token_ids
        source.extra_keys = extra_keys
        fields.update(self.describe(group))
        source.description = fields
        return source

    cdef StoredRun partial_run(
        self, bytes digest, object parent, object token_ids, uint32_t group
    ):
        cdef StoredRun run = StoredRun.__new__(StoredRun)
        low_bits(parent)
        run.rows = digest
        run.width = <uint32_t>len(digest)
        run.parent = parent
        run.token_ids = copy_tokens(token_ids, 0, None)
        run.block_size = len(run.token_ids) or self.hash_block_size
        run.group = group
        run.medium = self.medium
        run.description = self.describe(group)
        return run

    cdef RegistrationLog start_log(
        self, const block_id_t* ids, const uint64_t* ends, HashBatch rows, uint32_t group,
        uint64_t size, EventSource source,
    ):
        cdef RegistrationLog log = RegistrationLog.__new__(RegistrationLog)
        log.pool = self
        log.ids = ids
        log.ends = ends
        log.rows = rows
        log.size = size
        log.source = source
        log.truthful = self.truthful_events
        log.steps = []
        log.find_parents()
        return log

    cdef int reserve_parents(self) except -1:
        # Before a registration: room to note its parent, while somebody may ask for it.
        if self.enable_kv_cache_events or self.parents.of_block != NULL:
            parents.reserve(
                &self.parents, self.core.blocks.num_blocks,
                <size_t>self.core.index.extras.num_chunks << self.core.index.extras.chunk_shift,
            )
        return 0

    cdef RemovedRun log_for(self, const block_id_t* ids, size_t count):
        # Room for all keys of the blocks; None when no event will be due. Nothing that could
        # run other code stands between the count and what the caller does next.
        cdef RemovedRun run
        if not self.enable_kv_cache_events or self.core.blocks.keys == NULL:
            return None
        run = RemovedRun.__new__(RemovedRun)
        run.fields = self.place_fields()
        reserve_removed(run, count_keys(&self.core, ids, count), self.core.blocks.stride)
        return run

    cdef bint is_resident(self, object digest, uint32_t group) except -1:
        # Whether a key is in the table; None is not.
        cdef Key key
        cdef Holder holder
        if digest is None:
            return False
        key.digest = <const uint8_t*>PyBytes_AS_STRING(digest)
        key.space = registry.find_space(&self.core, group, <uint32_t>PyBytes_GET_SIZE(digest))
        return registry.find_first(&self.core, &key, &holder)

    cdef int set_parent(self, object stored, object parent) except -1:
        if isinstance(stored, StoredRun):
            (<StoredRun>stored).parent = parent
        else:
            stored.parent_block_hash = (
                None if parent is None else self.types_of_events().external_hash(parent)
            )
        return 0

    cdef int emit(self, object event, bint compact) except -1:
        # An event, or a run that is expanded at once unless `compact`.
        if self.is_resetting:
            return 0
        queue = self.kv_event_queue
        if compact or not isinstance(event, EventRun):
            queue.append(event)
        else:
            for single in event.expand(self.types_of_events()):
                queue.append(single)
        return 0

    cdef int report(self, object event, bint compact) except -1:
        # As emit(), of a change that has been made.
        try:
            self.emit(event, compact)
        except BaseException as error:
            self.lose_events(error)
        return 0

    cdef int lose_events(self, object error) except -1:
        # A change that has been made could not be told: memory ran out, or the event classes
        # failed. The call has not failed for that; the next batch will be a clear and a
        # snapshot, which tell all. Only an interrupt goes on to the caller.
        self.events_lost = True
        if not isinstance(error, Exception):
            raise error
        return 0

    cdef int emit_removed(self, RemovedRun removed, bint compact) except -1:
        if removed is not None and removed.count:
            self.report(removed, compact)
        return 0

    cdef int emit_arrival(self, bytes key) except -1:
        # A key that was registered by itself, without its request.
        if not self.enable_kv_cache_events or not self.truthful_events:
            return 0
        if not self.reports_inserted_keys:
            return 0
        try:
            self.make_arrival(key)
        except BaseException as error:
            self.lose_events(error)
        return 0

    cdef int make_arrival(self, bytes key) except -1:
        types = self.types_of_events()
        width = len(key) - 4
        group = int.from_bytes(key[width:], "big")
        stored = types.BlockStored(
            block_hashes=[types.external_hash(key[:width])],
            parent_block_hash=None,
            token_ids=[],
            block_size=self.hash_block_size,
            lora_id=None,
            medium=self.medium,
            lora_name=None,
            group_idx=group,
        )
        for name, value in self.describe(group).items():
            setattr(stored, name, value)
        return self.emit(stored, False)

    cdef RemovedRun departure_log(self):
        # Room for a key that is taken away by itself; None when no event will be due. Made
        # before the key is looked for, because making it may run other code.
        cdef RemovedRun removed
        if not self.enable_kv_cache_events or not self.truthful_events:
            return None
        removed = RemovedRun.__new__(RemovedRun)
        removed.fields = self.place_fields()
        reserve_removed(removed, 1, MAX_HASH_BYTES)
        return removed

    cdef void log_departure(self, Holder holder, RemovedRun removed) noexcept:
        if removed is not None and not registry.flagged_space(&self.core, holder) & LOOSE_FLAG:
            log_key(&self.core, holder, removed, True)

    def emit_cached_block_events(
        self, request, num_cached_blocks, block_size, kv_cache_group_id
    ):
        """Report blocks that a request reuses as stored, without changing anything.

        With truthful events there is nothing to report: consumers know of these blocks.

        Args:
            request: As in `cache_full_blocks`.
            num_cached_blocks: Number of blocks from the start that were hits.
            block_size: Tokens in a block.
            kv_cache_group_id: Group of the blocks.
        """
        cdef int64_t count = read_count(num_cached_blocks, "num_cached_blocks", 0, 1 << 40)
        cdef uint64_t size = read_count(block_size, "block_size", 1, MAX_NUM_TOKENS)
        cdef Py_ssize_t scale
        if not self.enable_kv_cache_events or count == 0 or self.truthful_events:
            return
        hashes = self.hash_sequence(request, size, &scale)
        self.emit(
            self.make_stored(
                request, [hashes[(i + 1) * scale - 1] for i in range(count)], None, 0,
                count * size, size, read_group(kv_cache_group_id),
                [(i * size, (i + 1) * size) for i in range(count)],
            ),
            False,
        )

    def take_events(self):
        """All events since the last call, as a list of the caller's own; [] with events off.

        If an event could not be made, because memory ran out after the change that it was to
        tell of, the list is `AllBlocksCleared` and a snapshot of what the pool holds now.
        """
        events = self.take_event_runs()
        try:
            return expand_runs(events, self.types_of_events())
        except BaseException:
            self.events_lost = True
            raise

    def take_event_runs(self, *, snapshot=False):
        """As `take_events`, but what the batch interface did stays compact.

        Args:
            snapshot: Whether to take, instead of what happened, a clear and a snapshot of
                what the pool holds now: a batch for consumers that missed some.

        Returns:
            List of events and of runs, which stand for several events each: see
            ``run.num_events`` and ``run.expand``. `cpool.events.wire` encodes both.
        """
        if not self.enable_kv_cache_events:
            return []
        events = self.kv_event_queue
        fresh = []
        if snapshot or self.events_lost:
            events = [self.types_of_events().AllBlocksCleared(), self.take_snapshot()]
        self.kv_event_queue = fresh
        self.events_lost = False
        if events:
            self.num_event_batches += 1
        return events

    def snapshot_events(self):
        """All that the pool holds now, for a consumer that comes late or lost events.

        A consumer that forgets all it knows, applies these events and then every batch from
        ``sequence`` on, holds what one does that saw everything. Events that wait for
        `take_events` are part of that next batch and of the snapshot both: applying them
        again changes nothing. Batches are those that `take_events` or `take_event_runs`
        handed out, empty ones not counted, from 0.

        Takes time in proportion to the pool. Token ids, LoRA, extra keys and session are part
        of a snapshot only with ``detailed_snapshots``; otherwise those fields are empty.

        Returns:
            `EventSnapshot` with ``events`` and ``sequence``.

        Raises:
            ValueError: Events are off, so parents are not known.
        """
        if not self.enable_kv_cache_events:
            raise ValueError("a pool knows the parents of blocks only with events on")
        return EventSnapshot(self.take_snapshot(), self.num_event_batches)

    cdef EventDetail request_detail(self, object request, object start, object end):
        cdef EventDetail detail = make_detail(request.all_token_ids[start:end], end - start)
        types = self.types_of_events()
        mm_index = 0
        if start and getattr(request, "mm_features", None):
            mm_index = types.first_mm_index(request, start, end)
        extra, _ = types.block_extra_keys(request, start, end, mm_index)
        if extra is not None:
            detail.extra_keys[0] = types.event_extra_keys([extra])[0]
        lora = request.lora_request
        detail.lora_id = lora.adapter_id if lora else None
        detail.lora_name = lora.name if lora else None
        detail.session_id = getattr(request, "session_id", None)
        return detail

    cdef record_id_t last_extra(self, block_id_t id) noexcept:
        cdef record_id_t extra = NO_RECORD
        cdef record_id_t next = reverse_index.first(&self.core.index, id)
        while next != NO_RECORD:
            extra = next
            next = reverse_index.extra(&self.core.index, extra).next
        return extra

    cdef int note_detail(
        self, block_id_t id, bint as_extra, EventDetail detail, size_t row
    ) except -1:
        # Of the registration that the block got last, as an extra key or as its primary one.
        if not self.detailed_snapshots or not self.enable_kv_cache_events:
            return 0
        try:
            if self.details is None:
                self.extra_details = {}
                self.details = [None] * self.core.blocks.num_blocks
            kept = None if detail is None else (detail, row)
            if as_extra:
                self.extra_details[self.last_extra(id)] = kept
            else:
                self.details[id] = kept
        except MemoryError:
            # The detail of a former key must not stay.
            self.forget_details()
        return 0

    cdef void forget_details(self) noexcept:
        self.details = None
        self.extra_details = None

    cdef object detail_to_move(self, Holder holder):
        # In the middle of a move, which must not fail.
        try:
            return self.detail_of(holder)
        except MemoryError:
            self.forget_details()
            return None

    cdef object detail_of(self, Holder holder):
        if self.details is None:
            return None
        if holder.extra == NO_RECORD:
            return self.details[holder.block]
        return self.extra_details.get(holder.extra)

    cdef SnapshotRun take_snapshot(self):
        cdef SnapshotRun run = SnapshotRun.__new__(SnapshotRun)
        cdef Core* core = &self.core
        cdef size_t count = core.table.num_used
        cdef Array rows, index, order, scratch, sizes
        cdef Holder holder
        cdef uint32_t i
        cdef size_t row
        cdef int shift = 63
        run.medium = self.medium
        run.stride = core.blocks.stride
        run.spaces = [(0, 0)]
        for i in range(1, core.num_spaces):
            run.spaces.append((core.spaces[i].group, core.spaces[i].width))
        run.descriptions = {group: self.describe(group) for group, _ in run.spaces}
        if count == 0:
            return run
        while <size_t>1 << (64 - shift) < 2 * count:
            shift -= 1
        memset(&rows, 0, sizeof(Array))
        index = order = scratch = sizes = rows
        try:
            memory.allocate(&run.digest_array, count, run.stride)
            memory.allocate(&run.span_array, count, sizeof(StoredSpan))
            memory.allocate(&rows, count, sizeof(SnapshotRow))
            memory.allocate(&index, <size_t>1 << (64 - shift), sizeof(uint32_t))
            memory.allocate(&order, count, sizeof(uint64_t))
            memory.allocate(&scratch, count, sizeof(uint64_t))
            memory.allocate(&sizes, len(run.spaces), sizeof(uint32_t))
            for i in range(1, core.num_spaces):
                (<uint32_t*>sizes.data)[i] = self.group_block_sizes.get(core.spaces[i].group, 0)
            run.spans = <StoredSpan*>run.span_array.data
            fill_rows(core, &self.parents, <SnapshotRow*>rows.data)
            fill_index(
                <SnapshotRow*>rows.data, count, <uint32_t*>index.data, shift, core.seed[0]
            )
            find_parents(
                <SnapshotRow*>rows.data, count, <uint32_t*>index.data, shift, core.seed[0]
            )
            sort_by_tokens(
                <SnapshotRow*>rows.data, count, <uint64_t*>order.data, <uint64_t*>scratch.data
            )
            link_spans(
                <SnapshotRow*>rows.data, count, <uint64_t*>order.data, <uint32_t*>sizes.data,
                self.hash_block_size, self.details is None,
            )
            write_spans(core, <SnapshotRow*>rows.data, count, <uint64_t*>order.data, run)
            if self.details is not None:
                run.details = [None] * count
                for row in range(count):
                    holder.block = (<SnapshotRow*>rows.data)[row].block
                    holder.extra = (<SnapshotRow*>rows.data)[row].extra
                    run.details[(<SnapshotRow*>rows.data)[row].place] = self.detail_of(holder)
        finally:
            memory.release(&rows)
            memory.release(&index)
            memory.release(&order)
            memory.release(&scratch)
            memory.release(&sizes)
        return run

    # Save and load ------------------------------------------------------------------------

    def save(self, path):
        """Write the whole state to a file, under a temporary name that is then renamed.

        Held blocks stay held in the file: blocks, keys, counts and the order of eviction are
        all in it. Not in it are the metrics collector, events that nobody took yet,
        the details of `detailed_snapshots`, attributes that were assigned, and the table's
        random words, which each pool draws.

        Args:
            path: The file; an old one is replaced when the new one is complete.

        Raises:
            ContractError: Blocks wait for their ``on_reuse`` callback, which no file can
                hold, or counts were written from outside; nothing was written.
            OSError: The file cannot be written; an old one is as it was.
        """
        if self._reuse_watchers:
            raise ContractError(
                f"{len(self._reuse_watchers)} blocks have an on_reuse callback, "
                "which cannot be saved"
            )
        refuse_unsavable(&self.core)
        arrays = arrays_of(&self.core, &self.parents)
        spaces = arrays["spaces"]
        spaces["block_size"] = [self.group_block_sizes.get(group, 0) for group in spaces["group"]]
        arrays["queue"] = self.free_queue_ids()
        counts = self.ref_cnts.copy()
        np.maximum(counts[1:], 0, out=counts[1:])   # without the queue's notes
        arrays["ref_cnts"] = counts
        saving.write(path, self.settings(), arrays)

    cdef dict settings(self):
        return {
            "num_gpu_blocks": int(self.num_gpu_blocks),
            "hash_block_size": self.hash_block_size,
            "enable_caching": bool(self.enable_caching),
            "enable_kv_cache_events": bool(self.enable_kv_cache_events),
            "truthful_events": bool(self.truthful_events),
            "detailed_snapshots": bool(self.detailed_snapshots),
            "medium": str(self.medium),
            "hash_width": self.hash_width,
            "num_evicted_blocks": self.num_evicted_blocks,
        }

    @classmethod
    def load(cls, path, metrics_collector=None):
        """A pool in the state that `save` wrote: look-ups, counts, order of eviction.

        Args:
            path: The file.
            metrics_collector: As in the constructor.

        Raises:
            SavedPoolError: The file is no saved pool, is damaged, or is of a version that
                this one cannot read; the message says which. No pool was built.
            OSError: The file cannot be read.
        """
        settings, arrays = saving.read(path)
        try:
            pool = cls(
                num_gpu_blocks=settings["num_gpu_blocks"],
                enable_caching=settings["enable_caching"],
                hash_block_size=settings["hash_block_size"],
                enable_kv_cache_events=settings["enable_kv_cache_events"],
                metrics_collector=metrics_collector,
                medium=settings["medium"],
                truthful_events=settings["truthful_events"],
                detailed_snapshots=settings["detailed_snapshots"],
            )
        except ContractError as error:
            raise SavedPoolError(f"{path}: {error}") from error
        try:
            (<BlockPool>pool).load_arrays(settings, arrays)
        except SavedPoolError as error:
            raise SavedPoolError(f"{path}: {error}") from None
        return pool

    cdef int load_arrays(self, dict settings, dict arrays) except -1:
        # The arrays are ours, with the dtypes of save.pxi; their values are checked here.
        cdef size_t count = len(arrays["registrations"])
        cdef size_t num_copies = len(arrays["copies"])
        cdef size_t num_spaces = len(arrays["spaces"])
        cdef size_t width = arrays["digests"].shape[1]
        cdef IdBuffer extras = make_buffer(count)
        is_copy = np.zeros(count, np.uint8)
        cdef void* ref_cnts = data_of(arrays["ref_cnts"])
        cdef void* queue = data_of(arrays["queue"])
        cdef void* spaces = data_of(arrays["spaces"])
        cdef void* registrations = data_of(arrays["registrations"])
        cdef void* digests = data_of(arrays["digests"])
        cdef void* copies = data_of(arrays["copies"])
        cdef void* marks = data_of(is_copy)
        cdef void* parent_hashes = data_of(arrays["parents"])
        if len(arrays["ref_cnts"]) != self.core.blocks.num_blocks:
            raise SavedPoolError(
                f"{len(arrays['ref_cnts'])} counts for {self.core.blocks.num_blocks} blocks"
            )
        if len(arrays["digests"]) != count or count == 0 and num_spaces:
            raise SavedPoolError(
                f"{len(arrays['digests'])} digests in {num_spaces} spaces for {count} keys"
            )
        load_queue(&self.core, <const int32_t*>ref_cnts, <const block_id_t*>queue,
                   len(arrays["queue"]))
        load_spaces(&self.core, <const SavedSpace*>spaces, num_spaces, width)
        load_keys(
            &self.core, <const SavedRegistration*>registrations, count, <const uint8_t*>digests,
            width, <const uint32_t*>copies, num_copies, extras.ids, <uint8_t*>marks,
        )
        if len(arrays["parents"]) not in (0, count):
            raise SavedPoolError(f"{len(arrays['parents'])} parents for {count} keys")
        if len(arrays["parents"]):
            self.reserve_parents()
            load_parents(
                &self.parents, <const SavedRegistration*>registrations, extras.ids, count,
                <const uint64_t*>parent_hashes,
            )
        self.group_block_sizes.update(
            (int(group), int(size)) for group, _, size in arrays["spaces"].tolist() if size
        )
        self.hash_width = settings["hash_width"]
        self.num_evicted_blocks = settings["num_evicted_blocks"]
        self.after()
        return 0

    # What the pool holds ------------------------------------------------------------------

    @property
    def nbytes(self):
        """Bytes of all arrays, as asked of the allocator."""
        return (
            registry.nbytes(&self.core) + parents.nbytes(&self.parents)
            + self.pages_array.nbytes + self.num_pages * sizeof(HandlePage)
        )

    def __sizeof__(self):
        return object.__sizeof__(self) + self.nbytes

    @property
    def num_cached_keys(self):
        """Number of distinct keys."""
        return self.core.table.num_used

    @property
    def num_registrations(self):
        """Number of (key, block) pairs."""
        return self.core.num_registrations

    @property
    def states(self):
        """(num_gpu_blocks + 1,) structured read-only view, zero-copy.

        Fields ``prev`` and ``next`` (uint32) are the neighbours in the free queue, 2**32 - 1
        for both outside of it; ``ref_cnt`` (int32) counts holders outside of the queue, and is
        0 or a negative note of the queue's inside. The last row is the queue's end: its
        ``next`` is the head, its ``prev`` the tail.
        """
        return view_column(
            self, self.core.blocks.states,
            sizeof(BlockState) * (self.core.blocks.num_blocks + 1), STATE_DTYPE, False,
        )

    @property
    def ref_cnts(self):
        """(num_gpu_blocks,) int32, read-only view, zero-copy: holders of each block.

        0 or below means free: while a block is in the free queue, the queue keeps a note in
        the count. Of the null block it means nothing.
        """
        return self.states["ref_cnt"][:self.core.blocks.num_blocks]

    @property
    def key_num_tokens(self):
        """(num_gpu_blocks,) uint32, read-only view: tokens that each primary key covers.

        Zero without a key. While a view is alive the prefix cache cannot be reset.
        """
        if self.core.blocks.keys == NULL:
            result = np.zeros(self.core.blocks.num_blocks, dtype=np.uint32)
            result.flags.writeable = False
            return result
        return view_column(
            self, self.core.blocks.keys,
            sizeof(PrimaryKey) * self.core.blocks.num_blocks, KEY_DTYPE, True,
        )["num_tokens"]

    def free_queue_ids(self):
        """(num_free,) uint32 array: the free blocks in the order of eviction."""
        cdef block_id_t* ids
        cdef block_id_t id = self.core.queue.end
        cdef uint32_t i
        result = new_array(self.core.queue.num_free, numpy.NPY_UINT32)
        ids = <block_id_t*>data_of(result)
        for i in range(self.core.queue.num_free):
            id = free_queue.next_of(&self.core.queue, id)
            ids[i] = id
        return result

    def table_stats(self):
        """How full the table is, and how far its keys stand from their homes.

        Takes time in proportion to the pool.

        Returns:
            Dict with ``num_cells``, ``num_used``, ``mean_distance`` and ``max_distance``
            (cells between a key's home and its place) and ``max_run`` (used cells in a row).
        """
        cdef table_stats.TableStats stats = table_stats.stats_of(&self.core.table)
        return {
            "num_cells": self.core.table.num_cells,
            "num_used": self.core.table.num_used,
            "mean_distance": stats.total_distance / max(self.core.table.num_used, 1.0),
            "max_distance": stats.max_distance,
            "max_run": stats.max_run,
        }

    def check_consistency(self):
        """Look at every invariant of every structure; takes time in proportion to the pool.

        Raises:
            AssertionError: One does not hold. That is a bug in cpool, or counts and links
                were written from outside.
        """
        check.check(&self.core)


if CPOOL_DEBUG:
    class _testing:
        """Debug builds only: makes our allocations fail."""

        @staticmethod
        def fail_allocation(long countdown):
            """The ``countdown``-th allocation from now fails; 0: none does."""
            memory.fail_countdown = countdown

        @staticmethod
        def narrow_hash(uint32_t mask):
            """Keys hash to as many values as ``mask`` allows; 2**32 - 1: to all.

            Set it while no pool holds a key.
            """
            keys.hash_mask = mask

        @staticmethod
        def num_allocations():
            """Allocations asked for since the start."""
            return memory.num_allocations
