# SPDX-License-Identifier: Apache-2.0
"""The life of a request's blocks: lookup, admit, append, commit, finish, preempt.

`PrefixCache` turns the pool's primitives into what an engine asks. It keeps no request by
name and knows no engine: `lookup` says where to start, `admit` takes the blocks, `append`
makes room for more tokens, `commit` registers what is computed.

Every step decides first (what must be taken out of the free queue, does it fit), then reserves
memory, then commits; a step that does not fit returns None and has changed nothing, except
that `append` first frees the blocks which no later token reads. The order of all changes is that
of vLLM 0.32.0's ``KVCacheManager``, so block ids, copies and order of eviction are the same.
"""
cimport cython
from cpool.core cimport free_queue, guess, registry, reverse_index
from cpool.core.blocks cimport state_at
from cpool.core.guess cimport Guess
from cpool.core.pool cimport BlockPool, HashBatch, IdBuffer, check_items, read_hashes
from cpool.core.registry cimport Core, Holder
from cpool.core.keys cimport Key
from cpool.core.memory cimport prefetch
from cpool.core.types cimport (
    block_id_t, int64_t, space_t, uint32_t, uint64_t, MAX_HASH_BYTES, MAX_NUM_TOKENS,
    MAX_REF_CNT, NO_BLOCK, NO_RECORD,
)
from cpool.prefix cimport evictions, lookup, rows
from cpool.prefix.evictions cimport Eviction, Evictions
from cpool.prefix.lookup cimport GroupSet, Hit, Query, FULL_ATTENTION, MAMBA
from cpool.prefix.rows cimport Kind, Row
from cpython.buffer cimport (
    Py_buffer, PyBUF_WRITABLE, PyBuffer_Release,
    PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from libc.string cimport memcmp, memcpy, memset

import time

import numpy as np

from cpool.core.contract import ContractError
from cpool.hashing import BlockHashes
from cpool.prefix.explain import PartialTail, explain
from cpool.prefix.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow, plan, window_of

cdef object seconds = time.monotonic

cdef enum:
    MAX_SETS = 64           # bits of the word that remembers whose drafter was served


cdef struct Snapshot:       # of a pool: two that are equal mean that no block changed its keys
    uint64_t num_steps
    uint64_t num_registrations
    uint64_t num_departures
    uint64_t num_free


cdef struct Need:           # of one group, for one step
    size_t num_new          # blocks to take out of the queue for new tokens
    bint copies             # and one more, for a copy
    size_t num_hits         # blocks of the match, without those that no later token reads
    size_t num_nulls        # places at the left of the row without a block


include "arguments.pxi"
include "match.pxi"
include "request.pxi"
include "copies.pxi"
include "steps.pxi"
include "register.pxi"


@cython.final
cdef class PrefixCache:
    """The prefix cache of one model, with one or several groups of layers, over one pool.

    Args:
        pool: Where the blocks are; ``pool.hash_block_size`` is the distance of two hashes.
            The cache has to be the only one that allocates for these groups.
        groups: `FullAttention`, `SlidingWindow`, `ChunkedLocal` or `Mamba`, one for each
            ``kv_cache_group_id``.
        match: "fine": a hit may end inside a block, at any multiple of ``hash_block_size``;
            "coarse": only at a boundary of every group's blocks. None: fine when a Mamba
            block spans several hashes and every group can follow, as vLLM does.
        remember_evictions: How many evicted keys to remember, so that `PrefixMatch.explain`
            can tell an evicted prefix from one never seen: 12 bytes each, rounded up to a
            power of two.

    Raises:
        ValueError: A block size is no multiple of the pool's ``hash_block_size``, or the
            groups cannot be matched so.
    """
    cdef readonly BlockPool pool
    cdef readonly object layout
    cdef uint32_t num_groups
    cdef uint32_t num_sets
    cdef GroupSet* sets
    cdef uint32_t* members          # of all sets
    cdef uint32_t* set_of           # of each group
    cdef Kind* kinds                # of each group
    cdef Need* needs                # of each group, for the step at work
    cdef space_t* spaces            # of each group, for the lookup at work
    cdef block_id_t* tail           # of each group, for the lookup at work
    cdef Guess* guesses             # of each group, from the last lookup
    cdef tuple nothing              # an empty array for each group
    cdef uint64_t scheduler_block_size      # tokens
    cdef uint64_t match_unit_tokens
    cdef bint is_fine
    cdef bint has_eagle
    cdef bint is_single             # one group whose blocks are as long as the match unit
    cdef uint64_t num_steps         # changes made through this cache
    cdef list new_states            # of each group: keys whose state this step computes
    cdef _CopyQueue copies
    cdef Evictions history

    def __cinit__(self, *args, **kwargs):
        self.sets = NULL
        self.members = NULL
        self.set_of = NULL
        self.kinds = NULL
        self.needs = NULL
        self.spaces = NULL
        self.tail = NULL
        self.guesses = NULL
        self.history.cells = NULL

    def __init__(self, pool, groups, *, match=None, remember_evictions=0):
        cdef uint32_t g, s, placed = 0
        if self.sets != NULL:
            raise TypeError("a prefix cache is set up once")
        if not isinstance(pool, BlockPool):
            raise TypeError(f"pool must be a BlockPool, not {type(pool).__name__}")
        if not hasattr(groups, "__iter__"):
            raise TypeError(f"groups must be a sequence of groups, not {type(groups).__name__}")
        self.pool = pool
        self.layout = plan(tuple(groups), pool.hash_block_size, match)
        if len(self.layout.sets) > MAX_SETS:
            raise ValueError(f"{len(self.layout.sets)} kinds of groups; the limit is {MAX_SETS}")
        self.num_groups = len(self.layout.groups)
        self.num_sets = len(self.layout.sets)
        self.sets = <GroupSet*>room(self.num_sets, sizeof(GroupSet))
        self.members = <uint32_t*>room(self.num_groups, sizeof(uint32_t))
        self.set_of = <uint32_t*>room(self.num_groups, sizeof(uint32_t))
        self.kinds = <Kind*>room(self.num_groups, sizeof(Kind))
        self.needs = <Need*>room(self.num_groups, sizeof(Need))
        self.spaces = <space_t*>room(self.num_groups, sizeof(space_t))
        self.tail = <block_id_t*>room(self.num_groups, sizeof(block_id_t))
        self.guesses = <Guess*>room(self.num_groups, sizeof(Guess))
        for s, group_set in enumerate(self.layout.sets):
            self.sets[s].kind = KIND_OF[type(group_set.group)]
            self.sets[s].block_size = group_set.group.block_size
            self.sets[s].window = window_of(group_set.group)
            self.sets[s].eagle = group_set.eagle
            self.sets[s].members = self.members + placed
            self.sets[s].num_members = len(group_set.members)
            for member in group_set.members:
                g = member
                self.members[placed] = g
                placed += 1
                self.set_of[g] = s
                self.kinds[g].kind = self.sets[s].kind
                self.kinds[g].block_size = self.sets[s].block_size
                self.kinds[g].window = self.sets[s].window
                self.kinds[g].eagle = self.sets[s].eagle
        self.is_single = (
            self.num_groups == 1 and self.kinds[0].block_size == pool.hash_block_size
        )
        self.scheduler_block_size = self.layout.scheduler_block_size
        self.match_unit_tokens = self.layout.match_unit
        self.is_fine = self.layout.match == "fine"
        self.has_eagle = self.layout.eagle
        self.nothing = tuple([np.empty(0, dtype=np.uint32) for _ in range(self.num_groups)])
        self.new_states = [set() for _ in range(self.num_groups)]
        self.copies = _CopyQueue(self.num_groups)
        evictions.init(
            &self.history, read_tokens(remember_evictions, "remember_evictions", 0, 1 << 31)
        )

    def __dealloc__(self):
        cdef uint32_t g
        if self.guesses != NULL:
            for g in range(self.num_groups):
                guess.forget(&self.guesses[g])
        PyMem_Free(self.guesses)
        PyMem_Free(self.sets)
        PyMem_Free(self.members)
        PyMem_Free(self.set_of)
        PyMem_Free(self.kinds)
        PyMem_Free(self.needs)
        PyMem_Free(self.spaces)
        PyMem_Free(self.tail)
        evictions.release(&self.history)

    def __reduce__(self):
        raise TypeError("a prefix cache cannot be pickled or copied")

    @property
    def groups(self):
        """The groups, in the order of their ``kv_cache_group_id``."""
        self.require_setup()
        return self.layout.groups

    @property
    def match_unit(self):
        """Tokens: hits end at its multiples."""
        return self.match_unit_tokens

    cdef int require_setup(self) except -1:
        if self.copies is None:
            raise ContractError("the prefix cache was never set up")
        return 0

    cdef Snapshot take_snapshot(self) noexcept:
        cdef Snapshot now
        now.num_steps = self.num_steps
        now.num_registrations = self.pool.core.num_registrations
        now.num_departures = self.pool.core.num_departures
        now.num_free = self.pool.core.queue.num_free
        return now

    # Lookup -------------------------------------------------------------------------------

    def lookup(self, hashes, max_tokens=None):
        """Find the longest prefix that the pool holds.

        Args:
            hashes: The request's digests, one for each ``hash_block_size`` tokens:
                (n, width) uint8, bytes-like of n * width, or a sequence of bytes.
            max_tokens: Tokens that a hit may cover. An engine that needs the last token's
                output passes the number of the request's tokens - 1. None: all hashes.

        Returns:
            A `PrefixMatch`, of 0 tokens when nothing is found.

        Raises:
            ValueError: `BlockHashes` of another number of tokens than ``hash_block_size``.
        """
        cdef HashBatch batch = self.read_rows(hashes)
        cdef uint64_t unit = self.pool.hash_block_size
        cdef uint64_t covered = batch.count * unit
        cdef uint64_t limit = covered
        if max_tokens is not None:
            # Beyond the last hash nothing can be found.
            limit = min(
                read_tokens(max_tokens, "max_tokens", 0, MAX_NUM_TOKENS), covered + unit - 1
            )
        return self.find(hashes, batch, limit)

    cdef HashBatch read_rows(self, object hashes):
        # Rows cannot tell how many tokens they are apart, but who made them may know.
        self.require_setup()
        if type(hashes) is BlockHashes and hashes.hash_block_size != self.pool.hash_block_size:
            raise ValueError(
                f"the hashes are {hashes.hash_block_size} tokens apart; the pool's "
                f"hash_block_size is {self.pool.hash_block_size}"
            )
        return read_hashes(hashes, -1, self.pool.hash_width)

    cdef void ask(self, Query* query, HashBatch batch) noexcept:
        # All but what the pool may still change: spaces, and what is found.
        query.core = &self.pool.core
        query.rows = batch.rows
        query.num_rows = batch.count
        query.row_bytes = batch.row_bytes
        query.width = batch.width
        query.unit = self.pool.hash_block_size
        query.match_unit = self.match_unit_tokens
        query.sets = self.sets
        query.num_sets = self.num_sets
        query.spaces = self.spaces
        query.guesses = NULL
        query.tail = self.tail

    cdef PrefixMatch prepare(
        self, Query* query, object hashes, HashBatch batch, uint64_t max_tokens
    ):
        # An empty match with room for what `query` will find.
        cdef PrefixMatch match = PrefixMatch.__new__(PrefixMatch)
        cdef uint32_t g
        match.make_room(self, max_tokens)
        # Only now: a collection for the new object may have run a __del__ that reset the pool.
        for g in range(self.num_groups):
            self.spaces[g] = registry.find_space(&self.pool.core, g, batch.width)
        match.hashes = hashes
        match.max_tokens = max_tokens
        match.num_hashes = batch.count
        match.width = batch.width
        query.found = match.rows
        return match

    cdef PrefixMatch find(self, object hashes, HashBatch batch, uint64_t max_tokens):
        cdef Query query
        cdef PrefixMatch match
        self.ask(&query, batch)
        query.guesses = self.guesses
        # Memory answers while the match is made.
        lookup.fetch_rows(&query, max_tokens)
        match = self.prepare(&query, hashes, batch, max_tokens)
        if self.is_single:
            lookup.match_set(&query, self.sets, max_tokens, self.sets[0].eagle, match.hits)
            match.num_tokens = match.hits[0].num_tokens
            match.longest = match.num_tokens
        else:
            match.num_tokens = lookup.match_all(
                &query, self.sets, self.num_sets, max_tokens, match.hits, &match.longest
            )
        match.snapshot = self.take_snapshot()
        return match

    def reach(self, hashes, kv_cache_group_id, max_tokens, *, drop=True):
        """Tokens of the longest prefix that one group has by itself.

        Args:
            hashes: As for `lookup`.
            kv_cache_group_id: The group.
            max_tokens: Tokens that the hit may cover.
            drop: Whether a group with a drafter gives its last unit back, as in a lookup.
        """
        cdef GroupSet alone
        cdef Hit hit
        cdef Query query
        cdef HashBatch batch = self.read_rows(hashes)
        cdef uint64_t limit
        # After read_rows(), which refuses a cache without groups.
        cdef uint32_t g = read_tokens(
            kv_cache_group_id, "kv_cache_group_id", 0, self.num_groups - 1
        )
        cdef PrefixMatch _match     # owns what `query` writes to
        limit = read_tokens(
            max_tokens, "max_tokens", 0, batch.count * self.pool.hash_block_size
            + self.pool.hash_block_size - 1
        )
        self.ask(&query, batch)
        _match = self.prepare(&query, hashes, batch, limit)
        alone = self.sets[self.set_of[g]]
        alone.num_members = 1
        alone.members = &g
        if alone.eagle and alone.kind != MAMBA and not self.is_single:
            limit = min(
                limit + lookup.eagle_margin(&query, &alone),
                <uint64_t>query.num_rows * query.unit,
            )
        memset(&hit, 0, sizeof(Hit))
        lookup.match_set(&query, &alone, limit, alone.eagle and drop, &hit)
        return hit.num_tokens

    # The life of a request ----------------------------------------------------------------

    def admit(self, PrefixMatch match not None, num_new_tokens, num_prompt_tokens, *, reserve=0):
        """Give a request the blocks of its match and room for new tokens.

        All blocks of the match are held from now on. A tail that the match covers in part is
        replaced by a new block, and a copy is due (see `take_copies`).

        Args:
            match: From `lookup`, with nothing done to the pool in between.
            num_new_tokens: Tokens to compute in this step, after those of the match.
            num_prompt_tokens: Length of the prompt; its last boundary will be kept.
            reserve: Blocks that have to stay free.

        Returns:
            The running `Request`; None if there are too few blocks, or if the match starts
            from a state that is computed in this very step (see `begin_step`). Then nothing
            was changed.

        Raises:
            ValueError: The match is stale, the chunk passes a Mamba boundary from inside a
                block (see `chunk_end`), or a block has as many holders as can be counted;
                nothing was changed.
        """
        cdef uint64_t new = read_tokens(num_new_tokens, "num_new_tokens", 1, MAX_NUM_TOKENS)
        cdef uint64_t prompt = read_tokens(
            num_prompt_tokens, "num_prompt_tokens", 1, MAX_NUM_TOKENS
        )
        cdef uint64_t kept = read_tokens(reserve, "reserve", 0, MAX_NUM_TOKENS)
        self.check_fresh(match)
        check_chunk(self, match.num_tokens, match.num_tokens + new)
        if waits_for_step(self, match):
            return None
        return admit(self, match, match.num_tokens + new, prompt, kept)

    def append(
        self, Request request not None, num_new_tokens, *, num_computed_tokens=None, reserve=0
    ):
        """Make room for more tokens of a running request.

        First frees the blocks that no later token reads (outside the window, older states),
        also when there is no room for the new ones.

        Args:
            request: From `admit`.
            num_new_tokens: Tokens to compute in this step.
            num_computed_tokens: Tokens computed before this step; less than
                ``request.num_tokens`` when draft tokens were rejected.
            reserve: Blocks that have to stay free.

        Returns:
            For each group the block ids to append to the request's block table, a tuple of
            uint32 arrays; None if there are too few blocks.

        Raises:
            ValueError: The request is not running, the chunk passes a Mamba boundary from
                inside a block, or a block that has to be copied has as many holders as can be
                counted; nothing was changed.
        """
        cdef uint64_t new = read_tokens(num_new_tokens, "num_new_tokens", 1, MAX_NUM_TOKENS)
        cdef uint64_t kept = read_tokens(reserve, "reserve", 0, MAX_NUM_TOKENS)
        cdef uint64_t computed
        self.check_running(request)
        computed = request.num_tokens
        if num_computed_tokens is not None:
            computed = read_tokens(
                num_computed_tokens, "num_computed_tokens", 0, request.num_tokens
            )
        check_chunk(self, computed, computed + new)
        refuse_full(full_state(self, request))
        free_skipped(self, request, computed)
        return append(self, request, computed + new, kept)

    def commit(self, Request request not None, num_computed_tokens=None):
        """Register what a request has computed, or computes in this step.

        Full blocks get their keys; a block that had a partial entry is promoted. The last
        boundary of the prompt is kept as a partial entry, so that the same prompt hits up
        to there.

        Args:
            request: From `admit`; its ``hashes`` cover ``num_computed_tokens``.
            num_computed_tokens: Tokens whose values are final, with those that this step
                computes and without drafts. None: ``request.num_tokens``.

        Raises:
            ValueError: The request is not running or has too few hashes.
        """
        cdef uint64_t computed
        self.check_running(request)
        computed = request.num_tokens
        if num_computed_tokens is not None:
            computed = read_tokens(
                num_computed_tokens, "num_computed_tokens", 0, request.num_tokens
            )
        if self.pool.enable_caching:
            commit(self, request, computed)

    def finish(self, Request request not None):
        """Give all blocks of a request back; those with keys stay findable."""
        self.check_running(request)
        release_rows(self, request)

    def preempt(self, Request request not None):
        """As `finish`, for a request that will come again.

        To resume it, look up its hashes and admit it with ``request.num_prompt_tokens``.
        """
        self.check_running(request)
        release_rows(self, request)

    def begin_step(self):
        """A new step of the engine begins: what the last one computed can be used.

        Until then a match that starts from a Mamba state of the current step is not admitted:
        the state does not exist yet.
        """
        self.require_setup()
        for keys in self.new_states:
            keys.clear()

    def take_copies(self):
        """Copies that have to run before the step's forward pass, as a `CopyBatch`.

        Call it once a step, after the last `admit` and `append`.
        """
        self.require_setup()
        return take_batch(self)

    def copies_done(self, CopyBatch batch not None):
        """The copies ran: their sources and targets are let go.

        Raises:
            ValueError: The batch is another cache's, or was done before.
        """
        cdef IdBuffer left
        cdef size_t i
        if batch.cache is not self:
            raise ValueError("these copies are done already, or belong to another cache")
        flat = batch.pairs.reshape(-1)
        left = make_buffer(len(flat))
        for i in range(left.count):
            left.ids[i] = flat[i]
        self.pool.release(left, self.pool.enable_caching, False)
        batch.cache = None
        self.num_steps += 1

    cdef int check_running(self, Request request) except -1:
        if request.cache is not self:
            raise ValueError(f"{request!r} is not running in this cache")
        return 0

    cdef int check_fresh(self, PrefixMatch match) except -1:
        # The blocks of a match that is not held may have been given to others.
        cdef Snapshot now = self.take_snapshot()
        if match.cache is not self:
            raise ValueError("the match is another cache's")
        if memcmp(&now, &match.snapshot, sizeof(Snapshot)) and self.find_again(match) is not match:
            raise ValueError(
                f"the match of {match.num_tokens} tokens is stale: the pool has changed since "
                "the lookup"
            )
        return 0

    cdef PrefixMatch find_again(self, PrefixMatch match):
        # The match itself, unless a lookup finds other blocks now.
        cdef HashBatch batch = read_hashes(
            match.hashes, -1, self.pool.hash_width if self.pool.hash_width else match.width
        )
        cdef uint64_t unit = self.pool.hash_block_size
        # The hashes may have become fewer.
        cdef PrefixMatch again = self.find(
            match.hashes, batch, min(match.max_tokens, batch.count * unit + unit - 1)
        )
        return match if match.same_blocks(again) else again

    # What an engine plans with ------------------------------------------------------------

    def chunk_end(self, start, num_new_tokens, num_prompt_tokens, *, num_tokens=None, boundary=0):
        """Where the next chunk of a prefill has to stop so that its Mamba states are kept.

        A state is kept where a chunk ends: at the boundaries of Mamba blocks and at the
        prompt's last boundary. Without Mamba groups every end will do.

        Args:
            start: Tokens computed, those of the match included.
            num_new_tokens: Tokens that the engine would compute in this step.
            num_prompt_tokens: Length of the prompt.
            num_tokens: Tokens of the request, output included. None: only the prompt.
            boundary: ``PrefixMatch.shared_prefix_boundary``, to keep a state there too.

        Returns:
            A number of tokens above ``start``, at most ``start + num_new_tokens``.
        """
        cdef uint64_t first = read_tokens(start, "start", 0, MAX_NUM_TOKENS)
        cdef uint64_t end = first + read_tokens(
            num_new_tokens, "num_new_tokens", 1, MAX_NUM_TOKENS
        )
        cdef uint64_t prompt = read_tokens(
            num_prompt_tokens, "num_prompt_tokens", 1, MAX_NUM_TOKENS
        )
        cdef uint64_t length = prompt
        cdef uint64_t junction = read_tokens(boundary, "boundary", 0, MAX_NUM_TOKENS)
        cdef uint32_t s
        if num_tokens is not None:
            length = read_tokens(num_tokens, "num_tokens", prompt, MAX_NUM_TOKENS)
        for s in range(self.num_sets):
            if self.sets[s].kind == MAMBA:
                end = chunk_end(
                    self, self.sets[s].block_size, first, end, prompt, length, junction
                )
        return end

    def num_blocks_to_admit(self, PrefixMatch match not None, num_new_tokens):
        """Blocks that have to be free for `admit`: new ones, copies, and hits nobody holds."""
        cdef uint64_t new = read_tokens(num_new_tokens, "num_new_tokens", 1, MAX_NUM_TOKENS)
        if match.cache is not self:
            raise ValueError("the match is another cache's")
        return plan_admission(self, match, match.num_tokens + new)

    def eviction_of(self, bytes digest not None, kv_cache_group_id):
        """How long ago a key was evicted: (evictions since, seconds since), or None.

        None also when the eviction is forgotten, when ``remember_evictions`` is 0, or when it
        was not this cache that took the block.
        """
        cdef Key key
        cdef const Eviction* eviction
        cdef const Core* core
        cdef uint32_t group
        self.require_setup()
        group = read_tokens(kv_cache_group_id, "kv_cache_group_id", 0, self.num_groups - 1)
        core = &self.pool.core
        key.digest = digest
        key.space = registry.find_space(core, group, <uint32_t>len(digest))
        if key.space == 0:
            return None
        eviction = evictions.recall(&self.history, registry.hash_of(core, &key))
        if eviction == NULL:
            return None
        return (
            <uint32_t>(self.history.number - eviction.number),
            <uint32_t>(<uint32_t>seconds() - eviction.second),
        )

    def digests(self, hashes):
        """Hashes in any form as an (n, width) uint8 array."""
        self.require_setup()
        return rows_of(hashes, self.pool.hash_width)

    @property
    def num_evictions(self):
        """Blocks with keys that this cache has taken, counted if it remembers evictions."""
        return self.history.number


cdef dict KIND_OF = {
    FullAttention: FULL_ATTENTION,
    SlidingWindow: lookup.SLIDING_WINDOW,
    ChunkedLocal: lookup.CHUNKED_LOCAL,
    Mamba: MAMBA,
}
