# SPDX-License-Identifier: Apache-2.0
"""The same random operations on stock's pool and on ours, compared after each one."""

import random

import pytest

pytest.importorskip("vllm", reason="needs a vLLM: tests/vllm/run --set own")

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from .differential import (
    Metrics,
    OurBlockPool,
    StockBlockPool,
    assert_same,
    make_request,
    observe,
)

HASH_BLOCK_SIZE = 2
BLOCK_SIZE = 4
NUM_GROUPS = 2
NUM_STEPS = 400


class PairOfPools:
    """Two pools under the same operations; blocks are named by id."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        num_blocks = self.random.choice([2, 3, 9, 24])
        caching = self.random.random() < 0.9
        events = self.random.random() < 0.7
        self.pools = [
            cls(num_blocks, caching, HASH_BLOCK_SIZE, events, metrics_collector=Metrics())
            for cls in (StockBlockPool, OurBlockPool)
        ]
        self.seen_keys: set[bytes] = set()
        self.reused: list[list[int]] = [[], []]
        self.held: list[int] = []  # one entry per reference
        self.num_requests = 0

    def both(self, call) -> list:
        """Returns what ``call(pool)`` returned, per pool; None where both raised alike."""
        results = []
        errors = []
        for pool in self.pools:
            try:
                results.append(call(pool))
            except Exception as error:
                results.append(None)
                errors.append(error)
        if errors:
            stock, ours = errors
            assert isinstance(ours, type(stock))
            # Most of stock's assertions say nothing; where it has words, ours are the same.
            assert not str(stock) or str(ours) == str(stock)
        return results

    def request(self):
        # Few tokens and short prompts, so that equal prefixes are common.
        self.num_requests += 1
        length = self.random.randint(BLOCK_SIZE, 6 * BLOCK_SIZE)
        kwargs = {}
        if self.random.random() < 0.2:
            kwargs["cache_salt"] = "salt"
        if self.random.random() < 0.2:
            kwargs["mm_features"] = [
                MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=name,
                    mm_position=PlaceholderRange(offset=offset, length=3),
                )
                for name, offset in (("a", 1), ("b", 7))
            ]
        base = self.random.randint(0, 1)
        tokens = [base * 10 + i // 5 for i in range(length)]
        request = make_request(str(self.num_requests), tokens, HASH_BLOCK_SIZE, **kwargs)
        self.seen_keys |= {
            make_block_hash_with_group_id(block_hash, group)
            for block_hash in request.block_hashes
            for group in range(NUM_GROUPS)
        }
        return request

    def some_held(self) -> list[int]:
        ids = list(dict.fromkeys(self.held))
        return self.random.sample(ids, self.random.randint(0, len(ids)))

    def drop(self, ids: list[int]) -> None:
        for block_id in ids:
            self.held.remove(block_id)

    def get_new_blocks(self) -> list:
        num_blocks = self.random.randint(0, 4)
        results = self.both(lambda pool: [b.block_id for b in pool.get_new_blocks(num_blocks)])
        if isinstance(results[0], list):
            self.held += results[0]
        return results

    def get_too_many_blocks(self) -> list:
        return self.both(lambda pool: pool.get_new_blocks(pool.get_num_free_blocks() + 1))

    def free_blocks(self) -> list:
        ids = self.some_held()
        self.drop(ids)
        return self.both(lambda pool: pool.free_blocks(pool.blocks[i] for i in ids))

    def free_with_null(self) -> list:
        ids = [*self.some_held(), 0]
        self.drop(ids[:-1])
        return self.both(lambda pool: pool.free_blocks([pool.blocks[i] for i in ids]))

    def touch(self) -> list:
        num_blocks = self.pools[0].num_gpu_blocks
        ids = [self.random.randrange(num_blocks) for _ in range(self.random.randint(0, 3))]
        self.held += [i for i in ids if i]
        return self.both(lambda pool: pool.touch([pool.blocks[i] for i in ids]))

    def cache_full_blocks(self) -> list:
        request, group = self.request(), self.random.randrange(NUM_GROUPS)
        free_of_key = [i for i in self.some_held() if self.pools[0].blocks[i].block_hash is None]
        num_full = min(len(free_of_key), request.num_tokens // BLOCK_SIZE)
        num_cached = self.random.randint(0, num_full)
        ids = free_of_key[:num_full]
        for position in range(num_full):
            if self.random.random() < 0.1:
                ids[position] = 0
        mask = None
        if self.random.random() < 0.3:
            mask = [self.random.random() < 0.7 for _ in range(num_full - num_cached)]
        return self.both(
            lambda pool: pool.cache_full_blocks(
                request=request,
                blocks=[pool.blocks[i] for i in ids],
                num_cached_blocks=num_cached,
                num_full_blocks=num_full,
                block_size=BLOCK_SIZE,
                kv_cache_group_id=group,
                block_mask=mask,
            )
        )

    def promote(self) -> list:
        """Caches a block in full that may hold a partial entry of the same length or less."""
        request, group = self.request(), self.random.randrange(NUM_GROUPS)
        held = self.some_held()
        if not held or self.pools[0].blocks[held[0]].block_hash_num_tokens not in (None, 2):
            return [None, None]
        return self.both(
            lambda pool: pool.cache_full_blocks(
                request, [pool.blocks[held[0]]], 0, 1, BLOCK_SIZE, group
            )
        )

    def cache_partial_block(self) -> list:
        request, group = self.request(), self.random.randrange(NUM_GROUPS)
        block_id = self.random.choice([0, *self.some_held()])
        replace = self.random.random() < 0.2
        boundaries = range(HASH_BLOCK_SIZE, request.num_tokens + 1, HASH_BLOCK_SIZE)
        num_tokens = self.random.choice(boundaries)
        return self.both(
            lambda pool: pool.cache_partial_block(
                request, pool.blocks[block_id], num_tokens, group, BLOCK_SIZE, replace
            )
        )

    def emit_cached_block_events(self) -> list:
        request, group = self.request(), self.random.randrange(NUM_GROUPS)
        num_cached = self.random.randint(0, request.num_tokens // BLOCK_SIZE)
        return self.both(
            lambda pool: pool.emit_cached_block_events(request, num_cached, BLOCK_SIZE, group)
        )

    def get_cached_block(self) -> list:
        request = self.request()
        groups = self.random.choice([[0], [1], [0, 1], []])
        return self.both(
            lambda pool: [
                [b.block_id for b in found] if found is not None else None
                for block_hash in request.block_hashes
                for found in [pool.get_cached_block(block_hash, groups)]
            ]
        )

    def hit(self) -> list:
        """Looks a prompt up and touches what it finds, as a scheduler does."""
        request = self.request()

        def call(pool):
            found = [pool.get_cached_block(h, [0]) for h in request.block_hashes[1::2]]
            blocks = [blocks[0] for blocks in found if blocks]
            pool.touch(blocks)
            return [b.block_id for b in blocks]

        results = self.both(call)
        self.held += results[0]
        return results

    def move_block_hashes(self) -> list:
        held = self.some_held()
        with_key = [i for i in held if self.pools[0].blocks[i].block_hash is not None]
        without = [i for i in held if self.pools[0].blocks[i].block_hash is None]
        if not with_key or not without:
            return [None, None]
        return self.both(
            lambda pool: pool.move_block_hashes(pool.blocks[with_key[0]], pool.blocks[without[0]])
        )

    def evict_blocks(self) -> list:
        num_blocks = self.pools[0].num_gpu_blocks
        ids = {self.random.randrange(num_blocks) for _ in range(self.random.randint(0, 2))}
        return self.both(lambda pool: pool.evict_blocks(ids))

    def evict_an_id_out_of_range(self) -> list:
        num_blocks = self.pools[0].num_gpu_blocks
        return self.both(lambda pool: pool.evict_blocks({num_blocks}))

    def unpin_blocks(self) -> list:
        ids = self.some_held()
        self.drop(ids)
        return [
            pool.unpin_blocks(
                (pool.blocks[i] for i in ids), lambda block, log=log: log.append(block.block_id)
            )
            for pool, log in zip(self.pools, self.reused, strict=True)
        ]

    def maybe_evict_cached_block(self) -> list:
        block_id = self.random.randrange(self.pools[0].num_gpu_blocks)
        return self.both(lambda pool: pool._maybe_evict_cached_block(pool.blocks[block_id]))

    def insert_block_hash(self) -> list:
        request = self.request()
        held = [i for i in self.some_held() if i]
        if not held:
            return [None, None]
        block_hash, num_tokens = self.random.choice(request.block_hashes), None
        if self.random.random() < 0.5:
            num_tokens = HASH_BLOCK_SIZE
        key = make_block_hash_with_group_id(block_hash, 0)
        return self.both(
            lambda pool: pool._insert_block_hash(key, pool.blocks[held[0]], num_tokens=num_tokens)
        )

    def is_block_writable(self) -> list:
        return self.both(lambda pool: [pool.is_block_writable(b) for b in pool.blocks])

    def reset_while_in_use(self) -> list:
        return self.both(lambda pool: pool.reset_prefix_cache())

    def reset_when_free(self) -> list:
        if self.random.random() < 0.8:
            return [None, None]
        held, self.held = self.held, []
        self.both(lambda pool: pool.free_blocks([pool.blocks[i] for i in held]))
        return self.both(lambda pool: pool.reset_prefix_cache())


OPERATIONS = [
    value
    for name, value in vars(PairOfPools).items()
    if not name.startswith("_") and name not in ("both", "request", "some_held", "drop")
]


@pytest.mark.parametrize("seed", range(40))
def test_the_same_operations_leave_the_same_pools(seed):
    pair = PairOfPools(seed)
    for step in range(NUM_STEPS):
        operation = pair.random.choice(OPERATIONS)
        stock, ours = operation(pair)
        where = f"step {step} of seed {seed}: {operation.__name__}"
        assert ours == stock, f"results differ at {where}"
        assert pair.reused[1] == pair.reused[0], f"callbacks differ at {where}"
        observed = [observe(pool, pair.seen_keys, pool.take_events()) for pool in pair.pools]
        assert_same(*observed, where)
        pair.pools[1].check_consistency()
