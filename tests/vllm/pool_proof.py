# SPDX-License-Identifier: Apache-2.0
"""pytest plugin of ``tests/vllm/run``: which tests passed, and on whose pool.

With ``CPOOL_SUITE_POOL=cpool`` it installs cpool before the first test is collected; in both
modes it counts the pools that are built, by the class that builds them, so that the run can
tell a suite that passed on cpool from one that never met it. Each process appends lines of
JSON to the file named by ``CPOOL_SUITE_RESULTS``.
"""

import gc
import json
import os
from collections import Counter
from functools import wraps

RESULTS = os.environ["CPOOL_SUITE_RESULTS"]
ON_CPOOL = os.environ["CPOOL_SUITE_POOL"] == "cpool"

pools_built: Counter[str] = Counter()


def write(record: dict) -> None:
    with open(RESULTS, "a") as results:
        results.write(json.dumps(record) + "\n")


def count_pools(cls: type, label: str) -> None:
    """Counts each instance of ``cls`` or a subclass that finishes ``cls.__init__``."""
    init = cls.__init__

    @wraps(init)
    def counted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        pools_built[label] += 1

    cls.__init__ = counted


def pytest_configure(config):
    from vllm.v1.core import block_pool

    count_pools(block_pool.BlockPool, "stock")
    if ON_CPOOL:
        import cpool.vllm

        cpool.vllm.install()
        # The contract check looks at a pool of stock's.
        pools_built.clear()
        count_pools(block_pool.BlockPool, "cpool")


def pytest_collection_finish(session):
    # After each of its tests vLLM unfreezes and collects all that was ever imported: most of
    # a run goes there, and none of what it tests.
    gc.freeze()
    gc.unfreeze = lambda: None


def pytest_runtest_logreport(report):
    # Under xdist every report reaches the controller too; only it may write them.
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        outcome = report.outcome if report.when == "call" else f"{report.when} {report.outcome}"
        write({"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 2)})


def pytest_collectreport(report):
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        write({"test": report.nodeid, "outcome": "collection failed", "seconds": 0})


def pytest_sessionfinish(session):
    # Later would be too late: a worker of xdist may be killed once it has finished its session.
    write({"pools": dict(pools_built), "complete": "PYTEST_XDIST_WORKER" not in os.environ})
