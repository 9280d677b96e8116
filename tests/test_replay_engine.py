# SPDX-License-Identifier: Apache-2.0
"""What one request does to a pool, by hand; published traces are in test_replay_traces.py."""

import numpy as np
import pytest

from cpool.replay.ceiling import Ceiling
from cpool.replay.engine import FullAttentionEngine
from cpool.replay.records import Request
from cpool.replay.replay import Run, Timed, block_keys, replay
from cpool.replay.sweep import choose_capacities

BLOCK_SIZE = 4


def request(input_length, *ids):
    return Request(0, input_length, 0, np.array(ids, dtype=np.int64))


def run(num_blocks, *requests):
    result = Run(FullAttentionEngine(num_blocks, BLOCK_SIZE))
    hits = []
    for one in requests:
        before = result.hit_tokens
        replay([one], [result], BLOCK_SIZE, 32, lambda: None)
        hits.append(result.hit_tokens - before)
    return result, hits


def test_a_prompt_hits_as_far_as_its_blocks_were_seen():
    _, hits = run(10, request(12, 1, 2, 3), request(17, 1, 2, 4, 5), request(13, 1, 2, 3))
    assert hits == [0, 8, 12]


def test_the_last_token_is_always_computed():
    _, hits = run(10, request(8, 1, 2), request(8, 1, 2), request(9, 1, 2))
    assert hits == [0, 4, 8]


def test_a_partial_tail_is_never_a_key():
    _, hits = run(10, request(6, 1, 2), request(9, 1, 2))
    assert hits == [0, 4]


def test_the_tail_of_a_prompt_is_evicted_before_its_head():
    # Three of four blocks are needed anew: of [1, 2, 3] the last two go.
    result, hits = run(4, request(12, 1, 2, 3), request(12, 7, 8, 9), request(13, 1, 2, 3))
    assert hits == [0, 0, 4]
    assert result.engine.num_evictions == 2 + 3


def test_unused_partial_blocks_are_taken_again_before_anything_is_evicted():
    result, _ = run(3, request(9, 1, 2), request(3), request(2), request(1))
    assert result.engine.num_evictions == 0


def test_a_request_larger_than_the_pool_is_rejected_and_stays_in_the_denominator():
    result, hits = run(2, request(9, 1, 2), request(8, 1, 2), request(5, 1))
    assert hits == [0, 0, 4]
    assert (result.num_rejected, result.num_requests) == (1, 3)
    assert result.token_hit_rate == 4 / (9 + 8 + 5)
    assert result.block_references == 3


def test_the_ceiling_is_what_a_large_pool_hits():
    random = np.random.default_rng(3)
    requests = []
    for _ in range(200):
        # Prompts are walks down a tree: the id of a node names its whole path.
        ids, node = [], 0
        for _ in range(random.integers(1, 9)):
            node = 2 * node + int(random.integers(1, 3))
            ids.append(node)
        requests.append(request(4 * len(ids) + int(random.integers(0, 4)), *ids))
    ceiling = Ceiling(BLOCK_SIZE)
    result, _ = run(5_000, *ceiling.watch(requests))
    assert ceiling.hit_tokens == result.hit_tokens > 0
    assert ceiling.input_tokens == result.input_tokens
    assert ceiling.unique_blocks == len({i for r in requests for i in r.hash_ids.tolist()})


def test_engines_share_a_pass_and_do_not_disturb_each_other():
    requests = [request(9, i % 5, 10 + i % 5) for i in range(50)]
    together = [Run(FullAttentionEngine(blocks, BLOCK_SIZE)) for blocks in (3, 6, 12)]
    replay(requests, together, BLOCK_SIZE, 32, lambda: None)
    for one in together:
        alone, _ = run(one.engine.num_blocks, *requests)
        assert (alone.hit_tokens, alone.engine.num_evictions) == (
            one.hit_tokens,
            one.engine.num_evictions,
        )
    assert together[0].hit_tokens < together[2].hit_tokens


@pytest.mark.parametrize("num_bytes", [16, 32])
def test_keys_differ_exactly_where_ids_do(num_bytes):
    ids = np.array([0, 1, 255, 256, 2**31, 2**40, 2**63 - 1, 1])
    keys = block_keys(ids, num_bytes)
    assert keys.shape == (8, num_bytes)
    assert keys.dtype == np.uint8
    assert len({key.tobytes() for key in keys}) == 7
    assert block_keys(ids[:0], num_bytes).shape == (0, num_bytes)


def test_time_spent_in_the_source_is_added_up():
    timed = Timed([request(1), request(2)])
    assert [r.input_length for r in timed] == [1, 2]
    assert timed.seconds > 0


@pytest.mark.parametrize(
    ("unique", "largest", "capacities"),
    [
        (134_998, 9_000, [9_000, 17_000, 34_000, 68_000, 143_998]),
        (1_600, 10, [100, 200, 400, 800, 1_610]),
        (1_000, 900, [900, 1_900]),
        (0, 1, [1]),
        (3, 1, [1, 2, 4]),
    ],
)
def test_the_sweep_goes_from_a_share_of_the_working_set_to_all_of_it(unique, largest, capacities):
    assert choose_capacities(unique, largest) == capacities
