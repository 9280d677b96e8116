# SPDX-License-Identifier: Apache-2.0
"""The life of a partial entry, from its first boundary to promotion or eviction."""

from typing import Any

import pytest

import cpool

from .support import Request, dump, event_fields, make_request

HASH_BLOCK_SIZE = 4
BLOCK_SIZE = 16
GROUP = 1


@pytest.fixture
def pool() -> Any:
    return cpool.BlockPool(8, True, HASH_BLOCK_SIZE, enable_kv_cache_events=True)


@pytest.fixture
def request_() -> Request:
    return make_request(12, HASH_BLOCK_SIZE)


@pytest.fixture(params=["handles", "ids"])
def register(request: Any) -> Any:
    """Register a boundary of a request's chain, by either method."""

    def by_handle(pool: Any, chain: Any, block: Any, num_tokens: int, **kwargs: Any) -> None:
        pool.cache_partial_block(chain, block, num_tokens, GROUP, BLOCK_SIZE, **kwargs)

    def by_id(pool: Any, chain: Any, block: Any, num_tokens: int, **kwargs: Any) -> None:
        start = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        pool.cache_partial_id(
            block.block_id,
            hash_at(chain, num_tokens),
            num_tokens,
            GROUP,
            parent_hash=hash_at(chain, start) if start else None,
            token_ids=range(start, num_tokens),
            **kwargs,
        )

    return {"handles": by_handle, "ids": by_id}[request.param]


def hash_at(chain: Request, num_tokens: int) -> bytes:
    return chain.block_hashes[num_tokens // HASH_BLOCK_SIZE - 1]


def found(pool: Any, chain: Request, num_tokens: int) -> int:
    return int(pool.find_ids([hash_at(chain, num_tokens)], GROUP)[0])


def covered(pool: Any, block: Any) -> dict[bytes, int]:
    return {r.block_hash: r.num_tokens for r in pool.registrations(block)}


def take(pool: Any) -> list[tuple[str, list[int]]]:
    """Events as (kind, hashes)."""
    kinds = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}
    return [
        (kinds[type(event).__name__], list(getattr(event, "block_hashes", [])))
        for event in pool.take_events()
    ]


