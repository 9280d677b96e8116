# SPDX-License-Identifier: Apache-2.0
"""The command as a user runs it."""

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

import cpool
from cpool.cli import main

RUN_FIELDS = {
    "blocks": int,
    "requests": int,
    "rejected": int,
    "input_tokens": int,
    "hit_tokens": int,
    "token_hit_rate": float,
    "ceiling": float,
    "evictions": int,
    "pool_bytes": int,
    "block_references": int,
    "block_references_per_second": float,
    "seconds": float,
}


def line(input_length, hash_ids):
    return json.dumps({"input_length": input_length, "hash_ids": hash_ids}) + "\n"


LINES = [line(35, [0, 1, 2]), line(40, [0, 1, 3]), "oops\n", line(64, [0, 1, 2, 4])]
GOOD_LINES = [text for text in LINES if text != "oops\n"]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(GOOD_LINES))
    return path


@pytest.fixture
def bad_trace(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(LINES))
    return path


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-P", "-m", "cpool.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_the_table_and_the_json_say_the_same(trace, tmp_path, capsys):
    report_path = tmp_path / "report.json"
    arguments = ["replay", str(trace), "--block-size", "16", "--blocks", "3,100"]
    assert main([*arguments, "--json", str(report_path)]) == 0
    text = capsys.readouterr().out
    report = json.loads(report_path.read_text())
    small, large = report["runs"]
    for run in report["runs"]:
        assert {name: type(value) for name, value in run.items()} == RUN_FIELDS
    assert (small["blocks"], small["requests"], small["rejected"]) == (3, 3, 1)
    assert (large["hit_tokens"], large["input_tokens"], large["evictions"]) == (64, 139, 0)
    assert large["token_hit_rate"] == large["ceiling"] == 64 / 139
    assert large["pool_bytes"] > 0
    assert "0.4604" in text
    assert "ceiling" in text
    assert len([row for row in text.splitlines() if row.split()[1:3] == ["3", "1"]]) == 1


