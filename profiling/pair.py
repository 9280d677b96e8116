# SPDX-License-Identifier: Apache-2.0
"""The parent's side: one worker process per implementation, driven in turns (A B A B)."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class WorkerFailed(RuntimeError):
    """A worker died or answered with an error."""


class Driver:
    """A worker process of one implementation, running under its own interpreter."""

    def __init__(self, implementation, python, log):
        self.implementation = implementation
        self.log = open(log, "w")  # noqa: SIM115
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        )
        environment["VLLM_LOGGING_LEVEL"] = "ERROR"
        self.process = subprocess.Popen(
            [python, "-m", "profiling.worker", implementation],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=environment, cwd=ROOT,
        )  # fmt: skip

    def send(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def receive(self):
        line = self.process.stdout.readline()
        if not line:
            raise WorkerFailed(f"the worker of {self.implementation} is gone; see {self.log.name}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"{self.implementation}: {answer['error']}")
        return answer

    def ask(self, **command):
        self.send(**command)
        return self.receive()

    def end_session(self):
        self.send(do="end")
        status = self.receive()["status"]
        if status:
            raise WorkerFailed(f"a session of {self.implementation} ended with {status}")

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


def open_drivers(implementations, vllm_python, folder):
    """Start a worker for each implementation; all load their modules at the same time."""
    drivers = [
        Driver(
            name, vllm_python if name == "stock" else sys.executable, folder / f"worker-{name}.log"
        )
        for name in implementations
    ]
    for driver in drivers:
        driver.receive()
    return drivers


def ask_all(drivers, **command):
    """Send one command to all and wait for all: for what is not timed."""
    for driver in drivers:
        driver.send(**command)
    return [driver.receive() for driver in drivers]
