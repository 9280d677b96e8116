# SPDX-License-Identifier: Apache-2.0
"""What vLLM does for each running request in each step: register what is registered already.

A request's blocks, and the tail of its prompt, become findable once; from then on vLLM's full
attention asks the same again at every token. Here that is seen without Python code in between.
Knows vLLM's names, and imports nothing of it.
"""

from cpool.core.memory cimport prefetch
from cpool.core.pool cimport BlockPool, KVCacheBlock
from cpool.core.types cimport block_id_t, uint32_t
from cpython.object cimport PyObject

cdef extern from "Python.h":
    # Borrowed references.
    PyObject* PyDict_GetItemWithError(object items, object key) except? NULL
    PyObject* PyList_GET_ITEM(object items, Py_ssize_t index) noexcept
    Py_ssize_t PyList_GET_SIZE(object items) noexcept


def cache_blocks_method(cls, stock, bint keeps_last_token):
    """Returns what to put in the place of ``FullAttentionManager.cache_blocks``.

    Args:
        cls: the manager. For an instance of a subclass the stock method is called.
        stock: its method, which is called wherever there is something to do.
        keeps_last_token: whether the tail of a prompt may not include its last token, unless
            the manager works for EAGLE.
    """

    def cache_blocks(
        self, request, num_tokens, retention_interval=None, *, replay_boundaries
    ):
        if type(self) is not cls or not are_cached(self, request, num_tokens, keeps_last_token):
            stock(
                self, request, num_tokens, retention_interval,
                replay_boundaries=replay_boundaries,
            )

    return cache_blocks


cdef bint are_cached(
    object manager, object request, object num_tokens, bint keeps_last_token
) except -1:
    """Whether it is plain that the stock method would change nothing."""
    cdef object pool = manager.block_pool
    cdef PyObject* known
    cdef object hashes, blocks, digest
    cdef long long tokens, block_size, boundary, step
    cdef Py_ssize_t index
    cdef KVCacheBlock block
    if not isinstance(pool, BlockPool):
        return False
    # Asked for first, for it is in memory of the request's own.
    request_id = request.request_id
    hashes = request.block_hashes
    prefetch(<PyObject*>hashes)
    tokens = num_tokens
    block_size = manager.block_size
    known = PyDict_GetItemWithError(manager.num_cached_block, request_id)
    if (<object>known if known != NULL else 0) < tokens // block_size:
        return False
    step = (<BlockPool>pool).hash_block_size
    if block_size == step:
        return True
    boundary = request.num_prompt_tokens
    if keeps_last_token and not manager.use_eagle:
        boundary -= 1
    boundary = boundary // step * step
    if boundary == 0 or boundary > tokens or boundary % block_size == 0:
        return True
    known = PyDict_GetItemWithError(manager.req_to_blocks, request_id)
    if known == NULL or type(hashes) is not list or PyList_GET_SIZE(hashes) < boundary // step:
        return False
    blocks = <object>known
    index = boundary // block_size
    if type(blocks) is not list:
        return False
    if index >= PyList_GET_SIZE(blocks):
        return True
    if type(<object>PyList_GET_ITEM(blocks, index)) is not KVCacheBlock:
        return False
    block = <KVCacheBlock>PyList_GET_ITEM(blocks, index)
    digest = <object>PyList_GET_ITEM(hashes, boundary // step - 1)
    prefetch(<PyObject*>digest)
    if block.owner != <PyObject*>pool or block.is_end() or type(digest) is not bytes:
        return False
    return (<BlockPool>pool).has_primary_key(
        block.index, <bytes>digest, <uint32_t>manager.kv_cache_group_id
    )
