# SPDX-License-Identifier: Apache-2.0
"""KV-cache block pool for LLM serving: vLLM's decisions in flat C arrays."""

from cpool.core.contract import BlockIdError, ContractError, Registration, SavedPoolError
from cpool.core.pool import BlockPool, KVCacheBlock
from cpool.core.standalone import BlockHashToBlockMap, FreeKVCacheBlockQueue
from cpool.hashing import BlockHashes, BlockHasher, BlockHashListWithBlockSize, hash_tokens

__all__ = [
    "BlockHashListWithBlockSize",
    "BlockHashToBlockMap",
    "BlockHasher",
    "BlockHashes",
    "BlockIdError",
    "BlockPool",
    "ContractError",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "Registration",
    "SavedPoolError",
    "hash_tokens",
]

__version__ = "0.1.0"
