# SPDX-License-Identifier: Apache-2.0
"""What vLLM does for each running request in each step: register what is registered already.

A request's blocks, and the tail of its prompt, become findable once; from then on vLLM's full
attention asks the same again at every token. Here that is seen without Python code in between.
Knows vLLM's names, and imports nothing of it.
"""

from cpool.core.memory cimport prefetch
from cpool.core.pool cimport BlockPool, KVCacheBlock
from cpool.core.types cimport uint32_t
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
    """Whether it is plain that the stock method would change nothing.

    Most of the time it takes is spent waiting for the request's own memory, so that each thing
    is asked for before the one ahead of it is looked at.
    """
    cdef object pool = manager.block_pool
    cdef object request_id, hashes
    cdef PyObject* known
    cdef PyObject* blocks
    cdef PyObject* block
    cdef PyObject* digest
    cdef long long tokens, block_size, boundary, step
    cdef Py_ssize_t index
    if not isinstance(pool, BlockPool):
        return False
    tokens = num_tokens
    block_size = manager.block_size
    request_id = request.request_id
    if tokens >= block_size:
        known = PyDict_GetItemWithError(manager.num_cached_block, request_id)
        if (<object>known if known != NULL else 0) < tokens // block_size:
            return False
    step = (<BlockPool>pool).hash_block_size
    if block_size == step:
        return True
    hashes = request.block_hashes
    prefetch(<PyObject*>hashes)
    boundary = request.num_prompt_tokens
    blocks = PyDict_GetItemWithError(manager.req_to_blocks, request_id)
    prefetch(blocks)
    if keeps_last_token and not manager.use_eagle:
        boundary -= 1
    boundary = boundary // step * step
    if boundary == 0 or boundary > tokens or boundary % block_size == 0:
        return True
    index = boundary // step - 1
    if blocks == NULL or type(<object>blocks) is not list or type(hashes) is not list:
        return False
    if index >= PyList_GET_SIZE(hashes):
        return False
    digest = PyList_GET_ITEM(hashes, index)
    prefetch(digest)
    index = boundary // block_size
    if index >= PyList_GET_SIZE(<object>blocks):
        return True
    block = PyList_GET_ITEM(<object>blocks, index)
    if (
        type(<object>block) is not KVCacheBlock
        or (<KVCacheBlock>block).owner != <PyObject*>pool
        or (<KVCacheBlock>block).is_end()
    ):
        return False
    (<BlockPool>pool).prefetch_key((<KVCacheBlock>block).index)
    return type(<object>digest) is bytes and (<BlockPool>pool).has_primary_key(
        (<KVCacheBlock>block).index, <bytes>digest, <uint32_t>manager.kv_cache_group_id
    )
