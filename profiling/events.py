# SPDX-License-Identifier: Apache-2.0
"""What events cost: registration and eviction with events off, on and truthful.

    python -m profiling.events [--blocks 1000000] [--batch 1024] [--rounds 3]
    python -m profiling.events --stock      # the same work on vLLM's own pool, where installed

Work, the same for all: register every block of a pool in batches, free them in random order,
then allocate all of them again in batches, which evicts every key. Events are taken after each
batch, as an engine does after each step, and the last few stay alive, as in the queue of a
publisher that keeps up. Encoding is not part of it: that happens on another thread. Each round
makes new pools and the variants take turns; the best round counts. Throughput is in millions of
blocks for a second of the thread's own processor time, so that other load disturbs it less.
Token ids are given as a read-only array, which the pool keeps uncopied.

Also: bytes a block that parents and waiting events take, the time of a snapshot, and the time
to encode each kind of run.
"""

import argparse
import hashlib
import sys
import time
from collections import deque

import numpy as np

from profiling.host_memory import back_memory

BLOCK_SIZE = 16
HASH_BYTES = 32
BACKED_BYTES = 400  # a block: more than keys and waiting events take


class Tally:
    """Counts events and keeps the last few batches of them alive."""

    def __init__(self):
        self.num_events = 0
        self.waiting = deque(maxlen=4)

    def add(self, events):
        for event in events:
            self.num_events += getattr(event, "num_events", 1)
        self.waiting.append(events)


def make_hashes(num_blocks):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (num_blocks, HASH_BYTES), dtype=np.uint8)


