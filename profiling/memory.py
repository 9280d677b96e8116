# SPDX-License-Identifier: Apache-2.0
"""Memory of one pool in which every block is registered once, seen in three ways.

RSS is what the system gives; tracemalloc counts what Python's allocators were asked for, and
memray what all allocators were, with the place in the code. Each needs a process of its own.
"""

import gc
import os
import time
import tracemalloc

import numpy as np

from profiling.operations import REQUEST_BLOCKS


def rss_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def full_collection_seconds():
    start = time.perf_counter()
    gc.collect()
    return time.perf_counter() - start


def fill(api, num_blocks, hash_width, keys_per_block):
    """Register every block; digests are dropped at once, as they are not the pool's."""
    rng = np.random.default_rng(0)
    left = num_blocks - 1
    while left:
        count = min(REQUEST_BLOCKS, left)
        blocks = api.allocate(count)
        rows = [
            np.frombuffer(rng.bytes(count * hash_width), np.uint8).reshape(count, hash_width)
            for _ in range(keys_per_block)
        ]
        api.register(*api.register_arguments(blocks, rows[0]))
        if keys_per_block > 1:
            ids = api.ids_of(blocks)
            for extra in rows[1:]:
                for arguments in api.partial_arguments(ids, extra):
                    api.register_partial(*arguments)
        api.free(blocks)
        left -= count


def measure(interface, make_pool, method, num_blocks, hash_width, keys_per_block, path=None):
    """Build and fill one pool under one method's eyes.

    Args:
        method: "rss", "tracemalloc" or "memray".
        path: File for memray's records.

    Returns:
        Dict of bytes, less those before the pool, and of seconds where the key says so.
    """
    if method == "memray":
        return measure_with_memray(
            interface, make_pool, num_blocks, hash_width, keys_per_block, path
        )
    # A first small pool pays for what every process needs once; what exists before the pool is
    # no work for the collector.
    fill(interface(make_pool, 1000, hash_width), 1000, hash_width, keys_per_block)
    gc.collect()
    gc.freeze()
    result = {}
    if method == "tracemalloc":
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
    else:
        before = rss_bytes()
    api = interface(make_pool, num_blocks, hash_width)
    if method == "rss":
        result["constructed"] = rss_bytes() - before
    fill(api, num_blocks, hash_width, keys_per_block)
    if method == "tracemalloc":
        current, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        result |= {"filled": current - before, "peak": peak - before}
    else:
        result["filled"] = rss_bytes() - before
        result["collection_seconds"] = min(full_collection_seconds() for _ in range(3))
    if hasattr(api.pool, "nbytes"):
        result["nbytes"] = api.pool.nbytes
        require_registrations(api.pool, (num_blocks - 1) * keys_per_block)
    return result


def require_registrations(pool, wanted):
    if pool.num_registrations != wanted:
        raise AssertionError(f"{pool.num_registrations} registrations, expected {wanted}")


def measure_with_memray(interface, make_pool, num_blocks, hash_width, keys_per_block, path):
    import memray

    with memray.Tracker(
        path, trace_python_allocators=True,
        file_format=memray.FileFormat.AGGREGATED_ALLOCATIONS,
    ):  # fmt: skip
        api = interface(make_pool, num_blocks, hash_width)
        fill(api, num_blocks, hash_width, keys_per_block)
    with memray.FileReader(path) as reader:
        peak = reader.metadata.peak_memory
    if hasattr(api.pool, "num_registrations"):
        require_registrations(api.pool, (num_blocks - 1) * keys_per_block)
    return {"peak": peak}


def measure_snapshot(interface, make_pool, num_blocks, hash_width):
    """Seconds for all that is resident as events, from a pool that records events."""

    def make_recording_pool(*arguments):
        return make_pool(*arguments, enable_kv_cache_events=True)

    api = interface(make_recording_pool, num_blocks, hash_width)
    fill(api, num_blocks, hash_width, 1)
    api.pool.take_events()
    start = time.thread_time()
    snapshot = api.pool.snapshot_events()
    seconds = time.thread_time() - start
    stored = sum(len(event.block_hashes) for event in snapshot.events if event.block_hashes)
    if stored != num_blocks - 1:
        raise AssertionError(f"a snapshot of {stored} hashes, {num_blocks - 1} are resident")
    return {"seconds": seconds}
