# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of the pool against its model, with atheris.

Build the extensions so that libFuzzer sees their branches, then run from the top folder:

    CC=clang LDSHARED="clang -shared" CPOOL_DEBUG=1 \
        CFLAGS="-fsanitize=fuzzer-no-link -fno-sanitize-coverage=stack-depth" \
        python setup.py build_ext --inplace
    python -m tests.fuzz.fuzz_pool WORK_FOLDER tests/fuzz/corpus/pool

A finding is written as ``crash-*``: add it to ``tests/fuzz/corpus/pool``, where
``tests/test_fuzz_corpus.py`` replays it. ``-merge=1 SMALL LARGE`` minimises a corpus.
"""

import logging
import os
import sys

import atheris

LIMITS = ["-max_len=512", "-timeout=60", "-rss_limit_mb=2048"]


def run_one(data: bytes) -> None:
    from . import streams

    streams.run(data)


def main() -> None:
    logging.disable(logging.CRITICAL)  # The pool tells of each refused reset.
    # Setup loads libFuzzer; the extensions, loaded after it, find their counters there.
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    atheris.Setup([*sys.argv, *LIMITS], run_one)
    run_one(b"")
    atheris.Fuzz()


if __name__ == "__main__":
    main()
