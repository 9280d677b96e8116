# SPDX-License-Identifier: Apache-2.0
"""The file that a saved pool is: header, then arrays.

    magic       8 bytes
    version     uint32, little-endian like all that follows
    num_bytes   uint32, of the description
    crc32       uint32, of the description
    description JSON: the pool's settings; name, rows, columns and crc32 of each array
    arrays      each from a multiple of 64 bytes on; zeros between

A reader learns from the size of the file whether it is whole before it makes room for
anything. Checksums find accidents. They do not authenticate: what the arrays say is checked
by whoever builds a pool from them.
"""

import contextlib
import json
import os
import secrets
import struct
import zlib
from typing import Any

import numpy as np

from cpool.core.contract import SavedPoolError

MAGIC = b"\x89cpool\r\n"
VERSION = 2
PREFIX = struct.Struct("<8sIII")
ALIGNMENT = 64
MAX_DESCRIPTION_BYTES = 1 << 20
MAX_HASH_BYTES = 255

# Name -> dtype of the arrays, in their order in the file; columns if there are two dimensions.
ARRAYS: dict[str, Any] = {
    "ref_cnts": np.dtype("<i4"),
    "queue": np.dtype("<u4"),
    "spaces": np.dtype([("group", "<u4"), ("width", "<u4"), ("block_size", "<u4")]),
    "registrations": np.dtype(
        [("num_tokens", "<u4"), ("block", "<u4"), ("space", "<u2"), ("kind", "<u2")]
    ),
    "digests": np.dtype("u1"),
    "parents": np.dtype("<u8"),
    "copies": np.dtype("<u4"),
    "details": np.dtype([("number", "<u4"), ("row", "<u4")]),
    "tokens": np.dtype("u1"),
    "texts": np.dtype("u1"),
}
# What files of an older version have not; they are read as empty.
MISSING: dict[int, tuple[str, ...]] = {1: ("details", "tokens", "texts"), 2: ()}
# Name -> type of the settings, and the largest where it is a number.
SETTINGS: dict[str, tuple[type, int]] = {
    "num_gpu_blocks": (int, (1 << 32) - 1),
    "hash_block_size": (int, (1 << 32) - 1),
    "enable_caching": (bool, 1),
    "enable_kv_cache_events": (bool, 1),
    "truthful_events": (bool, 1),
    "detailed_snapshots": (bool, 1),
    "medium": (str, 0),
    "hash_width": (int, 255),
    "num_evicted_blocks": (int, (1 << 64) - 1),
}


