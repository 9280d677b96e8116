# SPDX-License-Identifier: Apache-2.0
"""Batch versions of vLLM functions that look at a request's blocks one by one.

They are put in place when a process builds its first pool, each where the code it stands for
is the code it was written after; else stock's stays. Blocks of stock's pool they treat as
stock's functions do.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize, resolve_block_hashes

import cpool
from cpool.core.pool import block_ids, count_evictable
from cpool.vllm.contract import function_digest
from cpool.vllm.guests import GuestMixin
from cpool.vllm.tails import allocate_slots_method, cache_blocks_method

# A miss is mostly early; a long run is looked up in ever larger pieces.
FIRST_PIECE = 16
GROWTH = 4


def longest_run(pool: Any, hashes: Iterable[bytes], groups: Sequence[int]) -> tuple[list[Any], ...]:
    """Returns, per group, the blocks of the first hashes that are registered in every group."""
    found: tuple[list[Any], ...] = tuple([] for _ in groups)
    remaining = iter(hashes)
    size = FIRST_PIECE
    while piece := list(islice(remaining, size)):
        try:
            runs = pool.find_prefix_blocks(piece, groups)
        except ValueError:  # hashes of another width
            return one_by_one(pool, piece + list(remaining), groups, found)
        for blocks, run in zip(found, runs, strict=True):
            blocks += run
        if len(runs[0]) < len(piece):
            break
        size *= GROWTH
    return found


def one_by_one(
    pool: Any, hashes: Iterable[bytes], groups: Sequence[int], found: tuple[list[Any], ...]
) -> tuple[list[Any], ...]:
    """Goes on from ``found`` with hashes of several widths, or of another than the pool's."""
    for block_hash in hashes:
        hit = pool.get_cached_block(block_hash, groups)
        if not hit:
            break
        for blocks, block in zip(found, hit, strict=True):
            blocks.append(block)
    return found


