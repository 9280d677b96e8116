# SPDX-License-Identifier: Apache-2.0
"""Batch versions of vLLM functions that look at a request's blocks one by one.

They are put in place when a process builds its first pool, where the code they stand for is
the code they were written after (it is the same in vLLM 0.30 to 0.32); else stock's stay. On
a pool that isn't cpool's they call stock's.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize, resolve_block_hashes

import cpool
from cpool.vllm.contract import code_digest
from cpool.vllm.guests import GuestMixin

# Of FullAttentionManager.find_longest_cache_hit.
KNOWN_DIGEST = "3c1702087661af16"

# A miss is mostly early; a long run is looked up in ever larger pieces.
FIRST_PIECE = 16
GROWTH = 4


def longest_run(pool: Any, hashes: Iterable[bytes], groups: Sequence[int]) -> tuple[list[Any], ...]:
    """Returns, per group, the blocks of the first hashes that are registered in every group."""
    found: tuple[list[Any], ...] = tuple([] for _ in groups)
    block_at = pool.blocks.__getitem__
    remaining = iter(hashes)
    size = FIRST_PIECE
    while piece := list(islice(remaining, size)):
        if len(set(map(len, piece))) > 1:
            return one_by_one(pool, piece + list(remaining), groups, found)
        runs = [pool.find_prefix_ids(piece, group) for group in groups]
        length = min(map(len, runs))
        for blocks, run in zip(found, runs, strict=True):
            blocks.extend(map(block_at, run[:length].tolist()))
        if length < len(piece):
            break
        size *= GROWTH
    return found


def one_by_one(
    pool: Any, hashes: Iterable[bytes], groups: Sequence[int], found: tuple[list[Any], ...]
) -> tuple[list[Any], ...]:
    """Goes on from ``found`` with hashes of several widths, which no batch can hold."""
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


def replace_methods(managers: Any) -> list[tuple[type, str, Any]]:
    """Puts the batch versions in place; returns class, name and what was there before."""
    manager = managers.FullAttentionManager
    name = "find_longest_cache_hit"
    stock = vars(manager)[name]
    if code_digest(stock.__func__) != KNOWN_DIGEST:
        return []
    setattr(manager, name, classmethod(full_attention_hit(stock.__func__)))
    return [(manager, name, stock)]
