# SPDX-License-Identifier: Apache-2.0
"""Random operations that reach the interesting states of a small pool.

A world has few hashes and requests that share prefixes, so that keys collide, blocks
are promoted and evicted all the time. The same generators serve a seeded driver and
hypothesis: both are a Picker. Most operations are legal; about one in ten is not.

A large world has ``scale`` times as many hashes, and its batches are as much longer: the
pool works on many keys at once, and looks ahead along its free queue, only in those. Blocks
and hashes then come side by side more often than not, as an engine's do.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from . import model as reference
from .support import Request, image, lora

HASH_BLOCK_SIZE = 4
BLOCK_SIZES = (4, 8, 16)
NUM_GROUPS = 3
CHAIN_LENGTH = 8
# Blocks and scale of large worlds: beyond 32 keys in flight, beyond the queue's notes.
LARGE = ((40, 10), (130, 16), (300, 24))


class Picker(Protocol):
    def integer(self, low: int, high: int) -> int: ...

    def choice(self, items: Sequence[Any]) -> Any: ...


class RandomPicker:
    def __init__(self, rng: random.Random) -> None:
        self.integer = rng.randint
        self.choice = rng.choice


class World:
    """Hashes of one width and the requests that use them."""

    def __init__(self, width: int, scale: int = 1) -> None:
        self.scale = scale
        # Alike at one end, alike at the other, all zero, with zeros inside: what a table
        # that compares only a part of a key would mix up.
        middle = bytes(range(1, width - 1))
        self.hashes = [bytes([i]) + middle + b"\x01" for i in range(4)]
        self.hashes += [b"\xff" + middle + bytes([i]) for i in range(4)]
        self.hashes += [bytes(width), b"\x01" + bytes(width - 1), bytes(width - 1) + b"\x01"]
        self.hashes += [b"\xff" * width]
        for i in range(len(self.hashes) * (scale - 1)):
            self.hashes.append(i.to_bytes(2, "big") + middle[1:] + b"\x02")
        first = self.hashes[: CHAIN_LENGTH * scale]
        self.requests = [
            self.request(first),
            self.request(
                first[: 3 * scale] + self.hashes[7 * scale : 12 * scale],
                cache_salt="salt",
                session_id="s1",
            ),
            self.request(self.hashes[::-1][: CHAIN_LENGTH * scale], lora_request=lora()),
            self.request(
                self.hashes[2 * scale : 10 * scale],
                mm_features=[image("a", 0, 6), image("b", 6, 3), image("c", 20, 9)],
            ),
            self.request(first[: 2 * scale]),
        ]

    def request(self, hashes: list[bytes], **kwargs: Any) -> Request:
        tokens = [1000 + i for i in range(CHAIN_LENGTH * self.scale * HASH_BLOCK_SIZE)]
        return Request(list(hashes), tokens, **kwargs)


class Operation(NamedTuple):
    """``method`` of the model with ``args``; ``ids`` if cpool's array twin is meant."""

    method: str
    args: tuple[Any, ...]
    ids: bool


def rarely(pick: Picker) -> bool:
    return pick.integer(0, 11) == 0


def any_block(pick: Picker, model: reference.ModelPool) -> int:
    return pick.integer(0, len(model.blocks) - 1)


def in_a_row(pick: Picker, items: Sequence[Any], num: int) -> list[Any]:
    """``num`` items, or all: side by side, up, down, or in a few passes over all of them."""
    start = pick.integer(0, len(items) - 1)
    step = pick.choice((1, 1, 1, -1, 3, 7))
    items = [*items[start:], *items[:start]]
    if step < 0:
        return items[::-1][:num]
    return [item for first in range(step) for item in items[first::step]][:num]


def some_blocks(pick: Picker, model: reference.ModelPool, world: World) -> list[int]:
    num = pick.integer(1, 3 * world.scale)
    if world.scale > 1:
        return in_a_row(pick, range(len(model.blocks)), num)
    return [any_block(pick, model) for _ in range(num)]


def held_blocks(model: reference.ModelPool) -> list[int]:
    """Held block ids, each as often as it is held."""
    return [i for i, b in enumerate(model.blocks) if i for _ in range(b.ref_cnt)]


def some_held(pick: Picker, model: reference.ModelPool, world: World) -> list[int]:
    left = held_blocks(model)
    num = min(pick.integer(1, 5 * world.scale), len(left))
    if world.scale > 1:
        ids = in_a_row(pick, left, num) if left else []
    else:
        ids = [left.pop(pick.integer(0, len(left) - 1)) for _ in range(num)]
    if rarely(pick):
        ids.insert(pick.integer(0, len(ids)), any_block(pick, model))
    return ids


