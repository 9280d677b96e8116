# SPDX-License-Identifier: Apache-2.0
import gzip
import io
import json
import lzma
import sys
import tarfile

import numpy as np
import pytest

from cpool.replay import mooncake
from cpool.replay.open_trace import open_trace
from cpool.replay.records import TraceError


def line(input_length, hash_ids, **more):
    return json.dumps({"input_length": input_length, "hash_ids": hash_ids} | more)


def trace_of(tmp_path, *lines, **options):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{text}\n" for text in lines))
    return open_trace(str(path), **options)


def ids_of(trace):
    return [request.hash_ids.tolist() for request in trace.requests]


LINES = [line(33, [0, 1, 2], timestamp=5, output_length=7), line(48, [0, 1, 3]), line(40, [0, 1])]


def test_a_request_is_read_with_all_its_numbers(tmp_path):
    first, second, _ = trace_of(tmp_path, *LINES, block_size=16).requests
    assert first[:3] == (5, 33, 7)
    assert first.hash_ids.dtype == np.int64
    assert second[:3] == (0, 48, 0)


def test_ceil_and_floor_lines_may_be_mixed_when_the_block_size_is_given(tmp_path):
    trace = trace_of(tmp_path, *LINES, block_size=16)
    assert ids_of(trace) == [[0, 1, 2], [0, 1, 3], [0, 1]]
    assert trace.block_size_from == "given"


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("name", ["trace.jsonl", "no_suffix"])
def test_compressed_traces_are_told_by_their_content(tmp_path, name, zstd):
    text = "\n".join(LINES).encode()
    if zstd:
        packers = [pytest.importorskip("zstandard").compress]
    else:
        packers = [bytes, gzip.compress, lzma.compress]
    for pack in packers:
        path = tmp_path / name
        path.write_bytes(pack(text))
        assert ids_of(open_trace(str(path), block_size=16)) == [[0, 1, 2], [0, 1, 3], [0, 1]]


def test_the_package_that_a_zstd_trace_needs_is_named(tmp_path, monkeypatch):
    for module in ("compression", "zstandard"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd and so on")
    with pytest.raises(TraceError, match=r"install the package 'zstandard'"):
        open_trace(str(path))


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_truncated_archive_is_an_error_even_if_bad_lines_are_skipped(tmp_path, pack):
    packed = pack("\n".join(LINES * 500).encode())
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz"):
        list(open_trace(str(path), 16, skip_bad=True).requests)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON object is needed, not a list"),
        ("null", "not null"),
        ('{"input_length": 16}', "hash_ids is missing"),
        ('{"hash_ids": [1]}', "input_length is missing"),
        ('{"requests": []}', r"a Weka session must be in a \.json file"),
        (line(-3, []), "input_length is -3; it must be at least 1"),
        (line(0, []), "input_length is 0; it must be at least 1"),
        (line("16", [1]), 'input_length is "16"; it must be a number'),
        (line(True, [1]), "input_length is true"),
        (line(float("nan"), [1]), "input_length is NaN"),
        (line(16, [1], timestamp=-1), "timestamp is -1"),
        (line(16, [1], output_length=None), "output_length is null"),
        (line(16, 7), "hash_ids must be a list, not 7"),
        (line(32, [1, 2.5]), r"hash_ids\[1\] is 2.5"),
        (line(32, [1, True]), r"hash_ids\[1\] is true"),
        (line(32, ["1", 2]), r'hash_ids\[0\] is "1"'),
        (line(32, [1, -2]), r"hash_ids\[1\] is -2; it must be an integer from 0"),
        (line(32, [1, 2**63]), rf"hash_ids\[1\] is {2**63}"),
        (line(32, [1, 10**30]), r"hash_ids\[1\] is 1000000"),
        ('{"input_length": 32, "hash_ids": [1,,2]}', "not JSON"),
        ('{"input_length": 32, "hash_ids": [1,2,]}', "not JSON"),
        ('{"input_length": 32, "hash_ids": [1 2]}', "not JSON"),
        ('{"input_length": 32, "hash_ids": [,]}', "not JSON"),
        ('{"input_length": 32, "hash_ids": [1, 2}', "not JSON"),
        (line(40, [1]), "1 hash_ids for 40 tokens; with block size 16 there must be 2 or 3"),
        (line(32, [1, 2, 3]), "3 hash_ids for 32 tokens; .* there must be 2$"),
    ],
)
def test_a_malformed_line_is_named_with_its_fault(tmp_path, text, reason):
    trace_lines = (LINES[0], "", text, LINES[1])
    with pytest.raises(TraceError, match=reason) as caught:
        list(trace_of(tmp_path, *trace_lines, block_size=16).requests)
    assert "trace.jsonl, line 3: " in str(caught.value)
    skipping = trace_of(tmp_path, *trace_lines, block_size=16, skip_bad=True)
    assert len(list(skipping.requests)) == 2
    assert skipping.num_skipped() == 1


