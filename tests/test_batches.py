# SPDX-License-Identifier: Apache-2.0
"""Look-ups of many keys at once answer as look-ups of one key at a time.

Blocks that lie side by side are found without the table; these are the cases in which that
must not be done, or ends.
"""

import numpy as np
import pytest

import cpool

SIZE = 16
NUM_ROWS = 200


def make_run(order):
    """A pool in which row i is block order[i]'s."""
    pool = cpool.BlockPool(2 * NUM_ROWS + 1, True, SIZE)
    rows = np.random.default_rng(3).integers(0, 256, (NUM_ROWS, 32), dtype=np.uint8)
    pool.get_new_block_ids(2 * NUM_ROWS)
    pool.cache_full_ids(order, rows, 0, SIZE)
    return pool, rows


class Request:
    def __init__(self, block_hashes):
        self.block_hashes = block_hashes


ORDERS = {
    "up": np.arange(1, NUM_ROWS + 1),
    "down": np.arange(NUM_ROWS, 0, -1),
    "up and down": np.concatenate([np.arange(100, 200), np.arange(99, -1, -1)]) + 1,
    "two runs": np.concatenate([np.arange(1, 101), np.arange(250, 350)]),
    "to the last block": np.arange(NUM_ROWS + 1, 2 * NUM_ROWS + 1),
}


def one_by_one(find, rows, *args):
    return [int(find(row.tobytes(), *args)[0]) for row in rows]


def agree(pool, rows):
    single = one_by_one(pool.find_ids, rows, 0)
    assert pool.find_ids(rows, 0).tolist() == single
    full = one_by_one(pool.find_full_ids, rows, 0, SIZE)
    assert pool.find_full_ids(rows, 0, SIZE).tolist() == full
    end = single.index(-1) if -1 in single else len(single)
    assert pool.find_prefix_ids(rows, 0).tolist() == single[:end]
    return single, full


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_runs_up_and_down(order):
    pool, rows = make_run(order)
    assert agree(pool, rows)[0] == order.tolist()


def test_a_run_ends_where_a_key_is_missing():
    pool, rows = make_run(ORDERS["up"])
    pool.evict_ids([120])
    assert agree(pool, rows)[0][119] == -1


def test_the_first_holder_answers_though_the_run_goes_on():
    pool, rows = make_run(ORDERS["up"])
    pool.evict_ids([120])
    pool.cache_full_ids([300], rows[119:120], 0, SIZE)
    pool.cache_full_ids([120], rows[119:120], 0, SIZE)
    assert agree(pool, rows)[0][119] == 300


def test_a_key_of_another_group_is_no_answer():
    pool, rows = make_run(ORDERS["up"])
    pool.evict_ids([120])
    pool.cache_full_ids([120], rows[119:120], 1, SIZE)
    assert agree(pool, rows)[0][119] == -1


def test_a_key_assigned_by_hand_is_no_answer():
    pool, rows = make_run(ORDERS["up"])
    pool.evict_ids([120])
    pool.blocks[120]._block_hash = rows[119].tobytes() + bytes(4)
    assert pool.blocks[120].block_hash is not None
    assert agree(pool, rows)[0][119] == -1


def test_a_partial_block_is_no_full_one_though_the_run_goes_on():
    pool, rows = make_run(ORDERS["up"])
    pool.evict_ids([120])
    pool = cpool.BlockPool(2 * NUM_ROWS + 1, True, SIZE)
    pool.get_new_block_ids(2 * NUM_ROWS)
    wide = 2 * SIZE
    order = ORDERS["up"]
    pool.cache_full_ids(order[:119], rows[:119], 0, wide)
    pool.cache_partial_id(120, rows[119].tobytes(), 119 * wide + SIZE, 0)
    pool.cache_full_ids(order[120:], rows[120:], 0, wide, first_block=120)
    found = pool.find_full_ids(rows, 0, wide).tolist()
    assert found == one_by_one(pool.find_full_ids, rows, 0, wide)
    assert found[119] == -1
    assert pool.find_ids(rows, 0)[119] == 120


def test_rows_that_repeat_and_rows_far_apart():
    pool, rows = make_run(ORDERS["up"])
    assert pool.find_ids(rows[[5, 6, 5, 6] * 20], 0).tolist() == [6, 7, 6, 7] * 20
    assert pool.find_ids(rows[::7], 0).tolist() == list(range(1, NUM_ROWS + 1, 7))


