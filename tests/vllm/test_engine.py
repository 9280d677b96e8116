# SPDX-License-Identifier: Apache-2.0
"""A real engine on stock's pool and on ours: whatever it decides must be the same."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs a vLLM: tests/vllm/run --set own")

PLUGIN_GROUP = "vllm.general_plugins"
ENGINE = Path(__file__).resolve().parents[2] / "profiling" / "vllm_engine.py"
ON_CPOOL = "manages the KV cache blocks"


def run_engine(mode: str, **settings: str) -> tuple[dict, str]:
    """Returns what the engine decided, and its log."""
    process = subprocess.run(
        [sys.executable, str(ENGINE), "--mode", mode],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    return json.loads(process.stdout), process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inprocess", "multiprocess", "serve"])
def test_an_engine_decides_the_same_on_both_pools(mode):
    if not any(plugin.value.startswith("cpool.") for plugin in entry_points(group=PLUGIN_GROUP)):
        pytest.skip("cpool is importable but not installed, so vLLM can't find its plugin")
    stock, stock_log = run_engine(mode, CPOOL_DISABLE="1")
    ours, our_log = run_engine(mode)
    assert ON_CPOOL not in stock_log
    # Each process that builds a pool says so once.
    assert our_log.count(ON_CPOOL) == 1

    # The run reaches what it is meant to compare.
    assert sum(stock["cached"]) > 0
    assert stock["resets"] == [True]
    kinds = {event["type"] for event in stock["events"]}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    if mode == "inprocess":
        assert stock["preemptions"] > 0
        assert stock["pool"] == "vllm.v1.core.block_pool.BlockPool"
        assert ours["pool"].startswith("cpool.vllm.pool.")

    for name in ("tokens", "cached", "resets", "preemptions", "events"):
        assert ours[name] == stock[name], f"{name} differ"
