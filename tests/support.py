# SPDX-License-Identifier: Apache-2.0
"""What the tests share: a request, calls by block id, and dumps to compare."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from . import model as reference


@dataclass
class Request:
    """What the pool reads of an engine's request."""

    block_hashes: Any
    all_token_ids: list[int] = field(default_factory=list)
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    cache_salt: str | None = None
    prompt_embeds: Any = None
    session_id: str | None = None


def make_request(
    num_hashes: int, hash_block_size: int = 4, width: int = 32, seed: int = 0, **kwargs: Any
) -> Request:
    """A request whose chain is made of distinct, recognisable digests."""
    hashes = [
        bytes([seed]) + bytes(width - 4) + number.to_bytes(2, "big") + b"\x5a"
        for number in range(1, num_hashes + 1)
    ]
    return Request(hashes, list(range(num_hashes * hash_block_size)), **kwargs)


def hold_nine(pool: Any, chain: Request) -> list[Any]:
    """Holds blocks 1 to 9: 1 to 3 with full keys, 4 a copy of 1, 5 and 6 with extra keys."""
    blocks = pool.get_new_blocks(9)
    pool.cache_full_blocks(chain, blocks, 0, 3, 4, 0)
    pool.cache_full_blocks(chain, blocks[3:], 0, 1, 4, 0)
    for block in blocks[4:6]:
        pool.cache_partial_block(chain, block, 12, 1, 16)
        pool.cache_partial_block(chain, block, 8, 1, 16)
    return blocks


def lora(name: str = "adapter", adapter_id: int = 7) -> Any:
    return SimpleNamespace(name=name, lora_name=name, lora_path="/lora", adapter_id=adapter_id)


def image(identifier: str, offset: int, length: int) -> Any:
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=position)


class Collector:
    """Writes down what a metrics collector is told, and when."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int | None]] = []

    def note(self, name: str, block: Any) -> None:
        self.calls.append((name, block if isinstance(block, int) else block.block_id))

    def on_block_allocated(self, block: Any) -> None:
        self.note("allocated", block)

    def on_block_accessed(self, block: Any) -> None:
        self.note("accessed", block)

    def on_block_evicted(self, block: Any) -> None:
        self.note("evicted", block)

    def reset(self) -> None:
        self.calls.append(("reset", None))


class HandleCalls:
    """The model's methods over any pool with vLLM's names: cpool's, or vLLM's own.

    Handles of odd ids are kept, those of even ids die after each call, so that both
    kinds of handle are met.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.reused: list[int] = []
        self.kept = {i: pool.blocks[i] for i in range(1, len(pool.blocks), 2)}

    def blocks(self, ids: Iterable[int]) -> list[Any]:
        blocks = [self.pool.blocks[i] for i in ids]
        for block in blocks:
            assert block is self.kept.get(block.block_id, block)
        return blocks

    def get_new_blocks(self, n: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(n)]

    def touch(self, ids: list[int]) -> None:
        self.pool.touch(self.blocks(ids))

    def free_blocks(self, ids: list[int]) -> None:
        self.pool.free_blocks(block for block in self.blocks(ids))

    def unpin_blocks(self, ids: list[int], on_reuse: Callable[[int], None]) -> None:
        self.pool.unpin_blocks(iter(self.blocks(ids)), lambda block: on_reuse(block.block_id))

    def evict_blocks(self, ids: list[int]) -> None:
        self.pool.evict_blocks(ids)

    def reset_prefix_cache(self) -> bool:
        return self.pool.reset_prefix_cache()

    def cache_full_blocks(self, request: Any, ids: list[int], *args: Any) -> None:
        return self.pool.cache_full_blocks(request, self.blocks(ids), *args)

    def cache_partial_block(self, request: Any, block_id: int, *args: Any) -> bytes | None:
        return self.pool.cache_partial_block(request, *self.blocks([block_id]), *args)

    def move_block_hashes(self, src: int, dst: int) -> None:
        self.pool.move_block_hashes(*self.blocks([src, dst]))

    def insert(self, key: bytes, block_id: int, num_tokens: int | None) -> None:
        self.pool._insert_block_hash(key, *self.blocks([block_id]), num_tokens=num_tokens)

    def maybe_evict(self, block_id: int) -> bool:
        return self.pool._maybe_evict_cached_block(*self.blocks([block_id]))

    def emit_cached_block_events(self, *args: Any) -> None:
        self.pool.emit_cached_block_events(*args)