def test_bytes_that_are_no_text_are_a_malformed_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"input_length": 16, "name": "\xff", "hash_ids": [1]}\n')
    with pytest.raises(TraceError, match="line 1: not UTF-8"):
        open_trace(str(path), block_size=16)


@pytest.mark.parametrize(
    "text",
    [
        '{"input_length":48,"hash_ids":[0,1,9223372036854775807]}',
        '{"hash_ids": [ 0 ,1,  9223372036854775807 ] , "input_length": 48.0}',
        '{"note": "\\"hash_ids\\": [8]", "hash_ids": [0,1,9223372036854775807], "input_length":48}',
        '{"hash_ids": [8, 8], "hash_ids": [0,1,9223372036854775807], "input_length": 48}',
        '{"inner": {"hash_ids": [8]}, "hash_ids": [0,1,9223372036854775807], "input_length": 48}',
        '{"hash_ids":[0,1,\\t9223372036854775807],"input_length":48}'.replace("\\t", "\t"),
    ],
)
def test_the_fast_path_reads_what_a_json_parser_would(text):
    request = mooncake.parse_line(text.encode())
    assert request.hash_ids.tolist() == json.loads(text)["hash_ids"]
    assert request.input_length == 48


def test_a_request_shorter_than_a_block_may_have_no_ids():
    assert mooncake.parse_line(line(5, []).encode()).hash_ids.tolist() == []


