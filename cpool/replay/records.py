# SPDX-License-Identifier: Apache-2.0
"""What every reader and the workload generator yield, and the error they raise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# A block's id becomes one signed 64-bit word of its key.
MAX_HASH_ID = 2**63 - 1


class TraceError(ValueError):
    """A trace cannot be read; the message says where and what is wrong."""


class Request(NamedTuple):
    """One request of a trace.

    ``hash_ids`` is a one-dimensional int64 array with an id for each block of the prompt.
    Equal ids mean equal blocks with equal predecessors. A partial last block may have an id
    (*ceil* traces) or none (*floor* traces).
    """

    timestamp: int  # ms from the start of the trace
    input_length: int  # tokens, at least 1
    output_length: int  # tokens
    hash_ids: NDArray[np.int64]


@dataclass
class Trace:
    """An open trace: what is known of it, and its requests, to be read once."""

    name: str
    format: str
    block_size: int  # tokens
    block_size_from: str  # how the block size is known, for people
    requests: Iterator[Request]
    # Of the input as stored, compression included. None if it was not read to its end.
    sha256: Callable[[], str | None] = lambda: None
    # From 0 to 1, or None if the end cannot be known.
    fraction_read: Callable[[], float | None] = lambda: None
    num_skipped: Callable[[], int] = lambda: 0
    parameters: dict[str, object] = field(default_factory=dict)


def full_blocks(request: Request, block_size: int) -> NDArray[np.int64]:
    """The ids of the request's full blocks: a partial tail's id is no key."""
    return request.hash_ids[: request.input_length // block_size]


def check_num_blocks(request: Request, block_size: int) -> None:
    """Raise ValueError unless there is an id for each full block, and at most one more."""
    floor = request.input_length // block_size
    ceil = -(-request.input_length // block_size)
    if len(request.hash_ids) not in (floor, ceil):
        expected = f"{floor}" if floor == ceil else f"{floor} or {ceil}"
        raise ValueError(
            f"{len(request.hash_ids)} hash_ids for {request.input_length} tokens; "
            f"with block size {block_size} there must be {expected}"
        )
