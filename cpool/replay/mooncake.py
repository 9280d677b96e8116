# SPDX-License-Identifier: Apache-2.0
"""Reader of Mooncake-layout JSONL: one request a line, with ``hash_ids``.

Nearly all bytes of a long-context trace are the digits of ``hash_ids``. They are cut out of
the line and read by numpy, five times as fast as a JSON parser makes a list of them; anything
out of the ordinary goes through the JSON parser, which also finds the words for an error.
"""

import io
import json
import warnings
from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cpool.replay.block_size import NUM_SAMPLES, infer_block_size
from cpool.replay.records import MAX_HASH_ID, Request, Trace, TraceError, check_num_blocks
from cpool.replay.source import MAX_LINE_BYTES, UNPACK_ERRORS, HashingReader


def parse_line(line: bytes) -> Request:
    """Parse one line.

    Raises:
        ValueError: what is wrong with the line.
    """
    record, hash_ids = _split(line)
    if hash_ids is None:
        try:
            record = json.loads(line)
        except UnicodeDecodeError:
            raise ValueError("not UTF-8") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise ValueError("not JSON that can be read: it is nested too deeply") from None
        if not isinstance(record, dict):
            raise ValueError(f"a JSON object is needed, not {_kind(record)}")
        hash_ids = hash_id_array(_field(record, "hash_ids"))
    return Request(
        count(record.get("timestamp", 0), "timestamp"),
        count(_field(record, "input_length"), "input_length", at_least=1),
        count(record.get("output_length", 0), "output_length"),
        hash_ids,
    )


def hash_id_array(value: object) -> NDArray[np.int64]:
    """A JSON list of ids as an int64 array; ValueError says which item is wrong."""
    if not isinstance(value, list):
        raise ValueError(f"hash_ids must be a list, not {_kind(value)}")
    for position, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= MAX_HASH_ID:
            raise ValueError(
                f"hash_ids[{position}] is {json.dumps(item)[:40]}; "
                f"it must be an integer from 0 to {MAX_HASH_ID}"
            )
    return np.array(value, dtype=np.int64)


def count(value: object, name: str, at_least: int = 0) -> int:
    """A JSON number as an int, fractions cut off; ValueError if it is none or too small."""
    if type(value) is float and value == value and abs(value) < 2**62:
        value = int(value)
    if type(value) is not int:
        raise ValueError(f"{name} is {json.dumps(value)[:40]}; it must be a number")
    if not at_least <= value <= 2**62:
        raise ValueError(f"{name} is {value}; it must be at least {at_least} and at most 2**62")
    return value


def read_jsonl(
    raw: HashingReader,
    lines: io.BufferedReader,
    name: str,
    block_size: int | None,
    skip_bad: bool,
) -> Trace:
    """Open a JSONL trace; its first requests are read to find the block size."""
    reader = _LineReader(lines, name, skip_bad)
    start = []
    for request in reader.parsed():
        start.append(request)
        if len(start) == NUM_SAMPLES:
            break
    how = "given"
    if block_size is None:
        block_size, how = infer_block_size([request for _, request in start], name)
    return Trace(
        name,
        "mooncake",
        block_size,
        how,
        reader.checked(chain(start, reader.parsed()), block_size),
        raw.sha256,
        raw.fraction_read,
        lambda: reader.num_skipped,
    )


class _LineReader:
    def __init__(self, lines: io.BufferedReader, name: str, skip_bad: bool) -> None:
        self._numbered = enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1)
        self._name = name
        self._skip_bad = skip_bad
        self.num_skipped = 0

    def parsed(self) -> Iterator[tuple[int, Request]]:
        number = 0
        while True:
            try:
                number, line = next(self._numbered)
            except StopIteration:
                return
            except UNPACK_ERRORS as error:
                # Nothing after this point can be read, so there is nothing to skip to.
                raise TraceError(f"{self._name}, after line {number}: {error}") from error
            if len(line) > MAX_LINE_BYTES:
                raise TraceError(f"{self._name}, line {number}: longer than {MAX_LINE_BYTES} bytes")
            if line.isspace():
                continue
            try:
                yield number, parse_line(line)
            except ValueError as error:
                self._refuse(number, error)

    def checked(
        self, numbered: Iterator[tuple[int, Request]], block_size: int
    ) -> Iterator[Request]:
        for number, request in numbered:
            try:
                check_num_blocks(request, block_size)
            except ValueError as error:
                self._refuse(number, error)
            else:
                yield request

    def _refuse(self, number: int, error: ValueError) -> None:
        if not self._skip_bad:
            raise TraceError(f"{self._name}, line {number}: {error}") from error
        self.num_skipped += 1


def _split(line: bytes) -> tuple[dict[str, object], NDArray[np.int64] | None]:
    """The line's object with an empty list, and the list; or None if it is not that simple."""
    key = line.find(b'"hash_ids"')
    first = line.find(b"[", key) + 1
    last = line.find(b"]", first)
    if key < 0 or first == 0 or last < 0 or last == first:
        return {}, None
    digits = line[first:last]
    if digits.translate(None, b"0123456789, "):
        return {}, None
    try:
        record = json.loads(line[:first] + line[last:])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ids = np.fromstring(digits, dtype=np.int64, sep=",")
    except (ValueError, RecursionError, DeprecationWarning):
        return {}, None
    # The list cut out must be the object's own, each comma must have separated two numbers,
    # and a number that does not fit would have been read as the largest one.
    whole = isinstance(record, dict) and record.get("hash_ids") == []
    if not whole or len(ids) != digits.count(b",") + 1 or ids.max() == MAX_HASH_ID:
        return {}, None
    return record, ids


def _field(record: dict[str, object], name: str) -> object:
    if name not in record:
        hint = "; a Weka session must be in a .json file" if "requests" in record else ""
        raise ValueError(f"{name} is missing{hint}")
    return record[name]


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return kinds.get(type(value), f"{json.dumps(value)[:40]}")
