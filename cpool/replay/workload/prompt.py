# SPDX-License-Identifier: Apache-2.0
"""A prompt is a list of segments; token i of a segment is the pair (segment, i)."""

from __future__ import annotations


class Prompt:
    """A prompt as its last segment and the prompt before it, so that a chat shares its start.

    Segments with the same number hold the same tokens as far as both go. A number may be
    used once in a prompt.
    """

    __slots__ = ("blocks", "length", "num_tokens", "parent", "segment")

    def __init__(self, parent: Prompt | None, segment: int, length: int) -> None:
        self.parent = parent
        self.segment = segment
        self.length = length
        self.num_tokens: int = length + (parent.num_tokens if parent else 0)
        self.blocks: object = None  # what BlockNumbers remembers of it

    def then(self, segment: int, length: int) -> Prompt:
        """This prompt with one more segment; the same one if the segment is empty."""
        return Prompt(self, segment, length) if length > 0 else self
