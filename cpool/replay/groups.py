# SPDX-License-Identifier: Apache-2.0
"""Groups of layers as words on the command line: ``full:1600,mamba:1600``, ``swa:16:4096``."""

from math import gcd

from cpool.prefix import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from cpool.prefix.groups import Group

_KINDS = {"full": FullAttention, "mamba": Mamba, "swa": SlidingWindow, "chunked": ChunkedLocal}
_SYNTAX = (
    "full:BLOCK, mamba:BLOCK, swa:BLOCK:WINDOW or chunked:BLOCK:CHUNK, all in tokens; "
    "the first three may end in :eagle"
)


def parse_groups(text: str) -> tuple[Group, ...]:
    """The groups that the words name, in their order.

    Raises:
        ValueError: a word names no group.
    """
    return tuple(_parse(word.strip()) for word in text.split(","))


def _parse(word: str) -> Group:
    kind, *numbers = word.split(":")
    options = {}
    if numbers and numbers[-1] == "eagle" and kind != "chunked":
        numbers.pop()
        options["eagle"] = True
    num_expected = 2 if kind in ("swa", "chunked") else 1
    if kind not in _KINDS or len(numbers) != num_expected:
        raise ValueError(f"{word!r} is no group; write {_SYNTAX}")
    if not all(number.isdecimal() and 0 < int(number) < 1 << 32 for number in numbers):
        raise ValueError(f"{word!r}: sizes are whole numbers of tokens, from 1 to {2**32 - 1}")
    return _KINDS[kind](*map(int, numbers), **options)


def word_of(group: Group) -> str:
    """A group as `parse_groups` reads it."""
    kind = next(name for name, cls in _KINDS.items() if type(group) is cls)
    parts = [kind, str(group.block_size)]
    if isinstance(group, SlidingWindow):
        parts.append(str(group.sliding_window))
    if isinstance(group, ChunkedLocal):
        parts.append(str(group.attention_chunk_size))
    if not isinstance(group, ChunkedLocal) and group.eagle:
        parts.append("eagle")
    return ":".join(parts)


def common_block_size(groups: tuple[Group, ...]) -> int:
    """Tokens: the largest size that divides every group's block."""
    return gcd(*(group.block_size for group in groups))


def check_units(groups: tuple[Group, ...], match_unit: int, trace_block_size: int) -> None:
    """Raise ValueError unless the trace has a hash at every boundary that is asked for."""
    if match_unit % trace_block_size:
        raise ValueError(
            f"a match unit of {match_unit} tokens is no multiple of the trace's block size "
            f"{trace_block_size}"
        )
    for group in groups:
        if group.block_size % match_unit:
            raise ValueError(
                f"{word_of(group)}: {group.block_size} is no multiple of the match unit "
                f"{match_unit}"
            )


def min_request_blocks(groups: tuple[Group, ...], num_tokens: int, max_chunk: int) -> int:
    """Blocks that one request of that length cannot do without."""
    total = 0
    for group in groups:
        held = num_tokens
        if isinstance(group, SlidingWindow):
            held = min(held, group.sliding_window - 1 + max_chunk)
        elif isinstance(group, ChunkedLocal):
            held = min(held, group.attention_chunk_size)
        elif isinstance(group, Mamba):
            held = min(held, group.block_size)
        total += -(-held // group.block_size)
    return total


def max_useful_blocks(groups: tuple[Group, ...], unique_tokens: int, num_requests: int) -> int:
    """Blocks beyond which a pool is hardly ever fuller: those that an infinite one would hold.

    A request leaves a few states behind in a Mamba group, and one unshared tail in the others.
    """
    total = 0
    for group in groups:
        full = unique_tokens // group.block_size + num_requests
        total += min(full, 4 * num_requests) if isinstance(group, Mamba) else full
    return total
