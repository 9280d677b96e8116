# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import pytest


@pytest.fixture
def in_fresh_process(tmp_path):
    """Runs Python source in a process of its own and returns what it printed.

    What is imported first is what these tests are about, so none can share a process.
    """

    def run(source: str, **settings: str) -> str:
        process = subprocess.run(
            [sys.executable, "-c", source],
            cwd=tmp_path,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout + process.stderr

    return run
