# SPDX-License-Identifier: Apache-2.0
"""Snapshots: what a consumer that comes late is told, and that it then knows everything."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpool
from cpool.events import types
from cpool.events.types import BlockStored, GroupDescription

from .events_driver import (
    BLOCK_SIZE,
    HASH_BLOCK_SIZE,
    Driver,
    Request,
    StrictConsumer,
    pool_keys,
)

TOKENS = list(range(1, 21))


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def make_pool(**arguments):
    return cpool.BlockPool(
        16, True, HASH_BLOCK_SIZE, enable_kv_cache_events=True, truthful_events=True, **arguments
    )


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_snapshot_and_tail_give_what_one_knows_who_saw_everything(seed):
    driver = Driver(seed, truthful_events=True)
    saw_all = StrictConsumer(driver.prefix_of)
    late = []  # consumers and the sequence number from which they go on
    for _ in range(60):
        driver.step()
        sequence = driver.pool.num_event_batches
        batch = driver.pool.take_events()
        saw_all.apply(batch)
        for consumer, start in late:
            if batch and sequence >= start:
                consumer.apply(batch)
            assert consumer.keys == saw_all.keys
        if driver.random.random() < 0.1:
            snapshot = driver.pool.snapshot_events()
            consumer = StrictConsumer(driver.prefix_of)
            consumer.apply(list(snapshot.events))
            assert consumer.keys == pool_keys(driver.pool)
            late.append((consumer, snapshot.sequence))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_snapshot_in_the_middle_of_a_batch_may_be_followed_by_the_whole_batch(seed):
    driver = Driver(seed, truthful_events=True)
    for _ in range(30):
        driver.step()
    driver.pool.take_events()
    for _ in range(driver.random.randint(0, 5)):
        driver.step()
    snapshot = driver.pool.snapshot_events()
    for _ in range(5):
        driver.step()
    assert snapshot.sequence == driver.pool.num_event_batches
    known = {
        (digest, event.group_idx) for event in snapshot.events for digest in event.block_hashes
    }
    for event in driver.pool.take_events():
        keys = {(digest, event.group_idx) for digest in getattr(event, "block_hashes", ())}
        if isinstance(event, types.AllBlocksCleared):
            known.clear()
        elif isinstance(event, BlockStored):
            known |= keys
        else:
            known -= keys
    assert known == pool_keys(driver.pool)


def parents_in(events):
    parent_of = {}
    for event in events:
        parent = event.parent_block_hash
        for digest in event.block_hashes:
            parent_of[digest, event.group_idx] = parent
            parent = digest
    return parent_of


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_parents_are_the_resident_block_before(seed):
    driver = Driver(seed, with_inserts=False, truthful_events=True)
    for _ in range(60):
        driver.step()
    keys = pool_keys(driver.pool)
    for (digest, group), parent in parents_in(driver.pool.snapshot_events().events).items():
        tokens = driver.prefix_of[digest]
        start = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
        expected = [
            other
            for other, prefix in driver.prefix_of.items()
            if prefix == tokens[:start] and (other, group) in keys
        ]
        assert [parent] == (expected or [None])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_detailed_snapshot_carries_the_tokens_of_every_block(seed):
    driver = Driver(seed, with_inserts=False, truthful_events=True, detailed_snapshots=True)
    for _ in range(60):
        driver.step()
    consumer = StrictConsumer(driver.prefix_of)
    events = list(driver.pool.snapshot_events().events)
    assert all(event.token_ids for event in events)
    consumer.apply(events)  # checks that tokens belong to hashes and parents
    assert consumer.keys == pool_keys(driver.pool)


def test_a_detailed_snapshot_tells_what_the_events_told():
    pool = make_pool(detailed_snapshots=True)
    ids = pool.get_new_block_ids(2)
    pool.cache_full_ids(
        ids,
        Request(TOKENS).full_hashes()[:2],
        0,
        BLOCK_SIZE,
        token_ids=TOKENS[:8],
        lora_id=7,
        lora_name="adapter",
        extra_keys=[("adapter", "salt"), ("adapter",)],
        session_id="s",
    )
    (event,) = pool.take_events()
    first, second = pool.snapshot_events().events
    assert first.token_ids + second.token_ids == event.token_ids
    assert first.extra_keys + second.extra_keys == event.extra_keys
    for part in (first, second):
        assert (part.lora_id, part.lora_name, part.session_id) == (7, "adapter", "s")


def test_a_chain_of_blocks_is_one_event():
    pool = make_pool()
    request = Request(TOKENS)
    hashes = request.full_hashes()
    ids = pool.get_new_block_ids(5)
    # From the end to the front, so that children are registered before their parents.
    for i in (4, 3, 2, 1, 0):
        pool.cache_full_ids(
            ids[i : i + 1],
            hashes[i : i + 1],
            3,
            BLOCK_SIZE,
            i,
            parent_hash=hashes[i - 1] if i else None,
        )
    (event,) = pool.snapshot_events().events
    assert event.block_hashes == hashes
    assert event.parent_block_hash is None
    assert event.block_size == BLOCK_SIZE
    assert event.group_idx == 3


def test_a_parent_that_comes_back_on_another_block_is_found_again():
    pool = make_pool()
    request = Request(TOKENS)
    hashes = request.full_hashes()
    ids = pool.get_new_block_ids(3)
    pool.cache_full_ids(ids[:2], hashes[:2], 0, BLOCK_SIZE)
    pool.evict_ids(ids[:1])
    (orphan,) = pool.snapshot_events().events
    assert orphan.block_hashes == hashes[1:2]
    assert orphan.parent_block_hash is None
    pool.cache_full_ids(ids[2:], hashes[:1], 0, BLOCK_SIZE)
    (event,) = pool.snapshot_events().events
    assert event.block_hashes == hashes[:2]


def test_a_parent_whose_low_bits_another_key_shares_is_not_named():
    pool = make_pool()
    parent, other, child = (bytes([i]) * 8 + bytes(7) + b"\x01" for i in (1, 2, 3))
    child = child[:-1] + b"\x02"
    ids = pool.get_new_block_ids(3)
    pool.cache_full_ids(ids[:1], [parent], 0, BLOCK_SIZE)
    pool.cache_full_ids(ids[1:2], [other], 0, BLOCK_SIZE)
    pool.cache_full_ids(ids[2:], [child], 0, BLOCK_SIZE, 1, parent_hash=parent)
    assert parents_in(pool.snapshot_events().events)[child, 0] is None
    pool.evict_ids(ids[1:2])
    assert parents_in(pool.snapshot_events().events)[child, 0] == parent


def test_moved_keys_keep_their_parents():
    pool = make_pool()
    request = Request(TOKENS)
    hashes = request.full_hashes()
    blocks = pool.get_new_blocks(3)
    ids = [block.block_id for block in blocks]
    pool.cache_full_ids(ids[:2], hashes[:2], 0, BLOCK_SIZE)
    pool.cache_partial_block(request, blocks[1], 6, 0, BLOCK_SIZE)
    before = parents_in(pool.snapshot_events().events)
    assert before[request.block_hashes[2], 0] == hashes[0]
    pool.move_ids(ids[1], ids[2])
    assert parents_in(pool.snapshot_events().events) == before


def test_groups_are_described():
    pool = make_pool(medium="CPU")
    pool.event_groups = {1: GroupDescription("sliding_window", 128)}
    pool.event_locality = "LOCAL"
    ids = pool.get_new_block_ids(2)
    request = Request(TOKENS)
    pool.cache_full_ids(ids[:1], request.full_hashes()[:1], 0, BLOCK_SIZE)
    pool.cache_full_ids(ids[1:], request.full_hashes()[:1], 1, BLOCK_SIZE)
    streams = [pool.take_events(), list(pool.snapshot_events().events)]
    for events in streams:
        by_group = {event.group_idx: event for event in events}
        assert by_group[0].kv_cache_spec_kind is None
        assert by_group[1].kv_cache_spec_kind == "sliding_window"
        assert by_group[1].kv_cache_spec_sliding_window == 128
        assert {event.medium for event in events} == {"CPU"}
        assert {event.locality for event in events} == {"LOCAL"}


def test_an_empty_pool_has_an_empty_snapshot():
    snapshot = make_pool().snapshot_events()
    assert list(snapshot.events) == []
    assert snapshot == (snapshot.events, 0)


def test_without_events_there_are_no_snapshots():
    with pytest.raises(ValueError, match="events on"):
        cpool.BlockPool(4, True, 16).snapshot_events()


def test_a_snapshot_stays_as_it_was():
    pool = make_pool()
    ids = pool.get_new_block_ids(3)
    pool.cache_full_ids(ids, Request(TOKENS).full_hashes()[:3], 0, BLOCK_SIZE)
    snapshot = pool.snapshot_events()
    before = copy.deepcopy(list(snapshot.events))
    pool.evict_ids(ids)
    pool.free_ids(ids)
    pool.reset_prefix_cache()
    assert list(snapshot.events) == before


def test_parents_cost_eight_bytes_a_block_and_nothing_with_events_off():
    rng = np.random.default_rng(0)
    num_blocks = 20_000
    sizes = {}
    for with_events in (False, True):
        pool = cpool.BlockPool(num_blocks, True, 16, with_events)
        ids = pool.get_new_block_ids(num_blocks - 1)
        hashes = rng.integers(0, 256, (num_blocks - 1, 32), dtype=np.uint8)
        pool.cache_full_ids(ids, hashes, 0, 16)
        sizes[with_events] = pool.nbytes
    assert 0 < sizes[True] - sizes[False] <= 8 * num_blocks + 1000


@pytest.mark.parametrize("as_int", ["0", "1"])
@pytest.mark.parametrize("legacy_array", [False, True])
def test_runs_encode_as_the_events_that_they_expand_to(monkeypatch, as_int, legacy_array):
    wire = pytest.importorskip("cpool.events.wire", reason="needs cpool[events]")
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", as_int)
    found = set()
    for seed in range(10):
        driver = Driver(seed, truthful_events=seed % 2 == 0)
        driver.pool.event_groups = {1: GroupDescription("mamba")}
        if seed % 3 == 0:
            driver.pool.event_locality = "REMOTE"
        for _ in range(60):
            driver.step()
        runs = driver.pool.take_event_runs()
        runs.append(driver.pool.snapshot_events().events)
        found |= {type(run).__name__ for run in runs}
        expanded = []
        for run in runs:
            expanded += run.expand(types) if hasattr(run, "expand") else [run]
        assert wire.encode_batch(runs, 1.0, 0, legacy_array) == wire.encode_batch(
            expanded, 1.0, 0, legacy_array
        )
    assert found >= {"RemovedRun", "StoredRun", "SnapshotRun", "BlockStored", "BlockRemoved"}
