# SPDX-License-Identifier: Apache-2.0
"""Every input that the fuzzers kept: streams on pool and model alike, bytes for each reader."""

import random
from pathlib import Path

import pytest

from .fuzz import streams

CORPORA = Path(__file__).parent / "fuzz" / "corpus"


def test_the_streams_of_the_corpus() -> None:
    files = sorted((CORPORA / "pool").iterdir())
    assert len(files) > 10
    assert sum(streams.run(file.read_bytes()) for file in files) > 100


@pytest.mark.parametrize("seed", range(8))
def test_any_bytes_are_a_stream(seed: int) -> None:
    assert streams.run(random.Random(seed).randbytes(400)) > 10


def test_the_inputs_of_the_readers() -> None:
    pytest.importorskip("msgspec", reason="decodes events")
    from .fuzz import garbage

    readers = {garbage.run(file.read_bytes()) for file in (CORPORA / "garbage").iterdir()}
    assert readers == {read.__name__ for read in garbage.READERS}
