# SPDX-License-Identifier: Apache-2.0
"""Time of every operation: one session per pool, the implementations taking turns."""

import statistics

from profiling.floor import FloorInTurns, compiled
from profiling.operations import OPERATIONS, SETUPS, phases, sample_size
from profiling.pair import ask_all


class Disagreement(AssertionError):
    """Two implementations took different decisions on the same operations."""


def run_session(drivers, case, say):
    """Walk all implementations through one session, and what bounds them: "floor" (see `floor`).

    Args:
        drivers: Workers, in the order of their turns.
        case: Dict with num_blocks, hash_width, keys_per_block, rounds, construct_rounds,
            sample_blocks (at most) and aging_passes.
        say: Called with a line of progress.

    Returns:
        List of records: implementation, operation and samples in ns a block.
    """
    rounds = case["rounds"]
    session = {
        key: case[key] for key in ("num_blocks", "hash_width", "keys_per_block", "aging_passes")
    }
    session["sample_blocks"] = sample_size(case["num_blocks"], rounds, case["sample_blocks"])
    ask_all(drivers, do="begin", session=session)
    with compiled() as program:
        floor = FloorInTurns(program, case["num_blocks"], case["hash_width"]) if program else None
        samples = take_samples(drivers, floor, case, say)
        if floor:
            floor.close()
    for driver in drivers:
        driver.end_session()
    return [
        {
            "implementation": implementation,
            "operation": name,
            "num_blocks": case["num_blocks"],
            "hash_width": case["hash_width"],
            "keys_per_block": case["keys_per_block"],
            **summary(values),
        }
        for (implementation, name), values in samples.items()
    ]


def take_samples(drivers, floor, case, say):
    """(implementation, operation) -> ns a block of each round."""
    samples = {}
    rounds = case["rounds"]
    for names, repeats in phases(rounds, case["construct_rounds"], case["keys_per_block"]):
        say(", ".join(names))
        for _ in range(repeats):
            for name in names:
                answers = take_turns(drivers, name)
                if len({answer.get("checksum") for answer in answers}) != 1:
                    raise Disagreement(f"{name}: the implementations chose different blocks")
                if name in OPERATIONS:
                    for driver, answer in zip(drivers, answers, strict=True):
                        nanoseconds = answer["seconds"] / answer["units"] * 1e9
                        samples.setdefault((driver.implementation, name), []).append(nanoseconds)
                nanoseconds = floor.measure(name) if floor else None
                if nanoseconds is not None:
                    samples.setdefault(("floor", name), []).append(nanoseconds)
    return samples


def take_turns(drivers, name):
    if name in SETUPS:
        return ask_all(drivers, do="run", name=name)
    return [driver.ask(do="run", name=name) for driver in drivers]


def summary(samples):
    """Median, quartiles and all samples, in ns a block."""
    ordered = sorted(samples)
    low, _, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else (ordered[0],) * 3
    return {
        "median_ns": statistics.median(ordered),
        "low_ns": low,
        "high_ns": high,
        "samples_ns": samples,
    }
