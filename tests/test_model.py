# SPDX-License-Identifier: Apache-2.0
"""The pool against its model: random operations on both, everything compared after each.

Two drivers share one Pair: hypothesis, which shrinks what it finds, and a seeded one,
which takes many more steps. A seed that once failed joins PAST_FAILURES and runs first.
CPOOL_TEST_SEED=n repeats a printed seed.
"""

import itertools
import os
import random
from functools import partial
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import cpool

from . import operations
from .model import (
    ContractRefusal,
    IdRefusal,
    ModelError,
    ModelPool,
    RootRefusal,
    TooFewBlocks,
    TooFewHashes,
    ValueRefusal,
)
from .support import (
    Collector,
    HandleCalls,
    IdCalls,
    assert_same_events,
    dump,
    dump_model,
    in_any_order,
)

PAST_FAILURES: list[int] = []
# Digests that a pool takes memory for when it is built: those that come, or others, or none.
PREPARED_FOR = [None, 8, 16, 32]

RAISES = {
    ContractRefusal: cpool.ContractError,
    RootRefusal: cpool.ContractError,
    IdRefusal: cpool.BlockIdError,
    ValueRefusal: ValueError,
    TooFewHashes: IndexError,
    TooFewBlocks: ValueError,
}


def note_reuse(log: list[Any], call: int, block_id: int) -> None:
    log.append((call, block_id))


class Pair:
    """A pool and its model, in step."""

    def __init__(
        self,
        num_blocks: int,
        width: int,
        caching: bool,
        events: bool,
        collect: bool,
        prepared_for: int | None = None,
        scale: int = 1,
    ) -> None:
        self.world = operations.World(width, scale)
        self.generators = operations.generators(caching)
        self.collectors = [Collector(), Collector()] if collect else [None, None]
        shape = (num_blocks, caching, operations.HASH_BLOCK_SIZE, events)
        self.model = ModelPool(*shape, self.collectors[0])
        self.pool = cpool.BlockPool(*shape, self.collectors[1], hash_width=prepared_for)
        self.handles = HandleCalls(self.pool)
        self.ids = IdCalls(self.pool)
        # Which call of unpin_blocks heard of which block, on the model and on the pool.
        self.reused: tuple[list[Any], list[Any]] = ([], [])
        self.num_unpins = 0
        self.last: operations.Operation | None = None

    def step(self, generator: operations.Generator, pick: operations.Picker) -> str:
        """One operation on both; its name, with a star, or "^" for RootRefusal, if refused."""
        operation = generator(pick, self.model, self.world)
        self.last = operation
        method, args, by_ids = operation
        calls = self.ids if by_ids else self.handles
        watchers: list[tuple[Any, ...]] = [(), ()]
        if method == "unpin_blocks":
            self.num_unpins += 1
            watchers = [(partial(note_reuse, log, self.num_unpins),) for log in self.reused]
        try:
            expected = getattr(self.model, method)(*args, *watchers[0])
        except ModelError as refusal:
            message = f"^{refusal}$" if isinstance(refusal, TooFewBlocks) else None
            is_root = isinstance(refusal, RootRefusal)
            if is_root:
                message = "with events on parent_hash is needed"
            with pytest.raises(RAISES[type(refusal)], match=message):
                getattr(calls, method)(*args, *watchers[1])
            return method + ("^" if is_root else "*")
        actual = getattr(calls, method)(*args, *watchers[1])
        if method == "evict_blocks" and not by_ids:
            expected = None  # vLLM's method does not count them.
        assert actual == expected, operation
        return method

    def compare(self) -> None:
        self.pool.check_consistency()
        assert self.reused[1] == self.reused[0]
        assert_same_events(self.pool.take_events(), self.model.take_events())
        if self.collectors[0]:
            assert self.collectors[1].calls == self.collectors[0].calls
        actual, expected = dump(self.pool), dump_model(self.model)
        for name in actual.keys() & expected.keys():
            if name == "registrations":  # The order of the extra keys is left open.
                assert in_any_order(actual[name]) == in_any_order(expected[name])
            else:
                assert actual[name] == expected[name], name
        self.compare_lookups()

    def compare_lookups(self) -> None:
        pool, model, world = self.pool, self.model, self.world
        for group in range(operations.NUM_GROUPS):
            assert pool.find_ids(world.hashes, group).tolist() == model.find_ids(
                world.hashes, group
            )
            for size in operations.BLOCK_SIZES:
                found = pool.find_full_ids(world.hashes, group, size).tolist()
                assert found == model.find_full_ids(world.hashes, group, size)
            for request in world.requests:
                found = pool.find_prefix_ids(request.block_hashes, group).tolist()
                assert found == model.find_prefix_ids(request.block_hashes, group)
        for block_hash, groups in itertools.product(world.hashes, ([0], [2, 1], [0, 1, 2], [])):
            blocks = pool.get_cached_block(block_hash, groups)
            ids = None if blocks is None else [block.block_id for block in blocks]
            assert ids == model.get_cached_block(block_hash, groups)
        for block_id in range(pool.num_gpu_blocks):
            writable = pool.is_block_writable(pool.blocks[block_id])
            assert writable == model.is_block_writable(block_id)


