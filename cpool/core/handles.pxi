# SPDX-License-Identifier: Apache-2.0
# Handles: what vLLM-named methods take and return instead of block objects.

cdef extern from *:
    """
    /* The memory of dead blocks, which new ones get. Handles come and go by the thousand in
       every step of an engine; made this way they cost no allocator's time, and they don't
       count as new objects, which would start the garbage collector. */
    #define CPOOL_MAX_SPARE (1 << 15)
    static PyObject *cpool_spare_blocks[CPOOL_MAX_SPARE];
    static size_t cpool_num_spare = 0;

    static PyObject *cpool_new_block(PyTypeObject *type, Py_ssize_t Py_UNUSED(num_items)) {
        /* Not tracked by the garbage collector yet. */
        PyObject *block;
        if (cpool_num_spare) {
            block = cpool_spare_blocks[--cpool_num_spare];
            PyObject_Init(block, type);
        } else {
            block = PyObject_GC_New(PyObject, type);
            if (block == NULL) return NULL;
        }
        memset(block + 1, 0, (size_t)type->tp_basicsize - sizeof(PyObject));
        return block;
    }

    static void cpool_delete_block(void *block) {
        if (cpool_num_spare < CPOOL_MAX_SPARE)
            cpool_spare_blocks[cpool_num_spare++] = (PyObject *)block;
        else
            PyObject_GC_Del(block);
    }

    static int cpool_add_spare(PyTypeObject *type) {
        PyObject *block = PyObject_GC_New(PyObject, type);
        if (block == NULL) return -1;
        cpool_spare_blocks[cpool_num_spare++] = block;
        return 0;
    }

    static void cpool_reuse_blocks(PyTypeObject *type) {
        /* Subclasses made in Python have functions of their own there. */
        type->tp_alloc = cpool_new_block;
        type->tp_free = cpool_delete_block;
    }
    """
    size_t num_spare "cpool_num_spare"
    PyObject** spare_blocks "cpool_spare_blocks"
    int add_spare "cpool_add_spare"(type kind) except -1
    void reuse_blocks "cpool_reuse_blocks"(type kind) noexcept
    void PyObject_GC_Track(object block) noexcept
    bint PyObject_GC_IsTracked(object block) noexcept

cdef class OwnState:
    """What a block without a pool knows of itself."""
    cdef public object block_id
    cdef public object ref_cnt
    cdef public object block_hash
    cdef public object num_tokens
    cdef public object prev_free_block
    cdef public object next_free_block
    cdef public object is_null
    cdef public object pool


