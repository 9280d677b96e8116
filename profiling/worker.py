# SPDX-License-Identifier: Apache-2.0
"""A process that measures one implementation on request.

Reads one JSON object a line from stdin and answers each with one on stdout. ``begin`` forks a
child for one session, so each starts from the same small heap and vLLM is imported once.
"""

import gc
import json
import os
import sys
import time
import traceback
import zlib

import numpy as np

from profiling import memory
from profiling.host_memory import (
    BYTES_PER_BLOCK,
    MIN_BACKED_BYTES,
    back_memory,
    keep_heap_mapped,
)
from profiling.interfaces import IMPLEMENTATIONS
from profiling.operations import OPERATIONS, SETUPS, Session


def checksum(ids):
    return zlib.crc32(np.ascontiguousarray(ids, np.int64).tobytes())


def timed(function, arguments):
    """CPU seconds of this thread for all the calls, and what they returned."""
    results = []
    keep = results.append
    start = time.thread_time_ns()
    for items in arguments:
        keep(function(*items))
    return (time.thread_time_ns() - start) / 1e9, results


def run_operation(session, name):
    new_blocks = session.num_blocks if name == "construct" else session.sample_blocks
    back_memory(max(MIN_BACKED_BYTES, new_blocks * BYTES_PER_BLOCK))
    # An engine's step comes long after the last and finds nothing of the pool in the caches,
    # except what it has at hand: the arguments, which are made after the flush.
    session.flush_caches()
    steps = OPERATIONS[name][1](session)
    function, arguments = next(steps)
    # As an engine does after its start: what exists is no work for the garbage collector.
    gc.collect()
    gc.freeze()
    seconds, results = timed(function, arguments)
    try:
        steps.send(results)
    except StopIteration as stop:
        ids = stop.value
    units = int(ids[0]) if name == "construct" else len(ids)
    return {"seconds": seconds, "units": units, "checksum": checksum(ids)}


class Worker:
    def __init__(self, implementation, answers):
        self.interface, find_pool = IMPLEMENTATIONS[implementation]
        self.make_pool = find_pool()
        self.answers = answers
        self.session = None

    def answer(self, message):
        self.answers.write(json.dumps(message) + "\n")
        self.answers.flush()

    def handle(self, command):
        kind = command.pop("do")
        if kind == "run":
            name = command["name"]
            if name in SETUPS:
                ids = SETUPS[name](self.session)
                return {} if ids is None else {"checksum": checksum(ids)}
            return run_operation(self.session, name)
        if kind == "memory":
            return memory.measure(self.interface, self.make_pool, **command)
        if kind == "snapshot":
            return memory.measure_snapshot(self.interface, self.make_pool, **command)
        raise ValueError(f"unknown command {kind}")

    def serve(self, commands):
        """Answer commands until the end of a session (or of the input)."""
        while line := commands.readline():
            command = json.loads(line)
            if command["do"] == "begin":
                self.begin(command, commands)
                continue
            if command["do"] == "end":
                return
            try:
                self.answer(self.handle(command))
            except BaseException:
                self.answer({"error": traceback.format_exc()})

    def begin(self, command, commands):
        # The child takes over both pipes until the session's end. The commands are read
        # without a buffer, so that none of the parent's get stuck in it.
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            self.answer({"status": status})
            return
        try:
            if command.get("session"):
                keep_heap_mapped()
                self.session = Session(self.interface, self.make_pool, **command["session"])
            self.answer({})
            self.serve(commands)
        finally:
            self.answers.flush()
            os._exit(0)


def main():
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands = open(os.dup(0), "rb", buffering=0)  # noqa: SIM115
    worker = Worker(sys.argv[1], answers)
    worker.answer({"ready": True})
    worker.serve(commands)


if __name__ == "__main__":
    main()
