# SPDX-License-Identifier: Apache-2.0
"""allocate_slots asks vLLM's own wherever there is something to do, and nowhere else."""

import pytest

pytest.importorskip("vllm", reason="needs a vLLM: tests/vllm/run --set own")

from dataclasses import replace
from functools import partial

import torch
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec
from vllm.v1.request import RequestStatus

from cpool.vllm.tails import allocate_slots_method

from .differential import build_managers, make_request, stock_method
from .test_differential_managers import BLOCK_SIZE, full, make_manager, mamba, window

chunked = ChunkedLocalAttentionSpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=1,
    head_size=1,
    dtype=torch.float32,
    attention_chunk_size=4 * BLOCK_SIZE,
)
PROMPT = 5 * BLOCK_SIZE + 1
NUM_TOKENS = 12 * BLOCK_SIZE
STOCK = stock_method(KVCacheManager, "allocate_slots")


class Counted:
    """The stock method, and how often it was needed."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return STOCK(*args)


class Pair:
    """One request on stock's pool, asked of stock alone, and on ours."""

    def __init__(self, specs, **settings):
        settings = {"hash_block_size": BLOCK_SIZE, "num_blocks": 200} | settings
        self.managers = build_managers(partial(make_manager, specs, **settings))
        self.requests = [
            make_request("request", range(PROMPT), settings["hash_block_size"])
            for _ in self.managers
        ]
        self.stock = Counted()
        self.ours = allocate_slots_method(
            KVCacheManager,
            self.stock,
            frozenset(
                {
                    kv_cache_coordinator.UnitaryKVCacheCoordinator,
                    kv_cache_coordinator.HybridKVCacheCoordinator,
                    kv_cache_coordinator.KVCacheCoordinatorNoPrefixCache,
                }
            ),
            (FullAttentionManager, SlidingWindowManager, MambaManager),
            RequestStatus.WAITING,
            RequestStatus.PREEMPTED,
            True,
        )

    def allocate(self, num_new_tokens=1, **kwargs):
        """Returns what was decided, and whether stock's method was needed for it."""
        before = self.stock.calls
        stock, ours = (
            method(manager, request, num_new_tokens, **kwargs)
            for method, manager, request in zip(
                (STOCK, self.ours), self.managers, self.requests, strict=True
            )
        )
        assert (ours is None) == (stock is None)
        if ours is not None:
            assert isinstance(ours, KVCacheBlocks)
            assert ours.get_block_ids() == stock.get_block_ids()
        self.compare()
        return ours, self.stock.calls > before

    def prefill(self):
        self.allocate(PROMPT)
        for request in self.requests:
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = PROMPT
            request.append_output_token_ids(7)

    def decode(self):
        """Returns the number of computed tokens before each step that needed stock's method."""
        needed = []
        while (at := self.requests[0].num_computed_tokens) < NUM_TOKENS:
            new, asked = self.allocate()
            assert new is not None
            if asked:
                needed.append(at)
            for request in self.requests:
                request.num_computed_tokens += 1
                request.append_output_token_ids(at)
        return needed

    def compare(self):
        states = [
            (
                manager.get_block_ids("request"),
                [group.num_cached_block for group in manager.coordinator.single_type_managers],
                [block.block_hash for block in manager.block_pool.blocks],
                [block.ref_cnt for block in manager.block_pool.blocks],
            )
            for manager in self.managers
        ]
        assert states[1] == states[0]


def steps(remainders):
    return [at for at in range(PROMPT, NUM_TOKENS) if at % BLOCK_SIZE in remainders]


def test_a_decode_step_needs_stock_where_a_block_begins_or_fills_up():
    pair = Pair([full])
    pair.prefill()
    assert pair.decode() == steps({0, BLOCK_SIZE - 1})


def test_caching_off_a_decode_step_needs_stock_where_a_block_begins():
    pair = Pair([full], enable_caching=False)
    pair.prefill()
    assert pair.decode() == steps({0})


def test_a_block_that_leaves_the_window_is_freed_by_stock():
    # A window of 10 tokens and blocks of 4: token 9 + 4n is the last to read block n.
    pair = Pair([window])
    pair.prefill()
    needed = pair.decode()
    assert needed == steps({0, BLOCK_SIZE - 1, 9 % BLOCK_SIZE})
    assert pair.managers[1].get_block_ids("request")[0][0] == 0


def test_groups_of_both_kinds():
    pair = Pair([full, window])
    pair.prefill()
    assert pair.decode() == steps({0, BLOCK_SIZE - 1, 9 % BLOCK_SIZE})


