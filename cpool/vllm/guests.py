# SPDX-License-Identifier: Apache-2.0
"""Blocks that belong to no pool and are cached in one all the same.

Stock registers any block object that it is handed, also one made with ``KVCacheBlock(7)``.
cpool's columns have no place for such a guest. A pool that meets its first one becomes a
:func:`pool_with_guests`, which finds guests behind its own blocks; until then no lookup pays
for them. A guest is never in the free queue, so nothing but a reset takes its key away.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id, resolve_block_hashes

from cpool.core.standalone import BlockHashToBlockMap
from cpool.vllm.views import StockHashMap


def is_guest(block: Any) -> bool:
    return getattr(block, "pool", block) is None


class HashMapWithGuests(StockHashMap):
    """The pool's table, and behind it the keys that guests hold."""

    def get_one_block(self, key: bytes) -> Any:
        own = super().get_one_block(key)
        return self._pool.guests.get_one_block(key) if own is None else own

    def __len__(self) -> int:
        return super().__len__() + len(self._pool.guests)


class GuestMixin:
    """What a pool does differently once it has registered a guest."""

    guests: BlockHashToBlockMap

    @property
    def cached_block_hash_to_block(self) -> HashMapWithGuests:
        return HashMapWithGuests(self)

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: Sequence[int]
    ) -> list[Any] | None:
        keys = [make_block_hash_with_group_id(block_hash, group) for group in kv_cache_group_ids]
        found = [self.cached_block_hash_to_block.get_one_block(key) for key in keys]
        return None if any(block is None for block in found) else found

    def reset_prefix_cache(self) -> bool:
        done = super().reset_prefix_cache()
        if done:
            self.guests = BlockHashToBlockMap()
        return done


def pool_with_guests(pool_class: type) -> type:
    if issubclass(pool_class, GuestMixin):
        return pool_class
    return type(f"{pool_class.__name__}WithGuests", (GuestMixin, pool_class), {})


def register_guests(
    pool: Any,
    request: Any,
    blocks: Sequence[Any],
    num_cached_blocks: int,
    num_full_blocks: int,
    block_size: int,
    kv_cache_group_id: int,
) -> None:
    """Registers ``blocks[num_cached_blocks:num_full_blocks]``, all of them guests, as stock does.

    Raises:
        AssertionError: one of them has a key already.
    """
    if not isinstance(pool, GuestMixin):
        pool.__class__ = pool_with_guests(type(pool))
        pool.guests = BlockHashToBlockMap()
    hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, block_size)
    for index in range(num_cached_blocks, num_full_blocks):
        key = make_block_hash_with_group_id(hashes[index], kv_cache_group_id)
        blocks[index].set_block_hash(key, num_tokens=(index + 1) * block_size)
        pool.guests.insert(key, blocks[index])