class IdCalls:
    """The model's methods over cpool's array twins."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def get_new_blocks(self, n: int) -> list[int]:
        return self.pool.get_new_block_ids(n).tolist()

    def touch(self, ids: list[int]) -> None:
        self.pool.touch_ids(ids)

    def free_blocks(self, ids: list[int]) -> None:
        self.pool.free_ids(ids)

    def evict_blocks(self, ids: list[int]) -> int:
        return self.pool.evict_ids(ids)

    def cache_full_ids(self, *args: Any) -> None:
        *args, parent = args
        self.pool.cache_full_ids(*args, parent_hash=parent)

    def cache_partial_id(self, *args: Any) -> None:
        *args, parent = args
        self.pool.cache_partial_id(*args, parent_hash=parent)

    def cache_partial_ids(self, *args: Any) -> None:
        *args, parents = args
        self.pool.cache_partial_ids(*args, parent_hashes=parents)

    def move_block_hashes(self, src: int, dst: int) -> None:
        self.pool.move_ids(src, dst)


def dump(pool: Any) -> dict[str, Any]:
    """Everything that can be seen of a cpool.BlockPool, in plain comparable values.

    Events that wait are included and stay in the queue.
    """
    ids = range(pool.num_gpu_blocks)
    registrations = {i: [tuple(r) for r in pool.registrations(i)] for i in ids}
    keys = {(r[0], r[1]) for rows in registrations.values() for r in rows}
    return {
        "free_queue": pool.free_queue_ids().tolist(),
        "num_free": pool.get_num_free_blocks(),
        "usage": pool.get_usage(),
        # Of a free block the count holds a note of the queue's, 0 or below.
        "ref_cnts": pool.ref_cnts[:1].tolist() + pool.ref_cnts[1:].clip(0).tolist(),
        "primary": [pool.blocks[i].block_hash for i in ids],
        "num_tokens": [pool.blocks[i].block_hash_num_tokens for i in ids],
        "extra": {i: set(k) for i, k in pool.cached_block_hashes_by_block.items() if k},
        "registrations": {i: rows for i, rows in registrations.items() if rows},
        "first": {key: pool.get_cached_block(key[0], [key[1]])[0].block_id for key in sorted(keys)},
        "num_keys": pool.num_cached_keys,
        "num_registrations": pool.num_registrations,
        "num_evicted": pool.num_evicted_blocks,
        "events": [event_fields(event) for event in waiting_events(pool)],
    }


def waiting_events(pool: Any) -> list[Any]:
    """The events of the queue, runs written out."""
    from cpool.events import types

    events: list[Any] = []
    for event in pool.kv_event_queue:
        events += event.expand(types) if hasattr(event, "expand") else [event]
    return events


def dump_model(pool: reference.ModelPool) -> dict[str, Any]:
    """The same of the model; beyond it, ``holders``, which only the model and vLLM show."""
    blocks = pool.blocks
    registrations = {
        i: [
            (key[: -reference.GROUP_BYTES], group_of(key), num_tokens, key == block.primary)
            for key, num_tokens in block.keys.items()
        ]
        for i, block in enumerate(blocks)
        if block.keys
    }
    return {
        "free_queue": list(pool.free_queue),
        "num_free": pool.get_num_free_blocks(),
        "usage": pool.get_usage(),
        "ref_cnts": [block.ref_cnt for block in blocks],
        "primary": [block.primary for block in blocks],
        "num_tokens": [block.num_tokens for block in blocks],
        "extra": {i: set(list(b.keys)[1:]) for i, b in enumerate(blocks) if len(b.keys) > 1},
        "registrations": registrations,
        "first": {
            (key[: -reference.GROUP_BYTES], group_of(key)): holders[0]
            for key, holders in pool.table.items()
        },
        "holders": {key: list(holders) for key, holders in pool.table.items()},
        "watched": list(pool.watchers),
        "num_keys": len(pool.table),
        "num_registrations": sum(len(block.keys) for block in blocks),
        "num_evicted": pool.num_evicted_blocks,
    }


def in_any_order(registrations: dict[int, list[Any]]) -> dict[int, list[Any]]:
    return {i: sorted(rows, key=repr) for i, rows in registrations.items()}


def group_of(key: bytes) -> int:
    return int.from_bytes(key[-reference.GROUP_BYTES :], "big")


STORED_FIELDS = tuple(reference.Stored.__dataclass_fields__)


def event_fields(event: Any) -> tuple[Any, ...]:
    """An event of cpool or vLLM as the model's event, or as a tuple if it is another."""
    kind = type(event).__name__
    if kind == "BlockStored":
        fields = {name: getattr(event, name) for name in STORED_FIELDS}
        fields["token_ids"] = list(fields["token_ids"])
        return reference.Stored(**fields)
    if kind == "BlockRemoved":
        return reference.Removed(tuple(event.block_hashes), event.medium, event.group_idx)
    if kind == "AllBlocksCleared":
        return reference.Cleared()
    return (kind, event)


def assert_same_events(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compare a pool's events with the model's; only AnyOrder leaves the order open."""
    left = [event_fields(event) for event in actual]
    for event in expected:
        if isinstance(event, reference.AnyOrder):
            num = len(event.events)
            assert all(isinstance(e, reference.Removed) for e in left[:num]), (left, event)
            assert sorted(left[:num]) == sorted(event.events)
            left = left[num:]
        else:
            assert left, f"missing event: {event}"
            assert left[0] == event
            left = left[1:]
    assert not left, f"unexpected events: {left}"
