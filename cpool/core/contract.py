# SPDX-License-Identifier: Apache-2.0
"""Errors and records of the pool's contract."""

from typing import Any, NamedTuple


class ContractError(ValueError, AssertionError):
    """A call broke the pool's contract; nothing was changed.

    It is both a ValueError, as callers expect, and an AssertionError, which is what vLLM's
    pool raises at the same places.
    """


class BlockIdError(ContractError, IndexError):
    """A block id is out of range; nothing was changed."""


class SavedPoolError(ValueError):
    """A file is no saved pool, a damaged one, or one that this version cannot read."""


class Registration(NamedTuple):
    """One key under which a block can be found.

    Attributes:
        block_hash: The digest, as bytes.
        kv_cache_group_id: The group that owns the key.
        num_tokens: Prefix tokens that the key covers, None if it was registered without.
        is_primary: Whether it is the block's own key (``block.block_hash``).
    """

    block_hash: bytes
    kv_cache_group_id: int
    num_tokens: int | None
    is_primary: bool


class EventSnapshot(NamedTuple):
    """What a pool holds, for a consumer of events that comes late or lost some.

    Attributes:
        events: ``BlockStored`` events, compact: ``len`` and ``num_events`` count them,
            iteration makes them, `cpool.events.wire.encode_batch` takes the whole. Parents
            come before their children; a parent that is not resident is None.
        sequence: Number of the first batch of events to apply on top.
    """

    events: Any
    sequence: int
