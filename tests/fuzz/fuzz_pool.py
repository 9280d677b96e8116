# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of the pool against its model, with atheris.

Build the extensions so that libFuzzer sees their branches, then run from the top folder:

    CC=clang CFLAGS=-fsanitize=fuzzer-no-link CPOOL_DEBUG=1 python setup.py build_ext --inplace
    python -m tests.fuzz.fuzz_pool WORK_FOLDER tests/fuzz/corpus/pool

A finding is written as ``crash-*``: add it to ``tests/fuzz/corpus/pool``, where
``tests/test_fuzz_corpus.py`` replays it. ``-merge=1`` minimises a corpus.
"""

import logging
import sys

import atheris

from . import streams


def run_one(data: bytes) -> None:
    streams.run(data)


def main() -> None:
    logging.disable(logging.CRITICAL)   # refused resets are told of
    atheris.Setup([*sys.argv, "-max_len=512", "-timeout=30", "-rss_limit_mb=2048"], run_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
