# SPDX-License-Identifier: Apache-2.0
"""Made-up requests: the same for every block size, and like the users they stand for."""

import hashlib
from collections import Counter
from itertools import islice
from random import Random

import numpy as np
import pytest

from cpool.replay.ceiling import Ceiling
from cpool.replay.engine import FullAttentionEngine
from cpool.replay.records import full_blocks
from cpool.replay.replay import Run, replay
from cpool.replay.workload import PRESETS, chat, generate
from cpool.replay.workload.blocks import BlockNumbers
from cpool.replay.workload.distributions import (
    Chance,
    Choice,
    Quantiles,
    exponential,
    lognormal,
    lognormal_from,
    zipf,
)
from cpool.replay.workload.prompt import Prompt
from cpool.replay.workload.sessions import Turn, merge


def tokens_of(prompt):
    tokens = []
    while prompt is not None:
        tokens = [(prompt.segment, i) for i in range(prompt.length)] + tokens
        prompt = prompt.parent
    return tokens


def random_prompts(random, count):
    """Prompts that fork, share segments, and cut them at different lengths."""
    prompts = [None]
    for _ in range(count):
        parent = random.choice(prompts)
        used = set()
        node = parent
        while node is not None:
            used.add(node.segment)
            node = node.parent
        segment = random.choice([s for s in range(40) if s not in used])
        prompts.append(Prompt(parent, segment, random.randint(1, 30)))
    return prompts[1:]


@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
def test_equal_numbers_mean_equal_tokens_from_the_start_on(block_size):
    random = Random(block_size)
    numbers = BlockNumbers(block_size)
    start_of, number_of = {}, {}
    prompts = random_prompts(random, 300)
    for prompt in prompts + random.sample(prompts, 100):
        tokens = tokens_of(prompt)
        ids = numbers.of(prompt).tolist()
        assert len(ids) == len(tokens) // block_size
        for position, number in enumerate(ids):
            start = tuple(tokens[: (position + 1) * block_size])
            assert start_of.setdefault(number, start) == start
            assert number_of.setdefault(start, number) == number
    assert sorted(start_of) == list(range(len(start_of)))


def digest(preset, block_size, **options):
    text = hashlib.sha256()
    for request in generate(preset, 300, block_size=block_size, **options).requests:
        assert len(request.hash_ids) == request.input_length // block_size
        text.update(repr(request[:3]).encode())
    return text.hexdigest()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_block_size_changes_no_request(preset):
    assert digest(preset, 16) == digest(preset, 64) == digest(preset, 1600)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_seed_decides(preset):
    assert digest(preset, 64, seed=1) == digest(preset, 64, seed=1) != digest(preset, 64, seed=2)


@pytest.mark.parametrize("preset", PRESETS)
def test_coarse_blocks_are_equal_where_the_fine_ones_in_them_are(preset):
    fine, coarse = generate(preset, 200, block_size=16), generate(preset, 200, block_size=64)
    coarse_of, fine_of = {}, {}
    for one, other in zip(fine.requests, coarse.requests, strict=True):
        # A chained number names its whole start, so every fourth fine one stands for a coarse one.
        for few, many in zip(other.hash_ids.tolist(), one.hash_ids[3::4].tolist(), strict=True):
            assert coarse_of.setdefault(many, few) == few
            assert fine_of.setdefault(few, many) == many
    assert coarse_of


@pytest.mark.parametrize("preset", PRESETS)
def test_requests_come_in_order_of_time(preset):
    times = [request.timestamp for request in generate(preset, 1_000, block_size=512).requests]
    assert len(times) == 1_000
    assert times == sorted(times)
    assert times[-1] > 0


@pytest.mark.parametrize(
    ("preset", "digest_of_stream"),
    [
        ("agent", "26f9ded8aed1fc69"),
        ("chat", "87a40e623fb77b09"),
        ("rag", "a9e181b7f82c22ac"),
        ("toolapi", "74b7ed6dd9237c04"),
    ],
)
def test_a_seed_gives_the_same_requests_on_every_machine(preset, digest_of_stream):
    assert digest(preset, 64, seed=0)[:16] == digest_of_stream


def test_sessions_are_merged_in_order_of_time():
    def session(name, *waits):
        return iter([Turn(wait, name, 1) for wait in waits])

    starts = [(0, session("a", 5, 5, 20)), (7, session("b", 0, 3, 3)), (12, session("c"))]
    merged = [(arrival.time, arrival.prompt) for arrival in merge(starts)]
    assert merged == [(5, "a"), (7, "b"), (10, "a"), (10, "b"), (13, "b"), (30, "a")]


def quantiles_of(distribution, *ps, draws=20_000):
    random = Random(5)
    return np.quantile([distribution.draw(random) for _ in range(draws)], ps)


def test_quantiles_are_met_and_interpolated_as_logarithms():
    distribution = Quantiles([(0, 1), (0.5, 100), (1, 1_000_000)])
    found = quantiles_of(distribution, 0, 0.25, 0.5, 0.75, 1)
    assert found == pytest.approx([1, 10, 100, 10_000, 1_000_000], rel=0.1)


