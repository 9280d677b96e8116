# SPDX-License-Identifier: Apache-2.0
# What a lookup found.

@cython.final
@cython.freelist(8)
cdef class PrefixMatch:
    """The longest prefix that the pool holds for one request.

    A match holds no blocks: it is good until the pool changes. `PrefixCache.admit` and `explain`
    notice when it has gone stale.
    """
    cdef readonly PrefixCache cache
    cdef readonly object hashes
    cdef readonly uint64_t num_tokens       # tokens that the blocks cover
    cdef readonly uint64_t max_tokens       # tokens that the lookup was allowed
    cdef readonly uint64_t longest          # tokens that at least one set of groups had alone
    cdef readonly size_t num_hashes
    cdef uint32_t width                     # of the hashes, bytes
    cdef void* storage                      # of the three below, in this order
    cdef Hit* hits                          # of each set
    cdef block_id_t** rows                  # of each group
    cdef Snapshot snapshot

    def __dealloc__(self):
        PyMem_Free(self.storage)

    cdef int make_room(self, PrefixCache cache, uint64_t max_tokens) except -1:
        cdef size_t head = cache.num_sets * sizeof(Hit) + cache.num_groups * sizeof(block_id_t*)
        cdef size_t num_ids = 0
        cdef block_id_t* ids
        cdef uint32_t g
        for g in range(cache.num_groups):
            num_ids += rows.blocks_for(max_tokens, cache.kinds[g].block_size) + 2
        self.storage = PyMem_Malloc(head + num_ids * sizeof(block_id_t))
        if self.storage == NULL:
            raise MemoryError(f"cannot allocate room for {num_ids} block ids")
        self.cache = cache
        self.hits = <Hit*>self.storage
        memset(self.hits, 0, cache.num_sets * sizeof(Hit))
        self.rows = <block_id_t**>(self.hits + cache.num_sets)
        ids = <block_id_t*>(self.rows + cache.num_groups)
        for g in range(cache.num_groups):
            self.rows[g] = ids
            ids += rows.blocks_for(max_tokens, cache.kinds[g].block_size) + 2
        return 0

    def __repr__(self):
        return f"PrefixMatch(num_tokens={self.num_tokens}, max_tokens={self.max_tokens})"

    cdef int require_cache(self) except -1:
        if self.cache is None:
            raise ValueError("a PrefixMatch is of a lookup; this one was made by hand")
        return 0

    cdef size_t num_blocks(self, uint32_t group) noexcept:
        return self.hits[self.cache.set_of[group]].num_blocks

    cdef bint is_partial(self, uint32_t group) noexcept:
        # Whether the group's last block is only in part covered, so that a copy is needed.
        return (
            self.num_blocks(group) > 0
            and self.num_tokens % self.cache.kinds[group].block_size != 0
        )

    @property
    def block_ids(self):
        """Block ids of each group: a tuple of uint32 arrays; 0 where no block is needed."""
        cdef uint32_t g
        self.require_cache()
        return tuple([
            ids_array(self.rows[g], self.num_blocks(g)) for g in range(self.cache.num_groups)
        ])

    @property
    def partial_tails(self):
        """The blocks that the match covers in part: a tuple of `PartialTail`.

        They belong to the cache. A request that goes on from them needs copies, which `admit`
        provides.
        """
        cdef uint32_t g
        cdef list tails = []
        cdef block_id_t id
        self.require_cache()
        for g in range(self.cache.num_groups):
            if self.is_partial(g):
                id = self.rows[g][self.num_blocks(g) - 1]
                tails.append(PartialTail(
                    g, id, self.num_tokens % self.cache.kinds[g].block_size,
                    max(0, state_at(&self.cache.pool.core.blocks, id).ref_cnt),
                ))
        return tuple(tails)

    @property
    def shared_prefix_boundary(self):
        """Tokens up to which some group has this prefix although not all have; 0 if none.

        State kept at this boundary lets the next request with the same prefix hit.
        """
        return self.longest if self.longest > self.num_tokens else 0

    def explain(self):
        """Why the match is not longer: an `Explanation`, from the pool as it is now.

        If a lookup finds other blocks by now, it is about that lookup, and says so.
        """
        cdef PrefixMatch again
        self.require_cache()
        again = self.cache.find_again(self)
        return explain(
            again, rows_of(self.hashes, again.width), None if again is self else self.num_tokens
        )

    cdef bint same_blocks(self, PrefixMatch other) noexcept:
        cdef uint32_t g
        if self.num_tokens != other.num_tokens:
            return False
        for g in range(self.cache.num_groups):
            if self.num_blocks(g) != other.num_blocks(g) or memcmp(
                self.rows[g], other.rows[g], self.num_blocks(g) * sizeof(block_id_t)
            ):
                return False
        return True
