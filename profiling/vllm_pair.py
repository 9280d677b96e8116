# SPDX-License-Identifier: Apache-2.0
"""A process that runs the cases of vllm_cases, on stock vLLM or with cpool installed."""

import json
import os
import subprocess

from profiling.pair import ROOT, WorkerFailed


class Side:
    def __init__(self, name, python):
        self.name = name
        environment = os.environ | {
            "CPOOL_DISABLE": "1" if name == "stock" else "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        self.process = subprocess.Popen(
            [python, "-m", "profiling.vllm_cases", name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def send(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def receive(self):
        line = self.process.stdout.readline()
        if not line:
            raise WorkerFailed(f"the process of {self.name} is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"{self.name}: {answer['error']}")
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait()
