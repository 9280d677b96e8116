# SPDX-License-Identifier: Apache-2.0
"""Replaying a trace through a hybrid model, coarse and fine side by side."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from cpool.cli import main
from cpool.prefix import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from cpool.replay.engine import FullAttentionEngine
from cpool.replay.groups import parse_groups, word_of
from cpool.replay.hybrid import HybridEngine
from cpool.replay.replay import block_keys

SHARED = Path(os.environ.get("CPOOL_SHARED", Path(__file__).parents[2] / "shared"))


def run(capsys, *arguments):
    code = main(["replay", *map(str, arguments), "--json", "-"])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out)


def write_trace(path, lengths, block_size=16):
    """Every request is the beginning of one long prompt."""
    lines = [
        json.dumps(
            {
                "timestamp": i,
                "input_length": length,
                "output_length": 1,
                "hash_ids": list(range(-(-length // block_size))),
            }
        )
        for i, length in enumerate(lengths)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_next_turn_of_a_chat_coarse_and_fine(tmp_path, capsys):
    trace = write_trace(tmp_path / "trace.jsonl", [10_000, 10_200])
    report = run(
        capsys, trace, "--groups", "full:1600,mamba:1600", "--match-unit", 16, "--blocks", 50
    )
    coarse, fine = report["runs"]
    assert (coarse["match"], coarse["hit_tokens"]) == ("coarse", 9600)
    assert (fine["match"], fine["hit_tokens"]) == ("fine", 9984)
    assert (coarse["match_unit"], fine["match_unit"]) == (1600, 16)
    assert fine["groups"] == ["full:1600", "mamba:1600"]
    assert report["parameters"]["match_unit"] == 16
    assert coarse["reasons"]["match unit"] == {"requests": 1, "missed_tokens": 10_192 - 9600}
    assert fine["reasons"]["never seen"]["requests"] == 2


def test_one_group_of_full_attention_is_the_plain_replay(tmp_path, capsys):
    file = SHARED / "traces" / "agent_miniswe.hash16.jsonl.gz"
    if not file.exists():
        pytest.skip("no shared traces; set CPOOL_SHARED to their folder")
    options = [file, "--blocks", "1000,4000,20000", "--limit", 150]
    plain = run(capsys, *options)["runs"]
    grouped = run(capsys, *options, "--groups", "full:16")["runs"]
    assert len(grouped) == len(plain) == 3
    for one, other in zip(plain, grouped, strict=True):
        assert other["match"] == "coarse"
        for name in ("hit_tokens", "evictions", "rejected", "blocks"):
            assert one[name] == other[name]


def test_both_engines_agree_request_by_request():
    plain = FullAttentionEngine(40, 16)
    grouped = HybridEngine(40, (FullAttention(16),), "coarse", 16, 16, max_chunk=1 << 20)
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(300):
        length = int(rng.integers(1, 700))
        ids = np.arange(length // 16) + int(rng.integers(0, 6)) * 10_000
        keys = block_keys(ids, 32)
        found = plain.replay(length, keys)
        assert grouped.replay(length, keys) == found
        assert grouped.num_evictions == plain.num_evictions
        hits += found or 0
    assert hits > 0


@pytest.mark.parametrize(
    ("file", "coarse_at_most", "fine_at_least"),
    [("agent_miniswe.hash16.jsonl.gz", 0.81, 0.93), ("agent_taubench.hash16.jsonl.gz", 0, 0.81)],
)
def test_what_the_match_unit_buys_on_agent_traces(capsys, file, coarse_at_most, fine_at_least):
    file = SHARED / "traces" / file
    if not file.exists():
        pytest.skip("no shared traces; set CPOOL_SHARED to their folder")
    report = run(
        capsys, file, "--groups", "full:1600,mamba:1600", "--match-unit", 16, "--blocks", 1000
    )
    coarse, fine = report["runs"]
    assert coarse["token_hit_rate"] <= coarse_at_most
    assert fine["token_hit_rate"] >= fine_at_least
    assert fine["token_hit_rate"] <= fine["ceiling"]


def test_windows_match_coarse_only(tmp_path, capsys):
    trace = write_trace(tmp_path / "trace.jsonl", [1000, 2000, 1000, 900])
    report = run(capsys, trace, "--groups", "full:16,swa:16:256", "--blocks", 400)
    [coarse] = report["runs"]
    assert coarse["match"] == "coarse"
    assert coarse["hit_tokens"] == 992 + 992 + 896


def test_capacities_are_chosen_for_the_groups(tmp_path, capsys):
    trace = write_trace(tmp_path / "trace.jsonl", [5000, 6000, 7000])
    report = run(capsys, trace, "--groups", "full:160,mamba:160")
    assert report["runs"][-1]["evictions"] == 0
    assert all(r["rejected"] == 0 for r in report["runs"])
    assert len({r["blocks"] for r in report["runs"]}) * 2 == len(report["runs"])


def test_requests_that_cannot_fit_are_rejected():
    engine = HybridEngine(5, (FullAttention(16), Mamba(16)), "coarse", 16, 16)
    assert engine.replay(70, block_keys(np.arange(4), 32)) is None
    assert engine.replay(33, block_keys(np.arange(2), 32)) == 0
    assert engine.replay(33, block_keys(np.arange(2), 32)) == 32


def test_reasons_are_told_in_the_table(tmp_path, capsys):
    trace = write_trace(tmp_path / "trace.jsonl", [10_000, 10_200])
    assert main(["replay", str(trace), "--groups", "full:1600,mamba:1600", "--blocks", "50"]) == 0
    out = capsys.readouterr().out
    assert "coarse, 50 blocks: match unit: 1 requests" in out
    assert "fine, 50 blocks: never seen" in out


@pytest.mark.parametrize(
    "text",
    ["full:1600", "mamba:528", "swa:16:4096", "chunked:16:8192", "full:16:eagle,swa:16:64:eagle"],
)
def test_groups_are_read_as_they_are_written(text):
    assert ",".join(map(word_of, parse_groups(text))) == text


def test_words_name_groups():
    assert parse_groups("full:16, mamba:32,swa:16:64,chunked:16:128") == (
        FullAttention(16),
        Mamba(32),
        SlidingWindow(16, 64),
        ChunkedLocal(16, 128),
    )


@pytest.mark.parametrize(
    "text", ["", "full", "full:0", "full:x", "full:1:2", "swa:16", "cross:16", "full:-16"]
)
def test_other_words_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["replay", "--groups", text])
    assert "--groups" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--groups", "full:1600", "--match-unit", "24"], "no multiple of the trace's block size"),
        (["--groups", "full:1600", "--match-unit", "48"], "no multiple of the match unit 48"),
        (["--groups", "full:32,chunked:16:64"], "chunked local attention"),
        (["--match-unit", "16"], "--match-unit is for --groups"),
    ],
)
def test_units_that_do_not_fit_are_refused(options, message, tmp_path, capsys):
    trace = write_trace(tmp_path / "trace.jsonl", [100])
    assert main(["replay", str(trace), "--block-size", "16", *options]) == 2
    assert message in capsys.readouterr().err
