# SPDX-License-Identifier: Apache-2.0
"""Reader of Weka's coding-agent traces: one JSON file a session, or a folder or tar of them.

All sessions start at 0 and run at once. Requests of sub-agents take part in their parent's
session: their times count from the marker that started them. The order is (time, session,
position), and ids that are local to a session become global ones in that order.
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpool.replay.mooncake import count, hash_id_array
from cpool.replay.records import Request, Trace, TraceError, check_num_blocks
from cpool.replay.source import MAX_SESSION_BYTES, UNPACK_ERRORS, HashingReader

# Ids count from 1 in each session; a table by id would otherwise be too large.
_MAX_ID = 1 << 27
# The space of ids that mean the same in all sessions.
_GLOBAL = -1


class _Timed(NamedTuple):
    seconds: float
    id_space: int
    request: Request  # with the ids as they are in the file


class _Ids:
    """Global ids, dense, in the order of first use; ids of one space keep their meaning."""

    def __init__(self, timed: list[_Timed]) -> None:
        self._tables: dict[int, NDArray[np.int64]] = {}
        self._num_ids = 0
        # Of spaces with few ids that are large: those ids, sorted. A table as long as the
        # largest one would take memory out of proportion to the trace.
        self._sparse: dict[int, NDArray[np.int64]] = {}
        by_space: dict[int, list[NDArray[np.int64]]] = {}
        for each in timed:
            if len(each.request.hash_ids):
                by_space.setdefault(each.id_space, []).append(each.request.hash_ids)
        for id_space, lists in by_space.items():
            if max(int(ids.max()) for ids in lists) > 8 * sum(map(len, lists)) + 1024:
                self._sparse[id_space] = np.unique(np.concatenate(lists))

    def globalise(self, id_space: int, local: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(local):
            return local
        if id_space in self._sparse:
            local = np.searchsorted(self._sparse[id_space], local)
        table = self._tables.get(id_space, np.empty(0, dtype=np.int64))
        if local.max() >= len(table):
            grown = np.full(max(int(local.max()) + 1, 2 * len(table)), -1, dtype=np.int64)
            grown[: len(table)] = table
            table = self._tables[id_space] = grown
        new = np.flatnonzero(table[local] < 0)
        # An id that is new twice in one request gets the number of its first place.
        unseen, first = np.unique(local[new], return_index=True)
        order = np.argsort(first)
        table[unseen[order]] = self._num_ids + np.arange(len(unseen))
        self._num_ids += len(unseen)
        return table[local]


class SessionReader:
    """Collects sessions, then yields their requests in order of time."""

    def __init__(self, skip_bad: bool) -> None:
        self._skip_bad = skip_bad
        self._timed: list[_Timed] = []
        self._num_sessions = 0
        self.num_skipped = 0
        self.block_size: int | None = None

    def add(self, name: str, text: bytes) -> None:
        """Take one session's file in; sessions must come in their order."""
        try:
            session = json.loads(text)
            block_size, records = self._check(session)
        except (ValueError, RecursionError) as error:
            return self._refuse(name, error)
        self.block_size = block_size
        is_global = session.get("hash_id_scope") == "global"
        id_space = _GLOBAL if is_global else self._num_sessions
        self._num_sessions += 1
        for position, (offset, record) in enumerate(records):
            try:
                seconds, request = _parse(offset, record)
                check_num_blocks(request, block_size)
            except ValueError as error:
                self._refuse(f"{name}, request {position + 1}", error)
            else:
                self._timed.append(_Timed(seconds, id_space, request))

    def _check(self, session: Any) -> tuple[int, list[tuple[float, Any]]]:
        if not isinstance(session, dict):
            raise ValueError("not a Weka session: a JSON object is needed")
        block_size, requests = session.get("block_size"), session.get("requests")
        if type(block_size) is not int or block_size < 1:
            raise ValueError(f"block_size is {block_size!r:.40}; it must be an integer from 1")
        if self.block_size not in (None, block_size):
            raise ValueError(f"block_size is {block_size}; it was {self.block_size} before")
        if not isinstance(requests, list):
            raise ValueError(f"requests is {requests!r:.40}; it must be a list")
        return block_size, list(_flatten(requests, 0.0))

    def requests(self) -> Iterator[Request]:
        ids = _Ids(self._timed)
        # The sort is stable: at equal times the order is that of sessions, then of positions.
        for timed in sorted(self._timed, key=lambda timed: timed.seconds):
            hash_ids = ids.globalise(timed.id_space, timed.request.hash_ids)
            yield timed.request._replace(hash_ids=hash_ids)

    def _refuse(self, where: str, error: Exception) -> None:
        if not self._skip_bad:
            raise TraceError(f"{where}: {error}") from error
        self.num_skipped += 1