def run_cpool(num_blocks, batch, with_events, truthful_events):
    """Seconds to register and to evict, and bytes a block of what events need."""
    import cpool

    pool = cpool.BlockPool(
        num_blocks + 1, True, BLOCK_SIZE, with_events, truthful_events=truthful_events
    )
    hashes = make_hashes(num_blocks)
    order = np.random.default_rng(1).permutation(num_blocks).astype(np.uint32) + 1
    tokens = np.zeros(batch * BLOCK_SIZE, dtype=np.uint32)
    tokens.flags.writeable = False
    pool.get_new_block_ids(num_blocks)
    tally = Tally()
    back_memory(num_blocks * BACKED_BYTES)
    start = time.thread_time()
    for first in range(0, num_blocks, batch):
        ids = order[first : first + batch]
        pool.cache_full_ids(
            ids,
            hashes[first : first + batch],
            0,
            BLOCK_SIZE,
            token_ids=tokens[: len(ids) * BLOCK_SIZE],
        )
        tally.add(pool.take_event_runs())
    registered = time.thread_time()
    num_batches = -(-num_blocks // batch)
    assert tally.num_events == (num_batches if with_events else 0)
    rng = np.random.default_rng(2)
    pool.free_ids(rng.permutation(num_blocks).astype(np.uint32) + 1)
    back_memory(num_blocks * BACKED_BYTES)
    evicting = time.thread_time()
    for first in range(0, num_blocks, batch):
        pool.get_new_block_ids(min(batch, num_blocks - first))
        tally.add(pool.take_event_runs())
    evicted = time.thread_time()
    assert pool.num_cached_keys == 0
    assert tally.num_events == (num_batches + num_blocks if with_events else 0)
    return registered - start, evicted - evicting


class StockRequest:
    """What vLLM's pool asks of a request."""

    lora_request = None
    mm_features = ()
    cache_salt = None
    prompt_embeds = None
    session_id = None

    def __init__(self, hashes, token_ids):
        self.block_hashes = hashes
        self.all_token_ids = token_ids


def run_stock(num_blocks, batch, with_events, _):
    """As run_cpool, on vLLM's pool."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE, with_events)
    hashes = [row.tobytes() for row in make_hashes(num_blocks)]
    order = np.random.default_rng(1).permutation(num_blocks) + 1
    pool.get_new_blocks(num_blocks)
    tokens = [0] * (batch * BLOCK_SIZE)
    batches = [
        (
            StockRequest(hashes[first : first + batch], tokens),
            [pool.blocks[id] for id in order[first : first + batch]],
        )
        for first in range(0, num_blocks, batch)
    ]
    tally = Tally()
    back_memory(num_blocks * BACKED_BYTES)
    start = time.thread_time()
    for request, blocks in batches:
        pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_SIZE, 0)
        tally.add(pool.take_events())
    registered = time.thread_time()
    rng = np.random.default_rng(2)
    pool.free_blocks([pool.blocks[id] for id in rng.permutation(num_blocks) + 1])
    back_memory(num_blocks * BACKED_BYTES)
    evicting = time.thread_time()
    for first in range(0, num_blocks, batch):
        pool.get_new_blocks(min(batch, num_blocks - first))
        tally.add(pool.take_events())
    evicted = time.thread_time()
    assert tally.num_events == (len(batches) + num_blocks if with_events else 0)
    return registered - start, evicted - evicting


def measure(run, variants, num_blocks, batch, rounds):
    best = {}
    for _ in range(rounds):
        for name, arguments in variants.items():
            seconds = run(num_blocks, batch, *arguments)
            best[name] = tuple(map(min, zip(seconds, best.get(name, seconds), strict=True)))
    print(f"{num_blocks} blocks, batches of {batch}, best of {rounds} rounds")
    for name, seconds in best.items():
        rates = [num_blocks / value / 1e6 for value in seconds]
        costs = [100 * (1 - off / value) for off, value in zip(best["off"], seconds, strict=True)]
        print(
            f"  events {name:9} register {rates[0]:6.2f} M/s ({costs[0]:5.1f} % less)   "
            f"evict {rates[1]:6.2f} M/s ({costs[1]:5.1f} % less)"
        )


def report_sizes(num_blocks):
    """Memory of parents, and what a snapshot and the encoding of runs take."""
    import cpool
    from cpool.events.wire import encode_batch

    pools = [
        cpool.BlockPool(num_blocks + 1, True, BLOCK_SIZE, on, truthful_events=on)
        for on in (False, True)
    ]
    # Prompts of 64 blocks: each block but the first has a parent.
    digests = np.frombuffer(
        b"".join(hashlib.sha256(i.to_bytes(8, "big")).digest() for i in range(num_blocks)),
        dtype=np.uint8,
    ).reshape(num_blocks, HASH_BYTES)
    for pool in pools:
        ids = pool.get_new_block_ids(num_blocks)
        for first in range(0, num_blocks, 64):
            part = slice(first, first + 64)
            pool.cache_full_ids(ids[part], digests[part], 0, BLOCK_SIZE)
    extra = (pools[1].nbytes - pools[0].nbytes) / num_blocks
    print(f"parents: {extra:.1f} bytes a block")
    pool = pools[1]
    pool.take_event_runs()

    start = time.thread_time()
    snapshot = pool.snapshot_events()
    taken = time.thread_time()
    payload = encode_batch([snapshot.events], 0.0)
    encoded = time.thread_time()
    print(
        f"snapshot of {num_blocks} blocks: {taken - start:.3f} s, {len(snapshot.events)} events; "
        f"encoded in {encoded - taken:.3f} s to {len(payload) / num_blocks:.1f} bytes a block"
    )
    pool.evict_ids(ids)
    runs = pool.take_event_runs()
    start = time.thread_time()
    payload = encode_batch(runs, 0.0)
    seconds = time.thread_time() - start
    print(f"removals: encoded in {seconds:.3f} s to {len(payload) / num_blocks:.1f} bytes a block")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stock", action="store_true", help="measure vLLM's pool")
    arguments = parser.parse_args()
    sizes = arguments.blocks, arguments.batch, arguments.rounds
    if arguments.stock:
        measure(run_stock, {"off": (False, False), "on": (True, False)}, *sizes)
        return
    measure(
        run_cpool,
        {"off": (False, False), "on": (True, False), "truthful": (True, True)},
        *sizes,
    )
    report_sizes(arguments.blocks)


if __name__ == "__main__":
    sys.exit(main())
