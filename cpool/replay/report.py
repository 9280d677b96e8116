# SPDX-License-Identifier: Apache-2.0
"""The result of a replay: a table for people, a JSON object for programs."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from cpool.replay.ceiling import Ceiling
from cpool.replay.records import Trace
from cpool.replay.replay import Run

# "Nearly as good as an infinite cache", for the hint under the table.
_GOOD_SHARE = 0.95


@dataclass
class Result:
    """All that a report says."""

    trace: Trace
    ceiling: Ceiling
    runs: list[Run]
    parameters: dict[str, Any]
    parse_seconds: float
    is_interrupted: bool


def to_json(result: Result) -> dict[str, Any]:
    """The report as an object of JSON types; counts are exact, times in seconds."""
    trace, ceiling = result.trace, result.ceiling
    return {
        "versions": versions(),
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "sha256": trace.sha256(),
            "block_size": trace.block_size,
            "block_size_from": trace.block_size_from,
            "skipped": trace.num_skipped(),
            "requests": ceiling.num_requests,
            "input_tokens": ceiling.input_tokens,
            "block_references": ceiling.block_references,
            "unique_blocks": ceiling.unique_blocks,
            "max_request_blocks": ceiling.max_request_blocks,
            "ceiling": ceiling.hit_rate,
        },
        "parameters": result.parameters | trace.parameters,
        "interrupted": result.is_interrupted,
        "parse_seconds": result.parse_seconds,
        "runs": [_run_to_json(run, ceiling) for run in result.runs],
    }


def _run_to_json(run: Run, ceiling: Ceiling) -> dict[str, Any]:
    return {
        "blocks": run.engine.num_blocks,
        "requests": run.num_requests,
        "rejected": run.num_rejected,
        "input_tokens": run.input_tokens,
        "hit_tokens": run.hit_tokens,
        "token_hit_rate": run.token_hit_rate,
        "ceiling": ceiling.hit_rate,
        "evictions": run.engine.num_evictions,
        "pool_bytes": run.engine.nbytes,
        "block_references": run.block_references,
        "block_references_per_second": run.block_references_per_second,
        "seconds": run.seconds,
    } | run.engine.details()


def versions() -> dict[str, str]:
    try:
        own = version("cpool")
    except PackageNotFoundError:
        own = "not installed"
    return {"cpool": own, "python": platform.python_version(), "numpy": np.__version__}


def to_text(result: Result) -> str:
    """The report as lines for a terminal, 100 columns wide at most."""
    trace, ceiling = result.trace, result.ceiling
    lines = [
        f"{trace.name}: {ceiling.num_requests:,} requests, {ceiling.input_tokens:,} input tokens",
        f"{ceiling.block_references:,} block references to {ceiling.unique_blocks:,} distinct"
        f" full blocks of {trace.block_size} tokens (block size {trace.block_size_from})",
        f"read in {result.parse_seconds:.2f} s"
        f"; ceiling (token hit rate of an infinite cache): {ceiling.hit_rate:.4f}",
    ]
    if trace.num_skipped():
        lines.append(f"skipped as malformed: {trace.num_skipped():,}")
    if result.is_interrupted:
        lines.append("INTERRUPTED: what follows is the part that was done")
    lines += ["", *_table(result.runs, ceiling), "", *_reasons(result.runs)]
    hint = _hint(result)
    return "\n".join([*lines, hint] if hint else lines)


def _table(runs: list[Run], ceiling: Ceiling) -> list[str]:
    header = (
        "blocks",
        "requests",
        "rejected",
        "hit rate",
        "of ceiling",
        "evictions",
        "pool MiB",
        "M refs/s",
        "seconds",
    )
    matches = [run.engine.details().get("match") for run in runs]
    rows = [header]
    for run in runs:
        share = run.token_hit_rate / ceiling.hit_rate if ceiling.hit_rate else 1.0
        rows.append(
            (
                f"{run.engine.num_blocks:,}",
                f"{run.num_requests:,}",
                f"{run.num_rejected:,}",
                f"{run.token_hit_rate:.4f}",
                f"{share:.1%}",
                f"{run.engine.num_evictions:,}",
                f"{run.engine.nbytes / 2**20:.2f}",
                f"{run.block_references_per_second / 1e6:.2f}",
                f"{run.seconds:.2f}",
            )
        )
    if any(matches):
        rows = [(match or "", *row) for match, row in zip(["match", *matches], rows, strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _reasons(runs: list[Run]) -> list[str]:
    """What the hits missed and why, for engines that say so."""
    lines = []
    for run in runs:
        details = run.engine.details()
        for reason, count in details.get("reasons", {}).items():
            share = count["missed_tokens"] / run.input_tokens if run.input_tokens else 0.0
            lines.append(
                f"{details['match']}, {run.engine.num_blocks:,} blocks: {reason}:"
                f" {count['requests']:,} requests missed {share:.1%} of all input tokens"
            )
    return [*lines, ""] if lines else []


def _hint(result: Result) -> str:
    """The smallest capacity that is nearly as good as any, in words."""
    goal = _GOOD_SHARE * result.ceiling.hit_rate
    good = [run.engine.num_blocks for run in result.runs if run.token_hit_rate >= goal]
    is_grouped = any(run.engine.details() for run in result.runs)
    if not good or is_grouped or result.is_interrupted or not result.ceiling.hit_tokens:
        return ""
    tokens = min(good) * result.trace.block_size
    return (
        f"{min(good):,} blocks ({tokens:,} tokens of KV cache) reach {_GOOD_SHARE:.0%}"
        " of what an infinite cache would."
    )
