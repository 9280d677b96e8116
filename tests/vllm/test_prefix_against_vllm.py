# SPDX-License-Identifier: Apache-2.0
"""The same random requests through vLLM's KVCacheManager and through PrefixCache.

After every step both must agree on hit tokens, block ids, copies, keys and order of eviction.
"""

import random
from importlib import import_module
from math import lcm
from types import SimpleNamespace

import pytest

from cpool import BlockPool
from cpool.prefix import ChunkedLocal, FullAttention, Mamba, PrefixCache, SlidingWindow

torch = pytest.importorskip("torch", reason="vLLM's groups are described with torch dtypes")
pytest.importorskip("vllm", reason="compares with vLLM 0.32's KVCacheManager")
if not (found := import_module("vllm.version").__version__).startswith("0.32."):
    pytest.skip(f"cpool.prefix decides as vLLM 0.32 does; this is {found}", allow_module_level=True)

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request  # noqa: E402

MODELS = {
    "full": (4, [FullAttention(4)]),
    "full, drafter": (4, [FullAttention(4, eagle=True)]),
    "window": (4, [SlidingWindow(4, 10)]),
    "window, drafter": (4, [SlidingWindow(4, 9, eagle=True)]),
    "chunked": (4, [ChunkedLocal(4, 12)]),
    "state": (4, [Mamba(4)]),
    "full + state, fine": (4, [FullAttention(16), Mamba(16)]),
    "full + state, one size": (4, [FullAttention(4), Mamba(4)]),
    "full + wide state, fine": (4, [FullAttention(8), Mamba(24)]),
    "full of one unit + wide state, fine": (4, [FullAttention(4), Mamba(16)]),
    "state first": (2, [Mamba(8), FullAttention(8)]),
    "two full + three states": (
        4,
        [FullAttention(16), Mamba(16), Mamba(16), FullAttention(16), Mamba(16)],
    ),
    "full + two kinds of state": (4, [FullAttention(8), Mamba(16), Mamba(8)]),
    "full + window": (4, [FullAttention(4), SlidingWindow(4, 10)]),
    "full + window, coarse": (4, [FullAttention(8), SlidingWindow(4, 6)]),
    "full + two windows": (4, [FullAttention(4), SlidingWindow(4, 6), SlidingWindow(4, 14)]),
    "window + state": (4, [SlidingWindow(4, 8), Mamba(4)]),
    "wide window, coarse": (4, [SlidingWindow(8, 20), FullAttention(4)]),
    "full + chunked": (4, [FullAttention(4), ChunkedLocal(4, 8)]),
    "full + window + wide state, fine": (
        4,
        [SlidingWindow(4, 10), FullAttention(8), Mamba(16)],
    ),
    "full + wide window + state, coarse": (
        4,
        [SlidingWindow(8, 10), FullAttention(8), Mamba(16)],
    ),
    "drafter: full + state, fine": (4, [FullAttention(16, eagle=True), Mamba(16)]),
    "drafter: full + full + state, fine": (
        4,
        [FullAttention(16), FullAttention(16, eagle=True), Mamba(16)],
    ),
    "drafter: full + window": (4, [FullAttention(4, eagle=True), SlidingWindow(4, 10)]),
    "drafter: full + drafting window": (4, [FullAttention(4), SlidingWindow(4, 10, eagle=True)]),
    "drafter: coarse": (4, [FullAttention(8, eagle=True), SlidingWindow(4, 10, eagle=True)]),
    "drafter: full + window + state": (
        4,
        [FullAttention(4, eagle=True), SlidingWindow(4, 6, eagle=True), Mamba(8)],
    ),
}


MAX_PROMPT = 60
MAX_OUTPUT = 14
MAX_CHUNK = 40


def spec_of(group):
    attention = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if isinstance(group, FullAttention):
        return FullAttentionSpec(block_size=group.block_size, **attention)
    if isinstance(group, SlidingWindow):
        return SlidingWindowSpec(
            block_size=group.block_size, sliding_window=group.sliding_window, **attention
        )
    if isinstance(group, ChunkedLocal):
        return ChunkedLocalAttentionSpec(
            block_size=group.block_size,
            attention_chunk_size=group.attention_chunk_size,
            **attention,
        )
    return MambaSpec(
        block_size=group.block_size,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )


