# SPDX-License-Identifier: Apache-2.0
"""People who chat: Mooncake's conversation trace, an hour of Kimi.

One system prompt for all, first prompts from short questions to whole documents, most
conversations of one turn, and minutes between turns.
"""

from collections.abc import Iterator
from itertools import count
from random import Random

from cpool.replay.workload.distributions import Choice, Quantiles, exponential, lognormal
from cpool.replay.workload.prompt import Prompt
from cpool.replay.workload.sessions import Arrival, Turn, merge

SYSTEM_TOKENS = 870
MEAN_TURNS = 1.63
_REQUESTS_PER_SECOND = 3.4

_NUM_TURNS = Choice([0, 0.692, 0.178, 0.063, 0.027, 0.016, 0.007, 0.004, 0.013])
_LONG = 8  # turns; from here on the tail is geometric
_MORE_TURNS = Choice([0.3 * 0.7**k for k in range(64)])
_FIRST_PROMPT = Quantiles(
    [
        (0, 875),
        (0.10, 905),
        (0.25, 1_336),
        (0.50, 5_264),
        (0.75, 13_056),
        (0.90, 25_561),
        (0.99, 89_869),
        (1, 126_000),
    ]
)
# An answer and the next question; a tenth of the turns ask for another answer instead.
_GROWTH = Quantiles(
    [(0, 1), (0.10, 1), (0.25, 187), (0.50, 454), (0.75, 900), (0.90, 4_622), (1, 30_000)]
)
_OUTPUT = Quantiles(
    [
        (0, 4),
        (0.10, 24),
        (0.25, 156),
        (0.50, 350),
        (0.75, 472),
        (0.90, 597),
        (0.99, 1_120),
        (1, 2_000),
    ]
)
_GAP_MS = lognormal(4.88 + 6.9078, 0.98)  # 6.9078 = ln 1000


def arrivals(random: Random) -> Iterator[Arrival]:
    segments = count()
    system = Prompt(None, next(segments), SYSTEM_TOKENS)
    gap = exponential(1000 * MEAN_TURNS / _REQUESTS_PER_SECOND)

    def starts() -> Iterator[tuple[int, Iterator[Turn]]]:
        now = 0
        while True:
            yield now, conversation(random, system, segments)
            now += gap.draw(random)

    return merge(starts())


def conversation(random: Random, system: Prompt, segments: Iterator[int]) -> Iterator[Turn]:
    num_turns = _NUM_TURNS.draw(random)
    if num_turns == _LONG:
        num_turns += _MORE_TURNS.draw(random)
    prompt = system.then(next(segments), _FIRST_PROMPT.draw(random) - system.num_tokens)
    wait = 0
    for _ in range(num_turns):
        yield Turn(wait, prompt, _OUTPUT.draw(random))
        wait = _GAP_MS.draw(random)
        growth = _GROWTH.draw(random)
        if growth > 1:
            prompt = prompt.then(next(segments), growth)
