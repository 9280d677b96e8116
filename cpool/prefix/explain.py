# SPDX-License-Identifier: Apache-2.0
"""Why a lookup stopped where it did, as data and as a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from cpool.prefix.groups import (
    ChunkedLocal,
    FullAttention,
    Group,
    Mamba,
    SlidingWindow,
    is_eagle,
)

if TYPE_CHECKING:
    from cpool.prefix.cache import PrefixCache, PrefixMatch

_NAMES = {
    FullAttention: "full attention",
    SlidingWindow: "sliding window",
    ChunkedLocal: "chunked local attention",
    Mamba: "Mamba state",
}


class PartialTail(NamedTuple):
    """The last block of a match, of which only the first tokens belong to it."""

    group: int  # kv_cache_group_id
    block_id: int
    num_tokens: int  # of the block's own, that the match covers
    ref_cnt: int  # requests that hold the block


class Reason(StrEnum):
    """What kept a group from matching further."""

    NOTHING_LEFT = "nothing left"  # it matched all that it was allowed to
    NEVER_SEEN = "never seen"  # no such prefix is known
    EVICTED = "evicted"  # it was there
    COARSER_STATE = "only a coarser state exists"  # a state was kept, but further to the left
    NO_STATE = "no state was kept"  # attention has the prefix, but no state of it exists
    WINDOW_INCOMPLETE = "window incomplete"  # some blocks before the boundary are missing
    OTHER_GROUP = "another group is shorter"
    EAGLE_DROP = "EAGLE drop"  # the drafter needs the last unit computed again
    MATCH_UNIT = "match unit"  # something is there, but not at a multiple of the match unit


class GroupReport(NamedTuple):
    """How far one group matched, and what stopped it."""

    group: int  # kv_cache_group_id
    kind: str
    num_tokens: int  # that it could give, within what full attention has
    reason: Reason
    at_tokens: int | None  # the boundary in question
    evictions_since: int | None  # blocks with keys that were evicted since that one
    seconds_since: int | None

    def __str__(self) -> str:
        text = f"group {self.group} ({self.kind}) has {self.num_tokens:,} tokens"
        return f"{text}: {self._why()}"

    def _why(self) -> str:
        at = "" if self.at_tokens is None else f" at {self.at_tokens:,}"
        match self.reason:
            case Reason.NOTHING_LEFT:
                return "all that a hit may cover"
            case Reason.NEVER_SEEN:
                return f"no prefix{at} is known"
            case Reason.EVICTED:
                return (
                    f"the block{at} was evicted {self.seconds_since:,} s ago, "
                    f"{self.evictions_since:,} evictions back"
                )
            case Reason.COARSER_STATE:
                return f"no state was kept{at}, only further to the left"
            case Reason.NO_STATE:
                return f"no state was kept up to {self.at_tokens:,}"
            case Reason.WINDOW_INCOMPLETE:
                return f"the window is incomplete: the block{at} is missing"
            case Reason.OTHER_GROUP:
                return "another group is shorter"
            case Reason.EAGLE_DROP:
                return "the drafter needs the last unit computed again"
            case Reason.MATCH_UNIT:
                return f"there is more{at}, but a hit has to end at a multiple of the match unit"


class Explanation(NamedTuple):
    """Why a match is not longer."""

    num_tokens: int  # of the match; if that is stale, of the one that a lookup finds now
    max_tokens: int  # that it was allowed
    match_unit: int  # tokens
    min_prompt_tokens: int  # the shortest prompt that can hit at all
    groups: tuple[GroupReport, ...]
    stale_tokens: int | None = None  # of the match, if a lookup finds other blocks by now

    @property
    def is_stale(self) -> bool:
        """Whether the pool has changed since the lookup, so that this is about a new one."""
        return self.stale_tokens is not None

    @property
    def reason(self) -> Reason:
        """The reason of the group that stopped the match."""
        stopped = [report for report in self.groups if report.reason in _OWN_REASONS]
        if not stopped:
            return self.groups[0].reason
        return min(stopped, key=lambda report: report.num_tokens).reason

    def __str__(self) -> str:
        lines = "; ".join(map(str, self.groups))
        changed = ""
        if self.stale_tokens is not None:
            changed = (
                "The pool has changed since the lookup, which found "
                f"{self.stale_tokens:,} tokens. Now "
            )
        return (
            f"{changed}{self.num_tokens:,} of {self.max_tokens:,} tokens hit: {lines}. Hits end at "
            f"multiples of {self.match_unit:,} tokens; the shortest prompt that can hit has "
            f"{self.min_prompt_tokens:,}."
        )


_OWN_REASONS = frozenset(Reason) - {Reason.NOTHING_LEFT, Reason.OTHER_GROUP}


# The match's hashes as an (n, width) uint8 array.
_Digests: TypeAlias = Any
# Reason, boundary in question, (evictions since, seconds since).
_Why: TypeAlias = tuple[Reason, int | None, tuple[int, int] | None]


def min_prompt_tokens(cache: PrefixCache) -> int:
    """Length of the shortest prompt that can hit; its last token is computed again.

    With a drafter, the unit that it gives back has to be in the prompt too.
    """
    layout = cache.layout
    unit = layout.match_unit
    if not layout.eagle:
        return unit + 1
    if len(layout.groups) == 1 and layout.groups[0].block_size == unit:
        return 2 * unit + 1
    margins = [
        unit if unit < s.group.block_size else s.group.block_size
        for s in layout.sets
        if s.eagle and not isinstance(s.group, Mamba)
    ]
    return max([unit + 1, *(unit + margin for margin in margins)])


class _Resident:
    """What the pool holds of one request in one group: a flag for each boundary."""

    def __init__(self, match: PrefixMatch, digests: _Digests, group: int) -> None:
        self.cache = match.cache
        self.group = group
        self.digests = digests
        self.unit = self.cache.pool.hash_block_size
        self.flags = self.cache.pool.find_ids(self.digests, group) >= 0

    def has(self, boundary: int) -> bool:
        return bool(self.flags[boundary // self.unit - 1])

    def highest(self, low: int, high: int) -> int | None:
        """The highest boundary in (low, high] tokens that is there."""
        first = low // self.unit
        found = np.flatnonzero(self.flags[first : high // self.unit])
        return (first + int(found[-1]) + 1) * self.unit if len(found) else None

    def eviction(self, boundaries: Iterable[int]) -> tuple[int, int, int] | None:
        """(boundary, evictions since, seconds since) of the latest among those not there."""
        gone = []
        for boundary in boundaries:
            row = boundary // self.unit - 1
            if row >= len(self.flags) or self.flags[row]:
                continue
            ago = self.cache.eviction_of(self.digests[row].tobytes(), self.group)
            if ago is not None:
                gone.append((ago[0], boundary, ago[1]))
        if not gone:
            return None
        evictions, boundary, seconds = min(gone)
        return boundary, evictions, seconds


def explain(match: PrefixMatch, digests: _Digests, stale_tokens: int | None) -> Explanation:
    """Why ``match`` is not longer, from what the pool holds now.

    Args:
        match: As a lookup finds it now.
        digests: Its hashes.
        stale_tokens: Tokens of the match that is asked for, if a lookup found that before.
    """
    cache = match.cache
    groups = cache.groups
    limit = match.max_tokens
    reach = {}
    for g, group in enumerate(groups):
        if isinstance(group, FullAttention):
            reach[g] = min(limit, cache.reach(digests, g, limit))
    # A state or a window counts only where full attention can follow.
    bound = min(reach.values(), default=limit)
    for g, group in enumerate(groups):
        if not isinstance(group, FullAttention):
            reach[g] = cache.reach(digests, g, bound)
    reports = tuple(
        _report(match, digests, g, group, reach[g], bound) for g, group in enumerate(groups)
    )
    return Explanation(
        match.num_tokens, limit, cache.match_unit, min_prompt_tokens(cache), reports, stale_tokens
    )


def _report(
    match: PrefixMatch, digests: _Digests, g: int, group: Group, reach: int, bound: int
) -> GroupReport:
    reason, at, ago = _why(match, digests, g, group, reach, bound)
    evictions, seconds = (None, None) if ago is None else ago
    return GroupReport(g, _NAMES[type(group)], reach, reason, at, evictions, seconds)


def _why(
    match: PrefixMatch, digests: _Digests, g: int, group: Group, reach: int, bound: int
) -> _Why:
    cache = match.cache
    unit = cache.match_unit
    allowed = match.max_tokens if isinstance(group, FullAttention) else bound
    target = allowed // unit * unit
    if target == 0 and match.max_tokens // unit == 0:
        return Reason.MATCH_UNIT, None, None
    if reach >= target or reach > match.num_tokens:
        done = match.num_tokens >= match.max_tokens // unit * unit
        return (Reason.NOTHING_LEFT if done else Reason.OTHER_GROUP), None, None
    in_set = next(s for s in cache.layout.sets if g in s.members)
    if in_set.eagle and cache.reach(digests, g, allowed, drop=False) >= target:
        return Reason.EAGLE_DROP, None, None
    resident = _Resident(match, digests, g)
    if isinstance(group, Mamba):
        is_known = any(isinstance(other, FullAttention) for other in cache.groups)
        return _why_state(resident, reach, target, is_known)
    if isinstance(group, SlidingWindow):
        return _why_window(resident, group, reach, target)
    return _why_run(resident, group, reach, allowed)


def _gone_or(resident: _Resident, boundaries: Iterable[int], otherwise: _Why) -> _Why:
    gone = resident.eviction(boundaries)
    if gone is None:
        return otherwise
    boundary, evictions, seconds = gone
    return Reason.EVICTED, boundary, (evictions, seconds)


def _why_run(
    resident: _Resident, group: FullAttention | ChunkedLocal, reach: int, allowed: int
) -> _Why:
    # The first block that is missing; coarse, also what is there beyond the last multiple.
    size = group.block_size
    start = reach // size * size
    if isinstance(group, ChunkedLocal):
        start = max(start, allowed // group.attention_chunk_size * group.attention_chunk_size)
    end = start + size
    while end <= allowed and resident.has(end):
        end += size
    inside = resident.highest(max(reach, end - size), min(end, allowed))
    if inside is None and end - size > reach:
        inside = end - size
    if inside is not None and inside % resident.cache.match_unit:
        return Reason.MATCH_UNIT, inside, None
    last = min(end, len(resident.flags) * resident.unit)
    wanted = range(max(reach, end - size) + resident.unit, last + 1, resident.unit)
    first = end if resident.cache.layout.match == "coarse" else reach + resident.unit
    return _gone_or(resident, wanted, (Reason.NEVER_SEEN, first, None))


def _why_state(resident: _Resident, reach: int, target: int, is_known: bool) -> _Why:
    between = resident.highest(reach, target)
    if between is not None:
        return Reason.MATCH_UNIT, between, None
    wanted = range(reach + resident.unit, target + 1, resident.unit)
    if reach:
        otherwise = Reason.COARSER_STATE
    else:
        otherwise = Reason.NO_STATE if is_known else Reason.NEVER_SEEN
    return _gone_or(resident, wanted, (otherwise, target, None))


def _why_window(resident: _Resident, group: SlidingWindow, reach: int, target: int) -> _Why:
    size = group.block_size
    needed = max(1, -(-(group.sliding_window - 1) // size))
    first = max(0, target // size - needed)
    window = [(block + 1) * size for block in range(first, target // size)]
    missing = [boundary for boundary in window if not resident.has(boundary)]
    if not missing:
        # Complete there, so a drafter's extra block is what is missing.
        return Reason.EAGLE_DROP if is_eagle(group) else Reason.OTHER_GROUP, target, None
    some = len(missing) < len(window) or reach > 0
    otherwise = Reason.WINDOW_INCOMPLETE if some else Reason.NEVER_SEEN
    return _gone_or(resident, missing, (otherwise, missing[-1], None))
