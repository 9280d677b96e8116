# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of the readers of foreign bytes, with atheris.

As `fuzz_pool.py`, with ``tests.fuzz.fuzz_garbage`` and ``tests/fuzz/corpus/garbage``.
"""

import logging
import sys

import atheris

with atheris.instrument_imports(include=["cpool", "json", "tarfile"]):
    from . import garbage

# A gigabyte for at most four kilobytes of input: what numpy and Python take is most of it.
LIMITS = ["-max_len=4096", "-timeout=60", "-rss_limit_mb=1024"]


def run_one(data: bytes) -> None:
    garbage.run(data)


def main() -> None:
    logging.disable(logging.CRITICAL)
    atheris.Setup([*sys.argv, *LIMITS], run_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
