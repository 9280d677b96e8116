# SPDX-License-Identifier: Apache-2.0
"""`cache_partial_ids` does what `cache_partial_id` does, block by block."""

import numpy as np
import pytest

import cpool

UNIT = 16


def make_pools(**options):
    pools = [cpool.BlockPool(65, True, UNIT, **options) for _ in range(2)]
    for pool in pools:
        pool.get_new_block_ids(64)
    return pools


def state(pool):
    return (
        [pool.registrations(id) for id in range(pool.num_gpu_blocks)],
        pool.free_queue_ids().tolist(),
        pool.take_events(),
    )


@pytest.mark.parametrize("options", [{}, {"enable_kv_cache_events": True}])
@pytest.mark.parametrize("truthful", [False, True])
def test_a_batch_is_its_single_registrations(options, truthful):
    rng = np.random.default_rng(5)
    batch, single = make_pools(**options, truthful_events=bool(options) and truthful)
    known = rng.integers(0, 256, (6, 32), dtype=np.uint8)
    for _ in range(60):
        count = int(rng.integers(0, 30))
        ids = rng.integers(0, 9, count)
        rows = known[rng.integers(0, 6, count)]
        ends = rng.integers(1, 6, count) * UNIT
        group = int(rng.integers(2))
        parents = [None if end == UNIT and rng.integers(2) else known[0].tobytes() for end in ends]
        tokens = [list(range(UNIT)) for _ in range(count)]
        batch.cache_partial_ids(ids, rows, ends, group, parent_hashes=parents, token_ids=tokens)
        for i in range(count):
            single.cache_partial_id(
                int(ids[i]), rows[i].tobytes(), int(ends[i]), group,
                parent_hash=parents[i], token_ids=tokens[i],
            )  # fmt: skip
        assert state(batch) == state(single)
        evicted = rng.integers(1, 9, 1)
        batch.evict_ids(evicted)
        single.evict_ids(evicted)
    assert batch.num_cached_keys == single.num_cached_keys > 0


@pytest.mark.parametrize("options", [{}, {"enable_kv_cache_events": True}])
def test_a_key_that_an_earlier_row_takes_away_is_registered_again(options):
    batch, single = make_pools(**options)
    short, long = b"s" * 32, b"l" * 32
    for pool in (batch, single):
        pool.cache_partial_id(5, short, UNIT, 0)
    batch.cache_partial_ids([5, 5], [long, short], [2 * UNIT, UNIT], 0, parent_hashes=[short, None])
    single.cache_partial_id(5, long, 2 * UNIT, 0, parent_hash=short)
    single.cache_partial_id(5, short, UNIT, 0)
    assert len(batch.registrations(5)) == 2
    assert state(batch) == state(single)


def test_thousands_of_keys_that_rows_before_them_take_away_come_back():
    # Every block has a primary key and extra ones; a longer key takes all, which the next rows
    # bring back as extra keys: what was the primary one, too, so there is one more of these.
    num_blocks, per_block = 1200, 5
    rng = np.random.default_rng(2)
    pool = cpool.BlockPool(num_blocks + 1, True, UNIT)
    ids = np.arange(1, num_blocks + 1)
    rows = rng.integers(0, 256, (per_block, num_blocks, 32), dtype=np.uint8)
    for held in rows:
        pool.cache_partial_ids(ids, held, np.full(num_blocks, UNIT), 0)
    longer = rng.integers(0, 256, (num_blocks, 32), dtype=np.uint8)
    all_ids = np.tile(ids, per_block + 1)
    all_rows = np.concatenate([longer, *rows])
    ends = np.repeat([2 * UNIT] + [UNIT] * per_block, num_blocks)
    pool.cache_partial_ids(all_ids, all_rows, ends, 0)
    pool.check_consistency()
    assert pool.num_registrations == (per_block + 1) * num_blocks
    assert (pool.find_ids(all_rows, 0) == all_ids).all()
    assert [key.is_primary for key in pool.registrations(7)] == [True] + [False] * per_block
    assert pool.registrations(7)[0].block_hash == longer[6].tobytes()


def test_a_repeated_batch_changes_nothing_and_emits_nothing():
    pool = make_pools(enable_kv_cache_events=True)[0]
    ids = np.arange(1, 41)
    rows = np.random.default_rng(1).integers(0, 256, (40, 32), dtype=np.uint8)
    pool.cache_partial_ids(ids, rows, np.full(40, UNIT), 0)
    assert len(pool.take_events()) == 40
    pool.cache_partial_ids(ids, rows, np.full(40, UNIT), 0)
    assert pool.take_events() == []
    assert pool.num_cached_keys == 40


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_tokens": [16, 24]}, cpool.ContractError, "num_tokens is 24 at position 1"),
        ({"num_tokens": [16, 0]}, cpool.ContractError, "num_tokens is 0 at position 1"),
        ({"num_tokens": [16, -16]}, cpool.ContractError, "num_tokens is -16 at position 1"),
        ({"num_tokens": [16, 1 << 40]}, cpool.ContractError, "num_tokens is 1099511627776"),
        (
            {"num_tokens": np.array([16, 1 << 63], np.uint64)},
            cpool.ContractError,
            "num_tokens is 9223372036854775808",
        ),
        ({"num_tokens": [16]}, cpool.ContractError, r"shape \(1,\); there are 2 blocks"),
        ({"num_tokens": [16.0, 16.0]}, TypeError, "float64"),
        ({"ids": [1, 65]}, cpool.BlockIdError, "block id 65 at position 1"),
        ({"hashes": [b"x" * 32]}, ValueError, "1 hashes for 2 blocks"),
        ({"hashes": [b"x" * 16] * 2}, ValueError, "16 bytes in a pool of 32-byte hashes"),
        ({"parent_hashes": [None]}, cpool.ContractError, "1 parent_hashes for 2 blocks"),
        ({"parent_hashes": [None, "x"]}, TypeError, "bytes"),
        ({"parent_hashes": [None, None]}, cpool.ContractError, "num_tokens is 32: .*parent_hash"),
        ({"token_ids": []}, cpool.ContractError, "0 token_ids for 2 blocks"),
    ],
)
def test_bad_arguments_change_nothing(change, error, message):
    pool = make_pools(enable_kv_cache_events=True)[0]
    pool.cache_partial_id(3, b"a" * 32, UNIT, 0)
    arguments = {"ids": [1, 2], "hashes": [b"b" * 32, b"c" * 32], "num_tokens": [16, 32]}
    arguments |= {"parent_hashes": [None, b"b" * 32]} | change
    before = state(pool)[:2]
    with pytest.raises(error, match=message):
        pool.cache_partial_ids(**arguments, kv_cache_group_id=0)
    assert state(pool) == (*before, [])
