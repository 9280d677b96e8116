# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of the pool against its model, with atheris.

Build the extensions so that libFuzzer sees their branches, then run from the top folder:

    CC=clang CFLAGS=-fsanitize=fuzzer-no-link CPOOL_DEBUG=1 python setup.py build_ext --inplace
    python -m tests.fuzz.fuzz_pool WORK_FOLDER tests/fuzz/corpus/pool

A finding is written as ``crash-*``: add it to ``tests/fuzz/corpus/pool``, where
``tests/test_fuzz_corpus.py`` replays it. ``-merge=1`` minimises a corpus.
"""

import os
import sys

import atheris

# The extension's branches are counted by clang; of Python only what decides about them.
with atheris.instrument_imports(include=["tests.model"]):
    from . import streams


def run_one(data: bytes) -> None:
    streams.run(data)


def main() -> None:
    atheris.Setup([*sys.argv, "-max_len=768", "-timeout=30", "-rss_limit_mb=2048"], run_one)
    atheris.Fuzz()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    main()
