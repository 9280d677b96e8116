# SPDX-License-Identifier: Apache-2.0
"""Events that tell the outside world what a pool holds.

`types` and this package import without msgspec. `wire` (bytes) and `publisher` (sockets) need
``pip install cpool[events]``.
"""

from cpool.events.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    GroupDescription,
    KVCacheEvent,
)

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "GroupDescription",
    "KVCacheEvent",
]
