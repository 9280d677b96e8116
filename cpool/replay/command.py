# SPDX-License-Identifier: Apache-2.0
"""The ``replay`` subcommand: arguments in, report out."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter

from cpool.prefix.groups import Group, why_coarse
from cpool.replay.ceiling import Ceiling
from cpool.replay.engine import Engine, FullAttentionEngine
from cpool.replay.groups import (
    check_units,
    max_useful_blocks,
    min_request_blocks,
    parse_groups,
)
from cpool.replay.hybrid import MAX_CHUNK, HybridEngine
from cpool.replay.open_trace import open_trace
from cpool.replay.progress import Progress
from cpool.replay.records import Request, Trace, TraceError
from cpool.replay.replay import Run, Timed, replay
from cpool.replay.report import Result, to_json, to_text
from cpool.replay.sweep import choose_capacities
from cpool.replay.workload import DEFAULT_BLOCK_SIZE, PRESETS, generate

_BAD_INPUT = 2
_INTERRUPTED = 130  # as a shell would say: 128 + SIGINT

_MAX_BLOCKS = 2**32 - 3  # ids are 32 bits wide, and one is the null block's

DESCRIPTION = """\
Replay a trace of requests through a block pool and report the prefix-cache hit rate at several
capacities. A trace is Mooncake-layout JSONL with hash_ids (plain, .gz, .xz, .zst, - for standard
input), or Weka's sessions (a .json file, a folder, a tar). Without one, requests are made up.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="file, folder, or -")
    parser.add_argument(
        "--blocks",
        type=_capacities,
        metavar="N,N,...",
        help="usable blocks of each pool to try (default: shares of the trace's working set;"
        " the trace is then held in memory, 8 bytes a block reference)",
    )
    parser.add_argument(
        "--block-size",
        type=_positive,
        metavar="B",
        help=f"tokens a block (default: inferred from the trace; {DEFAULT_BLOCK_SIZE} without one)",
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="stop after N requests")
    parser.add_argument(
        "--json", metavar="FILE", help="write the report as JSON (-: to standard output, no table)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no table")
    parser.add_argument(
        "--skip-bad", action="store_true", help="count malformed lines and go on (default: stop)"
    )
    parser.add_argument(
        "--hash-bytes",
        type=int,
        choices=(16, 32),
        default=32,
        help="width of a block's key (default: 32, as SHA-256)",
    )
    parser.add_argument(
        "--groups",
        type=_groups,
        metavar="G,G,...",
        help="the model's groups of layers, which share each pool: full:BLOCK, mamba:BLOCK,"
        " swa:BLOCK:WINDOW, chunked:BLOCK:CHUNK, in tokens (default: full attention with the"
        " trace's block size); replayed coarse and, where the groups allow it, fine",
    )
    parser.add_argument(
        "--match-unit",
        type=_positive,
        metavar="N",
        help="tokens between two boundaries at which a fine match may end, a multiple of the"
        " trace's block size (default: that); with --groups",
    )
    workload = parser.add_argument_group("made-up requests, if no trace is given")
    workload.add_argument(
        "--workload", choices=tuple(PRESETS), help="what kind of users (default: agent)"
    )
    workload.add_argument("--requests", type=_positive, metavar="N", help="how many")
    workload.add_argument("--seed", type=_natural, metavar="S", help="default: 0")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say; the exit code."""
    try:
        start = perf_counter()
        trace = _open(args)
        # Sessions are parsed, and the first lines of other traces, when a trace is opened.
        result = _replay(trace, args, open_seconds=perf_counter() - start)
        if args.json:
            _write_json(result, args.json)
    except TraceError as error:
        print(f"cpool replay: {error}", file=sys.stderr)
        return _BAD_INPUT
    except KeyboardInterrupt:
        print("cpool replay: interrupted before the first request", file=sys.stderr)
        return _INTERRUPTED
    if not args.quiet and args.json != "-":
        print(to_text(result))
    return _INTERRUPTED if result.is_interrupted else 0


def _open(args: argparse.Namespace) -> Trace:
    made_up = {"--workload": args.workload, "--requests": args.requests, "--seed": args.seed}
    if args.trace is None:
        preset = args.workload or "agent"
        return generate(preset, args.requests, args.seed or 0, args.block_size)
    given = [option for option, value in made_up.items() if value is not None]
    if given:
        raise TraceError(f"{given[0]} is for made-up requests, but a trace is given")
    return open_trace(args.trace, args.block_size, args.skip_bad)


def _check_groups(trace: Trace, args: argparse.Namespace) -> int:
    """The match unit in tokens, once it is known to suit trace and groups."""
    unit = args.match_unit or trace.block_size
    if args.groups is None:
        if args.match_unit is not None:
            raise TraceError("--match-unit is for --groups")
        return unit
    try:
        check_units(args.groups, unit, trace.block_size)
        for match in _matches(args.groups, unit):
            HybridEngine(1, args.groups, match, unit, trace.block_size)
    except ValueError as error:
        raise TraceError(f"--groups: {error}") from error
    return unit


def _matches(groups: tuple[Group, ...], unit: int) -> tuple[str, ...]:
    return ("coarse",) if why_coarse(groups, unit) else ("coarse", "fine")


def _engines(
    size: int, trace: Trace, groups: tuple[Group, ...] | None, unit: int
) -> Iterator[Engine]:
    if groups is None:
        yield FullAttentionEngine(size, trace.block_size)
        return
    for match in _matches(groups, unit):
        yield HybridEngine(size, groups, match, unit, trace.block_size)


def _choose_capacities(
    ceiling: Ceiling, trace: Trace, groups: tuple[Group, ...] | None, longest: int
) -> list[int]:
    if groups is None:
        return choose_capacities(ceiling.unique_blocks, ceiling.max_request_blocks)
    useful = max_useful_blocks(
        groups, ceiling.unique_blocks * trace.block_size, ceiling.num_requests
    )
    # A state has to be kept while the next one is computed, and a tail while it is copied.
    smallest = min_request_blocks(groups, longest, MAX_CHUNK) + 2 * len(groups)
    return choose_capacities(useful, smallest)


def _replay(trace: Trace, args: argparse.Namespace, open_seconds: float) -> Result:
    match_unit = _check_groups(trace, args)
    ceiling = Ceiling(trace.block_size)
    timed = Timed(islice(trace.requests, args.limit))
    requests: Iterable[Request] = ceiling.watch(timed)
    progress = Progress(args.quiet)
    capacities = args.blocks
    runs: list[Run] = []
    is_interrupted = False
    try:
        if capacities is None:
            progress.start("reading", trace.fraction_read)
            requests = held = _hold(requests, progress)
            longest = max((request.input_length for request in held), default=1)
            capacities = _choose_capacities(ceiling, trace, args.groups, longest)
            progress.start("replaying", len(held))
        else:
            progress.start("replaying", trace.fraction_read)
        runs += [
            Run(engine)
            for size in capacities
            for engine in _engines(size, trace, args.groups, match_unit)
        ]
        replay(requests, runs, trace.block_size, args.hash_bytes, progress.step)
    except KeyboardInterrupt:
        is_interrupted = True
    except MemoryError:
        raise TraceError(f"not enough memory for pools of {capacities} blocks") from None
    finally:
        progress.close()
    if not ceiling.num_requests and not is_interrupted:
        raise TraceError(f"{trace.name}: the trace has no requests")
    parameters = {
        "blocks": capacities,
        "block_size": args.block_size,
        "limit": args.limit,
        "skip_bad": args.skip_bad,
        "hash_bytes": args.hash_bytes,
    }
    if args.groups is not None:
        parameters["match_unit"] = match_unit
    parse_seconds = open_seconds + timed.seconds
    return Result(trace, ceiling, runs, parameters, parse_seconds, is_interrupted)


def _hold(requests: Iterable[Request], progress: Progress) -> list[Request]:
    held = []
    for request in requests:
        held.append(request)
        progress.step()
    return held


def _write_json(result: Result, path: str) -> None:
    text = json.dumps(to_json(result), indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def _number(text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{value} must be from {low} to {high}")
    return value


def _positive(text: str) -> int:
    return _number(text, 1, 2**62)


def _natural(text: str) -> int:
    return _number(text, 0, 2**62)


def _capacities(text: str) -> list[int]:
    return [_number(item, 1, _MAX_BLOCKS) for item in text.split(",")]


def _groups(text: str) -> tuple[Group, ...]:
    try:
        return parse_groups(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
