# SPDX-License-Identifier: Apache-2.0
"""Opens a trace of any supported kind; which kind is told by its content and name."""

from pathlib import Path

from cpool.replay import mooncake, weka
from cpool.replay.records import Trace, TraceError
from cpool.replay.source import STDIN, UNPACK_ERRORS, open_raw, unpack

_PACKED_SUFFIXES = (".gz", ".xz", ".zst")


def open_trace(path: str, block_size: int | None = None, skip_bad: bool = False) -> Trace:
    """Open a trace for reading.

    Args:
        path: Mooncake-layout JSONL (plain, gzip, xz or zstd), ``-`` for standard input, or
            Weka's sessions: a ``.json`` file, a tar of them, packed or not, or a folder.
        block_size: Tokens a block; by default as the trace says, or inferred.
        skip_bad: Count malformed lines or requests, and go on.

    Raises:
        TraceError: it cannot be opened; later, when it is read, a line is malformed.
    """
    if path != STDIN and Path(path).is_dir():
        return weka.read_directory(Path(path), block_size, skip_bad)
    raw = open_raw(path)
    name = "standard input" if path == STDIN else path
    try:
        stream = unpack(raw)
        is_tar = stream.peek(512)[257:262] == b"ustar"
        if is_tar:
            return weka.read_tar(raw, stream, name, block_size, skip_bad)
        if _bare_suffix(path) == ".json":
            return weka.read_session(raw, stream, name, block_size, skip_bad)
    except UNPACK_ERRORS as error:
        raise TraceError(f"{name}: {error}") from error
    return mooncake.read_jsonl(raw, stream, name, block_size, skip_bad)


def _bare_suffix(path: str) -> str:
    bare = Path(path)
    return (bare.with_suffix("") if bare.suffix in _PACKED_SUFFIXES else bare).suffix