@pytest.mark.parametrize("hash_size", [4, 16])
def test_states_of_mamba(hash_size):
    # The state before the last is freed as soon as the last one was computed: also that of the
    # prompt. Hashes that end behind the prompt are no boundaries of states.
    size = 16
    specs = [replace(spec, block_size=size) for spec in (full, mamba)]
    pair = Pair(specs, hash_block_size=hash_size)
    pair.prefill()
    assert pair.decode() == [
        at for at in range(PROMPT, NUM_TOKENS) if at % size in (0, 1, size - 1) or at == PROMPT
    ]


def test_a_group_of_another_kind_is_stock_s():
    pair = Pair([chunked])
    pair.prefill()
    assert pair.decode() == steps(range(BLOCK_SIZE))


@pytest.fixture
def running():
    pair = Pair([full], watermark=0.5)
    pair.prefill()
    new, asked = pair.allocate()
    assert not asked
    assert new is pair.managers[1].empty_kv_cache_blocks
    return pair


@pytest.mark.parametrize(
    "argument",
    [
        {"num_new_computed_tokens": BLOCK_SIZE},
        {"new_computed_blocks": KVCacheBlocks(([],))},
        {"num_external_computed_tokens": BLOCK_SIZE},
        {"delay_cache_blocks": True},
        {"num_encoder_tokens": 1},
        {"full_sequence_must_fit": True},
        {"num_lookahead_tokens": BLOCK_SIZE},
        {"num_new_tokens": BLOCK_SIZE},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_what_asks_for_more_is_stock_s(running, argument):
    _, asked = running.allocate(**argument)
    assert asked


def test_no_tokens_at_all_are_refused_as_by_stock(running):
    for method, manager, request in zip(
        (STOCK, running.ours), running.managers, running.requests, strict=True
    ):
        with pytest.raises(ValueError, match="num_new_tokens must be greater than 0"):
            method(manager, request, 0)


def test_blocks_kept_free_for_others(running):
    num_free = running.managers[0].block_pool.get_num_free_blocks()
    for reserved, is_refused in ((num_free, False), (num_free + 1, True)):
        new, asked = running.allocate(reserved_blocks=reserved)
        assert (new is None) == is_refused
        assert not asked


def test_fewer_free_blocks_than_none(running):
    # Blocks are withheld, and then one that is free is taken by a hit.
    pools = [manager.block_pool for manager in running.managers]
    for pool in pools:
        pool.free_block_queue.num_free_blocks = 0
    assert running.allocate()[0] is not None
    for pool in pools:
        pool.touch([pool.blocks[-1]])
        assert pool.get_num_free_blocks() == -1
    assert running.allocate() == (None, False)


@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.PREEMPTED])
def test_the_watermark_counts_for_those_that_wait_beside_others(running, status):
    watermark = running.managers[0].watermark_blocks
    reserved = running.managers[0].block_pool.get_num_free_blocks() - watermark + 1
    assert watermark > 1
    assert running.allocate(reserved_blocks=reserved)[0] is not None
    for request in running.requests:
        request.status = status
    assert running.allocate(reserved_blocks=reserved)[0] is None
    assert running.allocate(reserved_blocks=reserved - 1)[0] is not None
    assert running.allocate(reserved_blocks=reserved, has_scheduled_reqs=False)[0] is not None


def test_a_request_that_was_freed_is_stock_s(running):
    for manager, request in zip(running.managers, running.requests, strict=True):
        manager.free(request)
        request.num_computed_tokens = 0
    assert running.allocate(PROMPT)[1]


def test_a_tail_that_is_to_be_copied_is_stock_s(running):
    for manager in running.managers:
        group = manager.coordinator.single_type_managers[0]
        group._partial_hit_reqs["request"] = (5, group.req_to_blocks["request"][5])
    before = running.managers[1].get_block_ids("request")
    assert running.allocate()[1]
    assert running.managers[1].get_block_ids("request") != before


def test_a_subclass_is_stock_s(running):
    class Manager(KVCacheManager):
        pass

    running.managers[1].__class__ = Manager
    assert running.allocate()[1]


def test_other_coordinators_and_groups_are_stock_s(running):
    coordinator = running.managers[1].coordinator
    group = coordinator.single_type_managers[0]
    for part in (coordinator, group):
        known = type(part)
        part.__class__ = type("Other", (known,), {})
        assert running.allocate()[1]
        part.__class__ = known
        assert not running.allocate()[1]


def test_stock_s_pool_is_stock_s(running):
    before = running.stock.calls
    running.ours(running.managers[0], running.requests[0], 1)
    assert running.stock.calls == before + 1


def test_draft_tokens_that_may_be_rejected_are_not_registered():
    pair = Pair([full])
    pair.prefill()
    # Two tokens are final, two are drafts: with these the block would be full.
    for request in pair.requests:
        request.append_output_token_ids(8)
    assert pair.allocate(BLOCK_SIZE - 1)[1] is False
