# SPDX-License-Identifier: Apache-2.0
"""vLLM's own KV-cache managers on stock's pool and on ours, in the same random serving."""

import random
from functools import partial
from math import lcm

import pytest

pytest.importorskip("vllm", reason="needs a vLLM: tests/vllm/run --set own")

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from .differential import Metrics, assert_same, build_managers, make_request, observe

BLOCK_SIZE = 4
NUM_STEPS = 250
MAX_TOKENS = 64

full = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
window = SlidingWindowSpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=10
)
longer_window = SlidingWindowSpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=1,
    head_size=1,
    dtype=torch.float32,
    sliding_window=10,
    extra_retained_tokens=3,
)
wide_full = FullAttentionSpec(
    block_size=2 * BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
)
mamba = MambaSpec(
    block_size=BLOCK_SIZE, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align"
)
mamba_with_drafts = MambaSpec(
    block_size=BLOCK_SIZE,
    shapes=((1, 1),),
    dtypes=(torch.float32,),
    mamba_cache_mode="align",
    num_speculative_blocks=2,
)
CASES = {
    "full attention": {"specs": [full], "hash_block_size": BLOCK_SIZE},
    "full attention with EAGLE": {
        "specs": [full],
        "hash_block_size": BLOCK_SIZE,
        "use_eagle": True,
    },
    "full attention, the last tokens computed again": {
        "specs": [full],
        "hash_block_size": BLOCK_SIZE,
        "use_eagle": True,
        "num_prefill_lookahead": 3,
    },
    "sliding window": {"specs": [window], "hash_block_size": BLOCK_SIZE},
    "full and sliding window": {"specs": [full, window], "hash_block_size": BLOCK_SIZE},
    "full and sliding window with EAGLE": {
        "specs": [full, window],
        "hash_block_size": BLOCK_SIZE,
        "use_eagle": True,
    },
    "full and a window that retains more": {
        "specs": [full, longer_window],
        "hash_block_size": BLOCK_SIZE,
    },
    "two block sizes": {"specs": [wide_full, window], "hash_block_size": BLOCK_SIZE},
    "Mamba with partial hits": {"specs": [full, mamba], "hash_block_size": 2},
    "Mamba with partial hits and EAGLE": {
        "specs": [full, mamba_with_drafts],
        "hash_block_size": 2,
        "use_eagle": True,
    },
    "caching off": {"specs": [full], "hash_block_size": BLOCK_SIZE, "enable_caching": False},
}


def make_manager(
    specs,
    hash_block_size,
    num_blocks,
    use_eagle=False,
    enable_caching=True,
    watermark=0.0,
    num_prefill_lookahead=0,
) -> KVCacheManager:
    return KVCacheManager(
        KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)
            ],
        ),
        max_model_len=4 * MAX_TOKENS,
        scheduler_block_size=lcm(*(spec.block_size for spec in specs)),
        hash_block_size=hash_block_size,
        enable_caching=enable_caching,
        use_eagle=use_eagle,
        enable_kv_cache_events=True,
        log_stats=True,
        metrics_collector=Metrics(),
        watermark=watermark,
        num_prefill_lookahead=num_prefill_lookahead,
    )


