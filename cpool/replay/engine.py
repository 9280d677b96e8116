# SPDX-License-Identifier: Apache-2.0
"""What a request does to a pool: one engine is one capacity under test."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cpool.core.pool import BlockPool

_GROUP = 0


class Engine(Protocol):
    """Takes requests one at a time and says how many tokens each found in the cache."""

    num_blocks: int  # usable ones, the null block not counted

    def replay(self, input_length: int, keys: NDArray[np.uint8]) -> int | None:
        """Run one request from its arrival to its end.

        Args:
            input_length: Tokens of the prompt, at least 1.
            keys: An (n, width) array with the key of each of its n full blocks.

        Returns:
            The tokens that were found, or None if the request can never fit.
        """
        ...

    @property
    def num_evictions(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def details(self) -> dict[str, object]:
        """What a report says about this engine besides the numbers that all have."""
        ...


class FullAttentionEngine:
    """vLLM's order of operations for one group of full-attention layers.

    Requests run one after the other and leave nothing in use; blocks of generated tokens are
    left out.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._pool = BlockPool(num_blocks + 1, True, block_size)

    def replay(self, input_length: int, keys: NDArray[np.uint8]) -> int | None:
        num_needed = -(-input_length // self._block_size)
        if num_needed > self.num_blocks:
            return None
        pool = self._pool
        # The last token is always computed, so a hit ends before it.
        hits = pool.find_prefix_ids(keys[: (input_length - 1) // self._block_size], _GROUP)
        num_hits = len(hits)
        pool.touch_ids(hits)
        new = pool.get_new_block_ids(num_needed - num_hits)
        num_new_full = len(keys) - num_hits
        pool.cache_full_ids(
            new[:num_new_full], keys[num_hits:], _GROUP, self._block_size, first_block=num_hits
        )
        # Tail first: the start of a prompt, which more requests share, is evicted last.
        pool.free_ids(np.concatenate((hits, new))[::-1])
        return num_hits * self._block_size

    @property
    def num_evictions(self) -> int:
        return self._pool.num_evicted_blocks

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    def details(self) -> dict[str, object]:
        return {}