def full_attention_hit(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Returns FullAttentionManager.find_longest_cache_hit, with its first phase in batches."""

    def find_longest_cache_hit(
        cls: type,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        if not isinstance(block_pool, cpool.BlockPool) or isinstance(block_pool, GuestMixin):
            return stock(
                cls,
                block_hashes,
                max_length,
                kv_cache_group_ids,
                block_pool,
                kv_cache_spec,
                drop_eagle_block,
                alignment_tokens,
                dcp_world_size,
                pcp_world_size,
            )
        block_size = kv_cache_spec.block_size * max(dcp_world_size, 1)
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        is_fine = alignment_tokens < block_size and block_size % alignment_tokens == 0
        full_hashes = (
            BlockHashListWithBlockSize(hashes, alignment_tokens, block_size) if is_fine else hashes
        )
        found = longest_run(
            block_pool, islice(full_hashes, max_length // block_size), kv_cache_group_ids
        )
        num_tokens = len(found[0]) * block_size
        if is_fine:
            # The longest boundary inside the first block that isn't there in full.
            first = num_tokens // alignment_tokens
            last = min(
                first + block_size // alignment_tokens - 1,
                max_length // alignment_tokens,
                len(hashes),
            )
            for index in reversed(range(first, last)):
                tail = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
                if tail:
                    for blocks, block in zip(found, tail, strict=True):
                        blocks.append(block)
                    num_tokens = (index + 1) * alignment_tokens
                    break
        # EAGLE has the tokens before the point of generation computed again.
        if drop_eagle_block and num_tokens:
            num_tokens -= min(alignment_tokens, block_size)
        num_tokens -= num_tokens % alignment_tokens
        for blocks in found:
            del blocks[cdiv(num_tokens, block_size) :]
        return found, num_tokens

    return find_longest_cache_hit


# What FullAttentionManager.cache_blocks calls. The tail of a prompt has kept its last token
# since 0.32.
KNOWN_BASES = ("9814a759d3280d45", "7eed9b866f27b2b9")  # 0.30; 0.31 and 0.32
KNOWN_TAILS = {"9f4fae170330a7bc": False, "b0c2b5d9c852339a": True}  # 0.30 and 0.31; 0.32


def repeated_caching(stock: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns FullAttentionManager.cache_blocks, which first asks if it has been done before."""
    from vllm.v1.core import single_type_kv_cache_manager as managers

    base = managers.SingleTypeKVCacheManager.cache_blocks
    tail = managers.FullAttentionManager._cache_partial_tail_block
    keeps_last_token = KNOWN_TAILS.get(function_digest(tail))
    if function_digest(base) not in KNOWN_BASES or keeps_last_token is None:
        return None
    return cache_blocks_method(managers.FullAttentionManager, stock, keeps_last_token)


# What KVCacheManager.allocate_slots of 0.32 asks of full attention, sliding windows and Mamba.
COORDINATORS = (
    "UnitaryKVCacheCoordinator",
    "HybridKVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
)
KINDS = ("FullAttentionManager", "SlidingWindowManager", "MambaManager")
ASKED_FOR_SLOTS = (
    ("kv_cache_manager", ("KVCacheManager",), {"create_kv_cache_blocks": "86b53762a65f969c"}),
    (
        "kv_cache_coordinator",
        COORDINATORS,
        {
            "get_num_blocks_to_allocate": "e81e204ee89dc652",
            "remove_skipped_blocks": "50a97b7c1ba44766",
            "allocate_new_blocks": "4cc3478de95c98f2",
            "cache_blocks": "caa13c87a903ef46",
        },
    ),
    (
        "single_type_kv_cache_manager",
        ("FullAttentionManager",),
        {
            "get_num_blocks_to_allocate": "7a29a8cc4f5abd4a",
            "remove_skipped_blocks": "7a3b2a9d07ca935b",
            "get_num_skipped_tokens": "9b365c9597de4677",
            "allocate_new_blocks": "c42e7597894280a1",
            "cache_blocks": "a912780a75aa26b7",
            "_cache_partial_tail_block": "b0c2b5d9c852339a",
        },
    ),
    (
        "single_type_kv_cache_manager",
        ("SlidingWindowManager",),
        {
            "get_num_blocks_to_allocate": "7a29a8cc4f5abd4a",
            "remove_skipped_blocks": "7a3b2a9d07ca935b",
            "_remove_blocks_in_range": "f89645e54b1c5a14",
            "get_num_skipped_tokens": "d86de5483e7867f7",
            "allocate_new_blocks": "c42e7597894280a1",
            "cache_blocks": "7eed9b866f27b2b9",
        },
    ),
    (
        "single_type_kv_cache_manager",
        ("MambaManager",),
        {
            "get_num_blocks_to_allocate": "f2e7981241e32a1f",
            "remove_skipped_blocks": "62044213d26c0054",
            "_remove_blocks_in_range": "1f6e3ce958a03a3d",
            "get_num_skipped_tokens": "37c27d26a3727c14",
            "_needs_internal_checkpoint": "9da8d8d749add31a",
            "allocate_new_blocks": "59ea0d62b5e1dab9",
            "cache_blocks": "ede5495c93e19cdd",
            "_cache_partial_tail_block": "60985f96496b3e78",
        },
    ),
)


def slots_of_running(stock: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns KVCacheManager.allocate_slots, which first asks if there is nothing to do."""
    from vllm.v1.core import kv_cache_coordinator, kv_cache_manager, single_type_kv_cache_manager
    from vllm.v1.request import RequestStatus

    for module_name, class_names, methods in ASKED_FOR_SLOTS:
        module = import_module(f"vllm.v1.core.{module_name}")
        for class_name in class_names:
            for name, known_digest in methods.items():
                method = getattr(getattr(module, class_name), name, None)
                if function_digest(method) != known_digest:
                    return None
    return allocate_slots_method(
        kv_cache_manager.KVCacheManager,
        stock,
        frozenset(getattr(kv_cache_coordinator, name) for name in COORDINATORS),
        tuple(getattr(single_type_kv_cache_manager, name) for name in KINDS),
        RequestStatus.WAITING,
        RequestStatus.PREEMPTED,
        keeps_last_token=True,
    )


def evictable_blocks(stock: Callable[..., Any]) -> Callable[..., Any]:
    def _get_num_evictable_blocks(cls: type, blocks: Sequence[Any]) -> int:
        return count_evictable(blocks)

    return _get_num_evictable_blocks


def ids_of_groups(stock: Callable[..., Any]) -> Callable[..., Any]:
    def get_block_ids(
        self: Any, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        groups = self.blocks
        if group_ids is not None:
            groups = tuple(groups[group_id] for group_id in group_ids)
        if allow_none and not any(map(len, groups)):
            return None
        return tuple(map(block_ids, groups))

    return get_block_ids


# Module, class, method, digest of its code in the releases it was written after, and what
# makes ours of stock's, or None where what that calls is not known.
METHODS = (
    # Before the methods that it asks are replaced.
    (
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        "allocate_slots",
        "4a978f695974c9d5",  # 0.32
        slots_of_running,
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager",
        "find_longest_cache_hit",
        "3c1702087661af16",  # 0.30 to 0.32
        full_attention_hit,
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "FullAttentionManager",
        "cache_blocks",
        "a912780a75aa26b7",  # 0.30 to 0.32
        repeated_caching,
    ),
    (
        "vllm.v1.core.single_type_kv_cache_manager",
        "SingleTypeKVCacheManager",
        "_get_num_evictable_blocks",
        "0a738ba5361dc964",  # 0.30 to 0.32
        evictable_blocks,
    ),
    (
        "vllm.v1.core.kv_cache_manager",
        "KVCacheBlocks",
        "get_block_ids",
        "8b9c0b2f57060361",  # 0.31 and 0.32
        ids_of_groups,
    ),
)


def replace_methods() -> list[tuple[type, str, Any]]:
    """Puts the batch versions in place; returns class, name and what was there before."""
    replaced = []
    for module_name, class_name, name, known_digest, make in METHODS:
        owner = getattr(import_module(module_name), class_name)
        stock = vars(owner).get(name)
        function = getattr(stock, "__func__", stock)
        if function_digest(function) != known_digest:
            continue
        ours = make(function)
        if ours is None:
            continue
        setattr(owner, name, classmethod(ours) if isinstance(stock, classmethod) else ours)
        replaced.append((owner, name, stock))
    return replaced
