# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's own tests on its own pool once, then on cpool, and compares.

    tests/vllm/run --set core --set offload --workers 2

prints every test that passes on stock vLLM and not on cpool, and exits with 1 if there is
one, or if the tests of the second run did not really build cpool's pools.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import environment

# Patterns below vLLM's source folder; which of them exist depends on its version.
TEST_SETS = {
    "core": ["tests/v1/core"],
    "offload": [
        "tests/v1/simple_kv_offload",
        "tests/v1/hisparse",
        "tests/v1/e2e/general/test_hisparse.py",
        "tests/distributed/test_kv*events*.py",
    ],
    "connector": ["tests/v1/kv_connector/unit"],
}
TEST_SETS["all"] = [pattern for patterns in TEST_SETS.values() for pattern in patterns]
# This repository's own tests of cpool.vllm: they compare stock and cpool themselves.
OWN = "own"

SECONDS_PER_TEST = 300
HERE = Path(__file__).resolve().parent


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", default="0.32.0", help="of vLLM (default: %(default)s)")
    parser.add_argument("--set", dest="sets", action="append", choices=[*TEST_SETS, OWN])
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="instead of a set")
    parser.add_argument("--workers", type=int, default=1, help="pytest-xdist workers")
    parser.add_argument("--stock-only", action="store_true", help="stop after the first run")
    parser.add_argument("--rerun-stock", action="store_true", help="ignore its recorded result")
    parser.add_argument(
        "--known-list",
        type=Path,
        metavar="FILE",
        help="names of tests that pass on stock, instead of a run on stock",
    )
    parser.add_argument("--write-list", type=Path, metavar="FILE", help="write such a list")
    parser.add_argument("--python", type=Path, help="of a ready environment with this vLLM")
    parser.add_argument("--archive", type=Path, help="vLLM's source archive, if at hand")
    parser.add_argument(
        "--cpool",
        type=Path,
        metavar="DIR",
        help="folder to import cpool from (default: this repository, installed into the "
        "environment)",
    )
    arguments = parser.parse_args()
    arguments.sets = arguments.sets or ["core", "offload"]
    return arguments


def find_tests(suite: Path, arguments: argparse.Namespace) -> list[str]:
    if arguments.tests:
        return arguments.tests
    tests: list[str] = []
    for name in arguments.sets:
        for pattern in TEST_SETS.get(name, ()):
            tests += sorted(str(path.relative_to(suite)) for path in suite.glob(pattern))
    return list(dict.fromkeys(tests))


def settings_for(cpool: Path | None) -> dict[str, str]:
    """Returns environment variables that every run needs."""
    search_path = filter(None, [HERE, cpool and cpool.absolute()])
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, search_path)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def run_suite(
    python: Path,
    suite: Path,
    tests: list[str],
    results: Path,
    workers: int,
    pool: str,
    cpool: Path | None = None,
) -> None:
    """Runs ``tests`` on ``pool``, which is "stock" or "cpool", and records them."""
    results.parent.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    settings = settings_for(cpool) | {
        "CPOOL_DISABLE": "1" if pool == "stock" else "0",
        "CPOOL_SUITE_POOL": pool,
        "CPOOL_SUITE_RESULTS": str(results),
    }
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "pool_proof",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        f"--timeout={SECONDS_PER_TEST}",
        "--tb=short",
    ]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "loadfile"]
    log = results.with_suffix(".log")
    print(f"running on {pool} (log: {log})", flush=True)
    # pytest reads arguments from a file, as a command line has no room for thousands of names.
    names = results.with_suffix(".tests")
    names.write_text("".join(f"{test}\n" for test in tests))
    with log.open("w") as output:
        # A failing test is a result, not an error of this script.
        subprocess.run(
            [*command, f"@{names}"],
            cwd=suite,
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )


def run_own_tests(python: Path, folder: Path, cpool: Path | None) -> int:
    """Runs this repository's tests that need a vLLM, slow ones too; returns pytest's exit code."""
    command = [
        *(str(python), "-m", "pytest", "-p", "no:cacheprovider", "-m", "slow or not slow"),
        *(str(HERE), str(HERE.parent / "test_hashing_vllm.py")),
    ]
    # Not from the repository's root: its sources must not stand in for the installed package.
    return subprocess.run(
        command, cwd=folder, env=os.environ | settings_for(cpool), check=False
    ).returncode


