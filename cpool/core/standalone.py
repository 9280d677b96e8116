# SPDX-License-Identifier: Apache-2.0
"""Free queue and hash map over block objects that belong to no pool.

vLLM exposes these two parts of its pool as classes of their own, and code builds them from
lists of blocks. A BlockPool does not use them: its ``free_block_queue`` and
``cached_block_hash_to_block`` are views of flat arrays with the same methods.
"""

from collections.abc import Iterator, Sequence
from typing import Any


class FreeKVCacheBlockQueue:
    """Doubly linked list of free blocks, linked through the blocks themselves.

    Args:
        blocks: The blocks that are free, in the order in which they are to be handed out.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        from cpool.core.pool import KVCacheBlock

        self.num_free_blocks = 0
        self.fake_free_list_head = KVCacheBlock(block_id=-1)
        self.fake_free_list_tail = KVCacheBlock(block_id=-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.append_n(blocks)

    def popleft(self) -> Any:
        """Take the first free block. Raises ValueError when there is none."""
        first = self.fake_free_list_head.next_free_block
        if first is self.fake_free_list_tail or first is None:
            if self.num_free_blocks:
                raise AssertionError(
                    f"num_free_blocks ({self.num_free_blocks}) is out of sync with the free list."
                )
            raise ValueError("No free blocks available")
        if first.next_free_block is None:
            raise RuntimeError(
                "Invalid block found in popleft() which doesn't have a valid next_free_block"
            )
        self.remove(first)
        return first

    def popleft_n(self, n: int) -> list[Any]:
        """Take the first ``n`` free blocks. Raises AssertionError when there are fewer."""
        if n > self.num_free_blocks:
            raise AssertionError(f"{n} blocks asked for, {self.num_free_blocks} are free")
        return [self.popleft() for _ in range(n)]

    def remove(self, block: Any) -> None:
        """Take a block out of the middle. Raises RuntimeError when it is not in the list."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Put a block at the end."""
        last = self.fake_free_list_tail.prev_free_block
        if last is None:
            raise RuntimeError("prev_free_block of fake_free_list_tail should always exist")
        self._insert_after(last, block)

    def append_n(self, blocks: Sequence[Any]) -> None:
        """Put blocks at the end, in the given order.

        Raises:
            AssertionError: The end of the list has lost its link; nothing was changed.
        """
        if len(blocks) and self.fake_free_list_tail.prev_free_block is None:
            raise AssertionError("prev_free_block of fake_free_list_tail should always exist")
        for block in blocks:
            self.append(block)

    def prepend_n(self, blocks: Sequence[Any]) -> None:
        """Put blocks at the front, in the given order.

        Raises:
            AssertionError: The front of the list has lost its link; nothing was changed.
        """
        if len(blocks) and self.fake_free_list_head.next_free_block is None:
            raise AssertionError("next_free_block of fake_free_list_head should always exist")
        place = self.fake_free_list_head
        for block in blocks:
            self._insert_after(place, block)
            place = block

    def _insert_after(self, place: Any, block: Any) -> None:
        after = place.next_free_block
        block.prev_free_block = place
        block.next_free_block = after
        place.next_free_block = block
        after.prev_free_block = block
        self.num_free_blocks += 1

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks in order."""
        if self.fake_free_list_head.next_free_block is None:
            raise RuntimeError("next_free_block of fake_free_list_head should always exist")
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Iterate over the blocks behind ``cursor``, or over all of them if it is None."""
        block = (self.fake_free_list_head if cursor is None else cursor).next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            yield block
            block = block.next_free_block


class BlockHashToBlockMap:
    """Key -> the blocks registered under it, in order of registration."""

    def __init__(self) -> None:
        self._cache: dict[bytes, dict[int, Any]] = {}

    def get_one_block(self, key: bytes) -> Any:
        """The first block registered under ``key``, or None."""
        blocks = self._cache.get(key)
        return next(iter(blocks.values())) if blocks else None

    def contain(self, key: bytes, block_id: int) -> bool:
        """Whether that block is registered under ``key``."""
        return block_id in self._cache.get(key, ())

    def insert(self, key: bytes, block: Any) -> None:
        """Register ``block`` under ``key``, behind the blocks that already are."""
        self._cache.setdefault(key, {})[block.block_id] = block

    def pop(self, key: bytes, block_id: int) -> Any:
        """Take one block away from under ``key``; None if it is not there."""
        blocks = self._cache.get(key)
        if blocks is None:
            return None
        block = blocks.pop(block_id, None)
        if not blocks:
            del self._cache[key]
        return block

    def __len__(self) -> int:
        return len(self._cache)
