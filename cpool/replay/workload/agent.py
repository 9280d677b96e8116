# SPDX-License-Identifier: Apache-2.0
"""Coding agents: long prompts that grow by a tool's answer, again and again.

After traces of Claude Code sessions: tool definitions and a system prompt in four versions, the
notes of a repository that several sessions share, then what the session itself reads and
writes. That sessions share the first two parts is an assumption; the traces hide it.
"""

from collections.abc import Iterator
from itertools import count
from math import log
from random import Random

from cpool.replay.workload.distributions import (
    Chance,
    Choice,
    Quantiles,
    lognormal,
    lognormal_from,
    zipf,
)
from cpool.replay.workload.prompt import Prompt
from cpool.replay.workload.sessions import Arrival, Turn, merge

NUM_USERS = 32
_START_GAP_MS = 5_000  # between the first requests of two users

_VERSION = Choice([0.6, 0.25, 0.1, 0.05])
_TOOL_TOKENS = (12_262, 12_974, 12_600, 9_292)  # by version
_SYSTEM_TOKENS = 2_773
_NUM_REPOSITORIES = 50
_REPOSITORY = zipf(_NUM_REPOSITORIES, 1.2)
_REPOSITORY_TOKENS = 10_000
_SESSION_TOKENS = lognormal_from(median=5_000, mean=15_000, high=50_000)

_NUM_REQUESTS = lognormal(3.67, 1.16, low=3, high=1_200)
_APPEND = lognormal(6.71, 1.26)
_HAS_LARGE_APPEND = Chance(0.015)
_LARGE_APPEND = Quantiles([(0, 20_000), (1, 100_000)])
_OUTPUT = lognormal(5.56, 0.90)

_MODEL_MS = lognormal(log(6_100), 0.844)  # 90 % within 18 s
_IS_TOOL_STEP = Chance(0.89)
_TOOL_MS = lognormal_from(median=2_000, mean=5_000)
_USER_MS = lognormal(log(86_000), 2.095)  # 90 % within 21 minutes

_CONTEXT_LIMIT = 200_000  # tokens
_COMPACTED_PERCENT = 30
_GOES_BACK = Chance(0.0045)

_HAS_SUBAGENTS = Chance(0.026)
_NUM_SUBAGENTS = Choice([0, 0.1, 0.2, 0.3, 0.2, 0.1, 0.1])
_NUM_SUBAGENT_REQUESTS = lognormal(log(9), 0.6, low=2, high=60)
_SUBAGENT_TOOL_TOKENS = 8_300
_SUBAGENT_SYSTEM_TOKENS = 700


class _Shared:
    """The starts of prompts that sessions have in common."""

    def __init__(self, segments: Iterator[int]) -> None:
        self.mains = [
            Prompt(None, next(segments), tokens).then(next(segments), _SYSTEM_TOKENS)
            for tokens in _TOOL_TOKENS
        ]
        self.subagents = [
            Prompt(None, next(segments), _SUBAGENT_TOOL_TOKENS).then(
                next(segments), _SUBAGENT_SYSTEM_TOKENS
            )
            for _ in _TOOL_TOKENS
        ]
        self.repositories = [next(segments) for _ in range(_NUM_REPOSITORIES)]


def arrivals(random: Random) -> Iterator[Arrival]:
    segments = count()
    shared = _Shared(segments)
    return merge(
        (user * _START_GAP_MS, _user(random, shared, segments)) for user in range(NUM_USERS)
    )


def _user(random: Random, shared: _Shared, segments: Iterator[int]) -> Iterator[Turn]:
    while True:
        yield from _session(random, shared, segments)


def _session(random: Random, shared: _Shared, segments: Iterator[int]) -> Iterator[Turn]:
    version = _VERSION.draw(random)
    repository = shared.repositories[_REPOSITORY.draw(random)]
    fixed = shared.mains[version].then(repository, _REPOSITORY_TOKENS)
    start = fixed.then(next(segments), _SESSION_TOKENS.draw(random))
    num_requests = _NUM_REQUESTS.draw(random)
    # Sub-agents start once, half-way; their parent waits for them.
    half_way = num_requests // 2 if _HAS_SUBAGENTS.draw(random) else -1
    for number, turn in enumerate(_conversation(random, fixed, start, num_requests, segments)):
        yield turn
        if number == half_way:
            for _ in range(_NUM_SUBAGENTS.draw(random)):
                own = shared.subagents[version]
                task = own.then(next(segments), _APPEND.draw(random))
                length = _NUM_SUBAGENT_REQUESTS.draw(random)
                yield from _conversation(random, own, task, length, segments)


def _conversation(
    random: Random, fixed: Prompt, prompt: Prompt, num_requests: int, segments: Iterator[int]
) -> Iterator[Turn]:
    for _ in range(num_requests):
        output_length = _OUTPUT.draw(random)
        yield Turn(_wait(random), prompt, output_length)
        append = _APPEND.draw(random)
        if _HAS_LARGE_APPEND.draw(random):
            append += _LARGE_APPEND.draw(random)
        if _GOES_BACK.draw(random):
            prompt = _go_back(prompt, fixed)
        elif prompt.num_tokens + append > _CONTEXT_LIMIT:
            kept = prompt.num_tokens * _COMPACTED_PERCENT // 100
            prompt = fixed.then(next(segments), kept - fixed.num_tokens)
        # After a compaction the newest part is cut to what still fits.
        room = _CONTEXT_LIMIT - prompt.num_tokens
        prompt = prompt.then(next(segments), min(append, room))


def _go_back(prompt: Prompt, fixed: Prompt) -> Prompt:
    """An earlier state of the conversation, with at most 60 % of the tokens."""
    goal = prompt.num_tokens * 60 // 100
    while prompt is not fixed and prompt.num_tokens > goal and prompt.parent is not None:
        prompt = prompt.parent
    return prompt


def _wait(random: Random) -> int:
    other = _TOOL_MS if _IS_TOOL_STEP.draw(random) else _USER_MS
    return _MODEL_MS.draw(random) + other.draw(random)
