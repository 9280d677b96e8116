# SPDX-License-Identifier: Apache-2.0
"""The model makes vLLM's decisions: long random runs on it and on the real BlockPool.

Run with an interpreter that has vLLM 0.32.0. Where the model refuses, a copy of vLLM's
pool must refuse too, unless the model says that it is stricter there.
"""

import copy
import itertools
import random
from importlib import import_module
from typing import Any

import pytest

from .. import operations
from ..model import ModelError, ModelPool, TooFewBlocks
from ..support import Collector, HandleCalls, assert_same_events, dump_model

block_pool = pytest.importorskip(
    "vllm.v1.core.block_pool", reason="vLLM is not installed here", exc_type=ImportError
)
if not (found := import_module("vllm.version").__version__).startswith("0.32."):
    pytest.skip(f"the model decides as vLLM 0.32 does; this is {found}", allow_module_level=True)

# The twin on vLLM's side of an id method: none, so those are left to tests/test_model.py.
GENERATORS = {
    caching: [
        generator
        for generator in operations.generators(caching)
        if generator
        not in (
            operations.cache_full_ids,
            operations.cache_partial_id,
            operations.cache_partial_ids,
        )
    ]
    for caching in (False, True)
}


def dump_stock(pool: Any) -> dict[str, Any]:
    """What dump_model() says, read out of vLLM's objects."""
    table = pool.cached_block_hash_to_block._cache
    holders = {
        key: list(entry) if isinstance(entry, dict) else [entry.block_id]
        for key, entry in table.items()
    }
    return {
        "free_queue": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "num_free": pool.get_num_free_blocks(),
        "usage": pool.get_usage(),
        "ref_cnts": [block.ref_cnt for block in pool.blocks],
        "primary": [block.block_hash for block in pool.blocks],
        "num_tokens": [block.block_hash_num_tokens for block in pool.blocks],
        "extra": {i: keys for i, keys in pool.cached_block_hashes_by_block.items() if keys},
        "holders": holders,
        "watched": list(pool._reuse_watchers),
        "num_keys": len(pool.cached_block_hash_to_block),
        "num_registrations": sum(map(len, holders.values())),
    }


class Pair:
    def __init__(self, rng: random.Random) -> None:
        self.pick = operations.RandomPicker(rng)
        self.world = operations.World(rng.choice([8, 16, 32]))
        caching = rng.random() < 0.9
        self.generators = GENERATORS[caching]
        shape = (rng.randint(2, 10), caching, operations.HASH_BLOCK_SIZE, rng.random() < 0.8)
        self.collectors = [Collector(), Collector()] if rng.random() < 0.5 else [None, None]
        self.model = ModelPool(*shape, self.collectors[0])
        self.stock = HandleCalls(block_pool.BlockPool(*shape, self.collectors[1]))
        self.reused: tuple[list[int], list[int]] = ([], [])

    def step(self) -> str:
        """One operation on both; its name, with a star if it was refused."""
        operation = self.pick.choice(self.generators)(self.pick, self.model, self.world)
        method, args, _ = operation
        watchers = [(log.append,) if method == "unpin_blocks" else () for log in self.reused]
        try:
            expected = getattr(self.model, method)(*args, *watchers[0])
        except ModelError as refusal:
            self.assert_refused(operation, refusal)
            return method + "*"
        actual = getattr(self.stock, method)(*args, *watchers[1])
        if method != "evict_blocks":  # vLLM does not count them.
            assert actual == expected, operation
        assert self.reused[0] == self.reused[1]
        return method

    def assert_refused(self, operation: operations.Operation, refusal: ModelError) -> None:
        if refusal.stricter:
            return
        method, args, _ = operation
        throwaway = HandleCalls(copy.deepcopy(self.stock.pool))
        watcher = (lambda block_id: None,) if method == "unpin_blocks" else ()
        message = str(refusal) if isinstance(refusal, TooFewBlocks) else None
        with pytest.raises((AssertionError, ValueError, IndexError), match=message):
            getattr(throwaway, method)(*args, *watcher)

    def compare(self) -> None:
        expected, actual = dump_model(self.model), dump_stock(self.stock.pool)
        for name, value in actual.items():
            assert value == expected[name], name
        for block_hash, group in itertools.product(self.world.hashes, range(3)):
            found = self.stock.pool.get_cached_block(block_hash, [group])
            ids = found and [block.block_id for block in found]
            assert ids == self.model.get_cached_block(block_hash, [group])
        for block_id, block in enumerate(self.stock.pool.blocks):
            assert self.stock.pool.is_block_writable(block) == self.model.is_block_writable(
                block_id
            )
        assert_same_events(self.stock.pool.take_events(), self.model.take_events())
        if self.collectors[0]:
            assert self.collectors[0].calls == self.collectors[1].calls


def run(seed: int, num_steps: int) -> set[str]:
    print(f"seed {seed}")
    pair = Pair(random.Random(seed))
    seen = set()
    for _ in range(num_steps):
        seen.add(pair.step())
        pair.compare()
    return seen


@pytest.mark.parametrize("seed", range(40))
def test_model_makes_the_decisions_of_vllm(seed: int) -> None:
    run(seed, 300)


@pytest.mark.slow
def test_model_makes_the_decisions_of_vllm_for_long() -> None:
    base = random.SystemRandom().randrange(1 << 32)
    for seed in range(base, base + 300):
        run(seed, 1000)


def test_runs_reach_every_operation_and_every_refusal() -> None:
    seen = set().union(*(run(seed, 300) for seed in range(20)))
    methods = {
        "get_new_blocks", "touch", "free_blocks", "unpin_blocks", "evict_blocks",
        "reset_prefix_cache", "cache_full_blocks", "cache_partial_block", "insert",
        "maybe_evict", "move_block_hashes", "emit_cached_block_events",
    }  # fmt: skip
    never_refused = {"touch", "reset_prefix_cache", "maybe_evict"}
    assert seen == methods | {method + "*" for method in methods - never_refused}
