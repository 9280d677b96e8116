# SPDX-License-Identifier: Apache-2.0
"""Random operations that reach the interesting states of a small pool.

A world has few hashes and requests that share prefixes, so that keys collide, blocks
are promoted and evicted all the time. The same generators serve a seeded driver and
hypothesis: both are a Picker. Most operations are legal; about one in ten is not.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from . import model as reference
from .support import Request, image, lora

HASH_BLOCK_SIZE = 4
BLOCK_SIZES = (4, 8, 16)
NUM_GROUPS = 3
CHAIN_LENGTH = 8


class Picker(Protocol):
    def integer(self, low: int, high: int) -> int: ...

    def choice(self, items: Sequence[Any]) -> Any: ...


class RandomPicker:
    def __init__(self, rng: random.Random) -> None:
        self.integer = rng.randint
        self.choice = rng.choice


class World:
    """Hashes of one width and the requests that use them."""

    def __init__(self, width: int) -> None:
        # Alike at one end, alike at the other, all zero, with zeros inside: what a table
        # that compares only a part of a key would mix up.
        middle = bytes(range(1, width - 1))
        self.hashes = [bytes([i]) + middle + b"\x01" for i in range(4)]
        self.hashes += [b"\xff" + middle + bytes([i]) for i in range(4)]
        self.hashes += [bytes(width), b"\x01" + bytes(width - 1), bytes(width - 1) + b"\x01"]
        self.hashes += [b"\xff" * width]
        first = self.hashes[:CHAIN_LENGTH]
        self.requests = [
            self.request(first),
            self.request(first[:3] + self.hashes[7:12], cache_salt="salt", session_id="s1"),
            self.request(self.hashes[::-1][:CHAIN_LENGTH], lora_request=lora()),
            self.request(
                self.hashes[2:10],
                mm_features=[image("a", 0, 6), image("b", 6, 3), image("c", 20, 9)],
            ),
            self.request(first[:2]),
        ]

    @staticmethod
    def request(hashes: list[bytes], **kwargs: Any) -> Request:
        tokens = [1000 + i for i in range(CHAIN_LENGTH * HASH_BLOCK_SIZE)]
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


def held_blocks(model: reference.ModelPool) -> list[int]:
    """Held block ids, each as often as it is held."""
    return [i for i, b in enumerate(model.blocks) if i for _ in range(b.ref_cnt)]


def some_held(pick: Picker, model: reference.ModelPool) -> list[int]:
    left = held_blocks(model)
    ids = []
    for _ in range(min(pick.integer(1, 5), len(left))):
        ids.append(left.pop(pick.integer(0, len(left) - 1)))
    if rarely(pick):
        ids.insert(pick.integer(0, len(ids)), any_block(pick, model))
    return ids


def get_new(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    num_free = len(model.free_queue)
    n = pick.choice([-1, num_free + 1]) if rarely(pick) else pick.integer(0, min(4, num_free))
    return Operation("get_new_blocks", (n,), bool(pick.integer(0, 1)))


def touch(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    ids = [any_block(pick, model) for _ in range(pick.integer(1, 3))]
    return Operation("touch", (ids,), bool(pick.integer(0, 1)))


def free(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    return Operation("free_blocks", (some_held(pick, model),), bool(pick.integer(0, 1)))


def free_all(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    return Operation("free_blocks", (held_blocks(model),), bool(pick.integer(0, 1)))


def unpin(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    return Operation("unpin_blocks", (some_held(pick, model),), False)


def evict(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    ids = [any_block(pick, model) for _ in range(pick.integer(1, 3))]
    if rarely(pick):
        ids.append(len(model.blocks))
    return Operation("evict_blocks", (ids,), bool(pick.integer(0, 1)))


def reset(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    return Operation("reset_prefix_cache", (), False)


def promotable(
    pick: Picker, model: reference.ModelPool, index: int, block_size: int, taken: list[int]
) -> int:
    """A block that may become full block ``index``: held if possible."""
    tokens = (index + 1) * block_size
    fitting = [
        i
        for i, block in enumerate(model.blocks)
        if i not in taken and (not block.keys or (block.num_tokens or tokens) < tokens)
    ]
    held = [i for i in fitting if model.blocks[i].ref_cnt > 0]
    return pick.choice(held or fitting or [reference.NULL_BLOCK])


def full_ids(
    pick: Picker, model: reference.ModelPool, first: int, last: int, block_size: int
) -> list[int]:
    ids: list[int] = []
    for index in range(first, last):
        wild = rarely(pick)
        ids.append(
            any_block(pick, model) if wild else promotable(pick, model, index, block_size, ids)
        )
    return ids


def cache_full(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    request = pick.choice(world.requests)
    block_size = pick.choice(BLOCK_SIZES)
    num_boundaries = len(request.block_hashes) * HASH_BLOCK_SIZE // block_size
    num_cached = pick.integer(0, max(num_boundaries - 1, 0))
    num_full = min(num_cached + pick.integer(0, 3), num_boundaries + rarely(pick))
    ids = [any_block(pick, model) for _ in range(num_cached)]
    ids += full_ids(pick, model, num_cached, num_full, block_size)
    ids += [any_block(pick, model) for _ in range(pick.integer(0, 1))]
    mask = None
    if pick.integer(0, 3) == 0:
        mask = [bool(pick.integer(0, 1)) for _ in range(max(num_full - num_cached, 0))]
    group = pick.integer(0, NUM_GROUPS - 1)
    args = (request, ids, num_cached, num_full, block_size, group, mask)
    return Operation("cache_full_blocks", args, False)


def cache_full_ids(pick: Picker, model: reference.ModelPool, world: World) -> Operation:
    block_size = pick.choice(BLOCK_SIZES)
    first = pick.integer(0, 3)
    num = pick.integer(0, 3)
    ids = full_ids(pick, model, first, first + num, block_size)
    hashes = [pick.choice(world.hashes) for _ in range(num + (num > 0 and rarely(pick)))]
    group = pick.integer(0, NUM_GROUPS - 1)
    return Operation("cache_full_ids", (ids, hashes, group, block_size, first), True)


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
    num_tokens = pick.integer(1, CHAIN_LENGTH) * HASH_BLOCK_SIZE - rarely(pick)
    group = pick.integer(0, NUM_GROUPS - 1)
    block_hash = pick.choice(world.hashes)
    args = (likely_held(pick, model), block_hash, num_tokens, group, rarely(pick))
    return Operation("cache_partial_id", args, True)


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
