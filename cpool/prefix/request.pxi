# SPDX-License-Identifier: Apache-2.0
# What one running request holds.

@cython.final
cdef class Request:
    """The blocks of a request, from `PrefixCache.admit` to `finish` or `preempt`."""
    cdef readonly PrefixCache cache         # None when it no longer holds blocks
    cdef readonly object hashes             # grows with the request's tokens
    cdef readonly uint64_t num_prompt_tokens
    cdef readonly uint64_t num_cached_tokens    # that the admission found in the cache
    cdef readonly uint64_t num_tokens       # tokens with a slot, those being computed included
    cdef Row* rows                          # of each group
    cdef uint32_t num_groups

    def __cinit__(self):
        self.rows = NULL

    def __dealloc__(self):
        cdef uint32_t g
        if self.rows != NULL:
            for g in range(self.num_groups):
                PyMem_Free(self.rows[g].ids)
        PyMem_Free(self.rows)

    def __repr__(self):
        state = "running" if self.cache is not None else "released"
        return f"Request({state}, num_tokens={self.num_tokens})"

    @property
    def is_running(self):
        """Whether the request holds its blocks."""
        return self.cache is not None

    @property
    def block_ids(self):
        """Block ids of each group: a tuple of uint32 arrays; 0 where no block is needed."""
        cdef uint32_t g
        return tuple([
            ids_array(self.rows[g].ids, self.rows[g].count) for g in range(self.num_groups)
        ])


cdef Request make_request(PrefixCache cache, object hashes, uint64_t num_prompt_tokens):
    cdef Request request = Request.__new__(Request)
    cdef uint32_t g
    request.rows = <Row*>PyMem_Calloc(cache.num_groups, sizeof(Row))
    if request.rows == NULL:
        raise MemoryError(f"cannot allocate rows for {cache.num_groups} groups")
    request.num_groups = cache.num_groups
    for g in range(cache.num_groups):
        request.rows[g].tail = -1
    request.hashes = hashes
    request.num_prompt_tokens = num_prompt_tokens
    return request
