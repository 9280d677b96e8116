# SPDX-License-Identifier: Apache-2.0
"""The hit rate of an infinite cache, and the size of what it would hold.

Only membership counts here, so no pool is needed: a request hits as far as all of its blocks
have been seen. Ids are mostly small and dense; those index an array of flags. Larger ones,
such as 64-bit hashes, are kept in a set.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from cpool.replay.records import Request, full_blocks

_MAX_FLAGS = 1 << 27  # bytes


class Ceiling:
    """Counts what goes through ``watch``."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._flags = np.zeros(1 << 16, dtype=bool)
        self._large: set[int] = set()
        self.num_requests = 0
        self.input_tokens = 0
        self.hit_tokens = 0
        self.block_references = 0  # ids in the trace, partial tails included
        self.unique_blocks = 0  # distinct full blocks: what an infinite cache ends with
        self.max_request_blocks = 0  # needed to run the largest request

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    def watch(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests, each one counted first."""
        for request in requests:
            self._count(request)
            yield request

    def _count(self, request: Request) -> None:
        ids = full_blocks(request, self._block_size)
        seen = self._see(ids)
        # The last token is always computed, so a hit ends before it.
        limit = (request.input_length - 1) // self._block_size
        num_hits = limit if seen[:limit].all() else int(seen.argmin())
        self.num_requests += 1
        self.input_tokens += request.input_length
        self.hit_tokens += num_hits * self._block_size
        self.block_references += len(request.hash_ids)
        num_blocks = -(-request.input_length // self._block_size)
        self.max_request_blocks = max(self.max_request_blocks, num_blocks)

    def _see(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each id, whether it was seen before; from now on it is."""
        is_small = ids < _MAX_FLAGS
        small = ids[is_small]
        if len(small) and small.max() >= len(self._flags):
            size = min(_MAX_FLAGS, 2 * int(small.max()) + 2)
            self._flags = np.concatenate(
                [self._flags, np.zeros(size - len(self._flags), dtype=bool)]
            )
        seen = np.empty(len(ids), dtype=bool)
        seen[is_small] = self._flags[small]
        new = small[~seen[is_small]]
        self.unique_blocks += len(np.unique(new))
        self._flags[new] = True
        if len(small) < len(ids):
            large = ids[~is_small].tolist()
            seen[~is_small] = [item in self._large for item in large]
            before = len(self._large)
            self._large.update(large)
            self.unique_blocks += len(self._large) - before
        return seen
