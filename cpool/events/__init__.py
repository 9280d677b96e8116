# SPDX-License-Identifier: Apache-2.0
"""Events that tell the outside world what a pool holds."""

from cpool.events.types import AllBlocksCleared, BlockRemoved, BlockStored

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored"]