def get_new(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    num_free = len(model.free_queue)
    most = min(4 * world.scale, num_free)
    n = pick.choice([-1, num_free + 1]) if rarely(pick) else pick.integer(0, most)
    return Operation("get_new_blocks", (n,), bool(pick.integer(0, 1)))


def touch(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    ids = some_blocks(pick, model, world)
    return Operation("touch", (ids,), bool(pick.integer(0, 1)))


def free(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    return Operation("free_blocks", (some_held(pick, model, world),), bool(pick.integer(0, 1)))


def free_all(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    return Operation("free_blocks", (held_blocks(model),), bool(pick.integer(0, 1)))


def unpin(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    return Operation("unpin_blocks", (some_held(pick, model, world),), False)


def evict(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    ids = some_blocks(pick, model, world)
    if rarely(pick):
        ids.append(len(model.blocks))
    return Operation("evict_blocks", (ids,), bool(pick.integer(0, 1)))


def reset(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    return Operation("reset_prefix_cache", (), False)


def promotable(
    model: reference.ModelPool, index: int, block_size: int, taken: Sequence[int] = ()
) -> list[int]:
    """Blocks that may become full block ``index``: held ones if there are any."""
    tokens = (index + 1) * block_size
    fitting = [
        i
        for i, block in enumerate(model.blocks)
        if i not in taken and (not block.keys or (block.num_tokens or tokens) < tokens)
    ]
    held = [i for i in fitting if model.blocks[i].ref_cnt > 0]
    return held or fitting or [reference.NULL_BLOCK]


def full_ids(
    pick: Picker,
    model: reference.ModelPool,
    world: World,
    first: int,
    last: int,
    block_size: int,
) -> list[int]:
    num = max(last - first, 0)
    if world.scale > 1:
        ids = in_a_row(pick, promotable(model, first, block_size), num)
        ids += [reference.NULL_BLOCK] * (num - len(ids))
        if num and rarely(pick):
            ids[pick.integer(0, num - 1)] = any_block(pick, model)
        return ids
    ids = []
    for index in range(first, last):
        wild = rarely(pick)
        fitting = [] if wild else promotable(model, index, block_size, ids)
        ids.append(any_block(pick, model) if wild else pick.choice(fitting))
    return ids


def cache_full(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    request = pick.choice(world.requests)
    block_size = pick.choice(BLOCK_SIZES)
    num_boundaries = len(request.block_hashes) * HASH_BLOCK_SIZE // block_size
    num_cached = pick.integer(0, max(num_boundaries - 1, 0))
    num_full = min(num_cached + pick.integer(0, 3 * world.scale), num_boundaries + rarely(pick))
    if world.scale > 1:
        ids = [reference.NULL_BLOCK] * num_cached
    else:
        ids = [any_block(pick, model) for _ in range(num_cached)]
    ids += full_ids(pick, model, world, num_cached, num_full, block_size)
    ids += [any_block(pick, model) for _ in range(pick.integer(0, 1))]
    mask = None
    if pick.integer(0, 3) == 0:
        num = max(num_full - num_cached, 0)
        every = pick.integer(1, 8) if world.scale > 1 else 0
        mask = [i % every > 0 if every else bool(pick.integer(0, 1)) for i in range(num)]
    group = pick.integer(0, NUM_GROUPS - 1)
    args = (request, ids, num_cached, num_full, block_size, group, mask)
    return Operation("cache_full_blocks", args, False)


def some_hashes(pick: Picker, world: World, num: int) -> list[bytes]:
    if world.scale > 1:
        return in_a_row(pick, world.hashes, num)
    return [pick.choice(world.hashes) for _ in range(num)]


def cache_full_ids(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    block_size = pick.choice(BLOCK_SIZES)
    first = pick.integer(0, 3)
    num = pick.integer(0, 3 * world.scale)
    ids = full_ids(pick, model, world, first, first + num, block_size)
    hashes = some_hashes(pick, world, num + (num > 0 and rarely(pick)))
    group = pick.integer(0, NUM_GROUPS - 1)
    args = (ids, hashes, group, block_size, first)
    parent = likely_parent(world, args, first == 0)
    return Operation("cache_full_ids", (*args, parent), True)


def likely_parent(world: World, args: Any, is_first: bool) -> bytes | None:
    """What events name as the parent: None where a request begins and, rarely, elsewhere.

    Follows from the other arguments: nothing is drawn, so streams of draws that were kept
    before parents were part of an operation still mean the same operations.
    """
    number = zlib.crc32(repr(args).encode())
    if is_first or number % 12 == 0:
        return None
    return world.hashes[number // 12 % len(world.hashes)]


def likely_held(pick: Picker, model: reference.ModelPool) -> int:
    held = sorted(set(held_blocks(model)))
    return pick.choice(held) if held and not rarely(pick) else any_block(pick, model)


def cache_partial(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    request = pick.choice(world.requests)
    num_tokens = pick.integer(1, len(request.block_hashes)) * HASH_BLOCK_SIZE
    if rarely(pick):
        beyond = (len(request.block_hashes) + 1) * HASH_BLOCK_SIZE
        num_tokens = pick.choice([0, -HASH_BLOCK_SIZE, num_tokens - 1, beyond])
    group = pick.integer(0, NUM_GROUPS - 1)
    block_size = pick.choice(BLOCK_SIZES)
    args = (request, likely_held(pick, model), num_tokens, group, block_size, rarely(pick))
    return Operation("cache_partial_block", args, False)


def cache_partial_id(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    num_tokens = pick.integer(1, CHAIN_LENGTH * world.scale) * HASH_BLOCK_SIZE - rarely(pick)
    group = pick.integer(0, NUM_GROUPS - 1)
    block_hash = pick.choice(world.hashes)
    args = (likely_held(pick, model), block_hash, num_tokens, group, rarely(pick))
    parent = likely_parent(world, args, num_tokens == HASH_BLOCK_SIZE)
    return Operation("cache_partial_id", (*args, parent), True)


def cache_partial_ids(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    num = pick.integer(0, 3 * world.scale)
    if world.scale > 1:
        blocks = sorted(set(held_blocks(model))) or range(len(model.blocks))
        ids = in_a_row(pick, blocks, num)
    else:
        ids = [likely_held(pick, model) for _ in range(num)]
    hashes = some_hashes(pick, world, len(ids) + (num > 0 and rarely(pick)))
    # Short enough to become extra keys; whole blocks' keys and others, some of a kind in a row.
    first = pick.integer(1, CHAIN_LENGTH) * HASH_BLOCK_SIZE - rarely(pick)
    alike = pick.integer(1, 24)
    num_tokens = [first + i // alike * HASH_BLOCK_SIZE for i in range(len(ids))]
    args = (ids, hashes, num_tokens, pick.integer(0, NUM_GROUPS - 1))
    parents = [
        likely_parent(world, (args, i // 12), tokens == HASH_BLOCK_SIZE)
        for i, tokens in enumerate(num_tokens)
    ]
    return Operation("cache_partial_ids", (*args, parents), True)


def insert(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    key = reference.make_key(pick.choice(world.hashes), pick.integer(0, NUM_GROUPS - 1))
    num_tokens = pick.choice([None, 4, 8, 16, 32])
    return Operation("insert", (key, likely_held(pick, model), num_tokens), False)


def maybe_evict(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    return Operation("maybe_evict", (any_block(pick, model),), False)


def move(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    sources = [i for i, block in enumerate(model.blocks) if block.keys]
    targets = [i for i, block in enumerate(model.blocks) if i and not block.keys]
    wild = rarely(pick)
    src = any_block(pick, model) if wild or not sources else pick.choice(sources)
    dst = any_block(pick, model) if wild or not targets else pick.choice(targets)
    return Operation("move_block_hashes", (src, dst), bool(pick.integer(0, 1)))


def emit_cached(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    request = pick.choice(world.requests)
    block_size = pick.choice(BLOCK_SIZES)
    num_boundaries = len(request.block_hashes) * HASH_BLOCK_SIZE // block_size
    num_cached = pick.integer(0, num_boundaries + rarely(pick))
    args = (request, num_cached, block_size, pick.integer(0, NUM_GROUPS - 1))
    return Operation("emit_cached_block_events", args, False)


Generator = Callable[[Picker, reference.ModelPool, World], Operation]

# How often each is drawn, of the sum.
CACHING_WEIGHTS: dict[Generator, int] = {
    get_new: 16,
    touch: 8,
    free: 14,
    free_all: 1,
    unpin: 4,
    evict: 3,
    reset: 2,
    cache_full: 14,
    cache_full_ids: 6,
    cache_partial: 16,
    cache_partial_id: 6,
    insert: 3,
    maybe_evict: 1,
    move: 5,
    emit_cached: 2,
    cache_partial_ids: 6,
}
# Without caching an engine registers nothing.
UNCACHED_WEIGHTS: dict[Generator, int] = {
    get_new: 4,
    touch: 2,
    free: 4,
    free_all: 1,
    unpin: 1,
    evict: 1,
    reset: 1,
}


def generators(enable_caching: bool) -> list[Generator]:
    """Every generator, each as often as its weight says."""
    weights = CACHING_WEIGHTS if enable_caching else UNCACHED_WEIGHTS
    return [generator for generator, weight in weights.items() for _ in range(weight)]