def make_manager(groups, hash_block_size, num_blocks):
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer{i}"], spec_of(g), getattr(g, "eagle", False))
            for i, g in enumerate(groups)
        ],
    )
    return KVCacheManager(
        config,
        max_model_len=1 << 20,
        scheduler_block_size=lcm(*(g.block_size for g in groups)),
        hash_block_size=hash_block_size,
        use_eagle=any(getattr(g, "eagle", False) for g in groups),
    )


class Side:
    """One request on both sides."""

    def __init__(self, request):
        self.request = request  # vLLM's
        self.ours = None  # cpool's, while running


class Twins:
    """vLLM's manager and our cache, driven with the same steps."""

    def __init__(self, groups, hash_block_size, num_blocks, seed):
        self.random = random.Random(seed)
        self.groups = groups
        self.unit = hash_block_size
        self.manager = make_manager(groups, hash_block_size, num_blocks)
        self.pool = BlockPool(num_blocks, True, hash_block_size)
        self.cache = PrefixCache(self.pool, groups)
        fine = self.manager.coordinator.enable_partial_hash_hits
        assert self.cache.layout.match == ("fine" if fine else "coarse")
        self.state_sizes = {g.block_size for g in groups if isinstance(g, Mamba)}
        self.waiting = []
        self.running = []
        self.prompts = []
        self.num_hit_tokens = 0
        self.num_copies = 0
        self.num_refused = 0
        self.num_preempted = 0

    def new_request(self, number):
        prompt = []
        if self.prompts and self.random.random() < 0.85:
            old = self.random.choice(self.prompts[-8:])
            prompt = old[: self.random.choice((len(old), self.random.randint(0, len(old))))]
        added = self.random.randint(0, min(30, MAX_PROMPT - len(prompt)))
        prompt = prompt + [self.random.randint(0, 3) for _ in range(added)] or [7]
        self.prompts.append(prompt)
        params = SamplingParams(max_tokens=64)
        params.update_from_generation_config({}, eos_token_id=100)
        return Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=get_request_block_hasher(self.unit, sha256),
        )

    def num_new_tokens(self, request, start, boundary=0):
        """A random chunk, cut where states need it: by both, with the same result."""
        end = min(request.num_tokens, start + self.random.randint(1, MAX_CHUNK))
        if not self.state_sizes:
            return end - start
        ours = self.cache.chunk_end(
            start,
            end - start,
            request.num_prompt_tokens,
            num_tokens=request.num_tokens,
            boundary=boundary,
        )
        if len(self.state_sizes) == 1:
            request.shared_prefix_boundary = boundary
            scheduler = SimpleNamespace(
                cache_config=SimpleNamespace(block_size=min(self.state_sizes)),
                mamba_partial_cache_hit=self.manager.coordinator.enable_partial_hash_hits,
                hash_block_size=self.unit,
                block_size=self.manager.coordinator.scheduler_block_size,
                use_eagle_block_drop=self.cache.layout.eagle,
                mamba_has_prefill_checkpoint_blocks=False,
                mamba_prefill_checkpoint_alignment=None,
                max_num_scheduled_tokens=1,
                scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
                mamba_shared_prefix_checkpoint=False,
            )
            theirs = Scheduler._mamba_block_aligned_split(
                scheduler, request, end - start, start - request.num_computed_tokens
            )
            assert ours == start + theirs
        return ours - start

    def run(self, side):
        request = side.request
        start = request.num_computed_tokens
        new = self.num_new_tokens(request, start)
        theirs = self.manager.allocate_slots(request, new)
        ours = self.cache.append(side.ours, new, num_computed_tokens=start)
        assert (theirs is None) == (ours is None)
        if ours is None:
            self.num_refused += 1
            return False
        self.cache.commit(side.ours, min(start + new, request.num_tokens))
        request.num_computed_tokens += new
        self.check_blocks(side)
        return True

    def start(self, side):
        request = side.request
        blocks, num_hits, boundary = self.manager.get_computed_blocks(request)
        match = self.cache.lookup(request.block_hashes, request.num_tokens - 1)
        assert match.num_tokens == num_hits
        assert [ids.tolist() for ids in match.block_ids] == list(blocks.get_block_ids())
        assert match.shared_prefix_boundary == boundary
        new = self.num_new_tokens(request, num_hits, boundary)
        theirs = self.manager.allocate_slots(request, new, num_hits, blocks)
        ours = self.cache.admit(match, new, request.num_prompt_tokens)
        assert (theirs is None) == (ours is None)
        if ours is None:
            self.num_refused += 1
            return False
        self.num_hit_tokens += num_hits
        side.ours = ours
        self.cache.commit(ours, min(num_hits + new, request.num_tokens))
        request.num_computed_tokens = num_hits + new
        self.check_blocks(side)
        return True

    def stop(self, side, for_good):
        self.manager.free(side.request)
        (self.cache.finish if for_good else self.cache.preempt)(side.ours)
        side.ours = None
        side.request.num_computed_tokens = 0

    def check_blocks(self, side):
        theirs = self.manager.get_block_ids(side.request.request_id)
        assert [ids.tolist() for ids in side.ours.block_ids] == list(theirs)

    def check_pools(self):
        theirs = self.manager.block_pool
        queue = [block.block_id for block in theirs.free_block_queue.get_all_free_blocks()]
        assert self.pool.free_queue_ids().tolist() == queue
        for block in theirs.blocks[1:]:
            found = self.pool.registrations(block.block_id)
            keys = {r.block_hash + r.kv_cache_group_id.to_bytes(4, "big") for r in found}
            extra = theirs.cached_block_hashes_by_block.get(block.block_id, set())
            assert keys == ({block.block_hash} if block.block_hash else set()) | extra
            assert max(0, self.pool.ref_cnts[block.block_id]) == block.ref_cnt
            if block.block_hash:
                assert found[0].num_tokens == block.block_hash_num_tokens

    def run_copies(self):
        copies, held = self.manager.take_kv_cache_block_copies()
        batch = self.cache.take_copies()
        assert batch.pairs.tolist() == [[c.src_block_id, c.dst_block_id] for c in copies]
        self.manager.block_pool.free_blocks(held)
        self.cache.copies_done(batch)
        self.num_copies += len(batch)

    def step(self):
        self.manager.new_step_starts()
        self.cache.begin_step()
        for side in list(self.running):
            if side not in self.running:
                continue
            while not self.run(side):
                victim = self.running.pop()
                self.stop(victim, for_good=False)
                self.num_preempted += 1
                self.waiting.append(victim)
                if victim is side:
                    break
        while self.waiting and len(self.running) < 4 and self.start(self.waiting[-1]):
            self.running.append(self.waiting.pop())
        self.run_copies()
        self.check_pools()
        if self.random.random() < 0.1:
            block_id = self.random.randrange(1, self.pool.num_gpu_blocks)
            self.manager.evict_blocks({block_id})
            self.pool.evict_ids([block_id])
        for side in list(self.running):
            if side.request.num_computed_tokens < side.request.num_tokens:
                continue
            if side.request.num_output_tokens >= MAX_OUTPUT or self.random.random() < 0.15:
                self.running.remove(side)
                self.stop(side, for_good=True)
            else:
                side.request.append_output_token_ids([self.random.randint(0, 3)])
        self.check_pools()


