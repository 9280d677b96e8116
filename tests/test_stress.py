# SPDX-License-Identifier: Apache-2.0
"""A large pool under a production-like mix, for minutes: memory, consistency, the table's shape.

CPOOL_STRESS_BLOCKS sets the size (default 1,000,000), CPOOL_STRESS_TURNS how often every block
is handed out in each half (default 3).
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from cpool import BlockPool

pytestmark = pytest.mark.stress

NUM_BLOCKS = int(os.environ.get("CPOOL_STRESS_BLOCKS", "1000000"))
TURNS = int(os.environ.get("CPOOL_STRESS_TURNS", "3"))
# In 10^6 to 10^7 cells, 64 to 80 % full, the longest search of random keys reads some dozen
# lines of eight; one of clustered keys would read thousands.
LONGEST_SEARCH = 200
# Lines that a search for nothing reads beyond its first, on average, with 60 % of the cells
# filled: 0.1 where keys come back to their homes, above 0.5 where they do not.
MEAN_MISS = 0.3

MIX = Path(__file__).resolve().parent.parent / "profiling" / "production_mix.py"


def load_mix():
    spec = importlib.util.spec_from_file_location("production_mix", MIX)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


production_mix = load_mix()


def resident_mib():
    return production_mix.rss_bytes() / (1 << 20)


def test_memory_stays_flat_over_the_second_half():
    mix = production_mix.ProductionMix(BlockPool(NUM_BLOCKS, True, production_mix.BLOCK_SIZE))
    for _ in range(TURNS):
        mix.run(NUM_BLOCKS)
        mix.pool.check_consistency()
        assert mix.pool.table_stats()["max_distance"] < LONGEST_SEARCH
        assert mix.pool.table_stats()["mean_miss"] < MEAN_MISS
    mix.times.clear()
    nbytes, resident = mix.pool.nbytes, resident_mib()
    for _ in range(TURNS):
        mix.run(NUM_BLOCKS)
        mix.pool.check_consistency()
        assert mix.pool.table_stats()["max_distance"] < LONGEST_SEARCH
        assert mix.pool.table_stats()["mean_miss"] < MEAN_MISS
        print("\n".join(production_mix.longest_calls([mix.times])))
        mix.times.clear()
    assert mix.pool.num_registrations > 0.8 * NUM_BLOCKS
    assert mix.pool.nbytes <= 1.01 * nbytes
    assert resident_mib() <= 1.01 * resident + 8
    mix.fill_table()
    stats = mix.pool.table_stats()
    assert stats["num_used"] > NUM_BLOCKS
    assert stats["max_distance"] < LONGEST_SEARCH
    mix.finish_all()
    assert mix.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert mix.pool.reset_prefix_cache()
    mix.pool.check_consistency()
    # Rows alone are left: prev, next and ref_cnt, and the place of a key record.
    assert mix.pool.nbytes <= 18 * (NUM_BLOCKS + 1) + 4096


def adversarial_keys(kind, count):
    """Keys that all meet in one cell of a table whose hash is not seeded."""
    words = np.zeros((count, 4), np.uint64)
    counter = np.arange(count, dtype=np.uint64)
    if kind == "a zero factor":
        # Products of neighbouring words are 0 whatever the other word is.
        words[:, 1] = counter
        words[:, 3] = counter[::-1]
    elif kind == "one end":
        words[:, 0] = counter
    else:
        words[:, 3] = counter << np.uint64(40)
    return words.view(np.uint8)


@pytest.mark.parametrize("kind", ["a zero factor", "one end", "other end"])
def test_keys_chosen_to_collide_are_spread_by_the_seed(kind):
    count = 200_000
    pool = BlockPool(count + 1, True, 16)
    ids = pool.get_new_block_ids(count)
    keys = adversarial_keys(kind, count)
    assert len(np.unique(keys, axis=0)) == count
    pool.cache_full_ids(ids, keys, 0, 16)
    assert (pool.find_ids(keys, 0) == ids).all()
    stats = pool.table_stats()
    assert stats["num_used"] == count
    assert stats["max_distance"] < LONGEST_SEARCH
    # 64 % full: of random keys 1 in 30 is a line away from home.
    assert stats["mean_distance"] < 0.2
    pool.free_ids(ids)
    assert pool.evict_ids(ids) == count
    assert pool.table_stats()["num_used"] == 0
    pool.check_consistency()
