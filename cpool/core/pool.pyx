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
    batches, cells, check, free_queue, guess, handle_map, keys, memory, msgpack, parents, registry,
    reverse_index, shared_keys, table, table_stats,
)
from cpool.core.blocks cimport digest_slot, has_rows, key_at, state_at
from cpool.core.keys cimport Key, Space, copy_digest, MAX_SPACES
from cpool.core.memory cimport Array, prefetch, prefetch_write
from cpool.core.msgpack cimport Writer
from cpool.core.parents cimport Parents
from cpool.core.registry cimport Core, Holder
from cpool.core.types cimport (
    BlockState, block_id_t, hash_t, int32_t, int64_t, record_id_t, ref_t, space_t, uint8_t,
    uint16_t, uint32_t, uint64_t, INDEX_MASK, LOOSE_FLAG, MAX_BLOCKS, MAX_HASH_BYTES,
    MAX_NUM_TOKENS, MAX_REF_CNT, NO_BLOCK, NO_RECORD, NO_TOKENS_FLAG, NOT_QUEUED, NULL_BLOCK,
    SHARED, SHARED_FLAG, SPACE_MASK,
)
from cpython.buffer cimport (
    Py_buffer, PyBUF_FORMAT, PyBUF_STRIDED_RO, PyBuffer_FillInfo,
    PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.string cimport memcpy, memset

import logging
import os
from collections.abc import Mapping
from itertools import islice

import numpy as np

from cpool.core import saved_details, saving
from cpool.core.contract import (
    BlockIdError, ContractError, EventSnapshot, Registration, SavedPoolError,
)
from cpool.core.standalone import BlockHashToBlockMap, FreeKVCacheBlockQueue

cdef extern from *:
    bint CPOOL_DEBUG
    long long PyLong_AsLongLongAndOverflow(object number, int* overflow) except? -1
    PyObject* PyList_GET_ITEM(list items, Py_ssize_t index) noexcept
    PyObject* Py_TYPE(PyObject* object) noexcept
    # Objects made between a check and its commit could start the garbage collector, and then
    # the __del__ of anything could call the pool. So there it is off.
    int PyGC_Disable()
    int PyGC_Enable()

cdef enum:
    STEP = 1024                     # registrations that memory is reserved for at once
    SMALL_INT = 256                 # up to here Python has its integers already
    HANDLES_AT_ONCE = 1024          # that memory is prepared for
    FEW = 128                       # block ids for which a call has room of its own
    CHECKED_UP_TO_BLOCKS = 4096     # debug builds check pools of this size after each operation


cdef dict STATE_FIELDS = {
    "names": ["prev", "next", "ref_cnt"], "formats": ["<u4", "<u4", "<i4"], "offsets": [0, 4, 8],
}

numpy.import_array()

include "arguments.pxi"
include "steps.pxi"
include "event_runs.pxi"
include "event_steps.pxi"
include "snapshot.pxi"
include "handles.pxi"
include "views.pxi"
include "save.pxi"
include "save_details.pxi"


cdef inline object hash_at(object hashes, Py_ssize_t index):
    if type(hashes) is list and index < len(<list>hashes):
        return (<list>hashes)[index]
    return hashes[index]


cdef inline object hashes_of(object request):
    if request is None:
        raise TypeError("a request with block_hashes is needed, not NoneType")
    return request.block_hashes


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


cdef object view_column(
    BlockPool pool, void* data, size_t count, size_t row_bytes, dict fields, bint is_key_column
):
    # `count` elements, so many bytes apart; `fields` says where in each they lie (np.dtype).
    cdef Column column = Column.__new__(Column)
    column.pool = pool
    column.data = data
    column.nbytes = count * row_bytes
    column.is_key_column = is_key_column
    if is_key_column:
        pool.num_exports += 1
    return np.frombuffer(column, dtype=np.dtype({**fields, "itemsize": row_bytes}))


include "pool_state.pxi"
include "pool_events.pxi"
include "pool_lookup.pxi"
include "pool_allocation.pxi"
include "pool_registration.pxi"
include "pool_partials.pxi"


cdef class BlockPool(_PoolPartials):
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
            Only with ``enable_kv_cache_events``.
        detailed_snapshots: Whether snapshots carry token ids, LoRA, extra keys and session, as
            the events did. That keeps the tokens of every resident block in memory, four bytes
            each as a rule, and one small object a block. Only with ``enable_kv_cache_events``.
        hash_width: Bytes of the block hashes to come: 32 of ``sha256``, 16 of ``xxhash``. If
            given, the memory for a key a block is taken and touched now, and
            `reset_prefix_cache` keeps it: while blocks have one key each, no registration waits
            for the system to find pages. That takes 6 to 10 ms a million blocks where free pages
            are at hand, 16 to 230 ms in a new process on a virtual machine. If the hashes then
            have another width, memory follows them, over resets too. None: memory follows use.

    Raises:
        ContractError: A size is not an integer in its range, or ``truthful_events`` or
            ``detailed_snapshots`` is on without ``enable_kv_cache_events``.
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
        hash_width=None,
    ):
        if self.core.blocks.num_blocks:
            raise ContractError("a pool cannot be initialised twice")
        num_blocks = read_count(num_gpu_blocks, "num_gpu_blocks", 1, MAX_BLOCKS)
        self.hash_block_size = <uint32_t>read_count(
            hash_block_size, "hash_block_size", 1, MAX_NUM_TOKENS
        )
        width = 0 if hash_width is None else read_count(
            hash_width, "hash_width", 1, MAX_HASH_BYTES
        )
        if not isinstance(medium, str):
            raise TypeError(f"medium must be str, not {type(medium).__name__}")
        for name, value in (
            ("truthful_events", truthful_events), ("detailed_snapshots", detailed_snapshots)
        ):
            if value and not enable_kv_cache_events:
                raise ContractError(
                    f"{name} is {value!r} and enable_kv_cache_events is "
                    f"{enable_kv_cache_events!r}: without events it does nothing"
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
        registry.init(
            &self.core, <uint32_t>num_blocks, enable_caching,
            <uint32_t>width if enable_caching else 0,
        )
        free_queue.remove(&self.core.queue, NULL_BLOCK)

    def __reduce__(self):
        raise TypeError("a BlockPool cannot be pickled or copied: its blocks are device memory")

    def reset_prefix_cache(self):
        """Forget all keys, and give back what they took; with ``hash_width``, what they took
        beyond a key a block.

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
        watched = [self.handle(id) for id in list(self._reuse_watchers)]
        self.forget_keys()
        # A consumer learns of the reset at its end: of what watchers do meanwhile nothing
        # survives, so the truthful stream does not mention it.
        self.is_resetting = self.truthful_events
        try:
            self.notify_reuse(watched)
        finally:
            self.is_resetting = False
            self.finish_reset()
        self.after()
        return True

    cdef int finish_reset(self) except -1:
        # A watcher may have registered something: nothing of it survives the reset, unless it
        # holds a view of it, too. Whatever is raised here, consumers learn of the reset.
        try:
            self.forget_keys()
            if self.metrics_collector is not None:
                self.metrics_collector.reset()
            self.logger.info("Successfully reset prefix cache")
        except BaseException:
            self.events_lost = self.enable_kv_cache_events
            raise
        if self.enable_kv_cache_events:
            try:
                self.emit(self.types_of_events().AllBlocksCleared(), False)
            except BaseException as error:
                self.lose_events(error)
        return 0

    cdef int forget_keys(self) except -1:
        if self.num_exports and self.core.blocks.stride:
            # Somebody looks at the key columns, which would go.
            raise BufferError(
                f"{self.num_exports} numpy views of the key columns are alive: "
                "delete them before the reset"
            )
        registry.forget_keys(&self.core)
        parents.release(&self.parents)
        self.forget_prefixes()
        self.forget_details()
        self.hash_width = 0
        return 0

    def save(self, path):
        """Write the whole state to a file, under a temporary name that is then renamed.

        Held blocks stay held in the file: blocks, keys, counts and the order of eviction are
        all in it, and the details of `detailed_snapshots`. Not in it are the metrics collector,
        events that nobody took yet, attributes that were assigned, ``hash_width``, so that a
        loaded pool's memory follows use, and the table's random words, which each pool draws.

        Args:
            path: The file; an old one is replaced when the new one is complete.

        Raises:
            ContractError: Blocks wait for their ``on_reuse`` callback, which no file can
                hold, extra keys of a detail are neither text nor bytes, numbers, lists or
                tuples, or counts were written from outside; nothing was written.
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
        arrays.update(detail_arrays(<BlockPool>self))
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

        A file with events off has neither `truthful_events` nor `detailed_snapshots`, whatever
        it says of them.

        Args:
            path: The file.
            metrics_collector: As in the constructor.

        Raises:
            SavedPoolError: The file is no saved pool, is damaged, or is of a version that
                this one cannot read; the message says which. No pool was built.
            OSError: The file cannot be read.
        """
        settings, arrays = saving.read(path)
        with_events = settings["enable_kv_cache_events"]
        try:
            pool = cls(
                num_gpu_blocks=settings["num_gpu_blocks"],
                enable_caching=settings["enable_caching"],
                hash_block_size=settings["hash_block_size"],
                enable_kv_cache_events=with_events,
                metrics_collector=metrics_collector,
                medium=settings["medium"],
                truthful_events=with_events and settings["truthful_events"],
                detailed_snapshots=with_events and settings["detailed_snapshots"],
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
        load_details(
            <BlockPool>self, <const SavedRegistration*>registrations, extras.ids, count, arrays
        )
        # By column: numpy crashes when it cannot make the tuples of all fields.
        for group, size in zip(
            arrays["spaces"]["group"].tolist(), arrays["spaces"]["block_size"].tolist()
        ):
            if size:
                self.group_block_sizes[group] = size
        self.hash_width = settings["hash_width"]
        self.num_evicted_blocks = settings["num_evicted_blocks"]
        self.after()
        return 0


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

            Set it while no pool holds a key. Other modules, of which `PrefixCache` is one, do not
            hear of it: they look up as if nothing were narrowed.
            """
            keys.hash_mask = mask

        @staticmethod
        def num_allocations():
            """Allocations asked for since the start."""
            return memory.num_allocations
