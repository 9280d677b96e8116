# SPDX-License-Identifier: Apache-2.0
"""What a serving engine does with a pool, without end: for stress tests and for pauses.

    python -m profiling.production_mix [--blocks 1000000] [--turns 3] [--runs 3]

Conversations come back and grow, so that requests share prefixes; blocks are held while a
request runs, freed with its last block first and evicted when others need them. Some requests
register what another one already has (duplicates), tails are registered partially, again, and
promoted when they fill; contents move on copy-on-write; connectors evict. Prints how long
calls take: a scheduler feels the longest. Every run makes the same calls, so that the pool's own
pauses can be told from the machine's, of which a loop that does nothing has as many.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from array import array
from collections import deque

import numpy as np

BLOCK_SIZE = 16
BLOCK_TOKENS = 4 * BLOCK_SIZE  # four boundaries a block
GROUP = 0
HASH_WIDTH = 32
LONGEST = 256  # blocks a request


class ProductionMix:
    """Drives one pool through the mix.

    Args:
        pool: A cpool.BlockPool with ``hash_block_size`` 16, used by nobody else.
        seed: Of all that is chosen.
        clock: Nanoseconds; CPU time of the thread unless given.

    Attributes:
        times: Operation -> array of nanoseconds, one for each call.
        num_handed_out: Blocks allocated so far; the pool's size is one turn.
    """

    def __init__(self, pool, seed=0, clock=time.thread_time_ns):
        self.pool = pool
        self.rng = np.random.default_rng(seed)
        self.clock = clock
        self.times = {}
        self.num_handed_out = 0
        # Keys of all conversations there will ever be, three times what the pool can hold.
        # A conversation is a stretch of them, a request its beginning.
        num_keys = 3 * pool.num_gpu_blocks + 2 * LONGEST
        data = self.rng.bytes(num_keys * HASH_WIDTH)
        self.keys = np.frombuffer(data, np.uint8).reshape(num_keys, HASH_WIDTH)
        self.recent = deque(maxlen=2000)
        self.running = deque()

    def call(self, name, *arguments):
        method = getattr(self.pool, name)
        start = self.clock()
        result = method(*arguments)
        self.times.setdefault(name, array("q")).append(self.clock() - start)
        return result

    def run(self, num_blocks):
        """Serve requests until so many more blocks were handed out."""
        end = self.num_handed_out + num_blocks
        while self.num_handed_out < end:
            self.serve()

    def finish_all(self):
        while self.running:
            self.finish()

    def fill_table(self):
        """Give every block an extra key: the table passes its limit and grows, twice or so."""
        for id in range(1, self.pool.num_gpu_blocks):
            self.call("cache_partial_id", id, self.rng.bytes(HASH_WIDTH), BLOCK_SIZE, GROUP)

    def conversation(self):
        # Two thirds are recent ones, a third is a new start anywhere.
        if self.recent and self.rng.random() < 0.67:
            return self.recent[int(self.rng.integers(len(self.recent)))]
        starts = (len(self.keys) - 2 * LONGEST) // LONGEST
        start = int(self.rng.integers(starts)) * LONGEST
        self.recent.append(start)
        return start

    def serve(self):
        start = self.conversation()
        length = int(self.rng.integers(8, LONGEST))
        rows = self.keys[start : start + length]
        # One request in twenty does not look: it registers copies of what is there.
        looks = self.rng.random() < 0.95
        hits = self.call("find_prefix_ids", rows, GROUP) if looks else np.empty(0, np.uint32)
        if len(hits):
            self.call("touch_ids", hits)
        num_new = length - len(hits) + 2
        while self.pool.get_num_free_blocks() < num_new + self.pool.num_gpu_blocks // 10:
            self.finish()
        fresh = self.allocate(num_new)
        full, tail = fresh[:-2], fresh[-2:]
        if len(full):
            self.call("cache_full_ids", full, rows[len(hits) :], GROUP, BLOCK_TOKENS, len(hits))
        self.register_tail(tail, start + length, length)
        self.running.append(np.concatenate([hits, fresh]))
        if self.rng.random() < 0.02:
            self.call("evict_ids", self.rng.integers(1, self.pool.num_gpu_blocks, 16))
        if len(self.running) > 64 and self.rng.random() < 0.5:
            self.finish()

    def register_tail(self, tail, key, length):
        # A block grows past boundaries; every step registers it again. Half of them fill.
        first, second = (int(id) for id in tail)
        for boundary in (1, 1, 2):
            tokens = length * BLOCK_TOKENS + boundary * BLOCK_SIZE
            # A key of its own for each boundary: another byte in front.
            digest = bytes([boundary]) + self.keys[key].tobytes()[1:]
            self.call("cache_partial_id", first, digest, tokens, GROUP)
        if self.rng.random() < 0.5:
            self.call("cache_full_ids", tail[:1], self.keys[key : key + 1], GROUP, BLOCK_TOKENS,
                      length)  # fmt: skip
            # The shorter boundary stays findable: an extra key.
            digest = b"\x03" + self.keys[key].tobytes()[1:]
            tokens = length * BLOCK_TOKENS + BLOCK_SIZE
            self.call("cache_partial_id", first, digest, tokens, GROUP)
        elif self.rng.random() < 0.3:
            # Copy on write: the cache keeps the copy.
            self.call("move_ids", first, second)

    def allocate(self, count):
        self.num_handed_out += count
        return self.call("get_new_block_ids", count)

    def finish(self):
        # Mostly the oldest; the queue's order must not follow the order of arrival.
        if self.rng.random() < 0.3:
            self.running.rotate(-int(self.rng.integers(len(self.running))))
        self.call("free_ids", self.running.popleft()[::-1])


def longest_calls(runs):
    """Lines of a table: microseconds a call, of runs that made the same calls.

    What a call costs by itself it costs in every run. What happens to it in one of them is the
    machine's: a page that the host has to find, an interrupt, another guest's turn.
    """
    lines = [
        f"{'':18} {'calls':>9} {'p50':>8} {'p99':>8} {'p99.9':>8} {'max':>9} {'in all':>9}"
        "   us a call; the longest in any run, and in every run at the same call"
    ]
    for name in sorted(runs[0]):
        times = np.array([run[name] for run in runs]) / 1e3
        p50, p99, p999 = np.percentile(times, [50, 99, 99.9])
        always = times.min(axis=0)
        lines.append(
            f"{name:18} {times.shape[1]:9} {p50:8.1f} {p99:8.1f} {p999:8.1f} {times.max():9.1f} "
            f"{always.max():9.1f}   number {always.argmax()}"
        )
    return lines


def longest_pauses(seconds, clock=time.thread_time_ns, count=3):
    """Microseconds of the longest pauses of a loop that only reads the clock for so long."""
    longest = [0] * count
    end = time.monotonic() + seconds
    before = clock()
    while time.monotonic() < end:
        now = clock()
        if now - before > longest[0]:
            longest[0] = now - before
            longest.sort()
        before = now
    return [pause / 1e3 for pause in reversed(longest)]


def rss_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def run_once(num_blocks, turns, answer):
    from cpool import BlockPool

    mix = ProductionMix(BlockPool(num_blocks, True, BLOCK_SIZE, hash_width=HASH_WIDTH))
    for turn in range(turns):
        mix.run(num_blocks)
        print(
            f"turn {turn + 1}: {mix.pool.nbytes / num_blocks:.1f} B a block, RSS "
            f"{rss_bytes() >> 20} MiB, {mix.pool.table_stats()}",
            file=sys.stderr,
        )
    mix.pool.check_consistency()
    mix.fill_table()
    mix.finish_all()
    mix.call("reset_prefix_cache")
    answer.send(mix.times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=3, help="times each block is handed out")
    parser.add_argument("--runs", type=int, default=3, help="the same calls so often")
    arguments = parser.parse_args()
    runs = []
    context = multiprocessing.get_context("spawn")
    start = time.monotonic()
    for _ in range(arguments.runs):
        answers, answer = context.Pipe(duplex=False)
        process = context.Process(target=run_once, args=(arguments.blocks, arguments.turns, answer))
        process.start()
        answer.close()
        runs.append(answers.recv())
        process.join()
    seconds = (time.monotonic() - start) / arguments.runs
    print("\n".join(longest_calls(runs)))
    pauses = ", ".join(f"{pause:.1f}" for pause in longest_pauses(seconds))
    print(f"a loop that only reads the clock, for {seconds:.0f} s as a run, paused for {pauses} us")


if __name__ == "__main__":
    main()
