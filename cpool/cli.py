# SPDX-License-Identifier: Apache-2.0
"""The ``cpool`` command. Each subcommand lives beside the code that it runs."""

import argparse
from collections.abc import Sequence

from cpool.replay import command as replay_command
from cpool.replay.report import versions
from cpool.vllm import doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="cpool", description="A KV-cache block pool, and what it would do for you."
    )
    parser.add_argument("--version", action="version", version=f"cpool {versions()['cpool']}")
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    replay_command.add_arguments(
        subcommands.add_parser("replay", help="replay a trace at several cache sizes")
    )
    subcommands.add_parser(
        "doctor", help="show which block pool vLLM uses here, and prove it"
    ).set_defaults(run=lambda _: doctor.main([]))
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
