# SPDX-License-Identifier: Apache-2.0
"""The truthful stream: a consumer that keeps a set of (hash, group) holds the pool's keys."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpool
from cpool.events.types import AllBlocksCleared, BlockRemoved, BlockStored

from .events_driver import (
    BLOCK_SIZE,
    HASH_BLOCK_SIZE,
    Consumer,
    Driver,
    Request,
    StrictConsumer,
    pool_keys,
)

TOKENS = list(range(1, 21))


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


@pytest.fixture
def pool():
    return cpool.BlockPool(
        12, True, HASH_BLOCK_SIZE, enable_kv_cache_events=True, truthful_events=True
    )


def run(seed, num_steps, compact=False):
    driver = Driver(seed, truthful_events=True)
    consumer = StrictConsumer(driver.prefix_of)
    for _ in range(num_steps):
        driver.step()
        if driver.random.random() < 0.5:
            consumer.apply(driver.pool.take_events())
            assert consumer.keys == pool_keys(driver.pool)
    return consumer


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_set_of_hashes_equals_the_pools_keys_after_every_batch(seed):
    run(seed, 60)


def test_long_runs_reach_what_they_are_to_check():
    consumers = [run(seed, 1500) for seed in range(4)]
    assert all(consumer.num_clears > 1 for consumer in consumers)
    assert all(consumer.num_stored > 200 for consumer in consumers)
    assert sum(consumer.num_parents for consumer in consumers) > 50


def is_true_to_the_pool(seed, **arguments):
    driver = Driver(seed, **arguments)
    consumer = Consumer()
    for _ in range(200):
        driver.step()
        consumer.apply(driver.pool.take_events())
        if consumer.keys != pool_keys(driver.pool):
            return False
    return True


def test_vllms_stream_fails_the_same_check():
    assert not any(is_true_to_the_pool(seed) for seed in range(5))
    assert all(is_true_to_the_pool(seed, truthful_events=True) for seed in range(5))


def register(pool, request, blocks, first=0, mask=None, group=0):
    pool.cache_full_blocks(
        request,
        [pool.null_block] * first + blocks,
        first,
        first + len(blocks),
        BLOCK_SIZE,
        group,
        mask,
    )


def test_the_eviction_of_one_of_two_copies_is_not_reported(pool):
    request = Request(TOKENS)
    blocks = pool.get_new_blocks(2)
    register(pool, request, blocks[:1])
    register(pool, request, blocks[1:])
    assert len(pool.take_events()) == 1
    pool.evict_blocks({blocks[0].block_id})
    assert pool.take_events() == []
    pool.evict_ids([blocks[1].block_id])
    (removed,) = pool.take_events()
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [request.full_hashes()[0]]


def test_both_copies_evicted_in_one_batch_are_one_removal(pool):
    request = Request(TOKENS)
    ids = pool.get_new_block_ids(2)
    for id in ids:
        pool.cache_full_ids([id], request.full_hashes()[:1], 0, BLOCK_SIZE)
    pool.take_events()
    pool.evict_ids(ids)
    assert len(pool.take_events()) == 1


def test_masked_blocks_split_a_store_and_keep_tokens_and_parents_right(pool):
    request = Request(TOKENS)
    hashes = request.full_hashes()
    register(pool, request, pool.get_new_blocks(4), mask=[True, True, False, True])
    first, second = pool.take_events()
    assert first.block_hashes == hashes[:2]
    assert first.token_ids == TOKENS[:8]
    assert first.parent_block_hash is None
    assert second.block_hashes == [hashes[3]]
    assert second.token_ids == TOKENS[12:16]
    assert second.parent_block_hash is None  # block 2 is not resident
    assert len(second.extra_keys) == 1


def test_a_batch_in_which_every_block_is_masked_says_nothing(pool):
    register(pool, Request(TOKENS), pool.get_new_blocks(2), mask=[False, False])
    assert pool.take_events() == []


def test_the_parent_is_named_when_it_is_resident(pool):
    request = Request(TOKENS)
    hashes = request.full_hashes()
    blocks = pool.get_new_blocks(3)
    register(pool, request, blocks[:1])
    register(pool, request, blocks[1:2], first=1)
    pool.evict_blocks({blocks[1].block_id})
    register(pool, request, blocks[2:], first=2)
    events = [event for event in pool.take_events() if isinstance(event, BlockStored)]
    assert [event.parent_block_hash for event in events] == [None, hashes[0], None]


def test_a_partial_entry_tells_its_tokens_since_the_block_before(pool):
    request = Request(TOKENS)
    blocks = pool.get_new_blocks(2)
    register(pool, request, blocks[:1])
    pool.cache_partial_block(request, blocks[1], 6, 0, BLOCK_SIZE)
    stored = pool.take_events()[1]
    assert stored.block_hashes == [request.block_hashes[2]]
    assert stored.parent_block_hash == request.full_hashes()[0]
    assert stored.token_ids == TOKENS[4:6]
    assert stored.block_size == 2


def test_promotion_leaves_nothing_behind(pool):
    request = Request(TOKENS)
    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(request, block, 2, 0, BLOCK_SIZE)
    register(pool, request, [block])
    stored, removed, promoted = pool.take_events()
    assert removed.block_hashes == stored.block_hashes
    assert promoted.block_hashes == request.full_hashes()[:1]


def test_a_reset_is_one_clear_whatever_watchers_do(pool):
    request = Request(TOKENS)
    (block,) = pool.get_new_blocks(1)
    register(pool, request, [block])
    pool.unpin_blocks([block], lambda block: register(pool, request, [block]))
    pool.take_events()
    assert pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]
    assert pool.num_cached_keys == 0


def test_hits_are_not_reported_again(pool):
    request = Request(TOKENS)
    register(pool, request, pool.get_new_blocks(2))
    pool.take_events()
    pool.emit_cached_block_events(request, 2, BLOCK_SIZE, 0)
    assert pool.take_events() == []


def test_truthful_events_are_off_by_default_and_keyword_only():
    assert not cpool.BlockPool(2, True, 1).truthful_events
    with pytest.raises(TypeError):
        cpool.BlockPool(2, True, 1, True, None, "GPU", True)


@pytest.mark.parametrize("name", ["truthful_events", "detailed_snapshots"])
@pytest.mark.parametrize("given", [True, 1])
def test_options_of_events_without_events_are_refused(name, given):
    pool = cpool.BlockPool.__new__(cpool.BlockPool)
    for off in ({}, {"enable_kv_cache_events": False}):
        with pytest.raises(
            cpool.ContractError, match=f"^{name} is {given}.*enable_kv_cache_events is False"
        ):
            pool.__init__(1 << 20, True, HASH_BLOCK_SIZE, **off, **{name: given}, hash_width=32)
        assert pool.nbytes == 0
    # It can still become a pool, with events.
    pool.__init__(9, True, HASH_BLOCK_SIZE, enable_kv_cache_events=True, **{name: given})
    assert getattr(pool, name)
    pool.check_consistency()