class DataPicker:
    """Draws from hypothesis, so that it can shrink."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def integer(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def choice(self, items: Any) -> Any:
        return items[self.data.draw(st.integers(0, len(items) - 1))]


class PoolMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(1, 10),
        width=st.sampled_from([8, 16, 32]),
        caching=st.sampled_from([True, True, True, False]),
        events=st.booleans(),
        collect=st.booleans(),
        prepared_for=st.sampled_from(PREPARED_FOR),
    )
    def build(self, **shape: Any) -> None:
        hypothesis.note(repr(shape))
        self.pair = Pair(**shape)

    @rule(data=st.data())
    def step(self, data: Any) -> None:
        pick = DataPicker(data)
        try:
            self.pair.step(pick.choice(self.pair.generators), pick)
        finally:
            hypothesis.note(repr(self.pair.last))

    @invariant()
    def same(self) -> None:
        if hasattr(self, "pair"):
            self.pair.compare()


def machine(max_examples: int) -> Any:
    case = type("Case", (PoolMachine,), {}).TestCase
    case.settings = hypothesis.settings(
        max_examples=max_examples,
        stateful_step_count=50,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return case


TestPoolAndModelAgree = machine(60)
TestPoolAndModelAgreeForLong = pytest.mark.slow(machine(600))


def run(seed: int, num_steps: int, compare_every: int = 1, large: bool = False) -> set[str]:
    """A seeded run; the operations that it reached.

    Answers are compared at each step. A comparison of everything takes as long as eight
    operations, and what once went wrong is still wrong some steps later.
    """
    rng = random.Random(seed)
    num_blocks, scale = rng.choice(operations.LARGE) if large else (rng.randint(1, 10), 1)
    pair = Pair(
        num_blocks=num_blocks,
        scale=scale,
        width=rng.choice([8, 16, 32]),
        caching=rng.random() < 0.9,
        events=rng.random() < 0.7,
        collect=rng.random() < 0.3,
        prepared_for=rng.choice(PREPARED_FOR),
    )
    pick = operations.RandomPicker(rng)
    seen = set()
    try:
        for step in range(1, num_steps + 1):
            seen.add(pair.step(rng.choice(pair.generators), pick))
            if step % compare_every == 0 or step == num_steps:
                pair.compare()
    except BaseException as error:
        error.add_note(f"CPOOL_TEST_SEED={seed} repeats it{'; large' * large}; at {pair.last}")
        raise
    return seen


def first_seed() -> int:
    seed = os.environ.get("CPOOL_TEST_SEED") or random.SystemRandom().randrange(1 << 32)
    print(f"CPOOL_TEST_SEED={seed}")
    return int(seed)


def test_seeds_that_failed_before_pass() -> None:
    for seed in PAST_FAILURES:
        run(seed, 300)


def test_random_runs_agree() -> None:
    base = first_seed()
    for seed in range(base, base + 20):
        run(seed, 200)


def test_random_runs_in_large_worlds_agree() -> None:
    base = first_seed()
    for seed in range(base, base + 6):
        run(seed, 120, compare_every=12, large=True)


def test_runs_reach_every_operation_and_refusal() -> None:
    seen = set().union(*(run(seed, 200) for seed in range(30)))
    methods = {
        "get_new_blocks", "touch", "free_blocks", "unpin_blocks", "evict_blocks",
        "reset_prefix_cache", "cache_full_blocks", "cache_full_ids", "cache_partial_block",
        "cache_partial_id", "cache_partial_ids", "insert", "maybe_evict", "move_block_hashes",
        "emit_cached_block_events",
    }  # fmt: skip
    never_refused = {"touch", "reset_prefix_cache", "maybe_evict"}
    roots = {"cache_full_ids^", "cache_partial_id^", "cache_partial_ids^"}
    assert seen == roots | methods | {method + "*" for method in methods - never_refused}


@pytest.mark.slow
def test_long_random_runs_agree() -> None:
    base = first_seed()
    for seed in range(base, base + 300):
        run(seed, 1000, compare_every=5)
