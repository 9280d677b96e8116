# SPDX-License-Identifier: Apache-2.0
# Copies that have to run before the blocks they protect are written.

cdef struct Copy:
    uint32_t group
    block_id_t source
    block_id_t target


@cython.final
cdef class CopyBatch:
    """Block copies to run before the step's forward pass, from `PrefixCache.take_copies`.

    Sources and targets stay held until `PrefixCache.copies_done`.
    """
    cdef readonly PrefixCache cache     # None when the copies are done
    cdef readonly object pairs          # (n, 2) uint32: source, target
    cdef readonly object group_ids      # (n,) uint32

    def __len__(self):
        return 0 if self.pairs is None else len(self.pairs)

    def __repr__(self):
        return f"CopyBatch({[] if self.pairs is None else self.pairs.tolist()})"


@cython.final
cdef class _CopyQueue:
    """Copies that no batch has taken yet, in the order in which they came up."""
    cdef Copy* copies
    cdef size_t count
    cdef size_t capacity
    cdef uint32_t num_groups

    def __cinit__(self, uint32_t num_groups):
        self.num_groups = num_groups

    def __dealloc__(self):
        PyMem_Free(self.copies)

    cdef int reserve(self, size_t more) except -1:
        cdef Copy* fresh
        if self.count + more <= self.capacity:
            return 0
        fresh = <Copy*>room(2 * (self.count + more), sizeof(Copy))
        if self.count:
            memcpy(fresh, self.copies, self.count * sizeof(Copy))
        PyMem_Free(self.copies)
        self.copies = fresh
        self.capacity = 2 * (self.count + more)
        return 0

    cdef void push(self, uint32_t group, block_id_t source, block_id_t target) noexcept:
        # After reserve().
        self.copies[self.count].group = group
        self.copies[self.count].source = source
        self.copies[self.count].target = target
        self.count += 1

    cdef list by_group(self):
        # (group, source, target) of each, group by group.
        cdef list taken = []
        cdef size_t i
        cdef uint32_t g
        for g in range(self.num_groups):
            for i in range(self.count):
                if self.copies[i].group == g:
                    taken.append((g, self.copies[i].source, self.copies[i].target))
        return taken


cdef CopyBatch take_batch(PrefixCache cache):
    cdef CopyBatch batch = CopyBatch.__new__(CopyBatch)
    table = np.array(cache.copies.by_group(), dtype=np.uint32).reshape(-1, 3)
    batch.group_ids = table[:, 0].copy()
    batch.pairs = table[:, 1:].copy()
    for array in (batch.group_ids, batch.pairs):
        array.flags.writeable = False
    # Nothing below can fail.
    cache.copies.count = 0
    batch.cache = cache
    return batch
