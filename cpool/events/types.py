# SPDX-License-Identifier: Apache-2.0
"""Event classes: what a pool says about what it holds.

Field names, their order and their meanings are those of vLLM 0.32.0's
``vllm/distributed/kv_events.py``, so that the encoded bytes are the same. With msgspec
(``pip install cpool[events]``) the classes are msgspec Structs. Without it they are dataclasses
with the same attributes: a pool then collects and hands out events as usual, and only
`cpool.events.wire` and the publisher, which need msgspec, refuse to be imported.
"""

import os
from typing import Any, NamedTuple

from cpool.events.extra_keys import block_extra_keys, event_extra_keys, first_mm_index

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "ExternalHash",
    "GroupDescription",
    "KVCacheEvent",
    "block_extra_keys",
    "event_extra_keys",
    "external_hash",
    "first_mm_index",
    "uses_int_hashes",
]

ExternalHash = bytes | int

try:
    import msgspec
except ImportError:
    from dataclasses import dataclass

    class KVCacheEvent:
        """Base of all events."""

        def __init_subclass__(cls) -> None:
            dataclass(cls)

else:

    class KVCacheEvent(  # type: ignore[no-redef]
        msgspec.Struct, tag=True, omit_defaults=True, gc=False
    ):
        """Base of all events."""


class BlockStored(KVCacheEvent):
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
        kv_cache_spec_kind: Kind of attention cache of that group.
        kv_cache_spec_sliding_window: Its window, in tokens, if it has one.
        locality: LOCAL or REMOTE, as the publisher sees it.
        ownership: Name of a secondary tier that owns the blocks, if one does.
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
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.block_hashes), self.parent_block_hash, self.group_idx))


class BlockRemoved(KVCacheEvent):
    """Blocks are no longer findable under these hashes.

    Attributes:
        block_hashes: The hashes.
        medium: Storage medium.
        group_idx: KV cache group.
        locality: LOCAL or REMOTE, as the publisher sees it.
        ownership: Name of a secondary tier that owned the blocks, if one did.
    """

    block_hashes: list[ExternalHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.block_hashes), self.medium, self.group_idx))


class AllBlocksCleared(KVCacheEvent):
    """Nothing is findable any more."""

    def __hash__(self) -> int:
        return hash(AllBlocksCleared)


class GroupDescription(NamedTuple):
    """What `BlockStored` says about a KV cache group; see ``BlockPool.event_groups``.

    Attributes:
        kind: Kind of attention cache, such as ``full_attention`` or ``sliding_window``.
        sliding_window: Its window in tokens, or None.
    """

    kind: str | None = None
    sliding_window: int | None = None


def uses_int_hashes() -> bool:
    """Whether events carry hashes as 64-bit integers.

    They do unless ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`` is in the environment.
    """
    return os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") != "0"


def external_hash(digest: bytes) -> ExternalHash:
    """The digest as events carry it: its low 8 bytes as an unsigned integer, or the whole."""
    return int.from_bytes(digest[-8:], "big") if uses_int_hashes() else digest
