# SPDX-License-Identifier: Apache-2.0
"""What vLLM does for each running request in each step, where it would change nothing.

A request's blocks, and the tail of its prompt, become findable once; from then on vLLM's full
attention asks the same again at every token, and so does the search for slots that the request
has already. Here that is seen without Python code in between. Knows vLLM's names, and imports
nothing of it.
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
    cdef uint32_t group
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
    if type(<object>digest) is not bytes:
        return False
    group = manager.kv_cache_group_id
    # Once the block has filled up, the tail is one of its extra keys.
    return (<BlockPool>pool).has_primary_key(
        (<KVCacheBlock>block).index, <bytes>digest, group
    ) or (<BlockPool>pool).holds((<KVCacheBlock>block).index, <bytes>digest, group)


def allocate_slots_method(
    cls, stock, frozenset coordinators, tuple kinds, waiting, preempted, bint keeps_last_token
):
    """Returns what to put in the place of ``KVCacheManager.allocate_slots``.

    In most steps a running request's next token has its slot already, no block or state leaves
    its window, and nothing more is to be registered: then stock's method, which asks so of every
    part, would change nothing.

    Args:
        cls: the manager. For an instance of a subclass the stock method is called.
        stock: its method, which is called wherever there is something to do.
        coordinators: the classes that ask nothing else of the managers of their groups.
        kinds: ``FullAttentionManager``, ``SlidingWindowManager`` and ``MambaManager``. Where
            there is a group of another kind the stock method is called.
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
                self, request, num_new_tokens, num_lookahead_tokens, kinds, keeps_last_token
            )
        ):
            kept_free = reserved_blocks
            if has_scheduled_reqs and (
                request.status is waiting or request.status is preempted
            ):
                kept_free += self.watermark_blocks
            # Where blocks are withheld there may be fewer than none.
            if kept_free > self.block_pool.get_num_free_blocks():
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
    tuple kinds, bint keeps_last_token,
) except -1:
    """Whether it is plain that a request's blocks have room for its new tokens, that none of
    them is to be freed, and that all that can be registered are.
    """
    cdef object coordinator = kv_cache_manager.coordinator
    cdef object request_id = request.request_id
    cdef object manager, num_cacheable, num_to_cache
    cdef object full_cls, sliding_cls, mamba_cls
    cdef Py_ssize_t group_id
    cdef PyObject* found
    cdef list blocks
    cdef long long new_tokens = num_new_tokens
    cdef long long lookahead = num_lookahead_tokens
    cdef long long max_model_len = kv_cache_manager.max_model_len
    cdef long long num_computed = min(<long long>request.num_computed_tokens, max_model_len)
    cdef long long num_processed = num_computed - <long long>request.num_in_flight_tokens
    cdef long long need = min(num_computed + new_tokens + lookahead, max_model_len)
    if new_tokens <= 0 or lookahead < 0:
        return False
    if not isinstance(kv_cache_manager.block_pool, BlockPool):
        return False
    full_cls, sliding_cls, mamba_cls = kinds
    num_to_cache = min(num_computed + new_tokens, <long long>request.num_tokens)
    for group_id, manager in enumerate(coordinator.single_type_managers):
        found = PyDict_GetItemWithError(manager.req_to_blocks, request_id)
        if found == NULL or type(<object>found) is not list:
            return False
        blocks = <list>found
        if PyDict_GetItemWithError(manager._partial_hit_reqs, request_id) != NULL:
            return False    # its tail is to be copied
        num_cacheable = coordinator.get_num_cacheable_tokens(num_to_cache, group_id)
        if type(manager) is full_cls:
            if not has_room(manager, blocks, need):
                return False
            if manager.enable_caching and not are_cached(
                manager, request, num_cacheable, keeps_last_token
            ):
                return False
        elif type(manager) is sliding_cls:
            if not has_room(manager, blocks, need):
                return False
            if not is_in_window(manager, blocks, num_processed):
                return False
            if manager.enable_caching and not are_full_blocks_cached(
                manager, request_id, num_cacheable
            ):
                return False
        elif type(manager) is mamba_cls:
            # Draft tokens have no states.
            if not keeps_state(
                manager, request_id, blocks, num_computed + new_tokens, num_processed
            ):
                return False
            if manager.enable_caching and not are_states_cached(
                manager, request, blocks, num_cacheable
            ):
                return False
        else:
            return False
    return True


cdef bint has_room(object manager, list blocks, long long num_tokens) except -1:
    return num_tokens <= <long long>manager.block_size * len(blocks)


cdef bint is_in_window(object manager, list blocks, long long num_processed) except -1:
    """Whether all blocks that have left a sliding window are gone already."""
    cdef long long skipped = num_processed - <long long>manager.sliding_window + 1
    cdef Py_ssize_t last
    skipped -= <long long>manager.extra_retained_tokens
    last = min(skipped // <long long>manager.block_size, len(blocks)) - 1 if skipped > 0 else -1
    return last < 0 or blocks[last] is manager._null_block


cdef bint keeps_state(
    object manager, object request_id, list blocks, long long num_tokens, long long num_processed
) except -1:
    """Whether so many tokens take as many blocks as there are, all states that are not needed
    any more are gone, and none is set apart for a later request.
    """
    cdef long long block_size = manager.block_size
    cdef long long num_blocks = (num_tokens + block_size - 1) // block_size
    cdef long long num_past = min((max(num_processed, 0) - 1) // block_size, len(blocks))
    cdef PyObject* found
    cdef Py_ssize_t last
    if manager.mamba_cache_mode != "align" or manager.has_prefill_checkpoint_blocks:
        return False
    if num_blocks + <long long>manager.num_speculative_blocks != len(blocks):
        return False
    if request_id not in manager._allocated_block_reqs or request_id in manager._checkpoints:
        return False
    found = PyDict_GetItemWithError(manager._num_retired_blocks, request_id)
    if num_past > (<object>found if found != NULL else 0):
        return False
    found = PyDict_GetItemWithError(manager.last_state_block_idx, request_id)
    if found == NULL:
        return True
    last = <object>found
    num_blocks = (max(num_processed, 0) + block_size - 1) // block_size
    return last >= num_blocks - 1 or blocks[last] is manager._null_block


cdef bint are_states_cached(
    object manager, object request, list blocks, object num_tokens
) except -1:
    """Whether there is no state to register: not of full blocks, nor at a boundary of hashes.
    There are none behind the prompt, and a state that is gone can't be.
    """
    cdef long long tokens = num_tokens
    cdef long long block_size = manager.block_size
    cdef Py_ssize_t last
    if not are_full_blocks_cached(manager, request.request_id, num_tokens):
        return False
    if tokens <= 0 or tokens > <long long>request.num_prompt_tokens:
        return True
    if tokens % <long long>manager.block_pool.hash_block_size != 0:
        return True
    last = (tokens + block_size - 1) // block_size - 1
    return last >= len(blocks) or blocks[last] is manager._null_block


cdef bint are_full_blocks_cached(object manager, object request_id, object num_tokens) except -1:
    """Whether so many tokens fill no block that was not registered, or passed over, before."""
    cdef PyObject* known = PyDict_GetItemWithError(manager.num_cached_block, request_id)
    cdef object num_blocks = num_tokens // manager.block_size
    return num_blocks <= (<object>known if known != NULL else 0)
