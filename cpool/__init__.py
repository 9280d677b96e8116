# SPDX-License-Identifier: Apache-2.0
"""KV-cache block pool for LLM serving: vLLM's decisions in flat C arrays."""

from cpool.core.contract import BlockIdError, ContractError, Registration
from cpool.core.pool import BlockPool, KVCacheBlock
from cpool.core.standalone import BlockHashToBlockMap, FreeKVCacheBlockQueue

__all__ = [
    "BlockHashToBlockMap",
    "BlockIdError",
    "BlockPool",
    "ContractError",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "Registration",
]

__version__ = "0.1.0"
