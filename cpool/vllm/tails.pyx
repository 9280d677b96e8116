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
    if tokens >= block_size and not are_full_blocks_cached(manager, request_id, tokens):
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


def allocate_slots_method(
    cls, stock, frozenset coordinators, full_cls, sliding_cls, waiting, preempted,
    bint keeps_last_token,
):
    """Returns what to put in the place of ``KVCacheManager.allocate_slots``.

    In most steps a running request's next token has its slot already, no block leaves its
    window, and nothing more is to be registered: then stock's method, which asks so of every
    part, would change nothing.

    Args:
        cls: the manager. For an instance of a subclass the stock method is called.
        stock: its method, which is called wherever there is something to do.
        coordinators: the classes that ask nothing else of the managers of their groups.
        full_cls: ``FullAttentionManager``; a group of another kind than these two is stock's.
        sliding_cls: ``SlidingWindowManager``.
        waiting: a status for which, beside other requests, a watermark of blocks is kept free.
        preempted: another.
        keeps_last_token: as of `cache_blocks_method`.
    """

    def allocate_slots(
        self,
        request,
        num_new_tokens,
        num_new_computed_tokens=0,
        new_computed_blocks=None,
        num_lookahead_tokens=0,
        num_external_computed_tokens=0,
        delay_cache_blocks=False,
        num_encoder_tokens=0,
        full_sequence_must_fit=False,
        reserved_blocks=0,
        has_scheduled_reqs=True,
        skip_zeroing_group_ids=(),
    ):
        if (
            new_computed_blocks is None
            and not (num_new_computed_tokens or num_external_computed_tokens)
            and not (delay_cache_blocks or num_encoder_tokens or full_sequence_must_fit)
            and type(self) is cls
            and type(self.coordinator) in coordinators
            and have_slots(
                self, request, num_new_tokens, num_lookahead_tokens, full_cls, sliding_cls,
                keeps_last_token,
            )
        ):
            kept_free = reserved_blocks
            if has_scheduled_reqs and (
                request.status is waiting or request.status is preempted
            ):
                kept_free += self.watermark_blocks
            if kept_free and kept_free > self.block_pool.get_num_free_blocks():
                return None
            return self.empty_kv_cache_blocks
        return stock(
            self, request, num_new_tokens, num_new_computed_tokens, new_computed_blocks,
            num_lookahead_tokens, num_external_computed_tokens, delay_cache_blocks,
            num_encoder_tokens, full_sequence_must_fit, reserved_blocks, has_scheduled_reqs,
            skip_zeroing_group_ids,
        )

    return allocate_slots


cdef bint have_slots(
    object kv_cache_manager, object request, object num_new_tokens, object num_lookahead_tokens,
    object full_cls, object sliding_cls, bint keeps_last_token,
) except -1:
    """Whether it is plain that a request's blocks have room for its new tokens, that none of
    them is to be freed, and that all that can be registered are.
    """
    cdef object coordinator = kv_cache_manager.coordinator
    cdef object request_id = request.request_id
    cdef object manager, num_cacheable, num_to_cache
    cdef Py_ssize_t group_id
    cdef PyObject* blocks
    cdef long long new_tokens = num_new_tokens
    cdef long long lookahead = num_lookahead_tokens
    cdef long long max_model_len = kv_cache_manager.max_model_len
    cdef long long num_computed = min(<long long>request.num_computed_tokens, max_model_len)
    cdef long long need = min(num_computed + new_tokens + lookahead, max_model_len)
    if new_tokens <= 0 or lookahead < 0:
        return False
    if not isinstance(kv_cache_manager.block_pool, BlockPool):
        return False
    num_to_cache = min(num_computed + new_tokens, <long long>request.num_tokens)
    for group_id, manager in enumerate(coordinator.single_type_managers):
        if type(manager) is not full_cls and type(manager) is not sliding_cls:
            return False
        if PyDict_GetItemWithError(manager._partial_hit_reqs, request_id) != NULL:
            return False    # its tail is to be copied
        blocks = PyDict_GetItemWithError(manager.req_to_blocks, request_id)
        if blocks == NULL or type(<object>blocks) is not list:
            return False
        if need > <long long>manager.block_size * PyList_GET_SIZE(<object>blocks):
            return False
        if type(manager) is sliding_cls and not is_in_window(
            manager, <object>blocks, num_computed - <long long>request.num_in_flight_tokens
        ):
            return False
        if not manager.enable_caching:
            continue
        num_cacheable = coordinator.get_num_cacheable_tokens(num_to_cache, group_id)
        if type(manager) is full_cls:
            if not are_cached(manager, request, num_cacheable, keeps_last_token):
                return False
        elif not are_full_blocks_cached(manager, request_id, num_cacheable):
            return False
    return True


cdef bint is_in_window(object manager, list blocks, long long num_processed) except -1:
    """Whether all blocks that have left a sliding window are gone already."""
    cdef long long skipped = num_processed - <long long>manager.sliding_window + 1
    cdef Py_ssize_t last
    skipped -= <long long>manager.extra_retained_tokens
    last = min(skipped // <long long>manager.block_size, len(blocks)) - 1 if skipped > 0 else -1
    return last < 0 or blocks[last] is manager._null_block


cdef bint are_full_blocks_cached(object manager, object request_id, object num_tokens) except -1:
    """Whether so many tokens fill no block that was not registered, or passed over, before."""
    cdef PyObject* known = PyDict_GetItemWithError(manager.num_cached_block, request_id)
    cdef object num_blocks = num_tokens // manager.block_size
    return num_blocks <= (<object>known if known != NULL else 0)
