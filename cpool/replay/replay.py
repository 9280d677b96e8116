# SPDX-License-Identifier: Apache-2.0
"""The replay: each request of a stream goes through every engine before the next one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from cpool.replay.engine import Engine
from cpool.replay.records import Request, full_blocks


@dataclass
class Run:
    """One engine and what it has done so far."""

    engine: Engine
    num_requests: int = 0
    num_rejected: int = 0
    input_tokens: int = 0  # of rejected requests too
    hit_tokens: int = 0
    block_references: int = 0  # of the requests that were not rejected
    seconds: float = 0.0  # in the engine alone

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def block_references_per_second(self) -> float:
        return self.block_references / self.seconds if self.seconds else 0.0

    def replay(self, request: Request, keys: NDArray[np.uint8]) -> None:
        start = perf_counter()
        hit_tokens = self.engine.replay(request.input_length, keys)
        self.seconds += perf_counter() - start
        self.num_requests += 1
        self.input_tokens += request.input_length
        if hit_tokens is None:
            self.num_rejected += 1
        else:
            self.hit_tokens += hit_tokens
            self.block_references += len(request.hash_ids)


class Timed:
    """An iterator of requests that adds up the time its source takes."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests = iter(requests)
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        start = perf_counter()
        try:
            return next(self._requests)
        finally:
            self.seconds += perf_counter() - start


def block_keys(hash_ids: NDArray[np.int64], num_bytes: int) -> NDArray[np.uint8]:
    """An (n, num_bytes) array of keys, a different one for each id.

    The pool compares keys whole and mixes them with a seed of its own, so the id followed by
    zeros serves as well as a digest.
    """
    words = np.zeros((len(hash_ids), num_bytes // 8), dtype="<i8")
    words[:, 0] = hash_ids
    return words.view(np.uint8)


def replay(
    requests: Iterable[Request],
    runs: list[Run],
    block_size: int,
    key_bytes: int,
    on_request: Callable[[], None],
) -> None:
    """Send the requests through the engines of all runs, in order."""
    for request in requests:
        keys = block_keys(full_blocks(request, block_size), key_bytes)
        for run in runs:
            run.replay(request, keys)
        on_request()
