# SPDX-License-Identifier: Apache-2.0
"""Questions over retrieved passages: RAGPulse, a university's question service.

The system prompt has three parts: one of a few texts, one that stays for a while and is then
replaced, and one that is new in nearly every request. The last ends what requests share, so
the passages behind it never hit, although the same ones return again and again.
"""

from collections.abc import Iterator
from itertools import count
from math import log
from random import Random

from cpool.replay.workload.distributions import (
    Chance,
    Choice,
    Quantiles,
    exponential,
    lognormal,
    lognormal_from,
    zipf,
)
from cpool.replay.workload.prompt import Prompt
from cpool.replay.workload.sessions import Arrival, Turn, merge

_MS_PER_SESSION = 7 * 24 * 3_600_000 * 1.78 / 7_106

_FIRST_PART = Choice([0.77, 0.20, 0.01, 0.01, 0.01])
_NUM_FIRST_PARTS = 5
_FIRST_PART_TOKENS = 512
_SECOND_PART_TOKENS = lognormal(log(420), 0.2)
_SECOND_PART_REQUESTS = lognormal(log(5), 1.8)  # how long it stays
_THIRD_PART_TOKENS = lognormal(log(420), 0.2)

_HAS_PASSAGES = Chance(0.78)
_NUM_PASSAGES = 6
_NUM_KNOWN_PASSAGES = 3_235
_PASSAGE = zipf(_NUM_KNOWN_PASSAGES, 0.8)
_PASSAGE_TOKENS = lognormal_from(median=230, mean=266)

_NUM_HISTORIES = Choice([0, 0.7, 0.3])
_IS_STUB = Chance(0.4)
_STUB_TOKENS = 11
_HISTORY_TOKENS = lognormal_from(median=220, mean=334)
_HAS_WEB = Chance(0.09)
_WEB_TOKENS = lognormal(log(250), 0.5)
_QUESTION_TOKENS = lognormal_from(median=6, mean=7)
_OUTPUT = Quantiles([(0, 10), (0.10, 83), (0.50, 234), (0.90, 563), (1, 2_000)])

_NUM_TURNS = Choice([0, 0.62, 0.20, 0.10, 0.04, 0.02, 0.02])
_GAP_MS = lognormal(log(60_000), 1.0)


class _Texts:
    """The texts that requests have in common, and the one that is replaced now and then."""

    def __init__(self, random: Random, segments: Iterator[int]) -> None:
        self._random = random
        self._segments = segments
        self._firsts = [
            Prompt(None, next(segments), _FIRST_PART_TOKENS) for _ in range(_NUM_FIRST_PARTS)
        ]
        self._second = (0, 0)
        self._second_stays = 0
        self.stub = next(segments)
        # By rank: the most frequent first.
        self.passages = [
            (next(segments), _PASSAGE_TOKENS.draw(random)) for _ in range(_NUM_KNOWN_PASSAGES)
        ]

    def system_prompt(self) -> Prompt:
        if self._second_stays == 0:
            self._second_stays = _SECOND_PART_REQUESTS.draw(self._random)
            self._second = next(self._segments), _SECOND_PART_TOKENS.draw(self._random)
        self._second_stays -= 1
        first = self._firsts[_FIRST_PART.draw(self._random)]
        third = next(self._segments), _THIRD_PART_TOKENS.draw(self._random)
        return first.then(*self._second).then(*third)


def arrivals(random: Random) -> Iterator[Arrival]:
    segments = count()
    texts = _Texts(random, segments)
    gap = exponential(_MS_PER_SESSION)

    def starts() -> Iterator[tuple[int, Iterator[Turn]]]:
        now = 0
        while True:
            yield now, _session(random, texts, segments)
            now += gap.draw(random)

    return merge(starts())


def _session(random: Random, texts: _Texts, segments: Iterator[int]) -> Iterator[Turn]:
    wait = 0
    for _ in range(_NUM_TURNS.draw(random)):
        yield Turn(wait, _prompt(random, texts, segments), _OUTPUT.draw(random))
        wait = _GAP_MS.draw(random)


def _prompt(random: Random, texts: _Texts, segments: Iterator[int]) -> Prompt:
    prompt = texts.system_prompt()
    if _HAS_PASSAGES.draw(random):
        ranks: set[int] = set()
        while len(ranks) < _NUM_PASSAGES:
            ranks.add(_PASSAGE.draw(random))
        for rank in sorted(ranks):
            prompt = prompt.then(*texts.passages[rank])
    has_stub = False
    for _ in range(_NUM_HISTORIES.draw(random)):
        if not has_stub and _IS_STUB.draw(random):
            has_stub = True
            prompt = prompt.then(texts.stub, _STUB_TOKENS)
        else:
            prompt = prompt.then(next(segments), _HISTORY_TOKENS.draw(random))
    if _HAS_WEB.draw(random):
        prompt = prompt.then(next(segments), _WEB_TOKENS.draw(random))
    return prompt.then(next(segments), _QUESTION_TOKENS.draw(random))