def test_random_pools():
    rng = np.random.default_rng(11)
    for _ in range(30):
        pool, rows = make_run(ORDERS[rng.choice(list(ORDERS))])
        for block in rng.integers(1, 2 * NUM_ROWS + 1, rng.integers(0, 40)).tolist():
            pool.evict_ids([block])
            row = int(rng.integers(NUM_ROWS))
            pool.cache_full_ids([block], rows[row : row + 1], int(rng.integers(2)), SIZE)
        agree(pool, rows)


@pytest.mark.parametrize("events", [False, True])
def test_blocks_that_a_request_does_not_have(events):
    # vLLM's slice ends where the blocks do; with events it fails.
    pool = cpool.BlockPool(10, True, SIZE, enable_kv_cache_events=events)
    request = Request(cpool.hash_tokens(range(3 * SIZE), SIZE))
    blocks = pool.get_new_blocks(2)
    if events:
        with pytest.raises(cpool.ContractError, match="num_full_blocks is 3; there are 2 blocks"):
            pool.cache_full_blocks(request, blocks, 0, 3, SIZE, 0)
        assert pool.num_registrations == 0
        return
    pool.cache_full_blocks(request, blocks, 0, 3, SIZE, 0)
    pool.cache_full_blocks(request, blocks, 2, 3, SIZE, 0)
    assert pool.find_ids(list(request.block_hashes), 0).tolist() == [1, 2, -1]


@pytest.mark.parametrize("width", [32, 16, 20])
@pytest.mark.parametrize("evict", ["evict_ids", "get_new_block_ids"])
@pytest.mark.parametrize("num_holders", [2, 3, 70])
def test_holders_of_one_key_leave_in_one_call(num_holders, evict, width):
    # The last of them has the key alone by the time of its turn. The table is so full that keys
    # have to pass lines: whoever counts back in the wrong ones is found out.
    rng = np.random.default_rng(width)
    num_shared = 700 // num_holders
    num_own = 6000
    pool = cpool.BlockPool(num_shared * num_holders + num_own + 1, True, SIZE)
    rows = rng.integers(0, 256, (num_shared + num_own, width), dtype=np.uint8)
    ids = pool.get_new_block_ids(pool.num_gpu_blocks - 1)
    own, ids = ids[:num_own], ids[num_own:].reshape(num_holders, num_shared)
    pool.cache_full_ids(own, rows[num_shared:], 0, SIZE)
    for part in ids:
        pool.cache_full_ids(part, rows[:num_shared], 0, SIZE)
    assert pool.table_stats()["mean_miss"] > 0
    stays = num_shared // 2
    leaving = rng.permutation(ids[:, stays:].ravel())
    if evict == "evict_ids":
        assert pool.evict_ids(leaving) == len(leaving)
    else:
        pool.free_ids(leaving)
        assert pool.get_new_block_ids(len(leaving)).tolist() == leaving.tolist()
    pool.check_consistency()
    expected = [*ids[0, :stays].tolist(), *[-1] * (num_shared - stays), *own.tolist()]
    assert pool.find_ids(rows, 0).tolist() == expected
    assert pool.num_registrations == stays * num_holders + num_own
    assert pool.num_cached_keys == stays + num_own


@pytest.mark.parametrize("width", [32, 16, 20])
def test_keys_that_others_hold_or_that_grow_are_registered_in_one_call(width):
    rng = np.random.default_rng(width)
    pool = cpool.BlockPool(400, True, SIZE // 2)
    rows = rng.integers(0, 256, (100, width), dtype=np.uint8)
    short = rng.integers(0, 256, (20, width), dtype=np.uint8)
    ids = pool.get_new_block_ids(300).reshape(3, 100)
    pool.cache_partial_ids(ids[0, ::5], short, np.full(20, SIZE // 2), 0)
    pool.cache_full_ids(ids[0], rows, 0, SIZE)  # twenty of them in the place of shorter keys
    pool.check_consistency()
    assert pool.find_ids(short, 0).tolist() == [-1] * 20
    pool.cache_full_ids(ids[1:].ravel(), np.concatenate([rows, rows[::-1]]), 0, SIZE)
    pool.check_consistency()
    assert pool.find_ids(rows, 0).tolist() == ids[0].tolist()
    assert pool.num_registrations == 300
    pool.evict_ids(ids[0])
    assert pool.find_ids(rows, 0).tolist() == ids[1].tolist()
    pool.evict_ids(ids[1])
    assert pool.find_ids(rows, 0).tolist() == ids[2, ::-1].tolist()
    pool.check_consistency()
