# SPDX-License-Identifier: Apache-2.0
"""Event classes, and what turns a request's keys into the forms that events carry.

Field names and meanings are those of vLLM 0.32.0's ``vllm/distributed/kv_events.py``.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ExternalHash = bytes | int


@dataclass(slots=True)
class BlockStored:
    """Blocks became findable.

    Attributes:
        block_hashes: One hash per block, in order of the prefix.
        parent_block_hash: Hash before the first one; None at the start of a prompt.
        token_ids: Tokens of the blocks.
        block_size: Tokens per block.
        lora_id: Adapter's number, if any.
        medium: Storage medium.
        lora_name: Adapter's name, if any.
        extra_keys: Per block what beside tokens went into its hash, or None.
        group_idx: KV cache group.
        session_id: Session of the request, if any.
    """

    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    session_id: str | None = None


@dataclass(slots=True)
class BlockRemoved:
    """Blocks are no longer findable under these hashes."""

    block_hashes: list[ExternalHash]
    medium: str | None
    group_idx: int | None = None


@dataclass(slots=True)
class AllBlocksCleared:
    """Nothing is findable any more."""


def external_hash(digest: bytes) -> ExternalHash:
    """The digest as events carry it: its low 8 bytes as an integer, or the whole.

    ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`` selects the whole.
    """
    if os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") == "0":
        return digest
    return int.from_bytes(digest[-8:], "big")


def first_mm_index(request: Any, start: int, end: int) -> int:
    """Index of the first multimodal feature that reaches behind token ``start``."""
    for index, feature in enumerate(request.mm_features):
        position = feature.mm_position
        if position.offset + position.length > start:
            return index
    return len(request.mm_features)


def _mm_keys(request: Any, start: int, end: int, index: int) -> tuple[list[Any], int]:
    features = request.mm_features
    keys: list[Any] = []
    while index < len(features):
        position = features[index].mm_position
        if position.offset >= end:
            break
        behind = position.offset + position.length
        if behind > start:
            keys.append(("mm", features[index].identifier, position.offset - start))
            if behind > end:
                break
        index += 1
    return keys, index


def block_extra_keys(
    request: Any, start: int, end: int, mm_index: int
) -> tuple[tuple[Any, ...] | None, int]:
    """What beside its tokens identifies the block of tokens ``start`` to ``end``.

    Returns:
        Tagged keys or None, and the multimodal index to go on from.
    """
    keys: list[Any] = []
    lora = request.lora_request
    if lora:
        keys.append(("lora", lora.lora_name, lora.lora_path))
    if request.mm_features:
        mm_keys, mm_index = _mm_keys(request, start, end, mm_index)
        keys += mm_keys
    if start == 0 and request.cache_salt:
        keys.append(("cache_salt", request.cache_salt))
    if request.prompt_embeds is not None:
        digest = hashlib.sha256(bytes(memoryview(request.prompt_embeds[start:end]))).digest()
        keys.append(("prompt_embeds", digest))
    return (tuple(keys) if keys else None), mm_index


def event_extra_keys(
    block_keys: Sequence[tuple[Any, ...] | None],
) -> list[tuple[Any, ...] | None] | None:
    """The keys of each block without their tags, as consumers of events read them."""
    if not block_keys:
        return None
    return [
        None
        if keys is None
        else tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)
        for keys in block_keys
    ]