def blocks_of_one_request(group):
    tokens = MAX_PROMPT + MAX_OUTPUT
    if isinstance(group, Mamba):
        return 4
    if isinstance(group, SlidingWindow):
        tokens = min(tokens, MAX_CHUNK + group.sliding_window)
    if isinstance(group, ChunkedLocal):
        tokens = min(tokens, MAX_CHUNK + group.attention_chunk_size)
    return -(-tokens // group.block_size) + 1


def drive(model, seed, num_steps):
    init_none_hash(sha256)
    unit, groups = MODELS[model]
    # Room for one to four of the longest requests.
    num_blocks = 1 + int(sum(map(blocks_of_one_request, groups)) * (1 + seed % 4))
    twins = Twins(groups, unit, num_blocks, f"{model} {seed}")
    for number in range(num_steps):
        if len(twins.waiting) < 6:
            twins.waiting.insert(0, Side(twins.new_request(number)))
        twins.step()
    return twins


@pytest.mark.parametrize("model", MODELS)
def test_both_agree_on_every_step(model):
    reached = [drive(model, seed, num_steps=100) for seed in range(4)]
    assert sum(twins.num_hit_tokens for twins in reached) > 300
    assert sum(twins.pool.num_evicted_blocks for twins in reached) > 0
    if not any(isinstance(g, ChunkedLocal) for g in reached[0].groups):
        assert sum(twins.num_refused for twins in reached) > 0
        assert sum(twins.num_preempted for twins in reached) > 0
    if reached[0].cache.layout.match == "fine":
        assert sum(twins.num_copies for twins in reached) > 20


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_both_agree_over_many_seeds(model):
    for seed in range(4, 60):
        drive(model, seed, num_steps=150)