cdef class KVCacheBlock:
    """One block of a pool: a view on its columns, or a block of its own.

    A pool makes handles on demand, one object per id while anyone holds it, so ``is`` works.
    A handle does not keep its pool alive; when the pool goes, it keeps the last values.
    Constructed directly, it is a block of its own that holds whatever it is given.

    Args:
        block_id: Index in the pool; -1 for the ends of a free queue.
        ref_cnt: Number of holders.
        is_null: Whether it is a placeholder that is never cached.
        pool: Reported as ``block.pool``; free_blocks() forwards such a block to that pool.
    """

    def __init__(
        self,
        block_id,
        ref_cnt=0,
        _block_hash=None,
        _block_hash_num_tokens=None,
        prev_free_block=None,
        next_free_block=None,
        is_null=False,
        *,
        pool=None,
    ):
        cdef OwnState own
        if self.owner != NULL:
            raise TypeError("a block of a pool cannot be initialised again")
        own = OwnState.__new__(OwnState)
        own.block_id = block_id
        own.ref_cnt = ref_cnt
        own.block_hash = _block_hash
        own.num_tokens = _block_hash_num_tokens
        own.prev_free_block = prev_free_block
        own.next_free_block = next_free_block
        own.is_null = is_null
        own.pool = pool
        self.become(own)

    def __dealloc__(self):
        if self.owner != NULL:
            (<BlockPool>self.owner).forget_handle(self.index)

    cdef void become(self, object own) noexcept:
        # A block of its own: it refers to objects, so the collector has to know it. A pool's
        # handle refers to none.
        self.owner = NULL
        self.own = own
        if not PyObject_GC_IsTracked(self):
            PyObject_GC_Track(self)

    cdef object state(self):
        if self.own is None:
            raise ContractError("KVCacheBlock was never initialised")
        return self.own

    cdef bint is_end(self) noexcept:
        return self.index >= (<BlockPool>self.owner).core.blocks.num_blocks

    @property
    def block_id(self):
        """Index in the pool; -1 for the ends of a free queue."""
        if self.owner != NULL:
            return -1 if self.is_end() else <object>self.index
        return None if self.own is None else self.state().block_id

    @property
    def pool(self):
        """The pool that the block belongs to, or None."""
        if self.owner != NULL:
            return <object>self.owner
        return None if self.own is None else self.state().pool

    @property
    def is_null(self):
        """Whether this is the pool's placeholder block."""
        if self.owner != NULL:
            return self.index == NULL_BLOCK
        return self.state().is_null

    @is_null.setter
    def is_null(self, value):
        if self.owner != NULL:
            if bool(value) != (self.index == NULL_BLOCK):
                raise ContractError(
                    f"block {self.index} cannot become or stop being the null block: "
                    "that is block 0 of each pool"
                )
            return
        self.state().is_null = value

    @property
    def ref_cnt(self):
        """Number of holders. Of the null block it means nothing and may be negative."""
        if self.owner != NULL:
            return 0 if self.is_end() else registry.num_holders(
                &(<BlockPool>self.owner).core, self.index
            )
        return self.state().ref_cnt

    @ref_cnt.setter
    def ref_cnt(self, value):
        if self.owner == NULL:
            self.state().ref_cnt = value
        elif self.is_end():
            raise ContractError("the end of a free queue has no ref_cnt")
        else:
            low = -MAX_REF_CNT if self.index == NULL_BLOCK else 0
            count = read_count(value, f"ref_cnt of block {self.index}", low, MAX_REF_CNT)
            state_at(&(<BlockPool>self.owner).core.blocks, self.index).ref_cnt = <int32_t>count

    @property
    def block_hash(self):
        """Primary key: digest and four bytes of group, or None. Not proof of a full block."""
        if self.owner != NULL:
            return None if self.is_end() else (<BlockPool>self.owner).primary_key(self.index)
        return self.state().block_hash

    @property
    def _block_hash(self):
        return self.block_hash

    @_block_hash.setter
    def _block_hash(self, value):
        if self.owner != NULL:
            (<BlockPool>self.owner).assign_primary(self.index, value, None)
        else:
            self.state().block_hash = value

    @property
    def block_hash_num_tokens(self):
        """Prefix tokens that ``block_hash`` covers, or None."""
        if self.owner != NULL:
            return None if self.is_end() else (<BlockPool>self.owner).primary_tokens(self.index)
        return self.state().num_tokens

    @property
    def _block_hash_num_tokens(self):
        return self.block_hash_num_tokens

    @_block_hash_num_tokens.setter
    def _block_hash_num_tokens(self, value):
        if self.owner != NULL:
            (<BlockPool>self.owner).assign_primary_tokens(self.index, value)
        else:
            self.state().num_tokens = value

    def set_block_hash(self, block_hash, num_tokens=None):
        """Give the block a primary key without making it findable.

        Raises:
            ContractError: It has one already.
        """
        if self.block_hash is not None or self.block_hash_num_tokens is not None:
            raise ContractError("The block already has a hash. This should not happen.")
        if self.owner != NULL:
            (<BlockPool>self.owner).assign_primary(self.index, block_hash, num_tokens)
        else:
            self.state().block_hash = block_hash
            self.state().num_tokens = num_tokens

    def reset_hash(self):
        """Take the primary key away; in a pool the block is then not found under it."""
        if self.owner != NULL:
            (<BlockPool>self.owner).assign_primary(self.index, None, None)
        else:
            self.state().block_hash = None
            self.state().num_tokens = None

    @property
    def prev_free_block(self):
        """The block before this one in the free queue, or None outside of it."""
        if self.owner != NULL:
            return (<BlockPool>self.owner).neighbour(self.index, False)
        return self.state().prev_free_block

    @prev_free_block.setter
    def prev_free_block(self, value):
        self.refuse_links()
        self.state().prev_free_block = value

    @property
    def next_free_block(self):
        """The block behind this one in the free queue, or None outside of it."""
        if self.owner != NULL:
            return (<BlockPool>self.owner).neighbour(self.index, True)
        return self.state().next_free_block

    @next_free_block.setter
    def next_free_block(self, value):
        self.refuse_links()
        self.state().next_free_block = value

    cdef int refuse_links(self) except -1:
        if self.owner != NULL:
            raise ContractError(
                f"the free queue's links at block {self.index} belong to its pool"
            )
        return 0

    cdef int detach(self) except -1:
        # The pool goes: the handle keeps the last values.
        cdef OwnState own = OwnState.__new__(OwnState)
        own.block_id = self.block_id
        own.ref_cnt = self.ref_cnt
        own.block_hash = self.block_hash
        own.num_tokens = self.block_hash_num_tokens
        own.is_null = self.is_null
        self.become(own)
        return 0

    def __eq__(self, other):
        cdef KVCacheBlock that
        if self is other:
            return True
        if type(other) is not KVCacheBlock:
            return NotImplemented
        that = <KVCacheBlock>other
        if self.owner != NULL or that.owner != NULL:
            return False    # handles are one object per block
        return (
            self.block_id == that.block_id
            and self.ref_cnt == that.ref_cnt
            and self.block_hash == that.block_hash
            and self.block_hash_num_tokens == that.block_hash_num_tokens
            and self.is_null == that.is_null
        )

    def __hash__(self):
        return hash(self.block_id)

    def __bool__(self):
        return True

    def __repr__(self):
        before, after = self.prev_free_block, self.next_free_block
        return (
            f"KVCacheBlock(block_id={self.block_id}, "
            f"ref_cnt={self.ref_cnt}, "
            f"_block_hash={self.block_hash!r}, "
            f"_block_hash_num_tokens={self.block_hash_num_tokens}, "
            f"prev_free_block={None if before is None else before.block_id}, "
            f"next_free_block={None if after is None else after.block_id})"
        )


