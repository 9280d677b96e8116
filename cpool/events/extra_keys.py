# SPDX-License-Identifier: Apache-2.0
"""What beside its tokens went into a block's hash, from a request, in the forms of events."""

import hashlib
from collections.abc import Sequence
from typing import Any


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
    # Lists, no generators: Python 3.12 and 3.13 crash when one cannot be allocated.
    return [
        None if keys is None else tuple([key[1:] if key[0] == "mm" else key[1] for key in keys])
        for keys in block_keys
    ]
