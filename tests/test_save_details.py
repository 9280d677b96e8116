# SPDX-License-Identifier: Apache-2.0
"""What `detailed_snapshots` keeps is part of a saved pool."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpool
from cpool.core import saved_details, saving

from .support import event_fields, image, lora, make_request

CHAIN = make_request(
    12, cache_salt="salt", lora_request=lora(), session_id="s", mm_features=[image("a", 2, 9)]
)
KINDS = (b"\x00\xff", "\ud800", 1 << 70, ("a", (2, None)), ["b", [b""]], 1.5, True, None)


def detailed_pool() -> Any:
    """Details of requests, batches and partial entries, of copies and of keys without any."""
    pool = cpool.BlockPool(20, True, 4, enable_kv_cache_events=True, detailed_snapshots=True)
    blocks = pool.get_new_blocks(14)
    pool.cache_full_blocks(CHAIN, blocks, 0, 4, 4, 0)
    pool.cache_full_blocks(CHAIN, blocks[4:6], 0, 2, 8, 1, [False, True])
    pool.cache_partial_block(CHAIN, blocks[6], 24, 1, 16)
    pool.cache_partial_block(CHAIN, blocks[6], 20, 1, 16)
    tokens = np.arange(8, dtype=np.int64) + (1 << 40)
    pool.cache_full_ids(
        [8, 9],
        CHAIN.block_hashes[4:6],
        2,
        4,
        4,
        parent_hash=CHAIN.block_hashes[3],
        token_ids=tokens,
        extra_keys=[KINDS, None],
    )
    pool.cache_full_ids([10], CHAIN.block_hashes[:1], 0, 4, token_ids=[9, 8, 7, 6], lora_id=3)
    pool.cache_partial_id(
        11, CHAIN.block_hashes[7], 32, 3, parent_hash=CHAIN.block_hashes[6], token_ids=(5, 6)
    )
    pool._insert_block_hash(bytes(36), blocks[12], 8)
    pool.evict_ids([2])
    pool.take_events()
    return pool


def snapshot(pool: Any) -> list[Any]:
    return [event_fields(event) for event in pool.snapshot_events().events]


def test_the_snapshot_is_the_same_after_a_load(tmp_path: Path) -> None:
    pool, path = detailed_pool(), tmp_path / "pool"
    pool.save(path)
    loaded = cpool.BlockPool.load(path)
    assert repr(snapshot(loaded)) == repr(snapshot(pool))  # So that 1, 1.0 and True differ.
    assert repr(KINDS) in repr(snapshot(loaded))
    assert "[9, 8, 7, 6]" not in repr(snapshot(loaded))  # Of a copy.
    for each in (pool, loaded):
        each.evict_ids([1])  # Now block 10 is the first that has the key.
        each.move_ids(7, 19)
    assert "[9, 8, 7, 6]" in repr(snapshot(loaded))
    assert repr(snapshot(loaded)) == repr(snapshot(pool))


def test_a_pool_whose_keys_are_all_gone_can_be_loaded(tmp_path: Path) -> None:
    pool = detailed_pool()
    pool.evict_ids(range(1, 20))
    assert pool.num_registrations == 0
    pool.save(tmp_path / "pool")
    loaded = cpool.BlockPool.load(tmp_path / "pool")
    assert loaded.num_registrations == 0
    assert snapshot(loaded) == snapshot(pool)


def test_a_loaded_pool_can_be_saved_again(tmp_path: Path) -> None:
    detailed_pool().save(tmp_path / "one")
    cpool.BlockPool.load(tmp_path / "one").save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("value", [{"a": 1}, object(), 1j, np.zeros(2)])
def test_a_detail_that_no_file_can_hold_is_refused(value: Any, tmp_path: Path) -> None:
    pool, path = detailed_pool(), tmp_path / "pool"
    pool.save(path)
    content = path.read_bytes()
    pool.cache_full_ids([14], CHAIN.block_hashes[8:9], 2, 4, extra_keys=[(1, (value,))])
    with pytest.raises(cpool.ContractError, match=f"{type(value).__name__}, which cannot be saved"):
        pool.save(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ({"lora_id": "x"}, "lora_id 'x' cannot be saved"),
        ({"lora_id": True}, "lora_id True"),
        ({"lora_name": 3}, "lora_name 3"),
        ({"session_id": 7}, "session_id 7"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    name: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pool = cpool.BlockPool(9, True, 4, enable_kv_cache_events=True, detailed_snapshots=True)
    pool.cache_full_ids([1], CHAIN.block_hashes[:1], 0, 4, **name)
    with pytest.raises(cpool.ContractError, match=message):
        pool.save(tmp_path / "pool")
    assert not (tmp_path / "pool").exists()


def test_extra_keys_are_saved_32_lists_deep_and_no_deeper(tmp_path: Path) -> None:
    pool = cpool.BlockPool(9, True, 4, enable_kv_cache_events=True, detailed_snapshots=True)
    value: Any = 7
    for _ in range(32 - 1):  # The tuple of a block's extra keys is one, too.
        value = [value]
    pool.cache_full_ids([1], CHAIN.block_hashes[:1], 0, 4, extra_keys=[(value,)])
    pool.save(tmp_path / "pool")
    loaded = cpool.BlockPool.load(tmp_path / "pool")
    keys = [[e.extra_keys for e in p.snapshot_events().events] for p in (loaded, pool)]
    assert keys[0] == keys[1] == [[(value,)]]
    pool.cache_full_ids([2], CHAIN.block_hashes[1:2], 0, 4, extra_keys=[([value],)])
    with pytest.raises(cpool.ContractError, match="lists more than 32 deep"):
        pool.save(tmp_path / "pool")


def test_a_file_of_version_1_is_read(tmp_path: Path) -> None:
    """It has no details, and its arrays are the first seven of today's."""
    pool = cpool.BlockPool(9, True, 4, enable_kv_cache_events=True, detailed_snapshots=True)
    pool.cache_full_blocks(CHAIN, pool.get_new_blocks(4), 0, 4, 4, 0)
    path = tmp_path / "pool"
    pool.save(path)
    settings, arrays = saving.read(path)
    names = list(saving.ARRAYS)[:7]
    table = {n: [*saving.shape(arrays[n]), zlib.crc32(arrays[n])] for n in names}
    description = json.dumps({"settings": settings, "arrays": table}).encode()
    head = struct.pack("<8sIII", saving.MAGIC, 1, len(description), zlib.crc32(description))
    parts = [head + description, *(arrays[name].tobytes() for name in names)]
    path.write_bytes(b"".join(part + bytes(-len(part) % 64) for part in parts))
    loaded = cpool.BlockPool.load(path)
    assert loaded.find_ids(CHAIN.block_hashes[:5], 0).tolist() == [1, 2, 3, 4, -1]
    assert [event.token_ids for event in loaded.snapshot_events().events] == [[]]