def read_results(results: Path) -> tuple[dict[str, str], dict[str, int]]:
    """Returns each test's outcome and how many pools were built of which class."""
    outcomes: dict[str, str] = {}
    pools = {"stock": 0, "cpool": 0}
    for line in results.read_text().splitlines():
        record = json.loads(line)
        if "pools" in record:
            for label, count in record["pools"].items():
                pools[label] += count
        # A test that passes and then fails in its teardown has failed.
        elif outcomes.get(record["test"], "passed") == "passed":
            outcomes[record["test"]] = record["outcome"]
    return outcomes, pools


def passing_on_stock(
    arguments: argparse.Namespace, python: Path, suite: Path, folder: Path, tests: list[str]
) -> set[str]:
    if arguments.known_list:
        names = arguments.known_list.read_text().splitlines()
        known = {name for name in names if name and not name.startswith("#")}
        return {name for name in known if any(name.startswith(test.rstrip("/")) for test in tests)}
    sets = [name for name in arguments.sets if name != OWN]
    label = "chosen" if arguments.tests else "-".join(sets)
    results = folder / "runs" / f"stock-{label}.jsonl"
    if arguments.rerun_stock or arguments.tests or not is_complete(results):
        run_suite(python, suite, tests, results, arguments.workers, "stock")
    outcomes, pools = read_results(results)
    passed = {test for test, outcome in outcomes.items() if outcome == "passed"}
    print(
        f"stock: {len(passed)} of {len(outcomes)} tests passed, {pools['stock']} pools built",
        flush=True,
    )
    return passed


def is_complete(results: Path) -> bool:
    """Whether a recorded run came to its end."""
    return results.exists() and '"complete": true' in results.read_text()


def write_list(path: Path, version: str, passed: set[str]) -> None:
    header = f"# Tests that pass on stock vLLM {version}; made by tests/vllm/run --write-list.\n"
    path.write_text(header + "".join(f"{name}\n" for name in sorted(passed)))


def compare(arguments: argparse.Namespace, python: Path, suite: Path, folder: Path) -> int:
    """Runs vLLM's tests on stock, if need be, and on cpool; returns an exit code."""
    tests = find_tests(suite, arguments)
    if not tests:
        print(f"vLLM {arguments.version} has none of these tests")
        return 1
    expected = passing_on_stock(arguments, python, suite, folder, tests)
    if arguments.write_list:
        write_list(arguments.write_list, arguments.version, expected)
    if arguments.stock_only:
        return 0

    results = folder / "runs" / "cpool.jsonl"
    # What fails on stock, for want of a model or a device, is no measure.
    names = sorted(expected)
    run_suite(python, suite, names, results, arguments.workers, "cpool", arguments.cpool)
    outcomes, pools = read_results(results)
    missing = sorted(name for name in expected if outcomes.get(name) != "passed")
    print(
        f"cpool: {len(expected) - len(missing)} of the {len(expected)} tests that pass on stock "
        f"passed; pools built: {pools['cpool']} by cpool, {pools['stock']} by stock",
        flush=True,
    )
    for name in missing:
        print(f"{outcomes.get(name, 'not run')}: {name}")
    if pools["stock"] or not pools["cpool"]:
        print("the tests did not run on cpool's pool alone")
        return 1
    return 1 if missing else 0


def main() -> int:
    arguments = parse_arguments()
    folder = environment.cache_folder() / arguments.version
    folder.mkdir(parents=True, exist_ok=True)
    # Not resolved: a virtual environment is known by the path of its Python.
    python = (arguments.python or environment.make_venv(arguments.version, folder)).absolute()
    if not (arguments.stock_only or arguments.cpool):
        environment.install_cpool(python)
    code = 0
    if arguments.tests or arguments.sets != [OWN]:
        suite = environment.unpack_suite(arguments.version, folder, arguments.archive)
        code = compare(arguments, python, suite, folder)
    if OWN in arguments.sets:
        code = run_own_tests(python, folder, arguments.cpool) or code
    return code


if __name__ == "__main__":
    sys.exit(main())
