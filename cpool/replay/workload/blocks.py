# SPDX-License-Identifier: Apache-2.0
"""Numbers for the blocks of prompts: equal numbers mean equal tokens from the start on.

A block is known by the block before it and by its pieces, each (segment, first token, length).
Blocks inside one long segment follow from the first of them, so they are numbered as a run:
the key of a run is the block before it and where in the segment it begins.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpool.replay.workload.prompt import Prompt

_Piece = tuple[int, int, int]
_NO_BLOCK = -1  # before the first one


class _Blocks(NamedTuple):
    ids: NDArray[np.int64]  # of the full blocks
    tail: tuple[_Piece, ...]  # the pieces of the partial last block
    num_tail_tokens: int


_START = _Blocks(np.empty(0, dtype=np.int64), (), 0)


class BlockNumbers:
    """Gives dense numbers, in order of first use."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._num_ids = 0
        self._mixed: dict[tuple[int, tuple[_Piece, ...]], int] = {}
        self._runs: dict[tuple[int, int, int], NDArray[np.int64]] = {}

    def of(self, prompt: Prompt) -> NDArray[np.int64]:
        """The numbers of the prompt's full blocks, as int64."""
        todo = []
        node: Prompt | None = prompt
        while node is not None and node.blocks is None:
            todo.append(node)
            node = node.parent
        blocks = _START
        if node is not None:
            assert isinstance(node.blocks, _Blocks)
            blocks = node.blocks
            # A chat goes on from its newest prompt; older ones are rarely needed again.
            node.blocks = None
        for part in reversed(todo):
            blocks = self._extend(blocks, part.segment, part.length)
        prompt.blocks = blocks
        return blocks.ids

    def _extend(self, blocks: _Blocks, segment: int, length: int) -> _Blocks:
        size = self._block_size
        parts = [blocks.ids]
        parent = int(blocks.ids[-1]) if len(blocks.ids) else _NO_BLOCK
        start = 0
        if blocks.tail:
            start = min(size - blocks.num_tail_tokens, length)
            pieces = (*blocks.tail, (segment, 0, start))
            num_tail_tokens = blocks.num_tail_tokens + start
            if num_tail_tokens < size:
                return _Blocks(blocks.ids, pieces, num_tail_tokens)
            parent = self._mixed_block(parent, pieces)
            parts.append(np.array([parent], dtype=np.int64))
        num_full = (length - start) // size
        if num_full:
            parts.append(self._run(parent, segment, start, num_full))
        end = start + num_full * size
        rest = length - end
        tail = ((segment, end, rest),) if rest else ()
        return _Blocks(np.concatenate(parts), tail, rest)

    def _mixed_block(self, parent: int, pieces: tuple[_Piece, ...]) -> int:
        number = self._mixed.setdefault((parent, pieces), self._num_ids)
        self._num_ids += number == self._num_ids
        return number

    def _run(self, parent: int, segment: int, start: int, count: int) -> NDArray[np.int64]:
        key = (parent, segment, start)
        run = self._runs.get(key)
        known = 0 if run is None else len(run)
        if known < count:
            new = np.arange(self._num_ids, self._num_ids + count - known, dtype=np.int64)
            self._num_ids += len(new)
            run = self._runs[key] = new if run is None else np.concatenate((run, new))
        assert run is not None
        return run[:count]
