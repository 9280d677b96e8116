# SPDX-License-Identifier: Apache-2.0
"""Compile and run floor.c: what the memory system allows, beside which our times stand."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("floor.c")

# Operation -> the figure of floor.c that does the least work for it.
FLOOR_OF = {
    "find_sequential": "probe_batch",
    "find_random": "probe_batch",
    "find_prefix_cold": "probe_batch",
    "register_fresh": "insert_batch",
    "register_aged": "insert_batch",
    "touch": "unlink_batch",
    "allocate_evicting_aged": "evict_batch",
    "evict": "evict_batch",
    "free_shuffled": "read_batch",
    "free_aged": "read_batch",
    "register_partial": "insert_batch",
    "register_partial_again": "probe_batch",
}


@contextlib.contextmanager
def compiled():
    """The program's path, or None without a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "floor"
        subprocess.run([compiler, "-O3", "-std=gnu11", "-o", program, SOURCE], check=True)
        yield program


def measure_floor(sizes, widths):
    """Measure each size and width.

    Returns:
        List of dicts with num_blocks, hash_width, pages and ns per element of each figure,
        the smallest of some samples; empty without a C compiler.
    """
    records = []
    with compiled() as program:
        if program is None:
            return []
        for num_blocks in sizes:
            for width in widths:
                run = subprocess.run(
                    [program, str(num_blocks), str(width)], check=True, capture_output=True,
                    text=True,
                )  # fmt: skip
                figures = json.loads(run.stdout)
                records += [
                    {
                        "num_blocks": num_blocks,
                        "hash_width": width,
                        "pages": pages,
                        **figures[pages],
                    }
                    for pages in ("small_pages", "huge_pages")
                ]
    return records


class FloorInTurns:
    """The same figures, with huge pages, one at a time: in turns with what they bound.

    Args:
        program: From `compiled`.
        num_blocks, hash_width: Of the pool.
    """

    def __init__(self, program, num_blocks, hash_width):
        self.process = subprocess.Popen(
            [program, str(num_blocks), str(hash_width), "turns"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def measure(self, operation):
        """Ns an element of what bounds the operation, or None."""
        if operation not in FLOOR_OF:
            return None
        self.process.stdin.write(FLOOR_OF[operation] + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
