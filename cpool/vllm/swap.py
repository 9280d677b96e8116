# SPDX-License-Identifier: Apache-2.0
"""Puts cpool's classes in the place of vLLM's, and takes them out again.

States: absent -> waiting (an import hook, until a process imports vLLM's pool) -> installed,
and from each of these back to absent. A process that never imports the pool pays for the
hook alone.
"""

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from cpool.vllm import contract, rebind

POOL_MODULE = "vllm.v1.core.block_pool"
UTILS_MODULE = "vllm.v1.core.kv_cache_utils"
# Modules that subclass the pool; run again if they were imported before us.
SUBCLASS_MODULES = {"vllm.v1.hisparse.block_pool": "SharedEventQueueBlockPool"}

# vLLM's pool module keeps its own blocks, so that stock pools that are already in use go on
# working, and uninstall() leaves no stock pool with blocks of ours.
KEEP = {POOL_MODULE: frozenset({"KVCacheBlock"})}


@dataclass(frozen=True)
class Installation:
    """What was replaced, and why it was safe.

    Attributes:
        vllm_version: of the vLLM in this process.
        contract: the tested release whose contract that vLLM keeps.
        replacements: stock object and ours, for each object replaced.
    """

    vllm_version: str
    contract: str
    replacements: tuple[tuple[object, object], ...]


_hook: rebind.ImportHook | None = None
_installation: Installation | None = None
_replaced_methods: list[tuple[type, str, Any]] = []
_has_seen_managers = False


def plugin() -> None:
    """Entry point of vLLM's plugin group; may be called any number of times."""
    global _hook
    if os.environ.get("CPOOL_DISABLE", "0") not in ("", "0") or _hook is not None:
        return
    if POOL_MODULE in sys.modules:
        install()
    else:
        _hook = rebind.ImportHook(POOL_MODULE, install)
        _hook.place()


def install() -> bool:
    """Makes vLLM build cpool's pools in this process from now on.

    Pools that exist already stay as they are.

    Returns:
        Whether cpool is installed now: False only where ``CPOOL_STRICT=0`` let it fall back.

    Raises:
        ImportError: if there is no vLLM.
        ContractDrift: if this vLLM differs from those that cpool was tested with.
    """
    global _installation
    if is_installed():
        return True
    from vllm.logger import init_logger

    logger = init_logger("vllm.cpool")
    version = vllm_version()
    try:
        release = contract.find_contract(version, contract.describe()).release
    except contract.ContractDrift as drift:
        if os.environ.get("CPOOL_STRICT", "1") != "0":
            raise contract.ContractDrift(
                f"{drift}\nSet CPOOL_STRICT=0 to run on vLLM's own pool, or CPOOL_DISABLE=1 to "
                "do so without this check."
            ) from None
        logger.warning("cpool is not used, vLLM keeps its own block pool: %s", drift)
        return False
    replacements = replace_all(release)
    _installation = Installation(version, release, tuple(replacements))
    logger.debug("cpool will manage the KV cache blocks (contract of vLLM %s)", release)
    return True


def replace_all(release: str) -> list[tuple[object, object]]:
    from cpool.vllm import hashing, pool

    # Stock's FreeKVCacheBlockQueue stays: no pool of ours uses it, and over blocks that belong
    # to no pool it does what it always did.
    pool_module, utils_module = import_module(POOL_MODULE), import_module(UTILS_MODULE)
    replacements: list[tuple[object, object]] = [
        (pool_module.BlockPool, pool.pool_class(release)),
        (pool_module.BlockHashToBlockMap, pool.BlockHashToBlockMap),
        (utils_module.KVCacheBlock, pool.KVCacheBlock),
        (utils_module.get_request_block_hasher, hashing.request_block_hasher(release)),
    ]
    rebind.replace_everywhere(replacements, KEEP)
    for module_name, class_name in SUBCLASS_MODULES.items():
        if module_name in sys.modules:
            stock = getattr(sys.modules[module_name], class_name)
            ours = getattr(rebind.execute_again(module_name), class_name)
            replacements.append((stock, ours))
    rebind.replace_everywhere(replacements, KEEP)
    _replaced_methods.extend(hashing.replace_methods())
    return replacements


def when_pool_is_built() -> None:
    """Replaces methods of the managers, which may not have been imported at install()."""
    global _has_seen_managers
    from cpool.vllm import managers

    if _installation is not None and not _has_seen_managers:
        _has_seen_managers = True
        _replaced_methods.extend(managers.replace_methods())


def uninstall() -> None:
    """Makes vLLM build its own pools again; pools of ours that exist stay as they are."""
    global _hook, _installation, _has_seen_managers
    for owner, name, stock in _replaced_methods:
        setattr(owner, name, stock)
    _replaced_methods.clear()
    _has_seen_managers = False
    if _hook is not None:
        _hook.remove()
        _hook = None
    if _installation is None:
        return
    undone = [(ours, stock) for stock, ours in _installation.replacements]
    _installation = None
    # Subclasses that were first imported on top of our pool.
    rebind.replace_everywhere(undone, {})
    stale = []
    for module_name, class_name in SUBCLASS_MODULES.items():
        if module_name in sys.modules:
            bound = getattr(sys.modules[module_name], class_name)
            if not issubclass(bound, import_module(POOL_MODULE).BlockPool):
                stale.append((bound, getattr(rebind.execute_again(module_name), class_name)))
    rebind.replace_everywhere(stale, {})


def is_installed() -> bool:
    """Whether a pool that vLLM builds now, in this process, would be cpool's."""
    import cpool

    pool_module = sys.modules.get(POOL_MODULE)
    built = getattr(pool_module, "BlockPool", None)
    return isinstance(built, type) and issubclass(built, cpool.BlockPool)


def installation() -> Installation | None:
    """Returns what install() did in this process, or None."""
    return _installation


def vllm_version() -> str:
    from vllm.version import __version__

    return __version__
