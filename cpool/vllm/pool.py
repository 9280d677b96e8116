# SPDX-License-Identifier: Apache-2.0
"""The pool that vLLM builds: cpool's, with vLLM's own events, log and metrics.

Decisions are those of cpool.BlockPool. What differs between vLLM's releases is a subclass
here, named after the last release that did it that way.
"""

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.distributed import kv_events
from vllm.v1.core import block_pool, kv_cache_utils

import cpool
from cpool.core.contract import ContractError
from cpool.core.pool import KVCacheBlock
from cpool.core.standalone import BlockHashToBlockMap
from cpool.vllm import guests, swap
from cpool.vllm.views import StockHashMap
from cpool.vllm.withheld import StockFreeQueue

__all__ = [
    "BlockHashToBlockMap",
    "KVCacheBlock",
    "VllmBlockPool",
    "VllmBlockPool030",
    "VllmBlockPool031",
    "pool_class",
]

# Releases before 0.31 publish extra keys as they are hashed.
to_event_extra_keys = getattr(
    kv_cache_utils, "to_event_extra_keys", lambda extra_keys: extra_keys or None
)
# A scan from the first multimodal input finds the same ones as one from a later start.
EVENT_TYPES = SimpleNamespace(
    BlockStored=kv_events.BlockStored,
    BlockRemoved=kv_events.BlockRemoved,
    AllBlocksCleared=kv_events.AllBlocksCleared,
    external_hash=kv_cache_utils.maybe_convert_block_hash,
    block_extra_keys=kv_cache_utils.generate_block_hash_extra_keys,
    event_extra_keys=to_event_extra_keys,
    first_mm_index=lambda request, start, end: 0,
)

SHA256_BYTES = 32  # of vLLM's default; where others come, the pool follows them

_announced = False


def announce(pool: "VllmBlockPool") -> None:
    """Says once per process that vLLM's blocks are cpool's."""
    global _announced
    if not _announced:
        _announced = True
        block_pool.logger.info(
            "cpool %s manages the KV cache blocks: %d in the first pool, %s prefix caching",
            cpool.__version__,
            pool.num_gpu_blocks,
            "with" if pool.enable_caching else "without",
        )


class VllmBlockPool(cpool.BlockPool):
    """Drop-in for ``vllm.v1.core.block_pool.BlockPool`` of vLLM 0.32.

    ``CPOOL_TRUTHFUL_EVENTS=1`` in the environment makes events, where they are on, those of
    `cpool.BlockPool`'s ``truthful_events``.

    Args:
        num_gpu_blocks: number of blocks, the null block included.
        enable_caching: whether freed blocks stay findable by hash.
        hash_block_size: tokens between two boundaries at which requests have hashes.
        enable_kv_cache_events: whether to collect events.
        metrics_collector: vLLM's ``KVCacheMetricsCollector``.
        medium: reported in events.

    Raises:
        ContractError: a size is no positive integer.
    """

    logger = block_pool.logger
    event_types = EVENT_TYPES
    # The manager of the CPU tier does, right behind `_insert_block_hash`.
    reports_inserted_keys = False

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        medium: str = kv_events.MEDIUM_GPU,
    ) -> None:
        if not isinstance(num_gpu_blocks, int):
            kind = type(num_gpu_blocks).__name__
            raise ContractError(f"num_gpu_blocks must be an integer, not {kind}")
        super().__init__(
            num_gpu_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            medium,
            truthful_events=enable_kv_cache_events
            and os.environ.get("CPOOL_TRUTHFUL_EVENTS", "0") not in ("", "0"),
            hash_width=SHA256_BYTES,
        )
        swap.when_pool_is_built()
        announce(self)

    @property
    def free_block_queue(self) -> StockFreeQueue:
        """The free queue behind the interface of stock's."""
        return StockFreeQueue(self)

    @property
    def cached_block_hash_to_block(self) -> StockHashMap:
        """The table behind the interface of stock's map, private dict included."""
        return StockHashMap(self)

    def _cache_of_no_pool(self, request: Any, blocks: Sequence[Any], *rest: Any) -> None:
        """cache_full_blocks() for blocks that aren't all this pool's; stock takes any."""
        num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask = rest
        new_blocks = blocks[num_cached_blocks:num_full_blocks]
        if block_mask is not None or not all(map(guests.is_guest, new_blocks)):
            super()._cache_of_no_pool(request, blocks, *rest)
        guests.register_guests(
            self,
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
        )

    def _free_of_any_pool(self, blocks: list[Any]) -> None:
        """free_blocks() for blocks that aren't all this pool's.

        Those that belong to no pool lose a reference, and that is all.
        """
        of_no_pool = list(filter(guests.is_guest, blocks))
        super()._free_of_any_pool([block for block in blocks if not guests.is_guest(block)])
        for block in of_no_pool:
            block.ref_cnt -= 1


class VllmBlockPool031(VllmBlockPool):
    """The pool up to vLLM 0.31, which refuses partial entries that fill a block."""

    def cache_partial_block(
        self,
        request: Any,
        block: Any,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> bytes | None:
        is_partial = block_size > self.hash_block_size and num_tokens % block_size
        if not (block.is_null or replace_existing_hashes or is_partial):
            raise ContractError(
                f"{num_tokens} tokens fill blocks of {block_size} tokens; a partial entry must "
                f"end inside a block and blocks must be larger than {self.hash_block_size} tokens"
            )
        return super().cache_partial_block(
            request, block, num_tokens, kv_cache_group_id, block_size, replace_existing_hashes
        )


class VllmBlockPool030(VllmBlockPool031):
    """The pool up to vLLM 0.30, whose partial events know the last multimodal input alone."""

    partial_event_types = SimpleNamespace(
        **vars(EVENT_TYPES) | {"first_mm_index": lambda request, start, end: -1}
    )

    def cache_partial_block(self, *args: Any, **kwargs: Any) -> bytes | None:
        self.event_types = self.partial_event_types
        try:
            return super().cache_partial_block(*args, **kwargs)
        finally:
            del self.event_types


def pool_class(release: str) -> type[VllmBlockPool]:
    """Returns the pool that decides as vLLM ``release`` does, e.g. "0.32.0"."""
    minor = int(release.split(".")[1])
    if minor <= 30:
        return VllmBlockPool030
    return VllmBlockPool031 if minor == 31 else VllmBlockPool
