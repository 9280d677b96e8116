# SPDX-License-Identifier: Apache-2.0
"""Lookups against the definition of a hit, spelled out over a dict of what is resident."""

import random

import numpy as np
import pytest

from cpool import BlockPool, hash_tokens
from cpool.prefix import ChunkedLocal, FullAttention, Mamba, PrefixCache, SlidingWindow
from cpool.prefix.groups import why_coarse

UNIT = 4


def prompt(num_tokens, seed=0):
    return [seed * 1_000_000 + i for i in range(num_tokens)]


class Resident:
    """A pool that holds chosen boundaries of one prompt, and the same as plain sets."""

    def __init__(self, num_tokens, groups, match=None):
        self.tokens = prompt(num_tokens)
        self.hashes = hash_tokens(self.tokens, UNIT)
        self.pool = BlockPool(2000, True, UNIT)
        self.cache = PrefixCache(self.pool, groups, match=match)
        self.boundaries = [{} for _ in groups]  # of each group: tokens -> block id

    def put(self, group, num_tokens):
        [block_id] = self.pool.get_new_block_ids(1).tolist()
        digest = self.hashes[num_tokens // UNIT - 1]
        self.pool.cache_partial_id(block_id, digest, num_tokens, group)
        self.boundaries[group][num_tokens] = block_id

    def put_all(self, group, num_tokens):
        size = self.cache.groups[group].block_size
        for end in range(size, num_tokens + 1, size):
            self.put(group, end)

    def reach_of_attention(self, g, max_tokens):
        """Full blocks in a row, then the highest partial entry in the next block."""
        there, size = self.boundaries[g], self.cache.groups[g].block_size
        run = 0
        while run + size <= max_tokens and run + size in there:
            run += size
        if self.cache.match_unit >= size:
            return run
        inside = range(run + UNIT, min(run + size - UNIT, max_tokens) + 1, UNIT)
        return max([run, *(end for end in inside if end in there)])

    def has(self, g, length, max_tokens):
        """Whether group g alone could serve a hit of that many tokens."""
        group, there = self.cache.groups[g], self.boundaries[g]
        size = group.block_size
        if isinstance(group, FullAttention):
            return length <= self.reach_of_attention(g, max_tokens)
        if isinstance(group, Mamba):
            return length in there
        if length % size:
            return False
        needed = max(1, -(-(group.sliding_window - 1) // size))
        return all(end in there for end in range(size, length + 1, size)[-needed:])

    def longest(self, max_tokens):
        unit = self.cache.match_unit
        for length in range(max_tokens // unit * unit, 0, -unit):
            if all(self.has(g, length, max_tokens) for g in range(len(self.cache.groups))):
                return length
        return 0


MODELS = {
    "full": [FullAttention(UNIT)],
    "wide full, fine": [FullAttention(12)],
    "window": [SlidingWindow(UNIT, 10)],
    "wide window": [SlidingWindow(8, 18)],
    "state": [Mamba(UNIT)],
    "wide state": [Mamba(16)],
    "full + state": [FullAttention(16), Mamba(16)],
    "two full + two states": [FullAttention(16), Mamba(16), FullAttention(16), Mamba(16)],
    "sizes": [FullAttention(8), Mamba(24)],
    "full + window": [FullAttention(UNIT), SlidingWindow(UNIT, 10)],
    "full + wide window": [FullAttention(8), SlidingWindow(UNIT, 6)],
    "window + state": [SlidingWindow(UNIT, 6), Mamba(UNIT)],
    "all": [SlidingWindow(UNIT, 6), FullAttention(8), Mamba(16)],
}


@pytest.mark.parametrize("match", ["coarse", "fine"])
@pytest.mark.parametrize("model", MODELS)
def test_a_hit_is_the_longest_prefix_that_all_groups_can_serve(model, match):
    groups = MODELS[model]
    if match == "fine" and why_coarse(groups, UNIT):
        pytest.skip("these groups match whole blocks only")
    rng = random.Random(f"{model} {match}")
    lengths = set()
    for _ in range(60):
        world = Resident(rng.randint(1, 130), groups, match)
        density = rng.choice((0.3, 0.8, 0.97))
        for g, group in enumerate(groups):
            for end in range(UNIT, len(world.tokens) + 1, UNIT):
                is_full = end % group.block_size == 0
                if rng.random() < (density if is_full else 0.2):
                    world.put(g, end)
        max_tokens = rng.randint(0, len(world.tokens))
        found = world.cache.lookup(world.hashes, max_tokens)
        assert found.num_tokens == world.longest(max_tokens)
        lengths.add(found.num_tokens)
        for g, ids in enumerate(found.block_ids):
            check_row(world, g, ids.tolist(), found.num_tokens)
    assert len(lengths) > 2


def check_row(world, g, ids, length):
    group, there = world.cache.groups[g], world.boundaries[g]
    size = group.block_size
    assert len(ids) == -(-length // size)
    for index, block_id in enumerate(ids):
        end = (index + 1) * size
        is_tail = end > length
        if isinstance(group, Mamba):
            expected = {there[length]} if index == len(ids) - 1 else {0}
        elif is_tail:
            expected = {there.get(e) for e in range(length, min(end, len(world.tokens)) + 1, UNIT)}
        elif isinstance(group, SlidingWindow):
            expected = {there.get(end), 0}
        else:
            expected = {there[end]}
        assert block_id in expected


def test_a_row_of_a_window_starts_with_nulls():
    world = Resident(64, [SlidingWindow(UNIT, 9)])
    world.put_all(0, 64)
    [ids] = world.cache.lookup(world.hashes, 63).block_ids
    assert ids[:13].tolist() == [0] * 13
    assert ids[13:].tolist() == [world.boundaries[0][end] for end in (56, 60)]


def test_a_broken_window_still_hits_from_the_start():
    world = Resident(64, [SlidingWindow(UNIT, 17)])
    for end in (4, 8, 20, 24, 28):
        world.put(0, end)
    assert world.cache.lookup(world.hashes).num_tokens == 8


def test_chunked_local_needs_only_the_current_chunk():
    world = Resident(64, [ChunkedLocal(UNIT, 16)])
    world.put(0, 52)
    found = world.cache.lookup(world.hashes, 63)
    assert found.num_tokens == 52
    assert found.block_ids[0].tolist() == [0] * 12 + [world.boundaries[0][52]]
    assert world.cache.lookup(world.hashes, 47).num_tokens == 32


def test_a_drafter_gets_its_last_unit_computed_again():
    plain = Resident(64, [FullAttention(16), Mamba(16)])
    eager = Resident(64, [FullAttention(16, eagle=True), Mamba(16)])
    for world in (plain, eager):
        world.put_all(0, 48)
        world.put(0, 60)
        for end in range(UNIT, 64, UNIT):
            world.put(1, end)
    assert plain.cache.lookup(plain.hashes, 62).num_tokens == 60
    assert eager.cache.lookup(eager.hashes, 62).num_tokens == 56


def test_duplicates_return_the_block_that_registered_first():
    world = Resident(16, [FullAttention(UNIT)])
    world.put(0, 4)
    first = world.boundaries[0][4]
    world.put(0, 4)
    assert world.cache.lookup(world.hashes).block_ids[0].tolist() == [first]


@pytest.mark.parametrize("form", ["rows", "bytes", "list", "tuple", "strided", "object"])
def test_hashes_may_come_in_any_form_of_the_pool(form):
    world = Resident(64, [FullAttention(UNIT)])
    world.put_all(0, 64)
    rows = np.frombuffer(b"".join(world.hashes), dtype=np.uint8).reshape(-1, 32)
    hashes = {
        "rows": rows,
        "bytes": rows.tobytes(),
        "list": list(world.hashes),
        "tuple": tuple(world.hashes),
        "strided": np.hstack([rows, rows])[:, :32],
        "object": world.hashes,
    }[form]
    assert world.cache.lookup(hashes, 63).num_tokens == 60


@pytest.mark.parametrize(
    ("hashes", "error"),
    [
        (b"x" * 33, ValueError),
        ([b"x" * 32, b"x" * 31], ValueError),
        ([1, 2], TypeError),
        ("text", TypeError),
        (np.zeros((2, 32), dtype=np.int64), TypeError),
        (np.zeros((2, 2, 32), dtype=np.uint8), TypeError),
        (np.zeros((2, 300), dtype=np.uint8), ValueError),
    ],
)
def test_bad_hashes_are_refused(hashes, error):
    world = Resident(8, [FullAttention(UNIT)])
    with pytest.raises(error):
        world.cache.lookup(hashes)


def test_an_empty_pool_and_an_empty_prompt_have_no_hit():
    world = Resident(64, [FullAttention(16), Mamba(16)])
    assert world.cache.lookup(world.hashes).num_tokens == 0
    assert world.cache.lookup([]).num_tokens == 0
    assert world.cache.lookup(world.hashes, 0).num_tokens == 0


@pytest.mark.parametrize("hash_block_size", [UNIT // 2, 2 * UNIT])
def test_hashes_of_another_size_are_refused(hash_block_size):
    pool = BlockPool(50, True, hash_block_size)
    cache = PrefixCache(pool, [FullAttention(hash_block_size)])
    hashes = hash_tokens(prompt(40), UNIT)
    message = f"are 4 tokens apart; the pool's hash_block_size is {hash_block_size}"
    with pytest.raises(ValueError, match=message):
        cache.lookup(hashes)
    with pytest.raises(ValueError, match=message):
        cache.reach(hashes, 0, 8)
    assert cache.lookup(hash_tokens(prompt(40), hash_block_size)).num_tokens == 0


@pytest.mark.parametrize(
    ("groups", "match", "message"),
    [
        ([], None, "at least one group"),
        ([FullAttention(6)], None, "multiple of the pool's hash_block_size 4"),
        ([FullAttention(0)], None, "multiple"),
        ([SlidingWindow(4, 0)], None, "window of 0"),
        ([ChunkedLocal(8, 16), FullAttention(16)], None, "blocks of the match unit, 16"),
        ([FullAttention(4)], "fine", "no boundaries inside"),
        ([SlidingWindow(8, 16), Mamba(16)], "fine", "whole blocks of 8 tokens only"),
        ([FullAttention(4)], "exact", "must be"),
    ],
)
def test_groups_that_cannot_be_matched_are_refused(groups, match, message):
    with pytest.raises(ValueError, match=message):
        PrefixCache(BlockPool(10, True, UNIT), groups, match=match)


def test_matching_is_fine_when_a_state_spans_several_hashes():
    pool = BlockPool(10, True, UNIT)
    assert PrefixCache(pool, [FullAttention(16), Mamba(16)]).match_unit == UNIT
    assert PrefixCache(pool, [FullAttention(16), Mamba(16)], match="coarse").match_unit == 16
    assert PrefixCache(pool, [FullAttention(16), SlidingWindow(8, 8)]).match_unit == 16
    assert PrefixCache(pool, [SlidingWindow(8, 8), Mamba(16)]).match_unit == 16


def test_a_match_that_no_lookup_made_says_so():
    match = type(PrefixCache(BlockPool(4, True, UNIT), [FullAttention(UNIT)]).lookup([]))()
    for ask in (lambda: match.block_ids, lambda: match.partial_tails, match.explain):
        with pytest.raises(ValueError, match="made by hand"):
            ask()
