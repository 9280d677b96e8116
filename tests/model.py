# SPDX-License-Identifier: Apache-2.0
"""The pool again, in dicts and lists: what cpool.BlockPool must do, written to be read.

Blocks are plain ids. Decisions are those of vLLM 0.32.0's BlockPool, which
tests/vllm/test_model_against_stock.py proves; where that pool would silently corrupt
itself, this one refuses before anything changes and marks the refusal ``stricter``.

Three things are deliberately left open, because the reference leaves them open: the
order in which extra keys of one block are removed (AnyOrder), and what an id method
says about tokens and extra keys in an event (ANYTHING).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

NULL_BLOCK = 0
GROUP_BYTES = 4


class ModelError(Exception):
    """A refusal; nothing was changed. ``stricter``: the reference would have gone on."""

    def __init__(self, message: str, stricter: bool = False) -> None:
        super().__init__(message)
        self.stricter = stricter


class ContractRefusal(ModelError):
    """cpool.ContractError."""


class RootRefusal(ModelError):
    """cpool.ContractError that asks for parent_hash."""


class IdRefusal(ModelError):
    """cpool.BlockIdError."""


class ValueRefusal(ModelError):
    """ValueError."""


class TooFewHashes(ModelError):
    """IndexError: the request's chain is shorter than the call needs."""


class TooFewBlocks(ModelError):
    """ValueError with exactly this message."""