def low_bytes(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


class Untouchable:
    """Tokens that nobody may read."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("the tokens were read")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the tokens were read")

    def __len__(self) -> int:
        raise AssertionError("the tokens were read")


class CountedHashes(list):
    """A chain that counts how often its hashes are read."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.num_reads += len(self)
        return super().__iter__()


def test_a_boundary_hash_comes_from_the_chain_and_is_never_recomputed() -> None:
    pool = cpool.BlockPool(8, True, HASH_BLOCK_SIZE)
    chain = make_request(12, HASH_BLOCK_SIZE)
    chain.all_token_ids = Untouchable()
    (block,) = pool.get_new_blocks(1)
    key = pool.cache_partial_block(chain, block, 20, GROUP, BLOCK_SIZE)
    assert key == chain.block_hashes[4] + GROUP.to_bytes(4, "big")
    assert block.block_hash == key
    assert block.block_hash_num_tokens == 20


def test_registering_a_boundary_again_changes_nothing(
    pool: Any, request_: Request, register: Any
) -> None:
    (block,) = pool.get_new_blocks(1)
    register(pool, request_, block, 8)
    register(pool, request_, block, 4)
    before, num_bytes = dump(pool), pool.nbytes
    for num_tokens in (8, 4):
        register(pool, request_, block, num_tokens)
    assert dump(pool) == before
    assert pool.nbytes == num_bytes


def test_registering_a_boundary_again_reads_one_hash_of_the_chain(pool: Any) -> None:
    chain = make_request(1000, HASH_BLOCK_SIZE)
    chain.block_hashes = CountedHashes(chain.block_hashes)
    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(chain, block, 3600, GROUP, BLOCK_SIZE)
    pool.take_events()
    chain.block_hashes.num_reads = 0
    chain.all_token_ids = Untouchable()
    pool.cache_partial_block(chain, block, 3600, GROUP, BLOCK_SIZE)
    assert chain.block_hashes.num_reads <= 1
    assert pool.take_events() == []


def test_a_longer_boundary_replaces_a_shorter_one_and_says_so(
    pool: Any, request_: Request, register: Any
) -> None:
    (block,) = pool.get_new_blocks(1)
    register(pool, request_, block, 4)
    register(pool, request_, block, 12)
    assert found(pool, request_, 4) == -1
    assert found(pool, request_, 12) == block.block_id
    assert covered(pool, block) == {hash_at(request_, 12): 12}
    shorter, longer = low_bytes(hash_at(request_, 4)), low_bytes(hash_at(request_, 12))
    assert take(pool) == [("stored", [shorter]), ("removed", [shorter]), ("stored", [longer])]


def test_a_longer_boundary_takes_the_extra_keys_too(
    pool: Any, request_: Request, register: Any
) -> None:
    (block,) = pool.get_new_blocks(1)
    for num_tokens in (8, 4, 12):
        register(pool, request_, block, num_tokens)
    assert covered(pool, block) == {hash_at(request_, 12): 12}
    assert pool.num_cached_keys == 1


def test_a_shorter_boundary_beside_a_longer_key_becomes_an_extra_key(
    pool: Any, request_: Request, register: Any
) -> None:
    (block,) = pool.get_new_blocks(1)
    register(pool, request_, block, 12)
    register(pool, request_, block, 4)
    assert block.block_hash == hash_at(request_, 12) + GROUP.to_bytes(4, "big")
    assert block.block_hash_num_tokens == 12
    extra_key = hash_at(request_, 4) + GROUP.to_bytes(4, "big")
    assert set(pool.cached_block_hashes_by_block[block.block_id]) == {extra_key}
    assert covered(pool, block) == {hash_at(request_, 12): 12, hash_at(request_, 4): 4}
    assert [r.is_primary for r in pool.registrations(block)] == [True, False]


def test_a_lookup_by_any_key_finds_the_block(pool: Any, request_: Request, register: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    boundaries = (16, 12, 8, 4)
    for num_tokens in boundaries:
        register(pool, request_, block, num_tokens)
    for num_tokens in boundaries:
        assert found(pool, request_, num_tokens) == block.block_id
        assert pool.get_cached_block(hash_at(request_, num_tokens), [GROUP]) == [block]
        assert pool.get_cached_block(hash_at(request_, num_tokens), [GROUP, 0]) is None


@pytest.mark.parametrize("full", ["handles", "ids"])
def test_a_block_that_fills_up_is_promoted_and_its_partial_keys_leave(
    pool: Any, request_: Request, register: Any, full: str
) -> None:
    (block,) = pool.get_new_blocks(1)
    register(pool, request_, block, 12)
    register(pool, request_, block, 8)
    register(pool, request_, block, 4)
    pool.take_events()
    if full == "handles":
        pool.cache_full_blocks(request_, [block], 0, 1, BLOCK_SIZE, GROUP)
    else:
        pool.cache_full_ids([block.block_id], [hash_at(request_, 16)], GROUP, BLOCK_SIZE)
    assert [found(pool, request_, n) for n in (4, 8, 12)] == [-1, -1, -1]
    assert pool.registrations(block) == [(hash_at(request_, 16), GROUP, 16, True)]
    assert pool.cached_block_hashes_by_block.get(block.block_id, set()) == set()
    events = take(pool)
    hashes = {num_tokens: low_bytes(hash_at(request_, num_tokens)) for num_tokens in (4, 8, 12, 16)}
    assert events[0] == ("removed", [hashes[12]])
    assert sorted(events[1:3]) == sorted([("removed", [hashes[8]]), ("removed", [hashes[4]])])
    assert events[3:] == [("stored", [hashes[16]])]


def test_a_full_block_is_not_promoted_again(pool: Any, request_: Request) -> None:
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks(request_, [block], 0, 1, BLOCK_SIZE, GROUP)
    before = dump(pool)
    with pytest.raises(cpool.ContractError, match="16"):
        pool.cache_full_blocks(request_, [block], 0, 1, BLOCK_SIZE, GROUP)
    assert dump(pool) == before


def test_one_block_that_cannot_be_promoted_stops_the_whole_call(
    pool: Any, request_: Request
) -> None:
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request_, blocks, 2, 3, BLOCK_SIZE, GROUP)
    before = dump(pool)
    with pytest.raises(cpool.ContractError):
        pool.cache_full_blocks(request_, blocks, 0, 3, BLOCK_SIZE, GROUP)
    assert dump(pool) == before
    pool.check_consistency()


def test_reuse_takes_every_key_of_a_block(pool: Any, request_: Request, register: Any) -> None:
    blocks = pool.get_new_blocks(7)
    for num_tokens in (16, 8, 4):
        register(pool, request_, blocks[3], num_tokens)
    pool.free_blocks([blocks[3]])
    pool.take_events()
    assert pool.get_new_blocks(1) == [blocks[3]]
    assert pool.num_cached_keys == pool.num_registrations == 0
    assert blocks[3].block_hash is None
    assert blocks[3].block_hash_num_tokens is None
    assert [kind for kind, _ in take(pool)] == ["removed"] * 3
    assert pool.num_evicted_blocks == 1


def test_evict_blocks_takes_every_key_and_leaves_the_block_held(
    pool: Any, request_: Request, register: Any
) -> None:
    (block,) = pool.get_new_blocks(1)
    for num_tokens in (16, 8, 4):
        register(pool, request_, block, num_tokens)
    pool.take_events()
    pool.evict_blocks({block.block_id})
    assert [found(pool, request_, n) for n in (4, 8, 16)] == [-1] * 3
    assert block.ref_cnt == 1
    hashes = [low_bytes(hash_at(request_, n)) for n in (16, 8, 4)]
    events = take(pool)
    assert events[0] == ("removed", hashes[:1])
    assert sorted(events) == sorted(("removed", [h]) for h in hashes)


def test_reset_takes_every_key_and_says_it_once(
    pool: Any, request_: Request, register: Any
) -> None:
    blocks = pool.get_new_blocks(2)
    for num_tokens in (16, 8):
        register(pool, request_, blocks[0], num_tokens)
    register(pool, request_, blocks[1], 4)
    assert not pool.reset_prefix_cache()
    assert pool.num_cached_keys == 3
    pool.free_blocks(blocks)
    pool.take_events()
    assert pool.reset_prefix_cache()
    assert pool.num_cached_keys == pool.num_registrations == 0
    assert [block.block_hash for block in blocks] == [None, None]
    assert [found(pool, request_, n) for n in (4, 8, 16)] == [-1] * 3
    assert take(pool) == [("cleared", [])]


@pytest.mark.parametrize("removed", [0, 1])
def test_two_blocks_under_one_key_are_kept_and_removing_either_leaves_the_other(
    pool: Any, request_: Request, register: Any, removed: int
) -> None:
    blocks = pool.get_new_blocks(2)[::-1]  # The first to be registered has the larger id.
    for block in blocks:
        register(pool, request_, block, 8)
    assert found(pool, request_, 8) == blocks[0].block_id
    assert (pool.num_cached_keys, pool.num_registrations) == (1, 2)
    pool.evict_blocks({blocks[removed].block_id})
    assert found(pool, request_, 8) == blocks[1 - removed].block_id
    assert (pool.num_cached_keys, pool.num_registrations) == (1, 1)
    pool.evict_blocks({blocks[1 - removed].block_id})
    assert found(pool, request_, 8) == -1


def test_duplicates_are_found_in_order_of_insertion(
    pool: Any, request_: Request, register: Any
) -> None:
    first, second, third, fourth = pool.get_new_blocks(4)
    order = [third, first, fourth, second]
    for block in order:
        register(pool, request_, block, 8)
    pool.evict_blocks({first.block_id})
    register(pool, request_, first, 8)
    for block in [third, fourth, second, first]:
        assert found(pool, request_, 8) == block.block_id
        pool.evict_blocks({block.block_id})


@pytest.mark.parametrize("move", ["handles", "ids"])
def test_moving_keys_to_a_copy_emits_nothing(
    pool: Any, request_: Request, register: Any, move: str
) -> None:
    source, copy = pool.get_new_blocks(2)
    register(pool, request_, source, 12)
    register(pool, request_, source, 4)
    pool.take_events()
    if move == "handles":
        pool.move_block_hashes(source, copy)
    else:
        pool.move_ids(source.block_id, copy.block_id)
    assert pool.take_events() == []
    assert pool.registrations(source) == []
    assert source.block_hash is None
    assert copy.block_hash == hash_at(request_, 12) + GROUP.to_bytes(4, "big")
    assert copy.block_hash_num_tokens == 12
    assert covered(pool, copy) == {hash_at(request_, 12): 12, hash_at(request_, 4): 4}
    assert [found(pool, request_, n) for n in (12, 4)] == [copy.block_id] * 2
    pool.check_consistency()


def test_a_moved_duplicate_goes_behind_the_others(
    pool: Any, request_: Request, register: Any
) -> None:
    first, second, copy = pool.get_new_blocks(3)
    register(pool, request_, first, 8)
    register(pool, request_, second, 8)
    pool.move_block_hashes(first, copy)
    assert found(pool, request_, 8) == second.block_id


def test_moving_keys_to_a_block_that_has_some_is_refused(
    pool: Any, request_: Request, register: Any
) -> None:
    source, target = pool.get_new_blocks(2)
    register(pool, request_, source, 12)
    register(pool, request_, target, 4)
    before = dump(pool)
    with pytest.raises(cpool.ContractError, match=str(target.block_id)):
        pool.move_block_hashes(source, target)
    assert dump(pool) == before


@pytest.mark.parametrize(
    ("num_tokens", "message"), [(6, "6.*4"), (0, "0"), (-4, "-4"), (52, "52.*(48|12)")]
)
def test_a_length_that_is_no_boundary_of_the_chain_is_refused(
    pool: Any, request_: Request, num_tokens: int, message: str
) -> None:
    (block,) = pool.get_new_blocks(1)
    before = dump(pool)
    with pytest.raises(cpool.ContractError, match=message):
        pool.cache_partial_block(request_, block, num_tokens, GROUP, BLOCK_SIZE)
    assert dump(pool) == before
    pool.check_consistency()


@pytest.mark.parametrize("num_tokens", [6, 0, -4])
def test_a_length_that_is_no_boundary_is_refused_by_id(
    pool: Any, request_: Request, num_tokens: int
) -> None:
    (block,) = pool.get_new_blocks(1)
    before = dump(pool)
    with pytest.raises(cpool.ContractError, match=str(num_tokens)):
        pool.cache_partial_id(block.block_id, request_.block_hashes[0], num_tokens, GROUP)
    assert dump(pool) == before


def test_the_null_block_is_never_registered(pool: Any, request_: Request) -> None:
    null = pool.null_block
    (block,) = pool.get_new_blocks(1)
    assert pool.cache_partial_block(request_, null, 4, GROUP, BLOCK_SIZE) is None
    pool.cache_partial_id(0, request_.block_hashes[0], 4, GROUP)
    assert pool.take_events() == []
    pool.cache_full_blocks(request_, [null, block], 0, 2, BLOCK_SIZE, GROUP)
    pool.cache_full_ids([0], [request_.block_hashes[3]], GROUP, BLOCK_SIZE)
    assert pool.registrations(0) == []
    assert pool.registrations(null) == []
    assert found(pool, request_, 16) == -1
    assert found(pool, request_, 32) == block.block_id
    stored = pool.take_events()
    assert [list(event.block_hashes) for event in stored] == [
        [low_bytes(hash_at(request_, 32))],
        [],
    ]
    with pytest.raises(cpool.ContractError, match="null"):
        pool.move_block_hashes(block, null)
    with pytest.raises(cpool.ContractError, match="null"):
        pool._insert_block_hash(hash_at(request_, 4) + bytes(4), null, num_tokens=4)
    pool.check_consistency()


def test_a_partially_filled_block_is_never_taken_for_full(
    pool: Any, request_: Request, register: Any
) -> None:
    partial, full = pool.get_new_blocks(2)
    register(pool, request_, partial, 12)
    register(pool, request_, partial, 8)
    pool.cache_full_blocks(request_, [partial, full], 1, 2, BLOCK_SIZE, GROUP)
    assert set(pool.registrations(partial)) == {
        (hash_at(request_, 12), GROUP, 12, True),
        (hash_at(request_, 8), GROUP, 8, False),
    }
    hashes = [hash_at(request_, n) for n in (8, 12, 16, 32)]
    anything = pool.find_ids(hashes, GROUP).tolist()
    assert anything == [partial.block_id, partial.block_id, -1, full.block_id]
    only_full = pool.find_full_ids(hashes, GROUP, BLOCK_SIZE).tolist()
    assert only_full == [-1, -1, -1, full.block_id]
    assert pool.find_full_ids(hashes, GROUP, 8).tolist() == [
        partial.block_id,
        -1,
        -1,
        full.block_id,
    ]


def test_a_partial_duplicate_does_not_hide_the_full_block(pool: Any) -> None:
    partial, full = pool.get_new_blocks(2)
    block_hash = bytes(31) + b"\x01"
    pool.cache_partial_id(partial.block_id, block_hash, 4, GROUP)
    pool.cache_full_ids([full.block_id], [block_hash], GROUP, BLOCK_SIZE)
    assert pool.find_ids([block_hash], GROUP).tolist() == [partial.block_id]
    assert pool.find_full_ids([block_hash], GROUP, BLOCK_SIZE).tolist() == [full.block_id]


def test_new_contents_replace_every_key(pool: Any, request_: Request, register: Any) -> None:
    (block,) = pool.get_new_blocks(1)
    register(pool, request_, block, 12)
    register(pool, request_, block, 4)
    pool.take_events()
    register(pool, request_, block, 4, replace_existing_hashes=True)
    assert covered(pool, block) == {hash_at(request_, 4): 4}
    assert block.block_hash == hash_at(request_, 4) + GROUP.to_bytes(4, "big")
    assert [kind for kind, _ in take(pool)] == ["removed", "removed", "stored"]


def test_a_partial_entry_is_announced_with_its_boundary(pool: Any) -> None:
    chain = make_request(12, HASH_BLOCK_SIZE, cache_salt="salt", session_id="session")
    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(chain, block, 12, GROUP, BLOCK_SIZE)
    (event,) = (event_fields(event) for event in pool.take_events())
    assert event.block_hashes == [low_bytes(hash_at(chain, 12))]
    assert event.parent_block_hash == low_bytes(hash_at(chain, 8))
    assert event.token_ids == chain.all_token_ids[8:12]
    assert (event.block_size, event.group_idx, event.medium) == (4, GROUP, "GPU")
    assert (event.extra_keys, event.session_id) == ([None], "session")


def test_a_registered_partial_block_is_not_writable(
    pool: Any, request_: Request, register: Any
) -> None:
    (block,) = pool.get_new_blocks(1)
    assert pool.is_block_writable(block)
    register(pool, request_, block, 4)
    assert not pool.is_block_writable(block)
