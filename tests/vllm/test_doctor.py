# SPDX-License-Identifier: Apache-2.0
"""``cpool doctor``, asked as an operator asks it: it must not say more than is true."""

import os
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs a vLLM: tests/vllm/run --set own")

DRIFT = """
from vllm.v1.core.block_pool import BlockPool
del BlockPool.touch
from cpool.vllm import doctor
raise SystemExit(doctor.main([]))
"""


def ask_doctor(folder: Path, *arguments: str, **settings: str) -> tuple[int, dict[str, str]]:
    """Returns the exit code, and what was found under which name."""
    if not any(plugin.value == "cpool.vllm:plugin" for plugin in entry_points(name="cpool")):
        pytest.skip("cpool is importable but not installed, so vLLM can't find its plugin")
    process = subprocess.run(
        [sys.executable, "-P", *(arguments or ("-m", "cpool.cli", "doctor"))],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in process.stderr, process.stderr
    lines = (line.partition("  ") for line in process.stdout.splitlines())
    return process.returncode, {name: value.strip() for name, _, value in lines}


def test_an_installed_cpool_is_found_in_use(tmp_path):
    code, found = ask_doctor(tmp_path)
    assert code == 0
    assert found["cpool"] == version("cpool")
    assert found["on cpool"] == "True"
    assert found["pool that vLLM built"].startswith("cpool.vllm.pool.VllmBlockPool")
    assert found["block"] == "cpool.core.pool.KVCacheBlock"
    assert found["core"].endswith(".so")
    assert found["still bound to stock"] == "no module"
    assert found["prefix hit"] == "64 of 65 tokens in the same prompt again"


@pytest.mark.parametrize("settings", [{"CPOOL_DISABLE": "1"}, {"VLLM_PLUGINS": "another"}])
def test_a_cpool_that_vllm_does_not_load_is_found_idle(tmp_path, settings):
    code, found = ask_doctor(tmp_path, **settings)
    assert code == 1
    assert found["on cpool"] == "False"
    assert found["pool that vLLM built"] == "vllm.v1.core.block_pool.BlockPool, 64 blocks"
    assert found["contract"] == "nothing was replaced"
    # Stock finds the same.
    assert found["prefix hit"] == "64 of 65 tokens in the same prompt again"


def test_a_vllm_that_drifted_is_reported_as_refused(tmp_path):
    code, found = ask_doctor(tmp_path, "-c", DRIFT)
    assert code == 1
    assert found["on cpool"] == "False"
    assert found["verdict"].startswith("refused: vLLM ")