def read_session(
    raw: HashingReader, stream: IO[bytes], name: str, block_size: int | None, skip_bad: bool
) -> Trace:
    """Open the JSON file of one session."""
    text = stream.read(MAX_SESSION_BYTES + 1)
    if len(text) > MAX_SESSION_BYTES:
        raise TraceError(f"{name}: longer than {MAX_SESSION_BYTES} bytes")
    return _trace(name, [(name, text)], block_size, skip_bad, raw.sha256)


def read_tar(
    raw: HashingReader, stream: io.BufferedReader, name: str, block_size: int | None, skip_bad: bool
) -> Trace:
    """Open a tar of session files; nothing is unpacked to disk."""
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            members = []
            for member in archive:
                if not member.name.endswith(".json") or not member.isfile():
                    continue
                if member.size > MAX_SESSION_BYTES:
                    raise TraceError(
                        f"{name}: {member.name:.80} is longer than {MAX_SESSION_BYTES} bytes"
                    )
                members.append((member.name, archive.extractfile(member).read()))
    except (tarfile.TarError, *UNPACK_ERRORS) as error:
        raise TraceError(f"{name}: damaged archive: {error}") from error
    return _trace(name, members, block_size, skip_bad, raw.sha256)


def read_directory(path: Path, block_size: int | None, skip_bad: bool) -> Trace:
    """Open a folder of session files. Its digest is that of its files' names and digests."""
    members = [(file.name, file.read_bytes()) for file in path.glob("*.json")]
    digest = hashlib.sha256()
    for name, text in sorted(members):
        digest.update(f"{hashlib.sha256(text).hexdigest()}  {name}\n".encode())
    return _trace(str(path), members, block_size, skip_bad, digest.hexdigest)


def _trace(
    name: str,
    members: Iterable[tuple[str, bytes]],
    block_size: int | None,
    skip_bad: bool,
    sha256: Callable[[], str | None],
) -> Trace:
    reader = SessionReader(skip_bad)
    for member, text in sorted(members, key=lambda member: _by_number(member[0])):
        reader.add(member, text)
    if reader.block_size is None:
        raise TraceError(f"{name}: no session (.json file) in it")
    if block_size not in (None, reader.block_size):
        raise TraceError(f"{name}: its block size is {reader.block_size}, not {block_size}")
    return Trace(
        name,
        "weka",
        reader.block_size,
        "written in the trace",
        reader.requests(),
        sha256,
        num_skipped=lambda: reader.num_skipped,
    )


def _by_number(name: str) -> tuple[list[tuple[int, str]], str]:
    """Sorts by the numbers in a name, of any length."""
    numbers = [digits.lstrip("0") for digits in re.findall(r"[0-9]+", Path(name).name)]
    return [(len(digits), digits) for digits in numbers], name


def _flatten(records: list[Any], offset: float) -> Iterator[tuple[float, Any]]:
    """Each request with the time, in seconds, from which its own is counted."""
    for record in records:
        if isinstance(record, dict) and isinstance(record.get("requests"), list):
            yield from _flatten(record["requests"], offset + _seconds(record))
        else:
            yield offset, record


def _parse(offset: float, record: Any) -> tuple[float, Request]:
    if not isinstance(record, dict):
        raise ValueError(f"a request must be an object, not {record!r:.40}")
    for field in ("in", "hash_ids"):
        if field not in record:
            raise ValueError(f"{field} is missing")
    seconds = offset + _seconds(record)
    hash_ids = hash_id_array(record["hash_ids"])
    if len(hash_ids) and hash_ids.max() > _MAX_ID:
        raise ValueError(f"hash id {hash_ids.max()} is larger than {_MAX_ID}")
    input_length = count(record["in"], "in", at_least=1)
    output_length = count(record.get("out", 0), "out")
    return seconds, Request(round(seconds * 1000), input_length, output_length, hash_ids)


def _seconds(record: dict[str, Any]) -> float:
    seconds = record.get("t")
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 <= seconds < 2**40
    ):
        raise ValueError(f"t is {seconds!r:.40}; it must be a number of seconds from 0")
    return float(seconds)
