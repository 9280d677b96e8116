# SPDX-License-Identifier: Apache-2.0
"""Pictures of growth: time an operation and bytes a block over the pool's size."""

from profiling.cases import HASH_WIDTH
from profiling.operations import OPERATIONS
from profiling.report import NAMES, case_of

PANELS = [
    "allocate_evicting_aged", "register_aged", "find_random", "find_missing",
    "find_prefix_cold", "touch", "free_shuffled", "evict",
]  # fmt: skip
COLOURS = {"stock": "#d55e00", "handles": "#56b4e9", "ids": "#0072b2", "floor": "#666666"}


def draw(results, folder):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "cpool", "font.size": 9})
    import matplotlib.pyplot as plt

    if results["times"]:
        save(draw_times(plt, results), folder, "time")
    if results["memory"]:
        save(draw_memory(plt, results["memory"]), folder, "memory")


def save(figure, folder, name):
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    figure.savefig(folder / f"{name}.png", dpi=110)


def draw_times(plt, results):
    figure, axes = plt.subplots(2, 4, figsize=(10, 5), sharex=True, layout="constrained")
    records = [r for r in results["times"] if case_of(r)[1:] == (HASH_WIDTH, 1)]
    for axis, operation in zip(axes.flat, PANELS, strict=True):
        for who, label in {**NAMES, "floor": "bare C loop on this memory"}.items():
            style = ":" if who == "floor" else "-"
            points = sorted(
                (r["num_blocks"], r["median_ns"], r["low_ns"], r["high_ns"])
                for r in records
                if (r["implementation"], r["operation"]) == (who, operation)
            )
            if points:
                x, middle, low, high = zip(*points, strict=True)
                axis.plot(
                    x, middle, style, marker="o", markersize=3, color=COLOURS[who], label=label
                )
                axis.fill_between(x, low, high, color=COLOURS[who], alpha=0.2, linewidth=0)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(OPERATIONS[operation][0], fontsize=9)
        axis.grid(alpha=0.3, which="major")
    for axis in axes[-1]:
        axis.set_xlabel("blocks in the pool")
    for axis in axes[:, 0]:
        axis.set_ylabel("ns a block")
    by_label = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        by_label.update(zip(labels, handles, strict=True))
    figure.legend(by_label.values(), by_label.keys(), loc="outside upper center", ncols=4)
    return figure


def draw_memory(plt, records):
    figure, axis = plt.subplots(figsize=(5.5, 3.5), layout="constrained")
    styles = {1: "-", 2: "--", 5: ":"}
    for who, name in (("stock", "stock vLLM"), ("ids", "cpool")):
        for keys, style in styles.items():
            points = sorted(
                (r["num_blocks"], r["filled"] / r["num_blocks"])
                for r in records
                if (r["implementation"], r["method"], r["hash_width"], r["keys_per_block"])
                == (who, "rss", HASH_WIDTH, keys)
            )
            if points:
                axis.plot(
                    *zip(*points, strict=True), linestyle=style, marker="o", markersize=3,
                    color=COLOURS[who],
                    label=f"{name}, {keys} key{'' if keys == 1 else 's'} a block",
                )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("blocks in the pool")
    axis.set_ylabel("bytes a block (RSS)")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    return figure
