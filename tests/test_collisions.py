# SPDX-License-Identifier: Apache-2.0
"""Keys whose table hash is the same: all in one cell's run, or in a few, at both ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cpool.core.pool
from cpool import BlockPool
from tests.support import dump
from tests.test_model import run

testing: Any = getattr(cpool.core.pool, "_testing", None)
pytestmark = pytest.mark.skipif(
    testing is None, reason="hashes can be narrowed in debug builds only (CPOOL_DEBUG=1)"
)

# One value; two, of which one is at the table's end; four; sixteen, neighbours.
MASKS = [0, 0x80000000, 0xC0000000, 0x1E]


@pytest.fixture(params=MASKS, ids=hex)
def narrow(request: Any) -> Iterator[None]:
    testing.narrow_hash(request.param)
    yield
    testing.narrow_hash(0xFFFFFFFF)


@pytest.mark.usefixtures("narrow")
def test_pool_and_model_agree_when_hashes_collide() -> None:
    for seed in range(12):
        run(seed, 120)


@pytest.mark.usefixtures("narrow")
def test_extra_keys_of_one_block_may_collide() -> None:
    pool = BlockPool(4, True, 4)
    digests = [bytes([i]) * 16 for i in range(4)]
    for i, digest in enumerate(digests):
        pool.cache_partial_id(1, digest, 16 - 4 * i, 0)
    assert pool.find_ids(digests, 0).tolist() == [1, 1, 1, 1]
    assert [r.num_tokens for r in pool.registrations(1)] == [16, 12, 8, 4]
    pool.check_consistency()


@pytest.mark.usefixtures("narrow")
def test_a_saved_pool_whose_keys_collide_is_loaded(tmp_path: Path) -> None:
    pool = BlockPool(6, True, 4)
    digests = [bytes([i]) * 16 for i in range(7)]
    for block_id, first in ((1, 0), (2, 3)):  # one key is both blocks'
        for i, digest in enumerate(digests[first : first + 4]):
            pool.cache_partial_id(block_id, digest, 16 - 4 * i, 0)
    pool.save(tmp_path / "pool")
    loaded = BlockPool.load(tmp_path / "pool")
    loaded.check_consistency()
    assert dump(loaded) == dump(pool)


@pytest.mark.usefixtures("narrow")
def test_a_run_that_wraps_round_the_end_is_searched_and_closed() -> None:
    pool = BlockPool(40, True, 4)
    digests = [bytes([i]) * 16 for i in range(1, 40)]
    pool.cache_full_ids(range(1, 40), digests, 0, 4)
    assert pool.find_ids(digests, 0).tolist() == list(range(1, 40))
    for block_id in range(39, 0, -2):
        pool.evict_ids([block_id])
        pool.check_consistency()
    left = [i if i % 2 == 0 else -1 for i in range(1, 40)]
    assert pool.find_ids(digests, 0).tolist() == left


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("width", [5, 8, 16, 24, 32])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_keys_are_told_apart_by_any_one_byte(width: int, place: str) -> None:
    position = {"first": 0, "middle": width // 2, "last": width - 1}[place]
    digests = [bytearray(width) for _ in range(8)]
    for i, digest in enumerate(digests):
        digest[position] = i
    known = [bytes(digest) for digest in digests[:6]]
    unknown = [bytes(digest) for digest in digests[6:]]
    pool = BlockPool(8, True, 4)
    pool.cache_full_ids(range(1, 7), known, 0, 4)
    assert pool.find_ids(known, 0).tolist() == [1, 2, 3, 4, 5, 6]
    assert pool.find_ids(unknown, 0).tolist() == [-1, -1]
    assert pool.num_cached_keys == 6


@pytest.mark.usefixtures("narrow")
def test_groups_are_told_apart() -> None:
    pool = BlockPool(4, True, 4)
    digest = bytes(32)
    for group in range(3):
        pool.cache_full_ids([group + 1], [digest], group, 4)
    assert [pool.find_ids([digest], group).tolist() for group in range(4)] == [[1], [2], [3], [-1]]
