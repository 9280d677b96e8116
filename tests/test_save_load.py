# SPDX-License-Identifier: Apache-2.0
"""A saved pool comes back as it was, and nothing else becomes a pool."""

import json
import os
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpool
import cpool.core.pool
from cpool.core import saving

from . import operations
from .operations import RandomPicker
from .support import Collector, dump, event_fields, in_any_order, make_request
from .test_model import Pair
from .test_save_details import detailed_pool

testing = getattr(cpool.core.pool, "_testing", None)
CHAIN = make_request(12)


def mixed_pool() -> Any:
    """Blocks in every state: held, cached, copies in a mixed-up order, extra and loose keys."""
    pool = cpool.BlockPool(24, True, 4, medium="CPU")
    blocks = pool.get_new_blocks(16)
    pool.touch(blocks[:3])
    for block in (blocks[5], blocks[1], blocks[9], blocks[0]):
        pool.cache_full_blocks(CHAIN, [block], 0, 1, 4, 0)
    pool.cache_full_blocks(CHAIN, blocks[2:5], 0, 3, 4, 1)
    pool.cache_partial_block(CHAIN, blocks[6], 12, 0, 16)
    pool.cache_partial_block(CHAIN, blocks[6], 4, 0, 16)  # Extra key, a copy of four others.
    pool.cache_partial_block(CHAIN, blocks[6], 8, 2, 16)
    pool.cache_partial_block(CHAIN, blocks[7], 12, 1, 16)
    pool.cache_partial_block(CHAIN, blocks[8], 4, 3, 16)
    pool._insert_block_hash(bytes(32) + bytes(4), blocks[10], None)
    blocks[11].set_block_hash(bytes(range(36)), 8)  # The table does not know it.
    pool.null_block.set_block_hash(bytes(range(1, 37)), 4)
    pool.cached_block_hash_to_block.insert(bytes(range(1, 37)), pool.null_block)
    pool.evict_blocks([blocks[1].block_id])
    pool.free_blocks([blocks[9], blocks[6], blocks[0], blocks[12], blocks[3]])
    return pool


def holders(pool: Any) -> dict[bytes, list[int]]:
    """Each key's blocks, in the order in which look-ups prefer them."""
    found = {}
    for key, value in pool.cached_block_hash_to_block._cache.items():
        found[key] = list(value) if isinstance(value, dict) else [value.block_id]
    return found