def padded(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def write(path: Any, settings: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Write a file: complete under a temporary name, then renamed to ``path``."""
    path = os.fsdecode(path)
    description = json.dumps(
        {
            "settings": settings,
            "arrays": {name: [*shape(arrays[name]), zlib.crc32(arrays[name])] for name in ARRAYS},
        }
    ).encode()
    prefix = PREFIX.pack(MAGIC, VERSION, len(description), zlib.crc32(description))
    folder = os.path.dirname(path) or os.curdir
    temporary = f"{path}.{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb", opener=open_for_owner) as file:
            write_padded(file, prefix + description)
            for name in ARRAYS:
                write_padded(file, memoryview(arrays[name].reshape(-1).view(np.uint8)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(folder)


def open_for_owner(path: str, flags: int) -> int:
    """An opener of files that nobody else may read."""
    return os.open(path, flags, 0o600)


def shape(array: Any) -> tuple[int, int]:
    """Rows and columns."""
    return (len(array), array.shape[1] if array.ndim == 2 else 1)


def write_padded(file: Any, data: Any) -> None:
    file.write(data)
    file.write(bytes(padded(len(data)) - len(data)))


def sync_folder(folder: str) -> None:
    """Make a rename last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings and arrays of a file.

    Raises:
        SavedPoolError: It is none of ours, damaged, or of another version.
    """
    path = os.fsdecode(path)  # no number: open() would take, and close, a descriptor
    with open(path, "rb") as file:
        try:
            return read_file(file, os.fstat(file.fileno()).st_size)
        except SavedPoolError as error:
            raise SavedPoolError(f"{path}: {error}") from None


def read_file(file: Any, num_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """As ``read``, of an open file with that many bytes."""
    prefix = file.read(PREFIX.size)
    if prefix[: len(MAGIC)] != MAGIC:
        raise SavedPoolError("this is not a saved pool")
    if len(prefix) < PREFIX.size:
        raise SavedPoolError(f"the file ends after {num_bytes} bytes, in its header")
    _, version, description_bytes, checksum = PREFIX.unpack(prefix)
    if version not in MISSING:
        raise SavedPoolError(
            f"the file has version {version}; this cpool reads {min(MISSING)} to {VERSION}"
        )
    if description_bytes > MAX_DESCRIPTION_BYTES:
        raise SavedPoolError(f"a description of {description_bytes} bytes is damaged")
    description = file.read(description_bytes)
    if len(description) < description_bytes:
        raise SavedPoolError(f"the file ends after {num_bytes} bytes, in its header")
    if zlib.crc32(description) != checksum:
        raise SavedPoolError("the description is damaged: its checksum differs")
    settings, table = parse(description, MISSING[version])
    expected = padded(PREFIX.size + description_bytes) + sum(
        padded(rows * columns * ARRAYS[name].itemsize) for name, (rows, columns, _) in table.items()
    )
    if num_bytes != expected:
        raise SavedPoolError(f"the file has {num_bytes} bytes; it should have {expected}")
    skip_padding(file, PREFIX.size + description_bytes)
    arrays = {name: read_array(file, name, *table[name]) for name in table}
    arrays.update((name, np.empty(0, ARRAYS[name])) for name in MISSING[version])
    return settings, arrays


def parse(
    description: bytes, missing: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Settings and the table of arrays, with everything as it must be."""
    try:
        parsed = json.loads(description)
        settings, table = parsed["settings"], parsed["arrays"]
        settings = {name: settings[name] for name in SETTINGS}
        table = {name: table[name] for name in ARRAYS if name not in missing}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SavedPoolError(f"the description cannot be read: {error}") from None
    for name, (kind, largest) in SETTINGS.items():
        value = settings[name]
        if type(value) is not kind or (kind is int and not 0 <= value <= largest):
            raise SavedPoolError(f"{name} is {value!r}")
    for name, row in table.items():
        if (
            not isinstance(row, list)
            or len(row) != 3
            or any(type(number) is not int or not 0 <= number < 1 << 32 for number in row)
            or (row[1] != 1 and name != "digests")
        ):
            raise SavedPoolError(f"array {name} is described as {row!r}")
    # What a pool takes of memory follows from these two, so the file must have as much itself.
    num_counts, num_blocks = table["ref_cnts"][0], settings["num_gpu_blocks"]
    if num_counts != num_blocks:
        raise SavedPoolError(f"{num_counts} counts for {num_blocks} blocks")
    if table["digests"][1] > MAX_HASH_BYTES:
        raise SavedPoolError(
            f"digests of {table['digests'][1]} bytes; the limit is {MAX_HASH_BYTES}"
        )
    return settings, table


def skip_padding(file: Any, num_bytes: int) -> None:
    if any(file.read(padded(num_bytes) - num_bytes)):
        raise SavedPoolError("bytes between the arrays are not zero")


def read_array(file: Any, name: str, rows: int, columns: int, checksum: int) -> Any:
    """One array, new and writable."""
    shape = (rows, columns) if name == "digests" else rows
    array = np.empty(shape, ARRAYS[name])
    if rows * columns:
        view = memoryview(array.reshape(-1).view(np.uint8))
        if file.readinto(view) != len(view):
            raise SavedPoolError(f"the file ends in array {name}")
    if zlib.crc32(array) != checksum:
        raise SavedPoolError(f"array {name} is damaged: its checksum differs")
    skip_padding(file, array.nbytes)
    return array
