# SPDX-License-Identifier: Apache-2.0
"""What code finds that reaches behind the methods of stock's hash map.

Stock keeps a dict: key -> block, or key -> {block id: block} once several blocks held the key.
cpool keeps no such dict; this one is read from its table when it is asked for.
"""

from collections.abc import Mapping
from typing import Any

from cpool.core.pool import PoolHashCache, PoolHashMap

HashCacheEntry = Any  # a block, or a dict of blocks by id


def blocks_of(entry: HashCacheEntry) -> list[Any]:
    return list(entry.values()) if isinstance(entry, dict) else [entry]


class StockHashCache(PoolHashCache):
    """A pool's keys as stock's private dict shows them; writing to it registers."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        """Compares keys and their blocks in order.

        Stock's entry stays a dict when all but one of its blocks are gone; ours doesn't know
        whether there were several once, so both forms are equal.
        """
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.keys() == other.keys() and all(
            blocks_of(self[key]) == blocks_of(other[key]) for key in self
        )

    def __copy__(self) -> dict[bytes, HashCacheEntry]:
        return dict(self)

    def __setitem__(self, key: bytes, entry: HashCacheEntry) -> None:
        self.pop(key, None)
        for block in blocks_of(entry):
            self._pool.cached_block_hash_to_block.insert(key, block)


class StockHashMap(PoolHashMap):
    """A pool's table behind the interface of stock's ``BlockHashToBlockMap``."""

    @property
    def _cache(self) -> StockHashCache:
        return StockHashCache(self._pool)
