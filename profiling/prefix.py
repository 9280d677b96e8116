# SPDX-License-Identifier: Apache-2.0
"""Longest-prefix lookups: `PrefixCache.lookup` beside vLLM's coordinator.

    python profiling/prefix.py                 # cpool alone
    python profiling/prefix.py --against-vllm  # in an environment with vLLM 0.32

Prompts of 100,000 tokens, all resident, in a pool of a million blocks that is full, as pools are:
what no prompt needs holds other keys. A *new* lookup is that of a request which arrives: its
hashes were just written, but the pool has not seen the prompt for many prompts. For an *old* one,
of a request that waited, neither was touched for as long. A *warm* one is repeated. *Scattered*:
no two blocks of a prompt lie side by side; *in order*: as a pool hands them out that has not been
mixed up, or that got back whole requests.

The two sides take turns. Before each cold one the processor's caches are filled with something
else, then all prompts are looked up; with --by-call one prompt, so that the page tables and the
code are cold, too. Medians, the middle half and the best are given, in CPU time of the thread, so
that neighbours on the machine disturb less. Both sides must find the same tokens.
"""

import argparse
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from statistics import median, quantiles
from time import thread_time_ns

import numpy as np

from cpool import BlockPool
from cpool.prefix import FullAttention, Mamba, PrefixCache

NUM_TOKENS = 100_000
UNIT = 16
WIDE = 1600
NUM_ROWS = NUM_TOKENS // UNIT
HASH_BYTES = 32
ELSEWHERE = np.zeros(16 << 20)  # 128 MiB: more than the caches hold


def clock_ns() -> int:
    times = [thread_time_ns() for _ in range(1001)]
    return int(median(after - before for before, after in pairwise(times)))


CLOCK_NS = clock_ns()  # what reading the clock takes of the time that it tells


class Model:
    """One layout of groups, and at which boundaries each group holds a prompt."""

    def __init__(self, name, groups, boundaries, expected):
        self.name = name
        self.groups = groups
        self.boundaries = boundaries  # of each group: tokens
        self.expected = expected  # hit tokens


FULL_ROWS = np.arange(UNIT, NUM_TOKENS + 1, UNIT)
WIDE_ROWS = np.arange(WIDE, NUM_TOKENS + 1, WIDE)
TAIL = (NUM_TOKENS - 1) // UNIT * UNIT
MODELS = [
    Model("full:16", [FullAttention(UNIT)], [FULL_ROWS], TAIL),
    Model(
        "full:1600,mamba:1600, tail of both",
        [FullAttention(WIDE), Mamba(WIDE)],
        [np.append(WIDE_ROWS, TAIL), np.append(WIDE_ROWS, TAIL)],
        TAIL,
    ),
    Model(
        "full:1600,mamba:1600, state far left",
        [FullAttention(WIDE), Mamba(WIDE)],
        [np.append(WIDE_ROWS, TAIL), WIDE_ROWS[:1]],
        WIDE,
    ),
    Model("full:16,mamba:16", [FullAttention(UNIT), Mamba(UNIT)], [FULL_ROWS, FULL_ROWS], TAIL),
]


def other_hashes(count: int, group: int) -> np.ndarray:
    rng = np.random.default_rng([2, group])
    return rng.integers(0, 256, (count, HASH_BYTES), dtype=np.uint8)


