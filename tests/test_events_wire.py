# SPDX-License-Identifier: Apache-2.0
"""The wire format against bytes that vLLM wrote, and against vLLM itself where it is installed.

`GOLDEN` was printed by vLLM 0.32.0's own encoder:

    python tests/golden_events.py

with the Python of an environment that has vLLM. `CPOOL_VLLM_PYTHON` names that Python for the
differential tests below.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

msgspec = pytest.importorskip("msgspec", reason="encoding events needs cpool[events]")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from cpool.events.types import AllBlocksCleared, BlockRemoved, BlockStored  # noqa: E402
from cpool.events.wire import EventBatch, decode_batch, encode_batch  # noqa: E402

HERE = Path(__file__).parent
CASES = json.loads((HERE / "golden_events.json").read_text())


def unpack_case(case):
    """Events, timestamp and rank of a golden case; hex strings become bytes again."""

    def revive(value):
        if isinstance(value, dict) and set(value) == {"hex"}:
            return bytes.fromhex(value["hex"])
        if isinstance(value, list):
            return [revive(item) for item in value]
        return value

    types = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}
    events = []
    for event in case["events"]:
        fields = {name: revive(value) for name, value in event.items() if name != "type"}
        if fields.get("extra_keys"):
            fields["extra_keys"] = [
                None if keys is None else tuple(keys) for keys in fields["extra_keys"]
            ]
        events.append(types[event["type"]](**fields))
    return events, case["timestamp"], case["data_parallel_rank"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_bytes_are_those_that_vllm_wrote(case):
    events, timestamp, rank = unpack_case(case)
    assert encode_batch(events, timestamp, rank).hex() == case["payload"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_vllms_bytes_decode_to_the_same_events(case):
    events, timestamp, rank = unpack_case(case)
    batch = decode_batch(bytes.fromhex(case["payload"]))
    assert batch.ts == timestamp
    assert batch.data_parallel_rank == rank
    assert encode_batch(batch.events, batch.ts, batch.data_parallel_rank).hex() == case["payload"]
    assert [type(event) for event in batch.events] == [type(event) for event in events]


hashes = st.one_of(st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=40))
texts = st.one_of(st.none(), st.text(max_size=40))
numbers = st.one_of(st.none(), st.integers(0, 2**32))
extra_keys = st.one_of(
    st.none(),
    st.lists(
        st.one_of(
            st.none(),
            st.lists(
                st.one_of(st.text(max_size=5), st.tuples(st.text(max_size=5), st.integers(0, 99))),
                min_size=1,
                max_size=2,
            ).map(tuple),
        ),
        max_size=3,
    ),
)
stored = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, max_size=20),
    parent_block_hash=st.one_of(st.none(), hashes),
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=40),
    block_size=st.integers(1, 2**32),
    lora_id=numbers,
    medium=texts,
    lora_name=texts,
    extra_keys=extra_keys,
    group_idx=numbers,
    kv_cache_spec_kind=texts,
    kv_cache_spec_sliding_window=numbers,
    locality=texts,
    ownership=texts,
    session_id=texts,
)
removed = st.builds(
    BlockRemoved,
    block_hashes=st.lists(hashes, min_size=1, max_size=3),
    medium=texts,
    group_idx=numbers,
    locality=texts,
    ownership=texts,
)
events_lists = st.lists(st.one_of(stored, removed, st.just(AllBlocksCleared())), max_size=20)


@settings(max_examples=100, deadline=None)
@given(events=events_lists, timestamp=st.floats(0, 2e9), rank=st.one_of(st.none(), st.just(3)))
def test_a_batch_encodes_as_one_struct_would(events, timestamp, rank):
    whole = msgspec.msgpack.encode(EventBatch(timestamp, events, rank))
    assert encode_batch(events, timestamp, rank) == whole


def as_lists(value):
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    return value


@settings(max_examples=100, deadline=None)
@given(events=events_lists)
def test_both_forms_decode_to_the_same_events(events):
    as_maps = decode_batch(encode_batch(events, 1.0, 0))
    as_arrays = decode_batch(encode_batch(events, 1.0, 0, legacy_array=True))
    assert as_lists(msgspec.to_builtins(as_arrays)) == as_lists(msgspec.to_builtins(as_maps))


def test_the_array_form_is_that_of_an_array_like_struct():
    class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
        pass

    class BlockRemoved(KVCacheEvent):
        block_hashes: list[int]
        medium: str | None

    payload = encode_batch([BlockRemoved([7, 2**63], "GPU")], 1.0, None, legacy_array=True)
    assert payload == msgspec.msgpack.encode([1.0, [BlockRemoved([7, 2**63], "GPU")], None])


def test_array_events_of_old_versions_decode_with_what_they_have():
    old = msgspec.msgpack.encode(
        [1.5, [["BlockStored", [1, 2], None, [5, 6], 1, None], ["BlockRemoved", [1]]]]
    )
    batch = decode_batch(old)
    assert batch.events[0].block_hashes == [1, 2]
    assert batch.events[0].medium is None
    assert batch.events[1].block_hashes == [1]
    assert batch.data_parallel_rank is None


@pytest.mark.parametrize(
    "payload", [b"", b"\x93", msgspec.msgpack.encode([1.0, [["Nonsense"]]]), b"\xc0"]
)
def test_bytes_that_are_no_batch_are_refused(payload):
    with pytest.raises(msgspec.DecodeError):
        decode_batch(payload)


VLLM_CHECK = """
import sys
import msgspec
from vllm.distributed.kv_events import KVEventBatch
batch = msgspec.msgpack.Decoder(KVEventBatch).decode(sys.stdin.buffer.read())
sys.stdout.buffer.write(msgspec.msgpack.encode(batch))
"""


def test_vllm_reads_our_bytes_and_writes_them_again():
    python = os.environ.get("CPOOL_VLLM_PYTHON")
    if not python:
        pytest.skip("CPOOL_VLLM_PYTHON does not name the Python of an environment with vLLM")
    events = [event for case in CASES for event in unpack_case(case)[0]]
    payload = encode_batch(events, 1234.5, 7)
    again = subprocess.run(
        [python, "-c", VLLM_CHECK], input=payload, capture_output=True, check=True, cwd="/"
    )
    assert again.stdout == payload


def test_the_golden_bytes_are_what_vllm_writes_today():
    python = os.environ.get("CPOOL_VLLM_PYTHON")
    if not python:
        pytest.skip("CPOOL_VLLM_PYTHON does not name the Python of an environment with vLLM")
    written = subprocess.run(
        [python, str(HERE / "golden_events.py")], capture_output=True, check=True, cwd="/"
    )
    assert json.loads(written.stdout) == CASES
