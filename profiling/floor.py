# SPDX-License-Identifier: Apache-2.0
"""Compile and run floor.c: what the memory system allows, beside which our times stand."""

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
    "register_partial": "probe",
    "register_partial_again": "read_dependent",
}


def measure_floor(sizes, widths):
    """Measure each size and width.

    Returns:
        List of dicts with num_blocks, hash_width, pages and ns per element of each figure,
        the smallest of some runs; empty without a C compiler.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return []
    records = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "floor"
        subprocess.run([compiler, "-O3", "-std=gnu11", "-o", program, SOURCE], check=True)
        for num_blocks in sizes:
            for width in widths:
                repeats = 1 if num_blocks > 1_000_000 else 3
                runs = [
                    json.loads(
                        subprocess.run(
                            [program, str(num_blocks), str(width)],
                            check=True, capture_output=True, text=True,
                        ).stdout
                    )
                    for _ in range(repeats)
                ]  # fmt: skip
                for pages in ("small_pages", "huge_pages"):
                    figures = {
                        name: min(run[pages][name] for run in runs)
                        for name in runs[0][pages]
                        if name != "ignore"
                    }
                    records.append(
                        {"num_blocks": num_blocks, "hash_width": width, "pages": pages, **figures}
                    )
    return records