class Ours:
    def __init__(self, model: Model, prompts: list[np.ndarray], order: np.ndarray) -> None:
        self.pool = BlockPool(len(order) + 1, True, UNIT)
        self.cache = PrefixCache(self.pool, model.groups)
        self.prompts = prompts
        free = iter(order.tolist())
        for rows in prompts:
            for group, boundaries in enumerate(model.boundaries):
                size = model.groups[group].block_size
                full = boundaries[boundaries % size == 0]
                self.pool.cache_full_ids(
                    [next(free) for _ in full], rows[full // UNIT - 1], group, size
                )
                for num_tokens in boundaries[boundaries % size != 0].tolist():
                    self.pool.cache_partial_id(
                        next(free), rows[num_tokens // UNIT - 1].tobytes(), num_tokens, group
                    )
        for group, others in enumerate(np.array_split(list(free), len(model.groups))):
            self.pool.cache_full_ids(
                others, other_hashes(len(others), group), group, model.groups[group].block_size
            )
        self.lookup = self.cache.lookup

    def read_hashes(self, prompt: int) -> None:
        self.prompts[prompt].copy()

    def num_tokens(self, match) -> int:
        return match.num_tokens


class Stock:
    """vLLM's coordinator over the same boundaries, in the same order of blocks."""

    def __init__(self, model: Model, prompts: list[np.ndarray], order: np.ndarray) -> None:
        import torch
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
        )

        def spec(group):
            if isinstance(group, Mamba):
                return MambaSpec(
                    block_size=group.block_size,
                    shapes=((1,),),
                    dtypes=(torch.float32,),
                    mamba_cache_mode="align",
                )
            return FullAttentionSpec(
                block_size=group.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
            )

        config = KVCacheConfig(
            num_blocks=len(order) + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer{i}"], spec(g)) for i, g in enumerate(model.groups)
            ],
        )
        manager = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=max(g.block_size for g in model.groups),
            hash_block_size=UNIT,
        )
        pool = manager.block_pool
        self.prompts = [[row.tobytes() for row in rows] for rows in prompts]
        free = iter(order.tolist())
        for hashes in self.prompts:
            for group, boundaries in enumerate(model.boundaries):
                for num_tokens in boundaries.tolist():
                    key = make_block_hash_with_group_id(hashes[num_tokens // UNIT - 1], group)
                    pool._insert_block_hash(key, pool.blocks[next(free)], num_tokens)
        for group, others in enumerate(np.array_split(list(free), len(model.groups))):
            hashes = other_hashes(len(others), group)
            for block_id, row in zip(others.tolist(), hashes, strict=True):
                key = make_block_hash_with_group_id(row.tobytes(), group)
                pool._insert_block_hash(key, pool.blocks[block_id], model.groups[group].block_size)

        self.lookup = manager.coordinator.find_longest_cache_hit

    def read_hashes(self, prompt: int) -> None:
        b"".join(self.prompts[prompt])

    def num_tokens(self, match) -> int:
        return match[1]


def timed(world: Ours | Stock, prompt: int, expected: int) -> float:
    """Seconds of one call, without the clock's own and without letting go of its result."""
    lookup, hashes = world.lookup, world.prompts[prompt]
    start = thread_time_ns()
    match = lookup(hashes, NUM_TOKENS - 1)
    seconds = (thread_time_ns() - start - CLOCK_NS) / 1e9
    found = world.num_tokens(match)
    assert found == expected, f"{found} tokens found, {expected} are there"
    return seconds


def turns(args: argparse.Namespace, sides: Iterable[str]) -> Iterator[tuple[str, range, str]]:
    """Of the cold lookups: (state, prompts, side), in their order."""
    for _, state in product(range(args.turns), ("new", "old")):
        size = 1 if args.by_call else args.prompts
        for first, side in product(range(0, args.prompts, size), sides):
            yield state, range(first, first + size), side


def measure(model: Model, sides: dict[str, type], args: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    hashes = [
        rng.integers(0, 256, (NUM_ROWS, HASH_BYTES), dtype=np.uint8) for _ in range(args.prompts)
    ]
    in_order = np.arange(1, args.blocks)
    orders = {"scattered": np.random.default_rng(1).permutation(in_order), "in order": in_order}
    print(f"{model.name}: {model.expected:,} of {NUM_TOKENS:,} tokens hit")
    for placing, order in orders.items():
        worlds = {name: side(model, hashes, order) for name, side in sides.items()}
        times: dict[tuple[str, str], list[float]] = {}
        for state, prompts, name in turns(args, worlds):
            ELSEWHERE[:] += 1
            for prompt in prompts:
                if state == "new":
                    worlds[name].read_hashes(prompt)
                seconds = timed(worlds[name], prompt, model.expected)
                times.setdefault((state, name), []).append(seconds)
        for _ in range(args.repeats):
            for name, world in worlds.items():
                timed(world, 0, model.expected)
                seconds = timed(world, 0, model.expected)
                times.setdefault(("warm", name), []).append(seconds)
        for (state, name), values in times.items():
            rate = NUM_ROWS / median(values) / 1e6
            low, _, high = quantiles(values, n=4)
            line = (
                f"  {placing:9}  {state:4}  {name:5}  median {median(values) * 1e6:8.1f} us"
                f" ({low * 1e6:.1f}-{high * 1e6:.1f})  best {min(values) * 1e6:8.1f} us"
                f"  {rate:7.2f} M boundaries/s"
            )
            if name != "cpool":
                ratio = median(values) / median(times[state, "cpool"])
                line += f"  cpool is {ratio:.1f} times as fast"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against-vllm", action="store_true", help="measure vLLM's too")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks of each pool")
    parser.add_argument("--prompts", type=int, default=24, help="resident prompts")
    parser.add_argument("--turns", type=int, default=5, help="of each side, over all prompts")
    parser.add_argument("--by-call", action="store_true", help="take turns after every call")
    parser.add_argument("--repeats", type=int, default=60, help="warm lookups")
    args = parser.parse_args()
    sides: dict[str, type] = {"cpool": Ours}
    if args.against_vllm:
        sides["vllm"] = Stock
    for model in MODELS:
        measure(model, sides, args)


if __name__ == "__main__":
    main()