def test_lognormal_has_the_median_the_mean_and_the_limits_asked_for():
    distribution = lognormal_from(median=5_000, mean=15_000)
    random = Random(5)
    drawn = [distribution.draw(random) for _ in range(50_000)]
    assert np.median(drawn) == pytest.approx(5_000, rel=0.03)
    assert np.mean(drawn) == pytest.approx(15_000, rel=0.1)
    clipped = lognormal(3.67, 1.16, low=3, high=1_200)
    found = quantiles_of(clipped, 0, 0.1, 0.5, 1)
    assert found == pytest.approx([3, 8.9, 39, 1_200], rel=0.1)


def test_exponential_has_its_mean_and_its_median():
    random = Random(5)
    distribution = exponential(1_000)
    drawn = [distribution.draw(random) for _ in range(5_000)]
    assert np.mean(drawn) == pytest.approx(1_000, rel=0.05)
    assert np.median(drawn) == pytest.approx(693, rel=0.06)


def test_weights_and_chances_are_kept():
    random = Random(5)
    choice, chance, ranks = Choice([1, 0, 3]), Chance(0.2), zipf(100, 1.0)
    drawn = Counter(choice.draw(random) for _ in range(10_000))
    assert drawn[0] == pytest.approx(2_500, rel=0.1)
    assert drawn[1] == 0
    assert sum(drawn.values()) == drawn[0] + drawn[2]
    assert sum(chance.draw(random) for _ in range(10_000)) == pytest.approx(2_000, rel=0.1)
    found = Counter(ranks.draw(random) for _ in range(10_000))
    assert found[0] == pytest.approx(2 * found[1], rel=0.15)
    assert set(found) <= set(range(100))


@pytest.mark.parametrize("points", [[(0.1, 1), (1, 2)], [(0, 1), (0.9, 2)]])
def test_quantiles_must_cover_everything(points):
    with pytest.raises(ValueError, match="begin at 0 and end at 1"):
        Quantiles(points)


class Measured:
    """Token hit rates of a workload: of an infinite cache, and by capacity."""

    def __init__(self, preset, num_requests, block_size, capacities):
        trace = generate(preset, num_requests, block_size=block_size)
        ceiling = Ceiling(block_size)
        runs = [Run(FullAttentionEngine(blocks, block_size)) for blocks in capacities]
        self.requests = list(trace.requests)
        replay(ceiling.watch(self.requests), runs, block_size, 16, lambda: None)
        self.ideal = ceiling.hit_rate
        self.at = {run.engine.num_blocks: run.token_hit_rate for run in runs}


# The figures that follow are those of the traces that the presets are made after.


def test_chat_hits_like_the_conversation_trace():
    found = Measured("chat", 12_000, 512, [10_000, 30_000, 50_000])
    assert found.ideal == pytest.approx(0.37, abs=0.03)
    for capacity, rate in {10_000: 0.21, 30_000: 0.33, 50_000: 0.35}.items():
        assert found.at[capacity] == pytest.approx(rate, abs=0.05), capacity
    reuses = Counter()
    for request in found.requests:
        reuses.update(full_blocks(request, 512).tolist())
    counts = sorted((count - 1 for count in reuses.values()), reverse=True)
    top = sum(counts[: len(counts) // 10]) / sum(counts)
    assert top == pytest.approx(0.75, abs=0.1)


def test_four_in_ten_chat_requests_continue_an_earlier_one():
    prompts = [arrival.prompt for arrival in islice(chat.arrivals(Random(0)), 24_000)]
    # The first one of a conversation follows the system prompt, and asking again repeats it.
    firsts = {id(prompt) for prompt in prompts if prompt.parent.parent is None}
    assert 1 - len(firsts) / len(prompts) == pytest.approx(0.39, abs=0.03)


def test_toolapi_hits_like_the_tool_and_agent_trace():
    found = Measured("toolapi", 23_608, 512, [1_000, 10_000, 30_000])
    assert found.ideal == pytest.approx(0.55, abs=0.04)
    for capacity, rate in {1_000: 0.34, 10_000: 0.46, 30_000: 0.54}.items():
        assert found.at[capacity] == pytest.approx(rate, abs=0.05), capacity


def test_rag_hits_like_the_question_service():
    found = Measured("rag", 7_106, 16, [1_000])
    assert found.ideal == pytest.approx(0.315, abs=0.02)
    assert found.at[1_000] == pytest.approx(0.29, abs=0.02)


@pytest.mark.parametrize("num_requests", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_agent_hits_nearly_everything_once_the_sessions_at_once_fit(num_requests):
    block_size = 64
    prompts = [r.input_length for r in generate("agent", num_requests).requests]
    at_once = 32 * int(np.mean(prompts)) // block_size
    found = Measured("agent", num_requests, block_size, [at_once // 8, at_once])
    assert 0.93 <= found.ideal <= 0.97
    # Sessions that wait for their user need not fit, so the knee lies in between.
    assert found.at[at_once] >= 0.98 * found.ideal
    assert found.at[at_once // 8] <= 0.7 * found.ideal
    assert max(prompts) <= 200_000
