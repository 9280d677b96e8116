# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of the pool against its model, with atheris.

Build the extensions so that libFuzzer sees their branches, then run from the top folder:

    CC=clang LDSHARED="clang -shared" CPOOL_DEBUG=1 \
        CFLAGS=-fsanitize=fuzzer-no-link \
        python setup.py build_ext --inplace
    LD_PRELOAD=$(python -c 'import atheris; print(atheris.path())')/ubsan_with_fuzzer.so \
        python -m tests.fuzz.fuzz_pool WORK_FOLDER tests/fuzz/corpus/pool

A finding is written as ``crash-*``: add it to ``tests/fuzz/corpus/pool``, where
``tests/test_fuzz_corpus.py`` replays it. ``-merge=1 SMALL LARGE`` minimises a corpus.
"""

import logging
import sys

import atheris

from . import streams

LIMITS = ["-max_len=512", "-timeout=60", "-rss_limit_mb=2048"]


def run_one(data: bytes) -> None:
    streams.run(data)


def main() -> None:
    logging.disable(logging.CRITICAL)  # The pool tells of each refused reset.
    atheris.Setup([*sys.argv, *LIMITS], run_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
