# SPDX-License-Identifier: Apache-2.0
"""``cpool doctor``: proves which block pool vLLM uses here, and says why if it isn't cpool's.

It goes the way an engine goes: lets vLLM load its plugins, builds vLLM's own KV-cache manager
for a small model, and runs a request through it. :func:`inspect_process` does the same without
building anything, for a process that already runs an engine.
"""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from cpool.vllm import contract, swap

PLUGIN_GROUP = "vllm.general_plugins"
BLOCK_SIZE = 16
NUM_BLOCKS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if vLLM runs on cpool, and 1 otherwise."""
    parser = argparse.ArgumentParser(prog="cpool doctor", description=__doc__.splitlines()[0])
    parser.parse_args(arguments)
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        print(f"vLLM can't be imported: {error}")
        return 1
    findings = versions_and_settings()
    try:
        findings |= prove_with_a_manager()
    except contract.ContractDrift as drift:
        findings |= {"verdict": f"refused: {drift}", "on cpool": False}
    return 0 if show(findings) else 1


def show(findings: dict[str, Any]) -> bool:
    width = max(map(len, findings))
    for name, value in findings.items():
        print(f"{name:<{width}}  {value}")
    return bool(findings["on cpool"])


def versions_and_settings() -> dict[str, Any]:
    import cpool

    plugins = [plugin.name for plugin in entry_points(group=PLUGIN_GROUP) if is_ours(plugin.value)]
    allowed = os.environ.get("VLLM_PLUGINS")
    return {
        "cpool": cpool.__version__,
        "vLLM": swap.vllm_version(),
        "Python": platform.python_version(),
        "plugin": ", ".join(plugins) or f"not among the entry points of {PLUGIN_GROUP}",
        "VLLM_PLUGINS": "not set: all plugins are loaded" if allowed is None else allowed,
        "CPOOL_DISABLE": os.environ.get("CPOOL_DISABLE", "not set"),
        "CPOOL_STRICT": os.environ.get("CPOOL_STRICT", "not set"),
        "CPOOL_TRUTHFUL_EVENTS": os.environ.get("CPOOL_TRUTHFUL_EVENTS", "not set"),
    }


def is_ours(target: str) -> bool:
    return target.partition(":")[0].startswith("cpool.")


def prove_with_a_manager() -> dict[str, Any]:
    """Lets vLLM build what an engine's scheduler builds, and uses it."""
    import torch
    from vllm.plugins import load_general_plugins
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    load_general_plugins()
    register_all_kvcache_specs(None)
    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        max_model_len=BLOCK_SIZE * NUM_BLOCKS,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    return describe_pool(manager.block_pool) | inspect_process() | run_a_request(manager)


def run_a_request(manager: Any) -> dict[str, Any]:
    """Allocates and caches blocks for a prompt, frees them and finds them again."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    prompt = list(range(4 * BLOCK_SIZE + 1))

    def request(name: str) -> Request:
        return Request(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)

    first = request("first")
    manager.allocate_slots(first, len(prompt))
    manager.free(first)
    _, num_hits = manager.get_computed_blocks(request("second"))[:2]
    return {"prefix hit": f"{num_hits} of {len(prompt)} tokens in the same prompt again"}


def describe_pool(pool: Any) -> dict[str, Any]:
    import cpool

    ours = isinstance(pool, cpool.BlockPool)
    return {
        "on cpool": ours,
        "pool that vLLM built": f"{qualified_name(type(pool))}, {pool.num_gpu_blocks} blocks",
        "block": qualified_name(type(pool.null_block)),
        "core": sys.modules[cpool.BlockPool.__module__].__file__ if ours else "not in use",
    }


def qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def inspect_process() -> dict[str, Any]:
    """Says what this process's modules are bound to.

    Returns:
        By name of the finding; "on cpool" is present only where the pool is imported, and says
        whether a pool built now would be cpool's.
    """
    done = swap.installation()
    findings: dict[str, Any] = {
        "contract": f"that of vLLM {done.contract}, kept by {done.vllm_version}"
        if done
        else "nothing was replaced"
    }
    if swap.POOL_MODULE in sys.modules:
        findings["on cpool"] = swap.is_installed()
    if done:
        findings["replaced"] = ", ".join(
            f"{getattr(stock, '__qualname__', stock)}" for stock, _ in done.replacements
        )
        left = bindings_of([stock for stock, _ in done.replacements])
        findings["still bound to stock"] = ", ".join(left) or "no module"
    return findings


def bindings_of(objects: Sequence[object]) -> list[str]:
    """Returns the names under which modules of vLLM hold one of the objects."""
    wanted = {id(value) for value in objects}
    return sorted(
        f"{module_name}.{name}"
        for module_name, module in list(sys.modules.items())
        if module_name.partition(".")[0] == "vllm"
        for name, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in wanted and name not in swap.KEEP.get(module_name, ())
    )


if __name__ == "__main__":
    sys.exit(main())
