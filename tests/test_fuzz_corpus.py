# SPDX-License-Identifier: Apache-2.0
"""Every stream that the fuzzer kept runs on pool and model alike."""

import random
from pathlib import Path

import pytest

from .fuzz import streams

CORPUS = Path(__file__).parent / "fuzz" / "corpus" / "pool"


def test_the_streams_of_the_corpus() -> None:
    files = sorted(CORPUS.iterdir())
    assert len(files) > 10
    assert sum(streams.run(file.read_bytes()) for file in files) > 100


@pytest.mark.parametrize("seed", range(8))
def test_any_bytes_are_a_stream(seed: int) -> None:
    assert streams.run(random.Random(seed).randbytes(400)) > 10
