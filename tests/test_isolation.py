# SPDX-License-Identifier: Apache-2.0
"""Who writes prompts cannot choose where keys land in the table, nor slow look-ups down.

The attack is run for real: with the table's random words known, keys are made that all hash
alike. It must work on the pool whose words they were made for, and on no other.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpool

NUM_KEYS = 1000
SEED_BYTES = 8 * 36
CHUNK_CELLS = 8
# Lines of cells beyond the home of a random key in a table 64 % full: 3 at most, as a rule.
LONGEST_SEARCH = 20


def known_words() -> np.ndarray:
    return np.frombuffer(np.random.default_rng(7).bytes(SEED_BYTES), np.uint64)


def colliding_keys(words: np.ndarray) -> np.ndarray:
    """Distinct (n, 32) digests of one hash: a factor of each product of NH is made zero."""
    keys = np.zeros((NUM_KEYS, 4), np.uint64)
    keys[:, 0] = -words[2:3]
    keys[:, 1] = np.arange(NUM_KEYS)
    keys[:, 2] = -words[4:5]
    keys[:, 3] = np.arange(NUM_KEYS)[::-1]
    return keys.view(np.uint8)


def pool_with(keys: np.ndarray) -> Any:
    pool = cpool.BlockPool(NUM_KEYS + 1, True, 16)
    ids = pool.get_new_block_ids(NUM_KEYS)
    pool.cache_full_ids(ids, keys, 0, 16)
    assert np.array_equal(pool.find_ids(keys, 0), ids)
    return pool


@pytest.fixture
def attacked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pool whose words the attacker knows, full of his keys."""
    words = known_words()
    with monkeypatch.context() as patch:
        patch.setattr(os, "urandom", lambda count: words.tobytes()[:count])
        pool = pool_with(colliding_keys(words))
    # Each of its words is drawn, so the attack works: every key is in one run.
    assert pool.table_stats()["max_distance"] == (NUM_KEYS - 1) // CHUNK_CELLS
    return pool


def assert_spread(pool: Any) -> None:
    stats = pool.table_stats()
    assert stats["num_used"] == NUM_KEYS
    assert stats["max_distance"] < LONGEST_SEARCH
    assert stats["mean_distance"] < 0.2  # 0.02 on average


def test_keys_made_for_one_pool_are_spread_in_another(attacked: Any) -> None:
    for _ in range(5):
        assert_spread(pool_with(colliding_keys(known_words())))


def test_a_loaded_pool_draws_words_of_its_own(attacked: Any, tmp_path: Path) -> None:
    attacked.save(tmp_path / "pool")
    assert known_words().tobytes()[:16] not in (tmp_path / "pool").read_bytes()
    assert_spread(cpool.BlockPool.load(tmp_path / "pool"))


def test_the_cells_of_equal_pools_differ() -> None:
    keys = np.random.default_rng(8).integers(0, 256, (NUM_KEYS, 32), np.uint8)
    distances = {pool_with(keys).table_stats()["mean_distance"] for _ in range(5)}
    assert len(distances) > 1
