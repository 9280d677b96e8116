# SPDX-License-Identifier: Apache-2.0
"""Bytes of a trace: from a file or standard input, unpacked, counted and hashed.

The kind of compression is told by the first bytes, so it works on standard input too.
"""

import gzip
import hashlib
import importlib
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable
from stat import S_ISREG
from typing import Any

from cpool.replay.records import TraceError


def _zstd_errors() -> tuple[type[Exception], ...]:
    for module in ("compression.zstd", "zstandard"):
        try:
            return (importlib.import_module(module).ZstdError,)
        except ImportError:
            continue
    return ()


STDIN = "-"
# The longest line of a trace, and the longest file of one session: a few packed bytes can stand
# for any number of them.
MAX_LINE_BYTES = 1 << 26
MAX_SESSION_BYTES = 1 << 28
# What a damaged archive makes the unpackers raise.
UNPACK_ERRORS = (EOFError, OSError, lzma.LZMAError, zlib.error, *_zstd_errors())


class HashingReader(io.RawIOBase):
    """A raw stream that counts and hashes what is read through it.

    A read returns what is there: a slow pipe is not waited for until a buffer is full.
    """

    def __init__(self, raw: io.FileIO, size: int | None) -> None:
        self._raw = raw
        self._digest = hashlib.sha256()
        self._at_end = False
        self._size = size  # bytes; None for a pipe
        self._num_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        num_bytes = self._raw.readinto(view)
        self._digest.update(view[:num_bytes])
        self._num_read += num_bytes
        self._at_end = num_bytes == 0
        return num_bytes

    def fraction_read(self) -> float | None:
        return min(1.0, self._num_read / self._size) if self._size else None

    def sha256(self) -> str | None:
        """The digest of the whole input; None if it is a pipe with unread bytes."""
        if self._size is not None:
            while self.read(1 << 20):
                pass
        return self._digest.hexdigest() if self._at_end else None


def open_raw(path: str) -> HashingReader:
    if path == STDIN:
        return HashingReader(io.FileIO(sys.stdin.fileno(), closefd=False), None)
    try:
        raw = io.FileIO(path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    status = os.fstat(raw.fileno())
    return HashingReader(raw, status.st_size if S_ISREG(status.st_mode) else None)


def unpack(raw: HashingReader) -> io.BufferedReader:
    """A buffered reader of the unpacked bytes: gzip, xz, zstd or plain.

    Raises:
        TraceError: zstd, and no package here can unpack it.
    """
    packed: io.BufferedReader = io.BufferedReader(raw, 1 << 16)
    for magic, opener in _OPENERS.items():
        if packed.peek(len(magic)).startswith(magic):
            return io.BufferedReader(opener(packed), 1 << 20)
    return packed


def _open_gzip(packed: io.BufferedReader) -> Any:
    return gzip.GzipFile(fileobj=packed)


def _open_zstd(packed: io.BufferedReader) -> Any:
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


_OPENERS: dict[bytes, Callable[[io.BufferedReader], Any]] = {
    b"\x1f\x8b": _open_gzip,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _open_zstd,
}