@pytest.mark.parametrize("size", [1, 16, 48, 512, 1600])
@pytest.mark.parametrize("is_ceil", [True, False])
def test_the_block_size_is_inferred(tmp_path, size, is_ceil):
    lengths = [size * blocks + part for blocks in (9, 800) for part in (0, 1, size - 1)]
    counts = [-(-n // size) if is_ceil else n // size for n in lengths]
    lines = [line(n, list(range(count))) for n, count in zip(lengths, counts, strict=True)]
    trace = trace_of(tmp_path, *lines)
    assert trace.block_size == size
    assert trace.block_size_from == "inferred from the first 6 requests"


def test_one_request_may_be_enough_to_tell_the_block_size(tmp_path):
    # One block of 32 would hold it, so it is not 32.
    assert trace_of(tmp_path, line(32, [1, 2])).block_size == 16


def test_a_block_size_that_cannot_be_told_is_asked_for(tmp_path):
    with pytest.raises(TraceError, match=r"possible: 32, 64, 128, .* give it with --block-size"):
        trace_of(tmp_path, line(40, [1]))
    with pytest.raises(TraceError, match=r"possible: none\)"):
        trace_of(tmp_path, line(1000, [1]), line(1000, [1, 2, 3]))


def test_a_missing_file_and_an_empty_one_are_errors(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        open_trace(str(tmp_path / "absent.jsonl"))
    with pytest.raises(TraceError, match="no requests"):
        trace_of(tmp_path)


def session(*requests, **more):
    return json.dumps({"block_size": 64, "hash_id_scope": "local", "requests": requests} | more)


def weka(seconds, hash_ids, tokens=None):
    return {"t": seconds, "in": tokens or 64 * len(hash_ids) + 5, "out": 3, "hash_ids": hash_ids}


def test_sessions_are_merged_by_time_and_their_ids_kept_apart(tmp_path):
    (tmp_path / "trace_10.json").write_text(session(weka(0, [2, 1]), weka(9, [2, 1, 3])))
    (tmp_path / "trace_9.json").write_text(session(weka(0, [1]), weka(5.5, [1, 2])))
    trace = open_trace(str(tmp_path))
    assert (trace.format, trace.block_size) == ("weka", 64)
    requests = list(trace.requests)
    # Number 9 comes before number 10, though its name sorts behind.
    assert [r.hash_ids.tolist() for r in requests] == [[0], [1, 2], [0, 3], [1, 2, 4]]
    assert [r.timestamp for r in requests] == [0, 0, 5500, 9000]


def test_global_ids_mean_the_same_in_all_sessions(tmp_path):
    for number in (1, 2):
        text = session(weka(number, [7, 8 + number]), hash_id_scope="global")
        (tmp_path / f"trace_{number}.json").write_text(text)
    assert ids_of(open_trace(str(tmp_path))) == [[0, 1], [0, 2]]


def test_sub_agents_take_part_in_their_parents_session(tmp_path):
    subagent = {"t": 4, "type": "subagent", "requests": [weka(0, [5]), weka(3, [5, 6])]}
    path = tmp_path / "trace_1.json"
    path.write_text(session(weka(0, [1]), subagent, weka(6, [1, 5])))
    requests = list(open_trace(str(path)).requests)
    assert [r.timestamp for r in requests] == [0, 4000, 6000, 7000]
    assert [r.hash_ids.tolist() for r in requests] == [[0], [1], [0, 1], [1, 2]]


def test_a_tar_of_sessions_reads_like_the_folder(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    for number in (3, 20):
        text = session(weka(0, [1, 2]), weka(number, [1, 2, 3]))
        (folder / f"trace_{number}.json").write_text(text)
    for mode in ("w", "w:gz", "w:xz"):
        path = tmp_path / "sessions.tar"
        with tarfile.open(path, mode) as archive:
            archive.add(folder, "sessions")
        assert ids_of(open_trace(str(path))) == ids_of(open_trace(str(folder)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "trace_1.json: "),
        ("[]", "not a Weka session"),
        (session(block_size="64"), "block_size is '64'"),
        (session(requests=3), "requests is 3; it must be a list"),
        (session(weka(0, [1]), 5), "request 2: a request must be an object, not 5"),
        (session({"t": 0, "in": 64}), "request 1: hash_ids is missing"),
        (session(weka("0", [1])), "t is '0'"),
        (session(weka(0, [1], tokens=640)), "1 hash_ids for 640 tokens"),
        (session(weka(0, [2**40])), "hash id 1099511627776 is larger than"),
    ],
)
def test_a_malformed_session_is_named_with_its_fault(tmp_path, text, reason):
    (tmp_path / "trace_1.json").write_text(text)
    (tmp_path / "trace_2.json").write_text(session(weka(0, [1])))
    with pytest.raises(TraceError, match=reason):
        open_trace(str(tmp_path))
    skipping = open_trace(str(tmp_path), skip_bad=True)
    assert ids_of(skipping)[-1] in ([0], [1])
    assert skipping.num_skipped() == 1


def test_a_folder_or_a_tar_without_sessions_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="no session"):
        open_trace(str(tmp_path))
    path = tmp_path / "other.tar"
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("readme.txt")
        archive.addfile(member, io.BytesIO())
    with pytest.raises(TraceError, match="no session"):
        open_trace(str(path))


def test_a_session_of_another_block_size_is_refused(tmp_path):
    path = tmp_path / "trace_1.json"
    path.write_text(session(weka(0, [1])))
    with pytest.raises(TraceError, match="its block size is 64, not 16"):
        open_trace(str(path), block_size=16)
