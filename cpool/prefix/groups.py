# SPDX-License-Identifier: Apache-2.0
"""What a model's KV-cache groups are, and the rules that follow for matching them."""

from dataclasses import dataclass
from math import lcm
from typing import Literal, NamedTuple, TypeAlias


@dataclass(frozen=True)
class FullAttention:
    """Layers that attend to every earlier token.

    Args:
        block_size: Tokens in a block, a multiple of the pool's ``hash_block_size``.
        eagle: Whether a drafter (EAGLE, MTP) needs the last matched unit recomputed.
    """

    block_size: int
    eagle: bool = False


@dataclass(frozen=True)
class SlidingWindow:
    """Layers that attend to the last ``sliding_window`` tokens.

    Args:
        block_size: Tokens in a block, a multiple of the pool's ``hash_block_size``.
        sliding_window: Tokens that a token sees, itself included.
        eagle: Whether a drafter needs the last matched block recomputed.
    """

    block_size: int
    sliding_window: int
    eagle: bool = False


@dataclass(frozen=True)
class ChunkedLocal:
    """Layers that attend to the current chunk of ``attention_chunk_size`` tokens.

    Args:
        block_size: Tokens in a block; all groups of the model must have this size.
        attention_chunk_size: Tokens in a chunk.
    """

    block_size: int
    attention_chunk_size: int


@dataclass(frozen=True)
class Mamba:
    """Layers with a running state, kept at block boundaries ("align" mode).

    Args:
        block_size: Tokens between two kept states, a multiple of ``hash_block_size``.
        eagle: Whether its set counts as the drafter's; a state itself is never given back.
    """

    block_size: int
    eagle: bool = False


Group: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | Mamba
Match: TypeAlias = Literal["coarse", "fine"]


MAX_TOKENS = (1 << 32) - 1  # of a block, a window or a prompt


class GroupSet(NamedTuple):
    """Groups of one kind and size: they are looked up together, a hit is one in each."""

    group: Group
    members: tuple[int, ...]  # kv_cache_group_ids
    eagle: bool


class Layout(NamedTuple):
    """The groups of a model and what follows from them; sizes in tokens."""

    groups: tuple[Group, ...]
    sets: tuple[GroupSet, ...]  # in the order of evaluation
    match_unit: int  # hits end at its multiples
    scheduler_block_size: int  # the least common multiple of the block sizes
    match: Match
    eagle: bool


def window_of(group: Group) -> int:
    """Tokens of a group's window or chunk, 0 if it has none."""
    if isinstance(group, SlidingWindow):
        return group.sliding_window
    if isinstance(group, ChunkedLocal):
        return group.attention_chunk_size
    return 0


def is_eagle(group: Group) -> bool:
    return not isinstance(group, ChunkedLocal) and group.eagle


def check_group(position: int, group: Group, hash_block_size: int) -> None:
    if not isinstance(group, FullAttention | SlidingWindow | ChunkedLocal | Mamba):
        raise TypeError(f"groups[{position}] is a {type(group).__name__}, not a group")
    size = group.block_size
    if type(size) is not int or size < 1 or size % hash_block_size:
        raise ValueError(
            f"groups[{position}].block_size is {size!r}; it must be a multiple of the pool's "
            f"hash_block_size {hash_block_size}"
        )
    if size > MAX_TOKENS:
        raise ValueError(f"groups[{position}].block_size is {size}; the limit is {MAX_TOKENS}")
    if isinstance(group, SlidingWindow | ChunkedLocal):
        window = window_of(group)
        if type(window) is not int or not 1 <= window <= MAX_TOKENS:
            raise ValueError(
                f"groups[{position}] has a window of {window!r} tokens; it must be from 1 to "
                f"{MAX_TOKENS}"
            )


def sets_of(groups: tuple[Group, ...]) -> tuple[GroupSet, ...]:
    """Groups that differ at most in ``eagle``, together; full attention first.

    Full attention scans from the left and so bounds the search of the others.
    """
    members: dict[tuple, list[int]] = {}
    for position, group in enumerate(groups):
        key = (type(group), group.block_size, window_of(group))
        members.setdefault(key, []).append(position)
    sets = [
        GroupSet(groups[ids[0]], tuple(ids), any(is_eagle(groups[i]) for i in ids))
        for ids in members.values()
    ]
    return tuple(sorted(sets, key=lambda s: not isinstance(s.group, FullAttention)))


def why_coarse(groups: tuple[Group, ...], hash_block_size: int) -> str | None:
    """What keeps these groups from matching inside blocks, or None."""
    for position, group in enumerate(groups):
        if group.block_size != hash_block_size and not isinstance(group, FullAttention | Mamba):
            return (
                f"groups[{position}] ({type(group).__name__}) matches whole blocks of "
                f"{group.block_size} tokens only"
            )
    if all(group.block_size == hash_block_size for group in groups):
        return f"all blocks have {hash_block_size} tokens: there are no boundaries inside"
    return None


def plan(groups: tuple[Group, ...], hash_block_size: int, match: Match | None) -> Layout:
    """The layout of a model.

    Args:
        groups: One per ``kv_cache_group_id``.
        hash_block_size: Tokens between two hashes.
        match: "fine": hits may end inside a block, at any hash; "coarse": only where every
            group has a block boundary. None: as vLLM decides, which is fine if a Mamba block
            spans several hashes and every other group can follow.

    Raises:
        ValueError: The groups cannot be matched so.
        TypeError: Something else than a group.
    """
    if not groups:
        raise ValueError("a model has at least one group")
    for position, group in enumerate(groups):
        check_group(position, group, hash_block_size)
    if match not in (None, "coarse", "fine"):
        raise ValueError(f'match is {match!r}; it must be "coarse", "fine" or None')
    obstacle = why_coarse(groups, hash_block_size)
    if match == "fine" and obstacle is not None:
        raise ValueError(f"cannot match fine: {obstacle}")
    if match is None:
        wide_state = any(isinstance(g, Mamba) and g.block_size > hash_block_size for g in groups)
        match = "fine" if wide_state and obstacle is None else "coarse"
    scheduler_block_size = lcm(*(group.block_size for group in groups))
    if scheduler_block_size > MAX_TOKENS:
        raise ValueError(
            f"the least common multiple of the block sizes is {scheduler_block_size} tokens; the "
            f"limit is {MAX_TOKENS}"
        )
    match_unit = hash_block_size if match == "fine" else scheduler_block_size
    sets = sets_of(groups)
    for position, group in enumerate(groups):
        if not isinstance(group, ChunkedLocal):
            continue
        if group.block_size != match_unit:
            raise ValueError(
                f"groups[{position}]: chunked local attention needs blocks of the match unit, "
                f"{match_unit} tokens, not {group.block_size}"
            )
    eagle = any(s.eagle for s in sets)
    return Layout(groups, sets, match_unit, scheduler_block_size, match, eagle)
