# SPDX-License-Identifier: Apache-2.0
"""Readers of foreign bytes: changed, cut and made-up input gives an error of theirs, no more.

Each reader starts from inputs that it takes and gets thousands of changed ones, from a fixed
seed. CPOOL_GARBAGE_ROUNDS=n tries more of them.
"""

import gzip
import io
import json
import os
import random
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cpool
from cpool.replay import mooncake, weka
from cpool.replay.open_trace import open_trace
from cpool.replay.records import TraceError

from .test_save_load import mixed_pool

NUM_ROUNDS = int(os.environ.get("CPOOL_GARBAGE_ROUNDS", "300"))
MAX_MEMORY = 64 << 20  # Bytes that reading a kilobyte of garbage may take.

TOKENS = [b"{", b"[", b"]", b"}", b'"', b"null", b"-1", b"1e999", b"\xff\xfe", b"\0", b"NaN"]
TOKENS += [str(1 << 70).encode(), b"[" * 5000, b'"hash_ids"', b"\x1f\x8b", b"BZh9", b"ustar"]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Up to four changes: a byte, a cut, a copied part, a token."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if place < len(changed):
                changed[place] = rng.randrange(256)
            case 1:
                del changed[place:]
            case 2:
                del changed[place : place + rng.randint(1, 8)]
            case 3:
                start = rng.randrange(len(changed) + 1)
                changed[place:place] = changed[start : start + rng.randint(1, 40)]
            case _:
                changed[place:place] = rng.choice(TOKENS)
    return bytes(changed)


def feed(read: Callable[[bytes], Any], error: Any, inputs: list[bytes], rounds: int) -> int:
    """How many changed inputs were refused; anything but ``error`` fails the test."""
    rng = random.Random(8)
    refused = 0
    for data in inputs:
        read(data)
    for _ in range(rounds):
        data = mutated(rng, rng.choice(inputs))
        try:
            read(data)
        except error:
            refused += 1
        except BaseException as raised:
            raise AssertionError(f"{type(raised).__name__} for {data[:200]!r}") from raised
    return refused


def mooncake_lines() -> bytes:
    lines = [
        {"timestamp": 5, "input_length": 33, "output_length": 7, "hash_ids": [0, 1, 2]},
        {"input_length": 48, "hash_ids": [0, 1, 3]},
        {"input_length": 40, "hash_ids": [0, 1, 4]},
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def weka_session() -> bytes:
    requests = [{"t": 0.5, "in": 48, "out": 3, "hash_ids": [1, 2, 3]}]
    requests.append({"t": 1.5, "in": 33, "hash_ids": [1, 2, 9]})
    return json.dumps({"block_size": 16, "requests": requests}).encode()


def weka_tar() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("a.json", "b.json"):
            member = tarfile.TarInfo(name)
            member.size = len(weka_session())
            archive.addfile(member, io.BytesIO(weka_session()))
    return packed.getvalue()


@pytest.mark.parametrize("make", [mooncake_lines, weka_tar], ids=["mooncake", "weka"])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_trace_readers(make: Callable[[], bytes], skip_bad: bool, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        for request in open_trace(str(path), skip_bad=skip_bad, block_size=16).requests:
            assert request.input_length >= 0

    plain = make()
    assert feed(read, TraceError, [plain, gzip.compress(plain)], NUM_ROUNDS) > 0


def packed_tar(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return packed.getvalue()


def sparse_session(largest: int) -> bytes:
    requests = [{"t": 0, "in": 48, "hash_ids": [5, largest, 7]}]
    requests.append({"t": 1, "in": 48, "hash_ids": [5, largest, 6]})
    return json.dumps({"block_size": 16, "requests": requests}).encode()


def read_ids(data: bytes, path: Path) -> list[list[int]]:
    path.write_bytes(data)
    return [request.hash_ids.tolist() for request in open_trace(str(path)).requests]


def test_large_ids_take_no_memory_out_of_proportion(tmp_path: Path) -> None:
    data = packed_tar({f"{i}.json": sparse_session((1 << 27) - i) for i in range(50)})
    tracemalloc.start()
    try:
        ids = read_ids(data, tmp_path / "trace.tar.gz")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    # At time 0 the first requests of all sessions, then the second ones.
    assert ids[:2] == [[0, 1, 2], [3, 4, 5]]
    assert ids[50:52] == [[0, 1, 150], [3, 4, 151]]


def test_a_member_of_any_number_is_sorted_by_it(tmp_path: Path) -> None:
    names = ["9.json", "10.json", "8" * 5000 + ".json", "007.json"]
    members = {
        name: sparse_session(9).replace(b'"in": 48', b'"in": 4%d' % (3 + i))
        for i, name in enumerate(names)
    }
    path = tmp_path / "trace.tar"
    path.write_bytes(packed_tar(members))
    lengths = [request.input_length for request in open_trace(str(path)).requests]
    assert lengths[:4] == [46, 43, 44, 45]


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "json", "tar"])
def test_a_bomb_is_refused_before_it_is_unpacked(
    kind: str, skip_bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(weka, "MAX_SESSION_BYTES", 1 << 20)
    bomb = b" " * (64 << 20)
    path = tmp_path / f"trace.{kind}.gz"
    path.write_bytes(packed_tar({"a.json": bomb}) if kind == "tar" else gzip.compress(bomb))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="longer than 1048576 bytes"):
            list(open_trace(str(path), skip_bad=skip_bad).requests)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_event_decoders() -> None:
    msgspec = pytest.importorskip("msgspec")
    from cpool.events import wire

    pool = cpool.BlockPool(6, True, 4, enable_kv_cache_events=True)
    pool.cache_full_ids([1, 2], [bytes(32), b"\1" * 32], 0, 4, token_ids=range(8))
    pool.evict_ids([1])
    events = pool.take_events()
    inputs = [
        bytes(wire.encode_batch(events, 1.0, legacy_array=legacy)) for legacy in (False, True)
    ]

    def read(data: bytes) -> None:
        wire.decode_batch(data)

    assert feed(read, msgspec.DecodeError, inputs, 10 * NUM_ROUNDS) > 0


def test_saved_pools(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    mixed_pool().save(path)
    whole = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        cpool.BlockPool.load(path).check_consistency()

    assert feed(read, cpool.SavedPoolError, [whole], NUM_ROUNDS) >= NUM_ROUNDS * 9 // 10


def test_garbage_takes_no_memory_out_of_proportion(tmp_path: Path) -> None:
    path = tmp_path / "garbage"
    mixed_pool().save(path)
    inputs = [path.read_bytes(), mooncake_lines(), weka_tar()]
    rng = random.Random(9)
    tracemalloc.start()
    try:
        for _ in range(60):
            path.write_bytes(mutated(rng, rng.choice(inputs)))
            for read in (cpool.BlockPool.load, lambda p: list(open_trace(str(p)).requests)):
                try:
                    read(path)
                except (cpool.SavedPoolError, TraceError):
                    continue
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()