def test_the_json_names_versions_input_and_parameters(trace, capsys):
    arguments = ["replay", str(trace), "--block-size", "16", "--blocks", "8", "--limit", "2"]
    assert main([*arguments, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["versions"]) == {"cpool", "python", "numpy"}
    assert report["interrupted"] is False
    assert report["parse_seconds"] > 0
    assert report["parameters"] == {
        "blocks": [8],
        "block_size": 16,
        "limit": 2,
        "skip_bad": False,
        "hash_bytes": 32,
    }
    found = report["trace"]
    digest = subprocess.check_output(["sha256sum", trace], text=True).split()[0]
    assert found["sha256"] == digest
    assert (found["name"], found["format"], found["requests"]) == (str(trace), "mooncake", 2)


def test_standard_input_is_replayed_like_the_file(trace):
    arguments = ["--block-size", "16", "--blocks", "8", "--json", "-"]
    from_file = json.loads(command("replay", trace, *arguments).stdout)
    with trace.open("rb") as stdin:
        from_stdin = json.loads(command("replay", "-", *arguments, stdin=stdin).stdout)
    for report in (from_file, from_stdin):
        for timed in ("seconds", "block_references_per_second"):
            report["runs"][0].pop(timed)
    assert from_file["runs"] == from_stdin["runs"]
    assert from_file["trace"]["sha256"] == from_stdin["trace"]["sha256"]


def test_without_capacities_shares_of_the_working_set_are_tried(trace, capsys):
    assert main(["replay", str(trace), "--block-size", "16", "--json", "-"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["blocks"] for run in runs] == [4, 8]
    assert runs[-1]["token_hit_rate"] == runs[-1]["ceiling"]


def test_without_a_trace_requests_are_made_up(capsys):
    arguments = ["replay", "--workload", "chat", "--requests", "50", "--seed", "3"]
    assert main([*arguments, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"]["workload"] == "chat"
    assert report["parameters"]["seed"] == 3
    assert {run["requests"] for run in report["runs"]} == {50}
    assert main(["replay", "--requests", "20", "--blocks", "20000"]) == 0
    assert "made-up workload 'agent', seed 0: 20 requests" in capsys.readouterr().out


def test_a_malformed_line_ends_the_run_with_code_2(bad_trace, capsys):
    arguments = ["replay", str(bad_trace), "--block-size", "16"]
    for blocks in ([], ["--blocks", "8"]):
        assert main([*arguments, *blocks]) == 2
        output = capsys.readouterr()
        assert "bad.jsonl, line 3: not JSON" in output.err
        assert output.out == ""


def test_malformed_lines_are_counted_if_they_are_to_be_skipped(bad_trace, capsys):
    arguments = ["replay", str(bad_trace), "--block-size", "16", "--blocks", "8", "--skip-bad"]
    assert main(arguments) == 0
    assert "skipped as malformed: 1" in capsys.readouterr().out
    assert main([*arguments, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["trace"]["skipped"], report["trace"]["requests"]) == (1, 3)


def test_a_quiet_run_says_nothing(trace, capsys):
    assert main(["replay", str(trace), "--block-size", "16", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--blocks", "0"], "0 must be from 1 to"),
        (["--blocks", "5,x"], "'x' is not a whole number"),
        (["--blocks", str(2**32)], f"{2**32} must be from 1 to {2**32 - 3}"),
        (["--limit", "-1"], "-1 must be from 1 to"),
        (["--block-size", "0"], "0 must be from 1 to"),
        (["--workload", "poems"], "invalid choice"),
        (["--hash-bytes", "20"], "invalid choice"),
    ],
)
def test_bad_options_are_refused_with_the_value_and_the_limit(arguments, reason, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["replay", *arguments])
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


def test_options_of_made_up_requests_do_not_go_with_a_trace(trace, capsys):
    assert main(["replay", str(trace), "--seed", "1"]) == 2
    assert "--seed is for made-up requests" in capsys.readouterr().err


def test_files_that_cannot_be_read_or_written_are_errors(trace, tmp_path, capsys):
    assert main(["replay", str(tmp_path / "absent")]) == 2
    assert "No such file" in capsys.readouterr().err
    arguments = ["replay", str(trace), "--block-size", "16", "--blocks", "8"]
    assert main([*arguments, "--json", str(tmp_path / "absent" / "report.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    assert main(["replay", str(tmp_path / "empty"), "--block-size", "16"]) == 2
    assert "no requests" in capsys.readouterr().err


def wait_until_all_is_read(process):
    """Until the pipe is empty and the process sleeps, which is when it waits for more."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        unread = fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4))
        with open(f"/proc/{process.pid}/stat") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
        if struct.unpack("i", unread) == (0,) and state == "S":
            return
        time.sleep(0.02)
    raise AssertionError("the command does not read its input")


@pytest.mark.parametrize("sweep", [False, True])
def test_an_interrupted_run_reports_what_it_had(tmp_path, sweep):
    report_path = tmp_path / "report.json"
    blocks = [] if sweep else ["--blocks", "8"]
    options = ["--block-size", "16", "--json", str(report_path), *blocks]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cpool.cli", "replay", "-", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As from a terminal: a shell's background jobs are started with the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # The first requests are held back until the reader has seen enough of them.
    process.stdin.write("".join(GOOD_LINES * 100))
    process.stdin.flush()
    wait_until_all_is_read(process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == ""
    assert "INTERRUPTED" in output
    report = json.loads(report_path.read_text())
    assert report["interrupted"] is True
    assert report["trace"]["requests"] == 300
    assert report["trace"]["sha256"] is None
    assert [run["requests"] for run in report["runs"]] == ([] if sweep else [300])


def test_a_terminal_gets_a_progress_line_that_is_wiped_at_the_end():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "cpool.cli",
            "replay",
            "--workload",
            "rag",
            "--requests",
            "3000",
        ],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    drawn = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            drawn += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"replaying [" in drawn
    assert b"requests" in drawn
    assert drawn.endswith(b"\r\x1b[K")


def test_the_command_asks_for_a_subcommand_and_knows_its_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("cpool ")


def test_source_that_was_not_built_says_so(tmp_path):
    source = Path(cpool.__file__).parent
    for name in ("__init__.py", "core/__init__.py", "core/contract.py"):
        (tmp_path / "cpool" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, tmp_path / "cpool" / name)
    done = subprocess.run(
        [sys.executable, "-c", "import cpool"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "ImportError: cpool's extensions are not built in" in done.stderr
    assert str(tmp_path / "cpool") in done.stderr
