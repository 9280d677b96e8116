# SPDX-License-Identifier: Apache-2.0
"""Which pools are measured, and what they should reach at a million blocks."""

MILLION = 1_000_000
HASH_WIDTH = 32
SIZES = (10_000, 100_000, MILLION, 10_000_000)
QUICK_SIZES = (10_000, 100_000, MILLION)

# operation -> times as fast as stock: block ids, vLLM's methods. At a million blocks.
GOALS = {
    "construct": (50, None),
    "allocate_fresh": (15, 4),
    "allocate_evicting_aged": (30, 8),
    "register_fresh": (20, 4),
    "register_aged": (20, 8),
    "find_sequential": (20, 4),
    "find_random": (50, 8),
    "find_missing": (25, 8),
    "find_prefix_cold": (20, 8),
    "touch": (10, 8),
    "free_fresh": (10, 4),
    "free_shuffled": (15, 8),
    "evict": (20, 8),
    "register_partial_again": (20, 8),
}
# operation -> times the floor measured beside it, at most. At a million blocks.
FLOOR_GOALS = dict.fromkeys(["find_sequential", "find_random", "find_prefix_cold"], 2) | (
    dict.fromkeys(["register_fresh", "register_aged"], 2)
)
WARM_PREFIX_GOAL_NS = 1000 / 60  # 60 million blocks a second


def timing_case(num_blocks, rounds, aging_passes, hash_width=HASH_WIDTH, keys_per_block=1):
    return {
        "num_blocks": num_blocks,
        "hash_width": hash_width,
        "keys_per_block": keys_per_block,
        "rounds": rounds,
        "construct_rounds": 3,
        "sample_blocks": 65_536,
        "aging_passes": aging_passes,
    }


def timing_cases(quick):
    if quick:
        return [timing_case(10_000, 5, 1), timing_case(100_000, 5, 1), timing_case(MILLION, 3, 1)]
    return [
        timing_case(10_000, 9, 2),
        timing_case(100_000, 7, 2),
        timing_case(MILLION, 11, 2),
        timing_case(10_000_000, 3, 1),
        timing_case(100_000, 5, 2, hash_width=16),
        timing_case(MILLION, 5, 1, hash_width=16),
        timing_case(100_000, 5, 1, keys_per_block=2),
        timing_case(100_000, 5, 1, keys_per_block=5),
        timing_case(MILLION, 3, 1, keys_per_block=2),
        timing_case(MILLION, 3, 1, keys_per_block=5),
    ]


def memory_cases(quick):
    """(implementation, method, num_blocks, hash_width, keys_per_block) of each measurement."""
    sizes = QUICK_SIZES if quick else SIZES
    cases = [
        ("ids", "rss", size, width, keys)
        for size in sizes
        for width in (16, HASH_WIDTH)
        for keys in (1, 2, 5)
        if size <= MILLION or keys < 5 or not quick
    ]
    cases += [("stock", "rss", size, HASH_WIDTH, 1) for size in sizes]
    if not quick:
        cases += [
            ("stock", "rss", size, HASH_WIDTH, keys)
            for size in (100_000, MILLION)
            for keys in (2, 5)
        ]
        cases += [("stock", "rss", MILLION, 16, 1)]
    for implementation in ("ids", "stock"):
        cases += [(implementation, "tracemalloc", 100_000, HASH_WIDTH, 1)]
        cases += [(implementation, "memray", 100_000, HASH_WIDTH, 1)]
    if not quick:
        cases += [("ids", "memray", MILLION, HASH_WIDTH, 5)]
        cases += [("ids", "tracemalloc", MILLION, HASH_WIDTH, 1)]
    return cases