def row(**changes: Any) -> list[Any]:
    fields = {"dtype": "<i4", "count": 1, "size": 4, "id": None, "name": None, "session": None}
    return list(({**fields, "keys": []} | changes).values())


TEXTS: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"[", "cannot be read"),
    "no list": (b"7", "cannot be read"),
    "too short a row": (b"[[1]]", "cannot be read"),
    "a dtype of objects": (json.dumps([row(dtype="O")]).encode(), "token ids of 'O'"),
    "a count that is none": (json.dumps([row(count=-1)]).encode(), "-1 token ids"),
    "more tokens than there are": (json.dumps([row(count=1 << 31)]).encode(), "of 4"),
    "fewer": (json.dumps([row(count=0)]).encode(), "4 bytes of token ids"),
    "a size that is none": (json.dumps([row(size=1.5)]).encode(), "1.5 in a block"),
    "a number as a name": (json.dumps([row(name=1)]).encode(), "lora_name 1 cannot"),
    "a name as a number": (json.dumps([row(id="a")]).encode(), "lora_id 'a'"),
    "unknown kinds": (json.dumps([row(keys=[[0, {"set": []}]])]).encode(), "no kind of value"),
    "half a byte": (json.dumps([row(keys=[[0, {"bytes": "a"}]])]).encode(), "cannot be read"),
    "keys of no block": (b'[["<i4", 1, 4, null, null, null, [[Infinity, null]]]]', "blocks .inf"),
    "keys without a block": (json.dumps([row(keys=[1])]).encode(), "cannot be read"),
    "a deep nest": (b"[" * 100_000, "cannot be read"),
    "a nest that JSON can read": (
        json.dumps([row(keys=[[0, 0]])]).replace("[0, 0]", "[0, " + "[" * 34 + "]" * 35).encode(),
        "lists more than 32 deep",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_details_that_cannot_be_are_refused(name: str) -> None:
    text, message = TEXTS[name]
    with pytest.raises(cpool.SavedPoolError, match=message):
        saved_details.unpack(np.zeros(4, np.uint8), np.frombuffer(text, np.uint8))


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a detail that is not there": ({}, {"number": 99}, "names detail 99 of"),
    "snapshots without details": ({"detailed_snapshots": False}, {}, "events are off"),
    "no events": ({"enable_kv_cache_events": False}, {}, "events are off"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_details_of_no_pool_are_refused(name: str, tmp_path: Path) -> None:
    settings, numbers, message = CHANGES[name]
    path = tmp_path / "pool"
    detailed_pool().save(path)
    old_settings, arrays = saving.read(path)
    for field, number in numbers.items():
        arrays["details"][field][0] = number
    saving.write(path, old_settings | settings, arrays)
    with pytest.raises(cpool.SavedPoolError, match=message):
        cpool.BlockPool.load(path)


@pytest.mark.parametrize(("name", "message"), [("details", "of no"), ("registrations", "for")])
def test_fewer_details_than_registrations_are_refused(
    name: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "pool"
    detailed_pool().save(path)
    settings, arrays = saving.read(path)
    arrays["details"] = arrays["details"][: 0 if name == "details" else -1]
    saving.write(path, settings, arrays)
    with pytest.raises(cpool.SavedPoolError, match=message):
        cpool.BlockPool.load(path)
