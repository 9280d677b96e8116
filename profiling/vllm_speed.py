# SPDX-License-Identifier: Apache-2.0
"""vLLM on its own block pool and on cpool, in one run.

    python profiling/vllm_speed.py --vllm-python PYTHON_WITH_VLLM

Two processes, one with cpool installed, take turns round by round (A B A B) on the cases of
vllm_cases. A figure is the median over the rounds of the CPU time of the thread, with the
lower and upper quartile. Both must decide the same, or the figures compare nothing.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from profiling.pair import WorkerFailed
from profiling.timing import Disagreement
from profiling.vllm_cases import CASES
from profiling.vllm_pair import Side

UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns"))


def spread(samples):
    """Median and quartiles, e.g. "12.3 us (11.9-13.0)"."""
    ordered = sorted(samples)
    low, _, high = statistics.quantiles(ordered, n=4)
    median = statistics.median(ordered)
    scale, unit = next(item for item in UNITS if median >= item[0] or item[0] == 1)
    return f"{median / scale:.3g} {unit} ({low / scale:.3g}-{high / scale:.3g})"


def run_case(sides, name, rounds):
    for side in sides:
        side.send(name)
    for side in sides:
        side.receive()
    samples = [[] for _ in sides]
    for _ in range(rounds):
        checksums = set()
        for side, values in zip(sides, samples, strict=True):
            side.send("")
            answer = side.receive()
            values.append(answer["ns"])
            checksums.add(answer["checksum"])
        if len(checksums) > 1:
            raise Disagreement(f"{name}: stock and cpool decided differently")
    # Per title: the samples of stock and those of cpool.
    by_title = [list(zip(*values, strict=True)) for values in samples]
    return list(zip(*by_title, strict=True))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm-python", default=os.environ.get("CPOOL_VLLM_PYTHON", sys.executable),
        help="interpreter that can import vLLM (default: this one)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="instead of each case's own number (at least 2)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all samples")
    arguments = parser.parse_args()
    sides = [Side(name, arguments.vllm_python) for name in ("stock", "cpool")]
    records = {}
    try:
        for side in sides:
            print(f"{side.name}: {side.receive()['pool']}", file=sys.stderr)
        print("| operation | stock vLLM | cpool | |\n|---|---|---|---|")
        for name in arguments.cases:
            titles, rounds, _ = CASES[name]
            results = run_case(sides, name, arguments.rounds or rounds)
            for title, (stock, ours) in zip(titles, results, strict=True):
                ratio = statistics.median(stock) / statistics.median(ours)
                print(f"| {title} | {spread(stock)} | {spread(ours)} | {ratio:.1f}x |", flush=True)
                records[title] = {"stock_ns": stock, "cpool_ns": ours}
    except WorkerFailed as failure:
        sys.exit(str(failure))
    finally:
        for side in sides:
            side.close()
    if arguments.json:
        load = os.getloadavg()[0]
        report = {"date": time.time(), "load_at_end": load, "operations": records}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
