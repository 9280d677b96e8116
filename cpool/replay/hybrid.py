# SPDX-License-Identifier: Apache-2.0
"""A model with one or several groups of layers, replayed through `PrefixCache`."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from cpool.core.pool import BlockPool
from cpool.prefix import PrefixCache, PrefixMatch, Reason, Request
from cpool.prefix.groups import Group, Match
from cpool.replay.groups import common_block_size, min_request_blocks, word_of

MAX_CHUNK = 8192  # tokens computed in one step


class HybridEngine:
    """vLLM's order of operations for a model whose groups share one pool.

    Requests run one after the other, in chunks, and leave nothing in use but what is cached;
    generated tokens are left out. Matching coarse, hashes are as far apart as the groups'
    blocks allow, as in an engine that was given no match unit.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: tuple[Group, ...],
        match: Match,
        match_unit: int,
        trace_block_size: int,
        max_chunk: int = MAX_CHUNK,
    ) -> None:
        self.num_blocks = num_blocks
        self._max_chunk = max_chunk
        unit = match_unit if match == "fine" else common_block_size(groups)
        self._trace_block_size = trace_block_size
        self._step = unit // trace_block_size
        self._pool = BlockPool(num_blocks + 1, True, unit)
        # Twice as many as the pool has blocks: what a pool of three times the size would hold.
        self._cache = PrefixCache(
            self._pool, groups, match=match, remember_evictions=2 * num_blocks
        )
        # Requests that did not hit all they could, and the tokens that they missed.
        self._reasons: Counter[Reason] = Counter()
        self._missed: Counter[Reason] = Counter()

    def replay(self, input_length: int, keys: NDArray[np.uint8]) -> int | None:
        cache = self._cache
        if min_request_blocks(cache.groups, input_length, self._max_chunk) > self.num_blocks:
            return None
        cache.begin_step()
        found = cache.lookup(keys[self._step - 1 :: self._step], input_length - 1)
        self._count_miss(found)
        request = self._compute(found, input_length)
        if request is None:
            return None
        self._cache.finish(request)
        return found.num_tokens

    def _compute(self, found: PrefixMatch, input_length: int) -> Request | None:
        """The request with all its prompt computed, or None if it does not fit."""
        cache = self._cache
        request: Request | None = None
        start = found.num_tokens
        while start < input_length:
            new = min(self._max_chunk, input_length - start)
            end = cache.chunk_end(start, new, input_length, boundary=found.shared_prefix_boundary)
            if request is None:
                request = cache.admit(found, end - start, input_length)
                if request is None:
                    return None
            elif cache.append(request, end - start) is None:
                cache.finish(request)
                return None
            cache.commit(request)
            cache.copies_done(cache.take_copies())
            cache.begin_step()
            start = end
        return request

    def _count_miss(self, found: PrefixMatch) -> None:
        """Note why a lookup did not cover all boundaries of the trace."""
        missed = found.max_tokens // self._trace_block_size * self._trace_block_size
        missed -= found.num_tokens
        if not missed:
            return
        unit = self._cache.match_unit
        reason = Reason.MATCH_UNIT
        if found.num_tokens < found.max_tokens // unit * unit:
            reason = found.explain().reason
        self._reasons[reason] += 1
        self._missed[reason] += missed

    @property
    def num_evictions(self) -> int:
        return self._pool.num_evicted_blocks

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    @property
    def match(self) -> Match:
        return self._cache.layout.match

    def details(self) -> dict[str, object]:
        """What a report says about this engine besides the numbers that all have."""
        return {
            "match": self.match,
            "match_unit": self._cache.match_unit,
            "groups": [word_of(group) for group in self._cache.groups],
            "reasons": {
                str(reason): {"requests": count, "missed_tokens": self._missed[reason]}
                for reason, count in self._reasons.most_common()
            },
        }
