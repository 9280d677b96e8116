# SPDX-License-Identifier: Apache-2.0
"""The right values: hit rates, rejections and evictions of published traces, digit for digit."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from cpool.cli import main
from cpool.replay.ceiling import Ceiling
from cpool.replay.open_trace import open_trace

SHARED = Path(os.environ.get("CPOOL_SHARED", Path(__file__).parents[2] / "shared"))
TRACES = SHARED / "traces"

pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason=f"no traces in {TRACES}; set CPOOL_SHARED to their folder's parent"
)

SLOW_FILES = {"weka_cc_A.jsonl.xz"}
FILES = (
    "agent_miniswe.hash16.jsonl.gz",
    "agent_taubench.hash16.jsonl.gz",
    "mooncake_conversation_head4000.jsonl.gz",
    "mooncake_synthetic.jsonl.gz",
    "mooncake_toolagent_head94.jsonl",
    "ragpulse_head3000.hash16.jsonl.gz",
    "weka_cc_small.jsonl.xz",
    "weka_cc_A.jsonl.xz",
)


def expected(file):
    return json.loads((TRACES / "expected.json").read_text())["files"][file]


def replay(path, capacities, tmp_path, *options):
    report = tmp_path / "report.json"
    blocks = ",".join(map(str, capacities))
    arguments = ["replay", str(path), "--quiet", "--blocks", blocks, "--json", str(report)]
    assert main([*arguments, *options]) == 0
    return json.loads(report.read_text())


def test_every_file_with_right_values_is_tried():
    listed = json.loads((TRACES / "expected.json").read_text())["files"]
    assert set(FILES) == set(listed)


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=pytest.mark.slow if f in SLOW_FILES else ()) for f in FILES],
)
def test_replay_gives_the_right_values(file, tmp_path):
    right = expected(file)
    rows = {row["capacity"]: row for row in right["rows"] if row["variant"] == "vllm"}
    infinite = rows.pop("inf")
    report = replay(TRACES / file, rows, tmp_path)

    trace = report["trace"]
    assert trace["sha256"] == right["sha256"]
    assert trace["block_size"] == right["block_size"]
    assert trace["requests"] == right["stats"]["requests"]
    assert trace["input_tokens"] == right["stats"]["tokens"]
    assert trace["block_references"] == right["stats"]["block_refs"]
    assert trace["unique_blocks"] == right["stats"]["unique_full"]
    assert round(trace["ceiling"], 6) == infinite["H_vllm"]

    assert len(report["runs"]) == len(rows) > 2
    for run in report["runs"]:
        row = rows[str(run["blocks"])]
        found = round(run["token_hit_rate"], 6), run["rejected"], run["evictions"]
        assert found == (row["H_vllm"], row["rejected"], row["evictions"]), run["blocks"]


def test_a_pool_larger_than_the_working_set_reaches_the_ceiling(tmp_path):
    file = "mooncake_toolagent_head94.jsonl"
    [run] = replay(TRACES / file, [2_000], tmp_path)["runs"]
    assert run["token_hit_rate"] == run["ceiling"]
    assert run["evictions"] == 0


def test_narrow_keys_give_the_same_values(tmp_path):
    file = TRACES / "agent_miniswe.hash16.jsonl.gz"
    wide, narrow = (
        replay(file, [1_000], tmp_path, "--hash-bytes", width)["runs"][0] for width in ("32", "16")
    )
    for field in ("hit_tokens", "rejected", "evictions"):
        assert wide[field] == narrow[field]


def test_weka_sessions_read_natively_are_the_merged_trace():
    merged = open_trace(str(TRACES / "weka_cc_small.jsonl.xz"))
    native = open_trace(str(TRACES / "weka_cc_small_originals.tar.xz"))
    assert merged.block_size == native.block_size == 64
    num_requests = 0
    for ours, right in zip(native.requests, merged.requests, strict=True):
        assert ours[:3] == right[:3]
        assert np.array_equal(ours.hash_ids, right.hash_ids)
        num_requests += 1
    assert num_requests == 577


def test_ids_of_any_size_give_the_same_ceiling():
    file = str(TRACES / "agent_miniswe.hash16.jsonl.gz")
    ceilings = []
    for stretch in (1, 10**12, 20_000):  # flags alone, the set alone, both
        trace = open_trace(file)
        ceiling = Ceiling(trace.block_size)
        requests = (r._replace(hash_ids=r.hash_ids * stretch) for r in trace.requests)
        for _ in ceiling.watch(requests):
            pass
        ceilings.append((ceiling.hit_tokens, ceiling.unique_blocks))
    assert ceilings[0] == ceilings[1] == ceilings[2]
    assert ceilings[0][1] == 10_001
