# SPDX-License-Identifier: Apache-2.0
"""Token ids to one chained hash per block boundary, the same bytes as vLLM's."""

from cpool.hashing.block_hashes import (
    BlockHashes,
    BlockHashListWithBlockSize,
    BlockSizeError,
    hash_tokens,
)
from cpool.hashing.chain import ALGORITHMS, BlockHasher, default_root

__all__ = [
    "ALGORITHMS",
    "BlockHashListWithBlockSize",
    "BlockHasher",
    "BlockHashes",
    "BlockSizeError",
    "default_root",
    "hash_tokens",
]
