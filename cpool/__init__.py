# SPDX-License-Identifier: Apache-2.0
"""KV-cache block pool for LLM serving: vLLM's decisions in flat C arrays."""

from cpool.core.contract import BlockIdError, ContractError, Registration, SavedPoolError

try:
    from cpool.core.pool import BlockPool, KVCacheBlock
except ModuleNotFoundError as error:
    if error.name != "cpool.core.pool":
        raise
    raise ImportError(
        f"cpool's extensions are not built in {__path__[0]}: this is its source, which hides the "
        "installed package. Start Python in another folder, or `pip install -e .` here."
    ) from None
from cpool.core.standalone import BlockHashToBlockMap, FreeKVCacheBlockQueue
from cpool.hashing import BlockHasher, BlockHashes, BlockHashListWithBlockSize, hash_tokens

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
