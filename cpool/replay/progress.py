# SPDX-License-Identifier: Apache-2.0
"""One line on the terminal that says how far the work is; silent elsewhere."""

import sys
from collections.abc import Callable
from time import monotonic
from typing import TextIO

_WIDTH = 30
_INTERVAL = 0.2  # seconds between two drawings


class Progress:
    """Counts requests; draws on a terminal, and wipes its line when closed."""

    def __init__(self, is_quiet: bool, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_on = not is_quiet and self._stream.isatty()
        self._next_drawing = monotonic() + _INTERVAL
        self._num_requests = 0
        self._label = ""
        self._fraction: Callable[[], float | None] = lambda: None

    def start(self, label: str, fraction: Callable[[], float | None] | int) -> None:
        """Begin a stage; its end is told by a function, or by a number of requests."""
        self._label = label
        self._num_requests = 0
        if isinstance(fraction, int):
            total = max(1, fraction)
            self._fraction = lambda: self._num_requests / total
        else:
            self._fraction = fraction

    def step(self) -> None:
        self._num_requests += 1
        if self._is_on and monotonic() >= self._next_drawing:
            self._draw()
            self._next_drawing = monotonic() + _INTERVAL

    def close(self) -> None:
        if self._is_on:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self) -> None:
        fraction = self._fraction()
        bar = ""
        if fraction is not None:
            filled = round(_WIDTH * min(1.0, fraction))
            bar = f" [{'#' * filled}{'.' * (_WIDTH - filled)}] {fraction:4.0%}"
        self._stream.write(f"\r\x1b[K{self._label}{bar} {self._num_requests:,} requests")
        self._stream.flush()
