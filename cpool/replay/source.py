# SPDX-License-Identifier: Apache-2.0
"""Bytes of a trace: from a file or standard input, unpacked, counted and hashed.

The kind of compression is told by the first bytes, so it works on standard input too.
"""

import gzip
import hashlib
import io
import lzma
import os
import sys
from pathlib import Path
from typing import IO, BinaryIO, cast

from cpool.replay.records import TraceError

STDIN = "-"
# What a damaged archive makes the unpackers raise.
UNPACK_ERRORS = (EOFError, OSError, lzma.LZMAError)


class HashingReader(io.RawIOBase):
    """A raw stream that counts and hashes what is read through it."""

    def __init__(self, raw: BinaryIO, size: int | None) -> None:
        self._raw = raw
        self._digest = hashlib.sha256()
        self._at_end = False
        self.size = size  # bytes; None for a pipe
        self.num_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        data = self._raw.read(len(view))
        view[: len(data)] = data
        self._digest.update(data)
        self.num_read += len(data)
        self._at_end = not data
        return len(data)

    def fraction_read(self) -> float | None:
        return min(1.0, self.num_read / self.size) if self.size else None

    def sha256(self) -> str | None:
        """The digest of the whole input; None if it is a pipe with unread bytes."""
        if self.size is not None:
            while self.read(1 << 20):
                pass
        return self._digest.hexdigest() if self._at_end else None


def open_raw(path: str) -> HashingReader:
    if path == STDIN:
        return HashingReader(cast(BinaryIO, sys.stdin.buffer), None)
    try:
        raw = Path(path).open("rb", buffering=0)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    status = os.fstat(raw.fileno())
    return HashingReader(cast(BinaryIO, raw), status.st_size or None)


def unpack(raw: HashingReader) -> io.BufferedReader:
    """A buffered reader of the unpacked bytes: gzip, xz, zstd or plain.

    Raises:
        TraceError: zstd, and no package here can unpack it.
    """
    packed = io.BufferedReader(raw, 1 << 16)
    start = packed.peek(6)
    stream: IO[bytes]
    if start.startswith(b"\x1f\x8b"):
        stream = gzip.GzipFile(fileobj=packed)
    elif start.startswith(b"\xfd7zXZ\x00"):
        stream = lzma.LZMAFile(packed)
    elif start.startswith(b"\x28\xb5\x2f\xfd"):
        stream = _open_zstd(packed)
    else:
        return packed
    return io.BufferedReader(cast(io.RawIOBase, stream), 1 << 20)


def _open_zstd(packed: IO[bytes]) -> IO[bytes]:
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        pass
    else:
        return zstd.ZstdFile(packed)
    try:
        import zstandard
    except ImportError:
        raise TraceError(
            "the trace is zstd-compressed: install the package 'zstandard' "
            "(pip install 'cpool[replay]'), or use Python 3.14 or newer"
        ) from None
    return zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