def saved(pool: Any, tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    pool.save(path)
    return path


def assert_same(actual: Any, expected: Any) -> None:
    assert dump(actual) == dump(expected)
    assert holders(actual) == holders(expected)
    for name in ("num_gpu_blocks", "hash_block_size", "enable_caching", "medium"):
        assert getattr(actual, name) == getattr(expected, name)
    actual.check_consistency()


def test_everything_comes_back(tmp_path: Path) -> None:
    pool = mixed_pool()
    before = dump(pool)
    loaded = cpool.BlockPool.load(saved(pool, tmp_path))
    assert dump(pool) == before
    assert_same(loaded, pool)
    assert loaded.blocks[12].block_hash == bytes(range(36))
    assert max(len(ids) for ids in holders(loaded).values()) == 4


def test_a_loaded_pool_goes_on_like_the_first(tmp_path: Path) -> None:
    pool = mixed_pool()
    loaded = cpool.BlockPool.load(saved(pool, tmp_path))
    for each in (pool, loaded):
        each.evict_blocks([6])  # The first copy of a key: the second answers now.
        each.get_new_blocks(9)
        each.cache_full_ids([4, 13], CHAIN.block_hashes[7:9], 0, 4, 7)
        each.move_ids(8, 14)
    assert_same(loaded, pool)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("enable_caching", [False, True])
def test_small_and_empty_pools(tmp_path: Path, num_blocks: int, enable_caching: bool) -> None:
    pool = cpool.BlockPool(num_blocks, enable_caching, 16)
    assert_same(cpool.BlockPool.load(saved(pool, tmp_path)), pool)


def test_a_pool_whose_keys_all_left(tmp_path: Path) -> None:
    pool = mixed_pool()
    pool.evict_blocks(range(1, 24))
    pool.blocks[12].reset_hash()
    loaded = cpool.BlockPool.load(saved(pool, tmp_path))
    assert_same(loaded, pool)
    assert loaded.find_ids(CHAIN.block_hashes, 0).tolist() == [-1] * 12


def test_random_pools_come_back(tmp_path: Path) -> None:
    for seed in range(20):
        pick = RandomPicker(random.Random(seed))
        pair = Pair(pick.integer(1, 12), pick.choice([8, 16, 20, 32]), True, False, False)
        for _ in range(60):
            pair.step(pick.choice(pair.generators), pick)
            pair.pool._reuse_watchers.clear()
            pair.model.watchers.clear()
        pair.pool = cpool.BlockPool.load(saved(pair.pool, tmp_path))
        assert holders(pair.pool) == pair.model.table
        assert in_any_order(dump(pair.pool)["registrations"]) == in_any_order(
            {i: rows for i, rows in registrations(pair).items() if rows}
        )
        pair.compare()


def registrations(pair: Pair) -> dict[int, list[Any]]:
    return {
        i: [
            (key[:-4], int.from_bytes(key[-4:], "big"), tokens, key == block.primary)
            for key, tokens in block.keys.items()
        ]
        for i, block in enumerate(pair.model.blocks)
    }


@pytest.mark.parametrize("truthful", [False, True])
@pytest.mark.parametrize("detailed", [False, True])
def test_events_go_on_as_they_were(truthful: bool, detailed: bool, tmp_path: Path) -> None:
    flags = {"truthful_events": truthful, "detailed_snapshots": detailed}
    pool = cpool.BlockPool(12, True, 4, enable_kv_cache_events=True, medium="CPU", **flags)
    blocks = pool.get_new_blocks(8)
    pool.cache_full_blocks(CHAIN, blocks, 0, 4, 4, 0)
    pool.cache_full_blocks(CHAIN, [blocks[4], blocks[0]], 0, 1, 4, 0)
    pool.cache_partial_block(CHAIN, blocks[5], 24, 1, 16)
    pool.cache_partial_block(CHAIN, blocks[5], 20, 1, 16)
    pool.take_events()
    loaded = cpool.BlockPool.load(saved(pool, tmp_path))
    assert {name: getattr(loaded, name) for name in flags} == flags
    # What a consumer that comes late is told.
    assert snapshot(loaded) == snapshot(pool)
    assert detailed == any(event.token_ids for event in pool.snapshot_events().events)
    for each in (pool, loaded):
        each.evict_ids([1])  # Truthful: another block holds the key, so nothing is told.
        each.evict_ids([5, 6])
        each.cache_full_blocks(CHAIN, blocks_of(each, 1, 2, 3, 4, 7), 4, 5, 4, 0)
    events = [[event_fields(event) for event in each.take_events()] for each in (pool, loaded)]
    assert events[0] == events[1]
    assert len(events[0]) == (4 if truthful else 5)


def test_options_of_events_in_a_file_without_events_are_dropped(tmp_path: Path) -> None:
    pool, path = mixed_pool(), tmp_path / "pool"
    pool.save(path)
    settings, arrays = saving.read(path)
    flags = {"truthful_events": True, "detailed_snapshots": True}
    saving.write(path, settings | flags, arrays)
    loaded = cpool.BlockPool.load(path)
    assert not any(getattr(loaded, name) for name in flags)
    assert_same(loaded, pool)


def blocks_of(pool: Any, *ids: int) -> list[Any]:
    return [pool.blocks[block_id] for block_id in ids]


def snapshot(pool: Any) -> list[Any]:
    return [event_fields(event) for event in pool.snapshot_events().events]


def test_a_million_blocks_come_back(tmp_path: Path) -> None:
    num_blocks = 1_000_000
    rng = np.random.default_rng(1)
    pool = cpool.BlockPool(num_blocks, True, 16)
    ids = pool.get_new_block_ids(num_blocks - 1)
    rows = rng.integers(0, 256, (len(ids), 32), np.uint8)
    rows[-1000:] = rows[:1000]
    pool.cache_full_ids(ids, rows, 0, 16)
    pool.free_ids(rng.permutation(ids)[:-1000])
    loaded = cpool.BlockPool.load(saved(pool, tmp_path))
    assert np.array_equal(loaded.find_ids(rows, 0), pool.find_ids(rows, 0))
    assert np.array_equal(loaded.free_queue_ids(), pool.free_queue_ids())
    assert np.array_equal(loaded.ref_cnts, pool.ref_cnts)
    assert loaded.num_registrations == pool.num_registrations
    assert (tmp_path / "pool").stat().st_size < 64 * num_blocks


def test_a_collector_and_a_subclass_can_be_given(tmp_path: Path) -> None:
    class Special(cpool.BlockPool):
        pass

    collector = Collector()
    loaded = Special.load(saved(mixed_pool(), tmp_path), metrics_collector=collector)
    assert type(loaded) is Special
    loaded.get_new_blocks(1)
    assert collector.calls != []


# Writing.


def test_watched_blocks_cannot_be_saved(tmp_path: Path) -> None:
    pool = cpool.BlockPool(4, True, 16)
    pool.unpin_blocks(pool.get_new_blocks(2), print)
    with pytest.raises(cpool.ContractError, match=r"^2 blocks have an on_reuse callback"):
        pool.save(tmp_path / "pool")
    assert list(tmp_path.iterdir()) == []


def test_counts_written_from_outside_are_not_saved(tmp_path: Path) -> None:
    pool = cpool.BlockPool(4, True, 16)
    pool.blocks[2].ref_cnt = 3
    with pytest.raises(cpool.ContractError, match="block 2 with ref_cnt 3 is in the free queue"):
        pool.save(tmp_path / "pool")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = saved(mixed_pool(), tmp_path)
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        cpool.BlockPool(4, True, 16).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    path = saved(mixed_pool(), tmp_path)
    cpool.BlockPool(4, True, 16).save(str(path))
    assert cpool.BlockPool.load(path).num_gpu_blocks == 4
    assert list(tmp_path.iterdir()) == [path]


# Files that are not whole.


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return saved(mixed_pool(), tmp_path).read_bytes()


def load_bytes(content: bytes, tmp_path: Path) -> Any:
    path = tmp_path / "changed"
    path.write_bytes(content)
    return cpool.BlockPool.load(path)


def test_every_shortened_file_is_refused(content: bytes, tmp_path: Path) -> None:
    for length in range(len(content)):
        with pytest.raises(cpool.SavedPoolError, match=r"not a saved pool|ends after|should have"):
            load_bytes(content[:length], tmp_path)
    with pytest.raises(cpool.SavedPoolError, match=rf"{len(content) + 1} bytes; it should have"):
        load_bytes(content + b"\0", tmp_path)


def test_every_flipped_byte_is_found(content: bytes, tmp_path: Path) -> None:
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 0x10
        with pytest.raises(cpool.SavedPoolError, match=r"/changed: \w"):
            load_bytes(bytes(changed), tmp_path)


@pytest.mark.parametrize("foreign", [b"", b"\x89PNG\r\n\x1a\n" + bytes(100), b"{}", bytes(1000)])
def test_a_foreign_file_is_refused(foreign: bytes, tmp_path: Path) -> None:
    with pytest.raises(cpool.SavedPoolError, match="changed: this is not a saved pool"):
        load_bytes(foreign, tmp_path)


def test_another_version_is_named(content: bytes, tmp_path: Path) -> None:
    newer = content[:8] + struct.pack("<I", 7) + content[12:]
    with pytest.raises(cpool.SavedPoolError, match="version 7; this cpool reads 1"):
        load_bytes(newer, tmp_path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cpool.BlockPool.load(tmp_path / "none")


# Files with right checksums and wrong contents.


def rewritten(pool: Any, path: Path, **changes: Any) -> Path:
    """The pool's file with some arrays or settings replaced, checksums made to fit."""
    settings, arrays = saving.read(saved(pool, path.parent))
    for name, value in changes.items():
        (arrays if name in arrays else settings)[name] = value
    saving.write(path, settings, arrays)
    return path


def changed(name: str, index: Any, value: Any, field: str | None = None) -> Any:
    def change(arrays: dict[str, Any]) -> dict[str, Any]:
        array = arrays[name].copy()
        (array[field] if field else array)[index] = value
        return {name: array}

    return change


def repeat_a_copy(arrays: dict[str, Any]) -> dict[str, Any]:
    copies = arrays["copies"].copy()
    copies[2] = copies[1]
    return {"copies": copies}


def without_copies(arrays: dict[str, Any]) -> dict[str, Any]:
    return {"copies": np.empty(0, np.uint32)}


def unlike_copies(arrays: dict[str, Any]) -> dict[str, Any]:
    """Two registrations under different keys as copies of one."""
    singles = set(range(len(arrays["registrations"]))) - set(arrays["copies"][1:].tolist())
    loose = arrays["registrations"]["kind"] & 2 > 0
    pair = [i for i in sorted(singles) if not loose[i]][:2]
    return {"copies": np.concatenate([arrays["copies"], np.array([2, *pair], np.uint32)])}


WRONG: dict[str, tuple[Any, str]] = {
    "a negative count": (changed("ref_cnts", 3, -5), "block 3 has ref_cnt -5"),
    "a count of a queued block": (changed("ref_cnts", 17, 1), "block 17 .* is held"),
    "an uncounted held block": (changed("ref_cnts", 6, 0), "block 6 is neither held nor"),
    "the null block in the queue": (changed("queue", 0, 0), "place 0 .* has block 0"),
    "a block beyond the pool": (changed("queue", 1, 24), "place 1 .* has block 24"),
    "a huge block": (changed("queue", 1, 0xFFFFFFFF), "place 1 .* has block 4294967295"),
    "a block twice in the queue": (
        lambda arrays: changed("queue", 1, arrays["queue"][0])(arrays),
        "is in it twice",
    ),
    "too few counts": (lambda a: {"ref_cnts": a["ref_cnts"][:-1]}, "23 counts for 24 blocks"),
    "a pool of another size": (lambda a: {"num_gpu_blocks": 23}, "24 counts for 23 blocks"),
    "a pool of no size": (
        lambda a: {"num_gpu_blocks": 0, "ref_cnts": a["ref_cnts"][:0]},
        "num_gpu_blocks is 0",
    ),
    "digests wider than any": (
        lambda a: {"digests": np.zeros((len(a["digests"]), 256), np.uint8)},
        "digests of 256 bytes; the limit is 255",
    ),
    "no hash_block_size": (lambda a: {"hash_block_size": 0}, "hash_block_size is 0"),
    "a setting of another type": (lambda a: {"enable_caching": 1}, "enable_caching is 1"),
    "a digest of no bytes": (changed("spaces", 0, 0, "width"), "space 0 has hashes of 0 bytes"),
    "a digest wider than its row": (changed("spaces", 0, 33, "width"), "hashes of 33 bytes"),
    "two equal spaces": (
        lambda a: {"spaces": a["spaces"][[0, 0, *range(2, len(a["spaces"]))]]},
        "repeats group",
    ),
    "a space too many": (changed("registrations", 0, 9, "space"), "names space 9"),
    "the last space": (changed("registrations", 0, 0xFFFF, "space"), "names space 65535"),
    "a block of no block": (changed("registrations", -1, 24, "block"), "names block 24"),
    "blocks out of order": (changed("registrations", 0, 20, "block"), "names block"),
    "an extra key of the null block": (
        changed("registrations", 0, 0, "kind"),
        "block 0, is of kind 0",
    ),
    "an unknown kind": (changed("registrations", 0, 8, "kind"), "is of kind 8"),
    "an extra key that is loose": (changed("registrations", 0, 2, "kind"), "is of kind 2"),
    "tokens of none": (changed("registrations", 0, 5, "kind"), "is of kind 5"),
    "fewer digests": (lambda a: {"digests": a["digests"][:-1]}, "digests in"),
    "one copy": (changed("copies", 0, 1), "1 copies of a key"),
    "more copies than there are": (changed("copies", 0, 1000), "1000 copies of a key"),
    "a copy twice": (repeat_a_copy, "cannot be a copy"),
    "a copy beyond the keys": (changed("copies", 1, 1 << 31), "registration 2147483648 cannot"),
    "copies of no known order": (without_copies, "of which no order is known"),
    "copies of different keys": (unlike_copies, "are no holders of one key"),
    "narrow digests": (lambda a: {"digests": a["digests"][:, :16].copy()}, "hashes of 32 bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_pool_can_be_is_refused(name: str, tmp_path: Path) -> None:
    pool = mixed_pool()
    change, message = WRONG[name]
    _, arrays = saving.read(saved(pool, tmp_path))
    path = rewritten(pool, tmp_path / "wrong", **change(arrays))
    with pytest.raises(cpool.SavedPoolError, match=rf"/wrong: .*{message}"):
        cpool.BlockPool.load(path)


@pytest.mark.parametrize("make", [mixed_pool, detailed_pool])
def test_random_changes_with_right_checksums_make_a_sound_pool_or_none(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    """Whatever the arrays say, the pool that comes of it holds all invariants."""
    pool = make()
    settings, arrays = saving.read(saved(pool, tmp_path))
    rng = random.Random(5)
    num_built = 0
    for _ in range(400):
        changes = {name: array.copy() for name, array in arrays.items()}
        for _ in range(rng.randint(1, 3)):
            filled = [name for name, array in changes.items() if array.size]
            raw = changes[rng.choice(filled)].reshape(-1).view(np.uint8)
            raw[rng.randrange(len(raw))] = rng.choice([0, 1, 2, 3, 5, 23, 24, 255])
        saving.write(tmp_path / "changed", settings, changes)
        try:
            loaded = cpool.BlockPool.load(tmp_path / "changed")
        except cpool.SavedPoolError:
            continue
        num_built += 1
        loaded.check_consistency()
        if loaded.enable_kv_cache_events:
            assert list(loaded.snapshot_events().events)
        loaded.evict_blocks(range(loaded.num_gpu_blocks))
        assert loaded.num_registrations == 0
        loaded.check_consistency()
    assert 0 < num_built < 400


@pytest.mark.parametrize(
    "description",
    [b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"settings": [], "arrays": []}', b"NaN"],
)
def test_a_description_that_is_none(description: bytes, tmp_path: Path) -> None:
    prefix = saving.PREFIX.pack(
        saving.MAGIC, saving.VERSION, len(description), zlib.crc32(description)
    )
    with pytest.raises(cpool.SavedPoolError, match=r"description cannot be read|is described"):
        load_bytes(prefix + description + bytes(1000), tmp_path)


def test_arrays_larger_than_the_file_are_refused_before_they_are_made(
    content: bytes, tmp_path: Path
) -> None:
    _, _, length, _ = saving.PREFIX.unpack(content[: saving.PREFIX.size])
    end = saving.PREFIX.size + length
    parsed = json.loads(content[saving.PREFIX.size : end])
    parsed["arrays"]["digests"] = [(1 << 32) - 1, 255, 0]
    description = json.dumps(parsed).encode()
    prefix = saving.PREFIX.pack(
        saving.MAGIC, saving.VERSION, len(description), zlib.crc32(description)
    )
    with pytest.raises(cpool.SavedPoolError, match="it should have"):
        load_bytes(prefix + description + content[end:], tmp_path)


def test_a_small_file_does_not_make_a_large_pool(tmp_path: Path) -> None:
    path = rewritten(mixed_pool(), tmp_path / "large", num_gpu_blocks=1 << 28)
    tracemalloc.start()
    try:
        with pytest.raises(cpool.SavedPoolError, match="24 counts for 268435456 blocks"):
            cpool.BlockPool.load(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_subclass_that_makes_a_smaller_pool_gets_no_larger_state(tmp_path: Path) -> None:
    class Small(cpool.BlockPool):
        def __init__(self, num_gpu_blocks: int, **arguments: Any) -> None:
            super().__init__(num_gpu_blocks - 1, **arguments)

    with pytest.raises(cpool.SavedPoolError, match="24 counts for 23 blocks"):
        Small.load(saved(mixed_pool(), tmp_path))


@pytest.mark.skipif(testing is None, reason="a release build cannot fail allocations")
def test_each_allocation_of_a_load_fails_in_turn(tmp_path: Path) -> None:
    pool = mixed_pool()
    path = saved(pool, tmp_path)
    num_failures = 0
    try:
        while True:
            testing.fail_allocation(num_failures + 1)
            try:
                loaded = cpool.BlockPool.load(path)
                break
            except MemoryError:
                num_failures += 1
    finally:
        testing.fail_allocation(0)
    assert num_failures >= 5
    assert_same(loaded, pool)


def test_the_group_numbers_of_operations_fit_the_saved_spaces(tmp_path: Path) -> None:
    pool = cpool.BlockPool(3, True, 4)
    pool.cache_partial_id(1, bytes(255), 4, 0xFFFFFFFF)
    pool.cache_partial_id(2, bytes(255), 8, operations.NUM_GROUPS)
    loaded = cpool.BlockPool.load(saved(pool, tmp_path))
    assert_same(loaded, pool)
    assert loaded.find_ids([bytes(255)], 0xFFFFFFFF).tolist() == [1]
