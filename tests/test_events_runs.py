# SPDX-License-Identifier: Apache-2.0
"""Events of the batch interface: compact while they wait, the same events once taken."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpool
from cpool.events.types import BlockRemoved, BlockStored

from .events_driver import BLOCK_SIZE, HASH_BLOCK_SIZE, Request

TOKENS = list(range(1, 21))


def make_pool(**arguments):
    return cpool.BlockPool(9, True, HASH_BLOCK_SIZE, enable_kv_cache_events=True, **arguments)


def on_handles(pool, operation, request, ids, first):
    blocks = [pool.blocks[id] for id in ids]
    if operation == "register":
        pool.cache_full_blocks(
            request, [pool.null_block] * first + blocks, first, first + len(blocks), BLOCK_SIZE, 0
        )
    elif operation == "evict":
        pool.evict_blocks(ids)
    elif operation == "free":
        pool.free_blocks(blocks)
    else:
        pool.get_new_blocks(len(blocks))


def on_ids(pool, operation, request, ids, first):
    hashes = request.full_hashes()
    if operation == "register":
        pool.cache_full_ids(
            ids,
            hashes[first : first + len(ids)],
            0,
            BLOCK_SIZE,
            first,
            parent_hash=hashes[first - 1] if first else None,
            token_ids=np.array(
                request.all_token_ids[first * BLOCK_SIZE : (first + len(ids)) * BLOCK_SIZE]
            ),
        )
    elif operation == "evict":
        pool.evict_ids(ids)
    elif operation == "free":
        pool.free_ids(ids)
    else:
        pool.get_new_block_ids(len(ids))


operations = st.lists(
    st.tuples(
        st.sampled_from(["register", "evict", "free", "get"]),
        st.integers(0, 1),
        st.lists(st.integers(1, 8), unique=True, min_size=1, max_size=3),
        st.integers(0, 2),
    ),
    max_size=25,
)


@pytest.mark.parametrize("truthful_events", [False, True])
@settings(max_examples=100, deadline=None)
@given(operations=operations)
def test_both_grains_give_the_same_events(truthful_events, operations):
    requests = [Request(TOKENS), Request(TOKENS[:8] + TOKENS[::-1][:12])]
    pools = [make_pool(truthful_events=truthful_events) for _ in range(2)]
    for pool in pools:
        pool.get_new_block_ids(8)
    for operation, request, ids, first in operations:
        outcomes = []
        for pool, apply in zip(pools, (on_handles, on_ids), strict=True):
            try:
                apply(pool, operation, requests[request], ids, first)
                outcomes.append("done")
            except ValueError as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]
    events = [pool.take_events() for pool in pools]
    assert events[0] == events[1]


def test_a_batch_waits_as_one_object():
    pool = make_pool()
    ids = pool.get_new_block_ids(5)
    pool.cache_full_ids(ids, Request(TOKENS).full_hashes(), 0, BLOCK_SIZE)
    pool.evict_ids(ids)
    assert [run.num_events for run in pool.kv_event_queue] == [1, 5]
    assert [type(event) for event in pool.take_events()] == [BlockStored] + 5 * [BlockRemoved]
    assert pool.kv_event_queue == []


def test_handles_put_events_into_the_queue_at_once():
    pool = make_pool()
    blocks = pool.get_new_blocks(8)
    pool.cache_full_blocks(Request(TOKENS), blocks, 0, 2, BLOCK_SIZE, 0)
    pool.free_blocks(blocks)
    pool.get_new_blocks(8)
    assert [type(event) for event in pool.kv_event_queue] == [BlockStored] + 2 * [BlockRemoved]


def test_the_list_of_events_is_the_callers_own():
    pool = make_pool()
    ids = pool.get_new_block_ids(2)
    pool.cache_full_ids(ids, Request(TOKENS).full_hashes()[:2], 0, BLOCK_SIZE)
    taken = pool.take_events()
    taken.append("mine")
    assert pool.take_events() == []
    assert pool.num_event_batches == 1


def test_what_the_caller_changes_later_does_not_change_events():
    pool = make_pool()
    ids = pool.get_new_block_ids(1)
    hashes = np.arange(32, dtype=np.uint8).reshape(1, 32)
    expected = int.from_bytes(hashes[0, 24:].tobytes(), "big")
    for tokens in (np.array(TOKENS[:4]), TOKENS[:4]):
        mine = hashes.copy()
        pool.cache_full_ids(ids, mine, 0, BLOCK_SIZE, token_ids=tokens)
        tokens[0] = 99
        mine[:] = 0
        (event,) = pool.take_events()
        assert event.token_ids == TOKENS[:4]
        assert event.block_hashes == [expected]
        pool.evict_ids(ids)
        pool.take_events()


@pytest.mark.parametrize("truthful_events", [False, True])
def test_a_block_named_twice_is_replaced_with_all_that_it_has(truthful_events):
    pool = make_pool(truthful_events=truthful_events)
    (block,) = pool.get_new_blocks(1)
    request = Request(list(range(40)))
    for num_tokens in range(20, 0, -HASH_BLOCK_SIZE):
        pool.cache_partial_block(request, block, num_tokens, 0, BLOCK_SIZE)
    block.reset_hash()  # takes the first key away; nine extra ones stay
    pool.take_events()
    hashes = request.full_hashes()
    pool.cache_full_ids([1, 1], hashes[5:7], 0, BLOCK_SIZE, 5, parent_hash=hashes[4])
    events = pool.take_events()
    assert sum(isinstance(event, BlockRemoved) for event in events) == 10
    assert pool.num_registrations == 1


def test_the_request_is_described():
    pool = make_pool()
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
    assert (event.lora_id, event.lora_name, event.session_id) == (7, "adapter", "s")
    assert event.extra_keys == [("adapter", "salt"), ("adapter",)]


@pytest.mark.parametrize(
    "arguments",
    [{"token_ids": TOKENS[:7]}, {"extra_keys": [None]}, {"parent_hash": "text"}],
)
def test_a_description_that_does_not_fit_is_refused_and_changes_nothing(arguments):
    pool = make_pool()
    ids = pool.get_new_block_ids(2)
    with pytest.raises((ValueError, TypeError)):
        pool.cache_full_ids(ids, Request(TOKENS).full_hashes()[:2], 0, BLOCK_SIZE, **arguments)
    assert pool.num_registrations == 0
    assert pool.take_events() == []
