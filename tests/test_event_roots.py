# SPDX-License-Identifier: Apache-2.0
"""Events say that a prefix begins only where one does: parents are asked for elsewhere."""

from typing import Any

import numpy as np
import pytest

import cpool
from cpool.prefix import FullAttention, Mamba, PrefixCache

from .support import dump, event_fields, make_request

UNIT = 4
HASHES = make_request(8, UNIT).block_hashes
LOW_BITS = [int.from_bytes(digest[-8:], "big") for digest in HASHES]


def make_pool(truthful: bool = False, events: bool = True) -> Any:
    pool = cpool.BlockPool(
        9, True, UNIT, enable_kv_cache_events=events, truthful_events=truthful and events
    )
    pool.get_new_block_ids(8)
    pool.cache_full_ids([1, 2], HASHES[:2], 0, UNIT)
    return pool


def parents(pool: Any) -> list[Any]:
    return [event_fields(event).parent_block_hash for event in pool.take_events()]


@pytest.fixture(params=[False, True], ids=["as vLLM", "truthful"])
def pool(request: Any) -> Any:
    pool = make_pool(request.param)
    pool.take_events()
    return pool


@pytest.mark.parametrize("ids", [[3, 4], [0, 4], [0, 0]])
@pytest.mark.parametrize("as_array", [False, True])
def test_full_blocks_in_the_middle_need_their_parent(
    pool: Any, ids: list[int], as_array: bool
) -> None:
    batch = np.array(ids, np.uint32) if as_array else ids
    before = dump(pool)
    with pytest.raises(
        cpool.ContractError, match=r"first_block is 2: .*parent_hash is needed.*before hashes\[0\]"
    ):
        pool.cache_full_ids(batch, HASHES[2:4], 0, UNIT, 2, token_ids=range(8))
    assert dump(pool) == before
    pool.cache_full_ids(batch, HASHES[2:4], 0, UNIT, 2, parent_hash=HASHES[1])
    # The truthful stream says nothing of null blocks, nor of a parent that is not resident.
    named = {"[3, 4]": [LOW_BITS[1]], "[0, 4]": [None], "[0, 0]": []}[str(ids)]
    assert parents(pool) == (named if pool.truthful_events else [LOW_BITS[1]])


def test_a_request_begins_without_a_parent_and_an_empty_batch_needs_none(pool: Any) -> None:
    pool.cache_full_ids([], [], 0, UNIT, 5)
    assert pool.take_events() == []
    pool.cache_full_ids([3], HASHES[4:5], 0, UNIT)
    assert parents(pool) == [None]


def test_without_events_no_parent_is_needed() -> None:
    pool = make_pool(events=False)
    pool.cache_full_ids([3], HASHES[2:3], 0, UNIT, 2)
    pool.cache_partial_id(4, HASHES[3], 16, 0)
    pool.cache_partial_ids([5], HASHES[4:5], [20], 0)
    assert pool.num_registrations == 5


@pytest.mark.parametrize("tokens", [None, [], [1], list(range(7)), list(range(9))])
def test_partial_entries_in_the_middle_need_their_parent(pool: Any, tokens: Any) -> None:
    before = dump(pool)
    message = "num_tokens is 8: .*parent_hash is needed.*all 8 token_ids"
    for replace in (False, True):
        with pytest.raises(cpool.ContractError, match=message):
            pool.cache_partial_id(3, HASHES[1], 8, 1, replace, token_ids=tokens)
    given: dict[str, Any] = {"token_ids": [[1, 2, 3, 4], tokens]}
    for some in (given, given | {"parent_hashes": [HASHES[3], None]}):
        with pytest.raises(cpool.ContractError, match=message):
            pool.cache_partial_ids([3, 4], HASHES[:2], [4, 8], 1, **some)
    assert dump(pool) == before
    pool.cache_partial_id(3, HASHES[2], 12, 0, parent_hash=HASHES[1], token_ids=tokens)
    pool.cache_partial_ids([4], HASHES[3:4], [12], 0, parent_hashes=HASHES[:1], token_ids=[tokens])
    assert parents(pool) == [LOW_BITS[1], LOW_BITS[0]]


def test_partial_entries_of_the_first_block_have_no_parent(pool: Any) -> None:
    pool.cache_partial_id(3, HASHES[4], 4, 0)
    pool.cache_partial_id(4, HASHES[5], 12, 0, token_ids=range(12))
    pool.cache_partial_ids([5, 6], HASHES[6:8], [4, 8], 0, token_ids=[None, np.arange(8)])
    assert parents(pool) == [None] * 4


def test_partial_entries_of_the_null_block_need_no_parent(pool: Any) -> None:
    pool.cache_partial_id(0, HASHES[2], 12, 0)
    pool.cache_partial_ids([0, 0], HASHES[2:4], [12, 16], 0)
    assert pool.take_events() == []
    assert pool.num_registrations == 2


def test_a_held_entry_needs_its_parent_all_the_same(pool: Any) -> None:
    pool.cache_partial_id(3, HASHES[2], 12, 0, parent_hash=HASHES[1])
    for call in (
        lambda: pool.cache_partial_id(3, HASHES[2], 12, 0),
        lambda: pool.cache_partial_ids([3], HASHES[2:3], [12], 0),
    ):
        with pytest.raises(cpool.ContractError, match="num_tokens is 12"):
            call()


def test_ids_that_len_of_the_tokens_changes_are_registered_as_they_were_checked() -> None:
    class Tokens(list):
        def __len__(self) -> int:
            ids[:] = 1 << 31
            return 8

    pool = make_pool()
    ids = np.array([3, 4], np.uint32)
    pool.cache_partial_ids(
        ids, HASHES[2:4], [8, 8], 0, token_ids=[Tokens(range(8)), Tokens(range(8))]
    )
    assert pool.find_ids(HASHES[2:4], 0).tolist() == [3, 4]
    pool.check_consistency()


@pytest.mark.parametrize("truthful", [False, True])
@pytest.mark.parametrize("groups", [[FullAttention(16)], [FullAttention(16), Mamba(16)]])
@pytest.mark.parametrize(("num_tokens", "tail_parent"), [(14, None), (30, 16)])
def test_a_prefix_cache_names_the_parents_of_its_tails(
    truthful: bool, groups: list[Any], num_tokens: int, tail_parent: int | None
) -> None:
    pool = cpool.BlockPool(20, True, UNIT, enable_kv_cache_events=True, truthful_events=truthful)
    cache = PrefixCache(pool, groups, match="fine")
    hashes = cpool.hash_tokens(range(num_tokens), UNIT)
    start = 0
    request = None
    while start < num_tokens:
        end = cache.chunk_end(start, num_tokens - start, num_tokens)
        if request is None:
            request = cache.admit(cache.lookup(hashes, num_tokens - 1), end, num_tokens)
        else:
            assert cache.append(request, end - start) is not None
        cache.commit(request)
        start = end
    tail = (num_tokens - 1) // UNIT - 1
    events = [event_fields(event) for event in pool.take_events()]
    tails = [event for event in events if event.block_hashes == [low_bits(hashes, tail)]]
    assert {event.group_idx for event in tails} == set(range(len(groups)))
    expected = None if tail_parent is None else low_bits(hashes, tail_parent // UNIT - 1)
    assert {event.parent_block_hash for event in tails} == {expected}


def low_bits(hashes: Any, index: int) -> int:
    return int.from_bytes(bytes(hashes[index])[-8:], "big")
