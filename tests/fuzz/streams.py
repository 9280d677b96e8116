# SPDX-License-Identifier: Apache-2.0
"""Operation streams encoded as bytes: any bytes are a valid stream.

The first five bytes choose the pool, each operation then reads as many bytes as it has
choices to make. The stream ends where the bytes do. Pool and model run in step and are
compared, so the model is the oracle; a debug build checks every invariant as well.

One first byte in four chooses a large world, see tests/operations.py.
"""

from collections.abc import Sequence
from typing import Any

from .. import operations
from ..test_model import Pair

WIDTHS = (32, 16, 8, 20)
MAX_SMALL = 12  # Blocks.
FIRST_LARGE = 192  # First bytes from here on.
COMPARE_EVERY = 8  # Operations; a full comparison takes longer than eight operations.


class EndOfStream(Exception):
    """No bytes are left."""


class BytesPicker:
    """Draws from bytes: one for each choice among at most 256, else two."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def integer(self, low: int, high: int) -> int:
        num_bytes = 1 if high - low < 256 else 2
        drawn = self.data[self.position : self.position + num_bytes]
        if len(drawn) < num_bytes:
            raise EndOfStream
        self.position += num_bytes
        return low + int.from_bytes(drawn, "big") % (high - low + 1)

    def choice(self, items: Sequence[Any]) -> Any:
        return items[self.integer(0, len(items) - 1)]


def pool_size(pick: BytesPicker) -> tuple[int, int]:
    """Blocks and scale."""
    drawn = pick.integer(0, 255)
    if drawn < FIRST_LARGE:
        return 1 + drawn % MAX_SMALL, 1
    return operations.LARGE[drawn % len(operations.LARGE)]


def run(data: bytes) -> int:
    """Run a stream; how many operations it had. Raises AssertionError on a difference."""
    pick = BytesPicker(data)
    num_operations = 0
    pair = None
    try:
        num_blocks, scale = pool_size(pick)
        pair = Pair(
            num_blocks=num_blocks,
            scale=scale,
            width=pick.choice(WIDTHS),
            caching=pick.integer(0, 7) > 0,
            events=bool(pick.integer(0, 1)),
            collect=bool(pick.integer(0, 1)),
        )
        while True:
            pair.step(pick.choice(pair.generators), pick)
            num_operations += 1
            if num_operations % COMPARE_EVERY == 0:
                pair.compare()
    except EndOfStream:
        pass
    if pair is not None:
        pair.compare()
    return num_operations
