# SPDX-License-Identifier: Apache-2.0
"""Programs that call an API beside people who chat: Mooncake's tool-and-agent trace.

Nearly half of the requests are chats. The others are single calls with one of two fixed templates
and a short unique part. Requests come in ticks of three seconds.
"""

from collections.abc import Iterator
from itertools import count
from random import Random

from cpool.replay.workload import chat
from cpool.replay.workload.distributions import Chance, Choice, Quantiles, exponential
from cpool.replay.workload.prompt import Prompt
from cpool.replay.workload.sessions import Arrival, Turn, merge

_REQUESTS_PER_SECOND = 6.56
_TICK_MS = 3_000
# Shares of the requests. In the trace's first 94 they are .52, .31 and .17; within the error of
# so few, these give the mean length and the hit rates of the whole trace.
_CHAT, _TOOL, _SHORT = 0.45, 0.38, 0.17

_TOOL_UNIQUE = Quantiles([(0, 22), (0.50, 474), (0.90, 1_316), (1, 2_869)])
_SHORT_UNIQUE = Quantiles([(0, 508), (0.50, 596), (1, 1_788)])
_TOOL_ANSWERS_YES = Chance(0.52)
_TOOL_OUTPUT = Quantiles([(0, 23), (1, 47)])
_SHORT_OUTPUT = Quantiles([(0, 16), (1, 25)])


def arrivals(random: Random) -> Iterator[Arrival]:
    segments = count()
    system = Prompt(None, next(segments), chat.SYSTEM_TOKENS)
    tool = Prompt(None, next(segments), 6_144)
    short = Prompt(None, next(segments), 2_560)
    # A conversation makes several requests, so fewer of them begin.
    kinds = Choice([_CHAT / chat.MEAN_TURNS, _TOOL, _SHORT])
    starts_per_second = _REQUESTS_PER_SECOND * (_CHAT / chat.MEAN_TURNS + _TOOL + _SHORT)
    gap = exponential(1000 / starts_per_second)

    def starts() -> Iterator[tuple[int, Iterator[Turn]]]:
        now = 0
        while True:
            kind = kinds.draw(random)
            if kind == 0:
                session = chat.conversation(random, system, segments)
            elif kind == 1:
                session = iter([_tool_call(random, tool, next(segments))])
            else:
                session = iter([_short_call(random, short, next(segments))])
            yield now - now % _TICK_MS, session
            now += gap.draw(random)

    return merge(starts())


def _tool_call(random: Random, template: Prompt, segment: int) -> Turn:
    prompt = template.then(segment, _TOOL_UNIQUE.draw(random))
    is_yes = _TOOL_ANSWERS_YES.draw(random)
    return Turn(0, prompt, 3 if is_yes else _TOOL_OUTPUT.draw(random))


def _short_call(random: Random, template: Prompt, segment: int) -> Turn:
    prompt = template.then(segment, _SHORT_UNIQUE.draw(random))
    return Turn(0, prompt, _SHORT_OUTPUT.draw(random))
