# SPDX-License-Identifier: Apache-2.0
"""Sessions of many users, merged into one stream of requests in order of time."""

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cpool.replay.workload.prompt import Prompt


class Turn(NamedTuple):
    """One request of a session."""

    wait: int  # ms since the turn before, or since the session began
    prompt: Prompt
    output_length: int  # tokens


class Arrival(NamedTuple):
    """One request of the stream."""

    time: int  # ms from the start
    prompt: Prompt
    output_length: int  # tokens


def merge(starts: Iterable[tuple[int, Iterator[Turn]]]) -> Iterator[Arrival]:
    """Merge sessions, given with the time, in ms, at which each one begins; earliest first."""
    # A session's number keeps the order of equal times fixed, and turns out of comparisons.
    waiting: list[tuple[int, int, Turn, Iterator[Turn]]] = []
    for number, (start, session) in enumerate(starts):
        while waiting and waiting[0][0] < start:
            yield _next(waiting)
        _push(waiting, start, number, session)
    while waiting:
        yield _next(waiting)


def _push(
    waiting: list[tuple[int, int, Turn, Iterator[Turn]]],
    time: int,
    number: int,
    session: Iterator[Turn],
) -> None:
    turn = next(session, None)
    if turn is not None:
        heapq.heappush(waiting, (time + turn.wait, number, turn, session))


def _next(waiting: list[tuple[int, int, Turn, Iterator[Turn]]]) -> Arrival:
    time, number, turn, session = heapq.heappop(waiting)
    _push(waiting, time, number, session)
    return Arrival(time, turn.prompt, turn.output_length)
