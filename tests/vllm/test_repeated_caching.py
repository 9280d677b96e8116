# SPDX-License-Identifier: Apache-2.0
"""Full attention registers anew whatever is not registered any more, and only that."""

import pytest

pytest.importorskip("vllm", reason="needs a vLLM: tests/vllm/run --set own")

import torch
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

from cpool.vllm import managers
from cpool.vllm.tails import cache_blocks_method

from .differential import OurBlockPool, make_request

HASH_SIZE = 4
BLOCK_SIZE = 16
PROMPT = 3 * BLOCK_SIZE + 2 * HASH_SIZE + 1  # its tail ends inside the fourth block
TAIL = PROMPT // HASH_SIZE  # in hashes
GROUP = 2


class Counted:
    """The stock method, and how often it was needed."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        # What replace_methods() put in its place when differential.py was imported.
        FullAttentionManager.cache_blocks(*args, **kwargs)


@pytest.fixture
def manager():
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return FullAttentionManager(
        spec,
        OurBlockPool(32, True, HASH_SIZE),
        enable_caching=True,
        kv_cache_group_id=GROUP,
        scheduler_block_size=BLOCK_SIZE,
    )


@pytest.fixture
def stock():
    return Counted()


@pytest.fixture
def cache(manager, stock):
    method = cache_blocks_method(FullAttentionManager, stock, True)

    def call(request, num_tokens=PROMPT):
        method(manager, request, num_tokens, retention_interval=None, replay_boundaries=())

    return call


@pytest.fixture
def request_of_four_blocks(manager, cache):
    request = make_request("request", range(PROMPT), HASH_SIZE)
    manager.allocate_new_blocks("request", PROMPT, PROMPT)
    cache(request)
    return request


def key_of(request, num_hashes):
    return make_block_hash_with_group_id(request.block_hashes[num_hashes - 1], GROUP)


def block_under(manager, key):
    return manager.block_pool.cached_block_hash_to_block.get_one_block(key)


def test_what_is_registered_is_not_registered_again(manager, cache, stock, request_of_four_blocks):
    blocks = manager.req_to_blocks["request"]
    assert block_under(manager, key_of(request_of_four_blocks, TAIL)) is blocks[3]
    assert stock.calls == 1
    for num_tokens in (PROMPT, PROMPT + 1, 4 * BLOCK_SIZE - 1):
        cache(request_of_four_blocks, num_tokens)
    assert stock.calls == 1


def test_a_block_that_fills_up_is_registered(manager, cache, stock, request_of_four_blocks):
    request = request_of_four_blocks
    request.append_output_token_ids(list(range(4 * BLOCK_SIZE - PROMPT)))
    cache(request, 4 * BLOCK_SIZE)
    assert stock.calls == 2
    assert manager.req_to_blocks["request"][3].block_hash == key_of(request, 16)
    assert manager.num_cached_block["request"] == 4
    # The tail is now one of the block's extra keys.
    assert block_under(manager, key_of(request, TAIL)) is manager.req_to_blocks["request"][3]
    cache(request, 4 * BLOCK_SIZE)
    assert stock.calls == 2


def test_a_tail_that_was_evicted_is_registered_again(manager, cache, stock, request_of_four_blocks):
    tail = manager.req_to_blocks["request"][3]
    manager.block_pool.evict_blocks({tail.block_id})
    assert tail.block_hash is None
    cache(request_of_four_blocks)
    assert stock.calls == 2
    assert tail.block_hash == key_of(request_of_four_blocks, TAIL)


def test_another_hash_at_the_same_boundary_is_registered(
    manager, cache, stock, request_of_four_blocks
):
    request_of_four_blocks.block_hashes[TAIL - 1] = bytes(32)
    cache(request_of_four_blocks)
    assert stock.calls == 2
    assert block_under(manager, key_of(request_of_four_blocks, TAIL)) is not None


def test_the_same_hash_of_another_group_is_not_taken_for_this_one(
    manager, cache, stock, request_of_four_blocks
):
    manager.kv_cache_group_id = GROUP + 1
    cache(request_of_four_blocks)
    assert stock.calls == 2


def test_another_block_in_its_place_is_registered(manager, cache, stock, request_of_four_blocks):
    (block,) = manager.block_pool.get_new_blocks(1)
    manager.req_to_blocks["request"][3] = block
    cache(request_of_four_blocks)
    assert stock.calls == 2
    assert block.block_hash == key_of(request_of_four_blocks, TAIL)


def test_the_null_block_and_missing_blocks_are_left_to_stock(
    manager, cache, stock, request_of_four_blocks
):
    manager.req_to_blocks["request"][3] = manager.block_pool.null_block
    cache(request_of_four_blocks)
    assert stock.calls == 2
    del manager.req_to_blocks["request"]
    manager.num_cached_block["request"] = 3
    cache(request_of_four_blocks)
    assert stock.calls == 3


def test_eagle_takes_the_whole_prompt(manager, cache, stock):
    manager.use_eagle = True
    request = make_request("whole", range(2 * HASH_SIZE), HASH_SIZE)
    manager.allocate_new_blocks("whole", 2 * HASH_SIZE, 2 * HASH_SIZE)
    cache(request, 2 * HASH_SIZE)
    cache(request, 2 * HASH_SIZE)
    assert stock.calls == 1
    assert manager.req_to_blocks["whole"][0].block_hash == key_of(request, 2)


def test_subclasses_are_left_to_stock(manager, stock, request_of_four_blocks):
    class Other(FullAttentionManager):
        pass

    method = cache_blocks_method(Other, stock, True)
    method(manager, request_of_four_blocks, PROMPT, replay_boundaries=())
    assert stock.calls == 2


def test_the_method_stays_where_what_it_calls_has_changed(monkeypatch):
    def _cache_partial_tail_block(self, request, num_tokens):
        """Not the one that ours knows."""

    assert managers.repeated_caching(FullAttentionManager.cache_blocks) is not None
    monkeypatch.setattr(
        FullAttentionManager, "_cache_partial_tail_block", _cache_partial_tail_block
    )
    assert managers.repeated_caching(FullAttentionManager.cache_blocks) is None