reuse_blocks(KVCacheBlock)


cdef class BlockList:
    """The pool's blocks as a sequence of handles."""
    cdef BlockPool pool

    cdef Py_ssize_t num_blocks(self) except -1:
        if self.pool is None:
            raise ContractError("a list of blocks is a pool's; this one was made by hand")
        return self.pool.core.blocks.num_blocks

    def __len__(self):
        return self.num_blocks()

    def __getitem__(self, index):
        cdef Py_ssize_t count = self.num_blocks()
        if isinstance(index, slice):
            return [self.pool.handle(i) for i in range(*index.indices(count))]
        position = PyNumber_Index(index)
        if position < 0:
            position += count
        if not 0 <= position < count:
            raise BlockIdError(f"block id {index} is out of range: the pool has {count} blocks")
        return self.pool.handle(position)

    def __iter__(self):
        cdef uint32_t i
        for i in range(<uint32_t>self.num_blocks()):
            yield self.pool.handle(i)

    def __contains__(self, block):
        return isinstance(block, KVCacheBlock) and block.pool is self.pool and block.block_id >= 0

    def __repr__(self):
        return f"<{len(self)} blocks of {self.pool!r}>"


def count_evictable(blocks):
    """Return how many of the blocks are free, the null block not counted.

    Args:
        blocks: A list or tuple of blocks, each of any pool.
    """
    cdef Py_ssize_t count = 0
    cdef KVCacheBlock block
    for item in blocks:
        if type(item) is KVCacheBlock and (<KVCacheBlock>item).owner != NULL:
            block = <KVCacheBlock>item
            count += (
                block.index != NULL_BLOCK
                and not block.is_end()
                and registry.num_holders(&(<BlockPool>block.owner).core, block.index) == 0
            )
        else:
            count += item.ref_cnt == 0 and not item.is_null
    return count


def block_ids(blocks):
    """Return the ids of blocks as a list, as `[block.block_id for block in blocks]` does."""
    cdef list ids = []
    for item in blocks:
        if type(item) is KVCacheBlock and (<KVCacheBlock>item).owner != NULL and not (
            (<KVCacheBlock>item).is_end()
        ):
            ids.append((<KVCacheBlock>item).index)
        else:
            ids.append(item.block_id)
    return ids