class Serving:
    """One scheduler's worth of requests, on two managers at once."""

    def __init__(self, case: dict, seed: int) -> None:
        self.random = random.Random(seed)
        self.case = case
        num_blocks = self.random.choice([14, 25, 60])
        watermark = self.random.choice([0.0, 0.1])
        self.managers = build_managers(
            partial(make_manager, num_blocks=num_blocks, watermark=watermark, **case)
        )
        self.running: list[tuple] = []  # the same request twice, once per manager
        self.num_requests = 0
        self.keys: set[bytes] = set()

    def step(self) -> str:
        for manager in self.managers:
            manager.new_step_starts()
        names = ["admit", "admit", "advance", "advance", "advance", "advance", "finish", "reset"]
        name = self.random.choice(names)
        getattr(self, name)()
        # The copies of partial hits have run by the end of the step.
        copies = [manager.take_kv_cache_block_copies() for manager in self.managers]
        for manager, taken in zip(self.managers, copies, strict=True):
            self.release_copies(manager, taken)
        offloads = [manager.take_boundary_state_offloads() for manager in self.managers]
        assert repr(offloads[1]) == repr(offloads[0])
        return name

    @staticmethod
    def release_copies(manager, taken) -> None:
        # A pair: the copies by id for the worker, and the blocks that it keeps until then.
        _, retained = taken
        manager.block_pool.free_blocks(retained)

    def admit(self) -> None:
        self.num_requests += 1
        first = self.random.randint(0, 1)
        length = self.random.randint(1, MAX_TOKENS)
        tokens = [first * 1000 + i for i in range(length)]
        if self.random.random() < 0.3:
            tokens[length // 2 :] = [5000 + self.num_requests] * (length - length // 2)
        pair = tuple(
            make_request(str(self.num_requests), tokens, self.case["hash_block_size"])
            for _ in self.managers
        )
        if self.schedule(pair, is_new=True):
            self.running.append(pair)

    def schedule(self, pair, is_new: bool) -> bool:
        """Gives a request slots for a chunk of its tokens, as a scheduler would."""
        hits = [0, 0]
        allocated = []
        chunk = None
        reserved = self.random.choice([0] * 12 + [1, 5, 100])
        is_alone = self.random.random() < 0.2
        in_flight = self.random.choice([0, 0, 0, 1, 6])
        for side, (manager, request) in enumerate(zip(self.managers, pair, strict=True)):
            blocks = None
            request.num_in_flight_tokens = 0 if is_new else in_flight
            if is_new:
                found = manager.get_computed_blocks(request)
                blocks, hits[side], request.shared_prefix_boundary = found
            start = request.num_computed_tokens + hits[side]
            if chunk is None:
                chunk = self.chunk_from(request, start)
            new = manager.allocate_slots(
                request,
                chunk,
                hits[side],
                blocks,
                num_lookahead_tokens=2 if self.case.get("use_eagle") else 0,
                reserved_blocks=reserved,
                has_scheduled_reqs=not is_alone,
            )
            allocated.append(None if new is None else new.get_block_ids(allow_none=True))
        assert hits[1] == hits[0], "hits differ"
        assert allocated[1] == allocated[0], "new blocks differ"
        if allocated[0] is None:
            return False
        for request in pair:
            request.num_computed_tokens += hits[0] + chunk
            request.status = RequestStatus.RUNNING
        return True

    def chunk_from(self, request, start: int) -> int:
        left = request.num_tokens - start
        if left <= 1 or not any(isinstance(s, MambaSpec) for s in self.case["specs"]):
            return left if self.random.random() < 0.5 else self.random.randint(1, left)
        # A Mamba state is written where a chunk ends: at a block's boundary, at the
        # prompt's last hash boundary, or at the end.
        aligned = [end for end in range(start + 1, start + left) if end % BLOCK_SIZE == 0]
        tail = request.num_tokens // 2 * 2
        stops = [end for end in (*aligned[-1:], tail) if start < end < start + left]
        return (min(stops) if stops else start + left) - start

    def advance(self) -> None:
        if not self.running:
            return
        pair = self.random.choice(self.running)
        if pair[0].num_computed_tokens == pair[0].num_tokens:
            token = self.random.randint(0, 3)
            for request in pair:
                request.append_output_token_ids(token)
        if not self.schedule(pair, is_new=False):
            self.preempt(self.running[-1])

    def preempt(self, pair) -> None:
        self.running.remove(pair)
        for manager, request in zip(self.managers, pair, strict=True):
            manager.free(request)
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED
        if self.schedule(pair, is_new=True):
            self.running.append(pair)

    def finish(self) -> None:
        if self.running:
            pair = self.running.pop(self.random.randrange(len(self.running)))
            for manager, request in zip(self.managers, pair, strict=True):
                manager.free(request)

    def reset(self) -> None:
        if self.random.random() < 0.1:
            while self.running:
                self.finish()
        results = [manager.reset_prefix_cache() for manager in self.managers]
        assert results[1] == results[0]

    def compare(self, where: str) -> None:
        for pair in self.running:
            self.keys |= {
                make_block_hash_with_group_id(block_hash, group)
                for block_hash in pair[0].block_hashes
                for group in range(len(self.case["specs"]))
            }
            tables = [
                manager.get_block_ids(request.request_id)
                for manager, request in zip(self.managers, pair, strict=True)
            ]
            assert tables[1] == tables[0], f"block tables differ after {where}"
        notes = [
            [
                (dict(group.num_cached_block), list(group.req_to_blocks), group.new_block_ids)
                for group in manager.coordinator.single_type_managers
            ]
            for manager in self.managers
        ]
        assert notes[1] == notes[0], f"the managers' notes differ after {where}"
        observed = [
            observe(manager.block_pool, self.keys, manager.take_events())
            for manager in self.managers
        ]
        assert_same(*observed, where)
        self.managers[1].block_pool.check_consistency()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CASES)
def test_the_same_serving_makes_the_same_decisions(name, seed):
    serving = Serving(CASES[name], seed)
    for step in range(NUM_STEPS):
        operation = serving.step()
        serving.compare(f"step {step} of seed {seed}: {operation}")
    statistics = [manager.make_prefix_cache_stats() for manager in serving.managers]
    assert statistics[1] == statistics[0]
    if CASES[name].get("enable_caching", True):
        assert statistics[0].hits or serving.keys
