# SPDX-License-Identifier: Apache-2.0
"""Results as Markdown tables."""

from profiling.cases import FLOOR_GOALS, GOALS, HASH_WIDTH, MILLION, WARM_PREFIX_GOAL_NS
from profiling.operations import OPERATIONS

NAMES = {"stock": "stock vLLM", "handles": "cpool, vLLM's methods", "ids": "cpool, block ids"}


def as_markdown(results):
    machine = results["machine"]
    lines = [
        "# cpool, measured",
        "",
        f"{results['date']}, {machine['processor']}, {machine['cpus']} CPUs, load "
        f"{machine['load_at_start']:.1f} at the start and {machine['load_at_end']:.1f} at the "
        f"end, transparent huge pages {machine['transparent_huge_pages']}, Python "
        f"{machine['python']}, vLLM {results['versions']['vllm'] or 'not measured'}.",
        "",
    ]
    cases = sorted({case_of(record) for record in results["times"]})
    main = (MILLION, HASH_WIDTH, 1)
    for case in sorted(cases, key=lambda case: (case != main, case[1:] != main[1:], case)):
        lines += time_table(results, case)
    if results["times"]:
        lines += growth_table(results)
    if results["snapshots"]:
        lines += snapshot_table(results["snapshots"])
    if results["memory"]:
        lines += memory_tables(results["memory"])
    if results["floor"]:
        lines += floor_table(results["floor"])
    return "\n".join(lines) + "\n"


def case_of(record):
    return record["num_blocks"], record["hash_width"], record["keys_per_block"]


def table(header, rows):
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def number(value):
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def with_spread(record):
    if record is None:
        return ""
    return f"{number(record['median_ns'])} ({number(record['low_ns'])}-{number(record['high_ns'])})"


def above_floor(ours, floor, goal):
    if ours is None or floor is None:
        return ""
    value = ours["median_ns"] / floor["median_ns"]
    return times(value, goal, goal is None or value <= goal)


def times(value, goal, is_met):
    text = f"{value:.1f}x"
    return text if goal is None else f"{text} (goal {goal}x{')' if is_met else ', **missed**)'}"


def ratio(stock, ours, goal):
    if stock is None or ours is None:
        return ""
    value = stock["median_ns"] / ours["median_ns"]
    return times(value, goal, goal is None or value >= goal)


def time_table(results, case):
    num_blocks, width, keys = case
    records = {
        (record["implementation"], record["operation"]): record
        for record in results["times"]
        if case_of(record) == case
    }
    rows = []
    for name, (title, _) in OPERATIONS.items():
        stock, handles, ids = (records.get((who, name)) for who in ("stock", "handles", "ids"))
        floor = records.get(("floor", name))
        if not (stock or handles or ids):
            continue
        goal, handles_goal = GOALS.get(name, (None, None)) if num_blocks == MILLION else (None,) * 2
        faster = ratio(stock, ids, goal)
        if name == "find_prefix_warm" and num_blocks == MILLION and ids:
            met = ids["median_ns"] <= WARM_PREFIX_GOAL_NS
            faster += f" (goal {WARM_PREFIX_GOAL_NS:.1f} ns" + (")" if met else ", **missed**)")
        rows.append(
            [
                title,
                with_spread(stock), with_spread(handles), with_spread(ids), with_spread(floor),
                faster,
                above_floor(ids, floor, FLOOR_GOALS.get(name) if num_blocks == MILLION else None),
                ratio(stock, handles, handles_goal),
            ]
        )  # fmt: skip
    return [
        f"## {num_blocks:,} blocks, {width}-byte hashes, {keys} "
        f"key{'' if keys == 1 else 's'} a block",
        "",
        "ns a block: median and middle half of the rounds. The floor is what a bare C loop with "
        "huge pages needs for the least of that work, in turns with the others "
        "(profiling/floor.c).",
        "",
        *table(
            [
                "operation",
                *NAMES.values(),
                "floor",
                "stock / ids",
                "ids / floor",
                "stock / methods",
            ],
            rows,
        ),
    ]


def growth_table(results):
    sizes = sorted({r["num_blocks"] for r in results["times"] if r["num_blocks"] >= 100_000})
    if len(sizes) < 2:
        return []
    medians = {
        (record["implementation"], record["operation"], record["num_blocks"]): record["median_ns"]
        for record in results["times"]
        if case_of(record)[1:] == (HASH_WIDTH, 1)
    }
    rows = []
    for name, (title, _) in OPERATIONS.items():
        row = [title]
        for who in NAMES:
            first, last = (medians.get((who, name, size)) for size in (sizes[0], sizes[-1]))
            row.append(f"{last / first:.2f}" if first and last else "")
        if any(row[1:]):
            rows.append(row)
    return [
        f"## Growth from {sizes[0]:,} to {sizes[-1]:,} blocks",
        "",
        "Time an operation, last size over first; the goal is at most 3.",
        "",
        *table(["operation", *NAMES.values()], rows),
    ]


def snapshot_table(records):
    rows = [
        [f"{r['num_blocks']:,}", f"{r['seconds'] * 1e3:.1f}",
         number(r["seconds"] / r["num_blocks"] * 1e9)]
        for r in records
    ]  # fmt: skip
    return [
        "## Snapshot",
        "",
        "All that is resident, as events, once; stock has no such call.",
        "",
        *table(["blocks", "ms", "ns a block"], rows),
    ]


def memory_tables(records):
    lines = [
        "## Memory, bytes a block",
        "",
        "Every block registered; digests that requests hold are not counted. RSS and "
        "tracemalloc are differences to before the pool, memray's peak is its own.",
        "",
    ]
    rows = []
    for record in records:
        size = record["num_blocks"]
        rows.append(
            [
                "stock vLLM" if record["implementation"] == "stock" else "cpool",
                record["method"], f"{size:,}", str(record["hash_width"]),
                str(record["keys_per_block"]),
                *(
                    number(record[key] / size) if key in record else ""
                    for key in ("constructed", "filled", "peak", "nbytes")
                ),
                f"{record['collection_seconds'] * 1e3:.1f}"
                if "collection_seconds" in record else "",
            ]
        )  # fmt: skip
    header = [
        "pool", "method", "blocks", "hash", "keys a block", "empty", "filled", "peak",
        "pool.nbytes", "full collection, ms",
    ]  # fmt: skip
    return lines + table(header, rows)


def floor_table(records):
    figures = [key for key in records[0] if key not in ("num_blocks", "hash_width", "pages")]
    rows = [
        [
            f"{record['num_blocks']:,}", str(record["hash_width"]),
            record["pages"].replace("_", " "), *(number(record[name]) for name in figures),
        ]
        for record in records
    ]  # fmt: skip
    return [
        "## What the memory allows, ns an element",
        "",
        "Described at the top of profiling/floor.c.",
        "",
        *table(["blocks", "hash", "pages", *(name.replace("_", " ") for name in figures)], rows),
    ]