class Anything:
    """Equal to everything: a field of which the contract says nothing."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None

    def __repr__(self) -> str:
        return "ANYTHING"


ANYTHING = Anything()


@dataclass
class Stored:
    block_hashes: list[int]
    parent_block_hash: Any
    token_ids: Any
    block_size: int
    lora_id: Any
    medium: str
    lora_name: Any
    extra_keys: Any
    group_idx: int
    session_id: Any


@dataclass(frozen=True, order=True)
class Removed:
    block_hashes: tuple[int, ...]
    medium: str
    group_idx: int


@dataclass(frozen=True)
class Cleared:
    pass


@dataclass(frozen=True)
class AnyOrder:
    """Removals that follow one another in an order the contract leaves open."""

    events: tuple[Removed, ...]


def make_key(block_hash: bytes, group: int) -> bytes:
    return block_hash + group.to_bytes(GROUP_BYTES, "big")


def event_hash(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def event_extra_keys(request: Any, starts: Iterable[int], size: int) -> list[Any] | None:
    """What each stored block depends on besides its tokens; None if no block is stored."""
    return [block_extra_keys(request, start, start + size) for start in starts] or None


def block_extra_keys(request: Any, start: int, end: int) -> tuple[Any, ...] | None:
    keys: list[Any] = []
    if request.lora_request:
        keys.append(request.lora_request.lora_name)
    for feature in request.mm_features:
        first = feature.mm_position.offset
        if first < end and start < first + feature.mm_position.length:
            keys.append((feature.identifier, first - start))
    if start == 0 and request.cache_salt:
        keys.append(request.cache_salt)
    return tuple(keys) or None


@dataclass
class Block:
    ref_cnt: int = 0
    # Key -> tokens it covers. The first entry is the primary key.
    keys: dict[bytes, int | None] = field(default_factory=dict)

    @property
    def primary(self) -> bytes | None:
        return next(iter(self.keys), None)

    @property
    def num_tokens(self) -> int | None:
        return next(iter(self.keys.values()), None)


class ModelPool:
    def __init__(
        self,
        num_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_events: bool = False,
        collector: Any = None,
        medium: str = "GPU",
    ) -> None:
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free_queue = list(range(1, num_blocks))
        self.table: dict[bytes, list[int]] = {}  # Key -> blocks, in order of insertion.
        self.watchers: dict[int, Callable[[int], None]] = {}
        self.events: list[Any] = []
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_events = enable_events
        self.collector = collector
        self.medium = medium
        self.num_evicted_blocks = 0

    # Checks. Each runs before the first change of its operation.

    def check_ids(self, ids: Iterable[int]) -> None:
        for block_id in ids:
            if not 0 <= block_id < len(self.blocks):
                raise IdRefusal(f"{block_id}, of {len(self.blocks)}", stricter=block_id < 0)

    def check_num_tokens(self, num_tokens: int) -> None:
        if num_tokens <= 0 or num_tokens % self.hash_block_size:
            raise ContractRefusal(f"num_tokens {num_tokens}")

    def check_root(self, parent: bytes | None, is_first: bool) -> None:
        """Only what comes first in a request has no parent that events could name."""
        if self.enable_events and parent is None and not is_first:
            raise RootRefusal("events would say that a prefix begins here", stricter=True)

    def check_releases(self, ids: list[int]) -> None:
        """No block may be released more often than it is held, repeats in ids counted."""
        for block_id in set(ids) - {NULL_BLOCK}:
            if ids.count(block_id) > self.blocks[block_id].ref_cnt:
                raise ContractRefusal(f"block {block_id} released too often", stricter=True)

    def check_promotions(self, stores: list[tuple[int, bytes, int]]) -> None:
        """A block that has a key takes a full one only if that covers more tokens."""
        covered = {
            block_id: self.blocks[block_id].num_tokens
            for block_id, _, _ in stores
            if self.blocks[block_id].keys
        }
        for block_id, _, num_tokens in stores:
            if block_id in covered:
                old = covered[block_id]
                if old is None or old >= num_tokens:
                    raise ContractRefusal(f"block {block_id} covers {old} >= {num_tokens}")
            covered[block_id] = num_tokens

    # Allocation, references, eviction.

    def get_new_blocks(self, n: int) -> list[int]:
        if n < 0:
            raise ContractRefusal(f"{n} blocks", stricter=True)
        if n > len(self.free_queue):
            raise TooFewBlocks(f"Cannot get {n} free blocks from the pool")
        ids = self.free_queue[:n]
        del self.free_queue[:n]
        self.notify_reuse(ids)
        for block_id in ids:
            if self.enable_caching:
                self.maybe_evict(block_id)
            self.blocks[block_id].ref_cnt += 1
            self.collect("on_block_allocated", block_id)
        return ids

    def touch(self, ids: list[int]) -> None:
        self.check_ids(ids)
        for block_id in ids:
            if self.blocks[block_id].ref_cnt == 0 and block_id != NULL_BLOCK:
                self.free_queue.remove(block_id)
            self.blocks[block_id].ref_cnt += 1
            self.collect("on_block_accessed", block_id)

    def free_blocks(self, ids: list[int]) -> None:
        self.check_ids(ids)
        self.check_releases(ids)
        unhashed, hashed = [], []
        for block_id in ids:
            block = self.blocks[block_id]
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block_id != NULL_BLOCK:
                keep = bool(block.keys) and self.enable_caching
                (hashed if keep else unhashed).append(block_id)
        self.free_queue[:0] = unhashed
        self.free_queue += hashed

    def unpin_blocks(self, ids: list[int], on_reuse: Callable[[int], None]) -> None:
        self.check_ids(ids)
        if NULL_BLOCK in ids:
            raise ContractRefusal("the null block is never pinned")
        try:
            self.check_releases(ids)
        except ContractRefusal as refusal:
            refusal.stricter = False
            raise
        for block_id in ids:
            self.blocks[block_id].ref_cnt -= 1
            self.watchers[block_id] = on_reuse
            if self.blocks[block_id].ref_cnt == 0:
                self.free_queue.append(block_id)

    def evict_blocks(self, ids: list[int]) -> int:
        self.check_ids(ids)
        return sum(self.maybe_evict(block_id) for block_id in ids)

    def reset_prefix_cache(self) -> bool:
        if len(self.free_queue) != len(self.blocks) - 1:
            return False
        self.table.clear()
        self.notify_reuse(list(self.watchers))
        for block in self.blocks:
            block.keys.clear()
        if self.collector:
            self.collector.reset()
        self.emit(Cleared())
        return True

    # Registration.

    def cache_full_blocks(
        self,
        request: Any,
        ids: list[int],
        num_cached: int,
        num_full: int,
        block_size: int,
        group: int,
        mask: list[bool] | None = None,
    ) -> None:
        if num_cached >= num_full:
            return
        if num_cached < 0:
            raise ContractRefusal(f"num_cached_blocks {num_cached}", stricter=True)
        if num_full > len(ids):
            raise ContractRefusal(f"{num_full} of {len(ids)} blocks", stricter=True)
        if mask is not None and len(mask) != num_full - num_cached:
            raise ContractRefusal(f"{len(mask)} mask entries")
        hashes = self.hashes_at(request, block_size)
        indices = [
            i
            for i in range(num_cached, num_full)
            if ids[i] != NULL_BLOCK and (mask is None or mask[i - num_cached])
        ]
        # The parent is only looked at for the event.
        last_needed = max([*indices, num_cached - 1 if self.enable_events else -1])
        if last_needed >= len(hashes):
            raise TooFewHashes(f"{last_needed + 1} of {len(hashes)} hashes")
        stores = [(ids[i], hashes[i], (i + 1) * block_size) for i in indices]
        self.check_promotions(stores)
        self.store_full(stores, group)
        self.emit(
            Stored(
                block_hashes=[event_hash(block_hash) for _, block_hash, _ in stores],
                parent_block_hash=self.parent(hashes, num_cached),
                token_ids=request.all_token_ids[num_cached * block_size : num_full * block_size],
                block_size=block_size,
                extra_keys=event_extra_keys(request, [i * block_size for i in indices], block_size),
                **self.event_context(request, group),
            )
        )

    def cache_full_ids(
        self,
        ids: Sequence[int],
        hashes: Sequence[bytes],
        group: int,
        block_size: int,
        first_block: int = 0,
        parent: bytes | None = None,
    ) -> None:
        self.check_ids(ids)
        if len(ids) != len(hashes):
            raise ValueRefusal(f"{len(ids)} ids, {len(hashes)} hashes")
        if block_size <= 0 or block_size % self.hash_block_size:
            raise ContractRefusal(f"block_size {block_size}")
        if ids:
            self.check_root(parent, first_block == 0)
        stores = [
            (block_id, block_hash, (first_block + i + 1) * block_size)
            for i, (block_id, block_hash) in enumerate(zip(ids, hashes, strict=True))
            if block_id != NULL_BLOCK
        ]
        self.check_promotions(stores)
        self.store_full(stores, group)
        if ids:
            digests = [block_hash for _, block_hash, _ in stores]
            self.emit_loosely(digests, parent, block_size, group)

    def store_full(self, stores: list[tuple[int, bytes, int]], group: int) -> None:
        for block_id, block_hash, num_tokens in stores:
            self.emit_removed(self.remove_keys(block_id))
            self.insert(make_key(block_hash, group), block_id, num_tokens)

    def cache_partial_block(
        self,
        request: Any,
        block_id: int,
        num_tokens: int,
        group: int,
        block_size: int,
        replace: bool = False,
    ) -> bytes | None:
        if block_id == NULL_BLOCK:
            return None
        self.hashes_at(request, block_size)
        self.check_num_tokens(num_tokens)
        hashes = request.block_hashes
        last = num_tokens // self.hash_block_size - 1
        if last >= len(hashes):
            raise ContractRefusal(f"{num_tokens} tokens, {len(hashes)} hashes")
        key = make_key(hashes[last], group)
        if self.store_partial(key, block_id, num_tokens, replace):
            start = last * self.hash_block_size
            self.emit(
                Stored(
                    block_hashes=[event_hash(hashes[last])],
                    parent_block_hash=self.parent(hashes, last),
                    token_ids=request.all_token_ids[start:num_tokens],
                    block_size=self.hash_block_size,
                    extra_keys=event_extra_keys(request, [start], self.hash_block_size),
                    **self.event_context(request, group),
                )
            )
        return key

    def cache_partial_id(
        self,
        block_id: int,
        block_hash: bytes,
        num_tokens: int,
        group: int,
        replace: bool = False,
        parent: bytes | None = None,
    ) -> None:
        self.check_ids([block_id])
        self.check_num_tokens(num_tokens)
        if block_id == NULL_BLOCK:
            return
        self.check_root(parent, num_tokens == self.hash_block_size)
        if self.store_partial(make_key(block_hash, group), block_id, num_tokens, replace):
            self.emit_loosely([block_hash], parent, self.hash_block_size, group)

    def cache_partial_ids(
        self,
        ids: Sequence[int],
        hashes: Sequence[bytes],
        num_tokens: Sequence[int],
        group: int,
        parents: Sequence[bytes | None],
    ) -> None:
        self.check_ids(ids)
        if len(ids) != len(hashes):
            raise ValueRefusal(f"{len(ids)} ids, {len(hashes)} hashes")
        for tokens in num_tokens:
            self.check_num_tokens(tokens)
        for block_id, tokens, parent in zip(ids, num_tokens, parents, strict=True):
            if block_id != NULL_BLOCK:
                self.check_root(parent, tokens == self.hash_block_size)
        for i, block_id in enumerate(ids):
            self.cache_partial_id(block_id, hashes[i], num_tokens[i], group, parent=parents[i])

    def store_partial(self, key: bytes, block_id: int, num_tokens: int, replace: bool) -> bool:
        """True if the key is new on this block, or its contents were replaced."""
        block = self.blocks[block_id]
        if key in block.keys and not replace:
            return False
        outgrown = block.num_tokens is not None and block.num_tokens < num_tokens
        if replace or outgrown:
            self.emit_removed(self.remove_keys(block_id))
        self.insert(key, block_id, num_tokens)
        return True

    def insert(self, key: bytes, block_id: int, num_tokens: int | None) -> None:
        if block_id == NULL_BLOCK:
            raise ContractRefusal("the null block is never registered", stricter=True)
        if key not in self.blocks[block_id].keys:
            self.blocks[block_id].keys[key] = num_tokens
            self.table.setdefault(key, []).append(block_id)

    def remove_keys(self, block_id: int) -> dict[bytes, int | None]:
        """Take every key of a block out of the table; primary first."""
        removed = self.blocks[block_id].keys
        self.blocks[block_id].keys = {}
        for key in removed:
            self.table[key].remove(block_id)
            if not self.table[key]:
                del self.table[key]
        return removed

    def maybe_evict(self, block_id: int) -> bool:
        self.collect("on_block_evicted", block_id)
        removed = self.remove_keys(block_id)
        self.emit_removed(removed)
        self.num_evicted_blocks += bool(removed)
        return bool(removed)

    def move_block_hashes(self, src: int, dst: int) -> None:
        self.check_ids([src, dst])
        if self.blocks[dst].keys:
            raise ContractRefusal(f"block {dst} has a key")
        if dst == NULL_BLOCK:
            raise ContractRefusal("the null block is never registered", stricter=True)
        for key, num_tokens in self.remove_keys(src).items():
            self.insert(key, dst, num_tokens)

    # Lookups.

    def find(self, block_hash: bytes, group: int) -> int | None:
        return next(iter(self.table.get(make_key(block_hash, group), [])), None)

    def get_cached_block(self, block_hash: bytes, groups: Sequence[int]) -> list[int] | None:
        found = [self.find(block_hash, group) for group in groups]
        return None if None in found else found

    def find_ids(self, hashes: Sequence[bytes], group: int) -> list[int]:
        found = [self.find(block_hash, group) for block_hash in hashes]
        return [-1 if block_id is None else block_id for block_id in found]

    def find_full_ids(self, hashes: Sequence[bytes], group: int, block_size: int) -> list[int]:
        found = []
        for block_hash in hashes:
            key = make_key(block_hash, group)
            covered = {b: self.blocks[b].keys[key] for b in self.table.get(key, [])}
            full = [b for b, tokens in covered.items() if tokens and tokens % block_size == 0]
            found.append(full[0] if full else -1)
        return found

    def find_prefix_ids(self, hashes: Sequence[bytes], group: int) -> list[int]:
        found = self.find_ids(hashes, group)
        return found[: found.index(-1)] if -1 in found else found

    def is_block_writable(self, block_id: int) -> bool:
        block = self.blocks[block_id]
        return block_id != NULL_BLOCK and block.ref_cnt == 1 and not block.keys

    def get_num_free_blocks(self) -> int:
        return len(self.free_queue)

    def get_usage(self) -> float:
        usable = len(self.blocks) - 1
        return 1.0 - len(self.free_queue) / usable if usable else 0

    # Events, watchers, metrics.

    def emit_cached_block_events(
        self, request: Any, num_cached: int, block_size: int, group: int
    ) -> None:
        if not self.enable_events or num_cached <= 0:
            return
        hashes = self.hashes_at(request, block_size)
        if num_cached > len(hashes):
            raise TooFewHashes(f"{num_cached} of {len(hashes)} hashes")
        starts = range(0, num_cached * block_size, block_size)
        self.emit(
            Stored(
                block_hashes=[event_hash(block_hash) for block_hash in hashes[:num_cached]],
                parent_block_hash=None,
                token_ids=request.all_token_ids[: num_cached * block_size],
                block_size=block_size,
                extra_keys=event_extra_keys(request, starts, block_size),
                **self.event_context(request, group),
            )
        )

    def take_events(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def emit(self, event: Any) -> None:
        if self.enable_events:
            self.events.append(event)

    def emit_removed(self, keys: Iterable[bytes]) -> None:
        removed = [
            Removed(
                (event_hash(key[:-GROUP_BYTES]),),
                self.medium,
                int.from_bytes(key[-GROUP_BYTES:], "big"),
            )
            for key in keys
        ]
        if removed:
            self.emit(removed[0])
        if removed[1:]:
            self.emit(AnyOrder(tuple(removed[1:])))

    def emit_loosely(
        self, hashes: list[bytes], parent: bytes | None, block_size: int, group: int
    ) -> None:
        self.emit(
            Stored(
                block_hashes=[event_hash(block_hash) for block_hash in hashes],
                parent_block_hash=None if parent is None else event_hash(parent),
                token_ids=ANYTHING,
                block_size=block_size,
                lora_id=None,
                medium=self.medium,
                lora_name=None,
                extra_keys=ANYTHING,
                group_idx=group,
                session_id=None,
            )
        )

    def event_context(self, request: Any, group: int) -> dict[str, Any]:
        lora = request.lora_request
        return {
            "lora_id": lora.adapter_id if lora else None,
            "lora_name": lora.name if lora else None,
            "medium": self.medium,
            "group_idx": group,
            "session_id": request.session_id,
        }

    def parent(self, hashes: Sequence[bytes], index: int) -> int | None:
        """The hash before ``hashes[index]``, as an event names it."""
        return event_hash(hashes[index - 1]) if index > 0 and self.enable_events else None

    def hashes_at(self, request: Any, block_size: int) -> list[bytes]:
        """The request's chain at every block_size boundary: nothing is hashed again."""
        if block_size <= 0 or block_size % self.hash_block_size:
            raise ContractRefusal(f"block_size {block_size}", stricter=block_size <= 0)
        step = block_size // self.hash_block_size
        return list(request.block_hashes)[step - 1 :: step]

    def notify_reuse(self, ids: Iterable[int]) -> None:
        for block_id in ids:
            watcher = self.watchers.pop(block_id, None)
            if watcher is not None:
                watcher(block_id)

    def collect(self, name: str, block_id: int) -> None:
        if self.collector:
            getattr(self.collector, name)(block_id)
