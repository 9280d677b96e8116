# SPDX-License-Identifier: Apache-2.0
"""Foreign bytes for every reader: traces, event batches, saved pools.

The first byte names the reader, the rest is its input. A reader may refuse with its own error;
what it takes must hold up. Checksums of saved pools are made to fit, or hardly any input would
come further than those.
"""

import contextlib
import os
import tempfile
from typing import Any

import msgspec
import numpy as np

import cpool
from cpool.core import saving
from cpool.events import wire
from cpool.replay.open_trace import open_trace
from cpool.replay.records import TraceError

MAX_REQUESTS = 200
SETTINGS: dict[str, Any] = {
    "enable_caching": True,
    "truthful_events": False,
    "detailed_snapshots": False,
    "medium": "GPU",
}


def read_trace(data: bytes, path: str) -> None:
    with open(path, "wb") as file:
        file.write(data)
    with contextlib.suppress(TraceError):
        for number, request in enumerate(open_trace(path, block_size=16).requests):
            assert request.input_length >= 1
            if number == MAX_REQUESTS:
                break


def read_events(data: bytes, path: str) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        wire.decode_batch(data)


def read_file(data: bytes, path: str) -> None:
    with open(path, "wb") as file:
        file.write(saving.MAGIC + data)
    with contextlib.suppress(cpool.SavedPoolError):
        cpool.BlockPool.load(path).check_consistency()


def read_arrays(data: bytes, path: str) -> None:
    """Eight bytes of settings and lengths, then the arrays one behind the other.

    The last one, the text of the details, is what is left.
    """
    header, rest = data[:8].ljust(8, b"\0"), data[8:]
    width = header[1] % 34
    rows = header[2] % 32
    num_rows = {
        "ref_cnts": header[0] % 24,
        "queue": header[3] % 24,
        "spaces": header[4] % 4,
        "registrations": rows,
        "digests": rows,
        "parents": rows if header[5] & 2 else 0,
        "copies": header[6] % 24,
        "details": rows if header[5] & 4 else 0,
        "tokens": 8 * (header[5] & 4),
        "texts": 0,
    }
    arrays = {}
    for name, num in num_rows.items():
        dtype = saving.ARRAYS[name]
        num_bytes = num * dtype.itemsize * (width if name == "digests" else 1)
        raw = np.frombuffer(rest[:num_bytes].ljust(num_bytes, b"\0"), np.uint8)
        rest = rest[num_bytes:]
        arrays[name] = raw.reshape(num, width) if name == "digests" else raw.view(dtype)
    if header[5] & 4:
        arrays["texts"] = np.frombuffer(rest, np.uint8)
    settings = {
        **SETTINGS,
        "num_gpu_blocks": num_rows["ref_cnts"],
        "hash_block_size": 4,
        "enable_kv_cache_events": bool(header[5] & 1),
        "detailed_snapshots": bool(header[5] & 4) and not header[5] & 8,
        "hash_width": header[7],
        "num_evicted_blocks": 0,
    }
    saving.write(path, settings, arrays)
    try:
        pool = cpool.BlockPool.load(path)
    except cpool.SavedPoolError:
        return
    pool.check_consistency()
    if header[5] & 1:
        assert len(list(pool.snapshot_events().events)) <= pool.num_cached_keys
    pool.save(path)
    assert cpool.BlockPool.load(path).num_registrations == pool.num_registrations
    pool.evict_ids(range(pool.num_gpu_blocks))
    assert pool.num_registrations == 0
    pool.check_consistency()


READERS = (read_trace, read_events, read_file, read_arrays)


def run(data: bytes) -> str:
    """The name of the reader that read the input."""
    read = READERS[data[0] % len(READERS)] if data else read_trace
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as at:
        read(data[1:], os.path.join(at, "input"))
    return read.__name__
