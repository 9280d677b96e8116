# SPDX-License-Identifier: Apache-2.0
"""vLLM on cpool: with cpool installed beside vLLM, its scheduler runs on cpool's block pool.

vLLM calls :func:`plugin` through the entry-point group ``vllm.general_plugins`` in each of its
processes. Set ``CPOOL_DISABLE=1`` to keep vLLM's own pool. A vLLM that cpool was not tested
with is refused with an error that says what differs; ``CPOOL_STRICT=0`` turns the error into a
warning and leaves vLLM's own pool in place. ``cpool doctor`` shows which pool is in use.
"""

from cpool.vllm.contract import ContractDrift
from cpool.vllm.swap import (
    Installation,
    install,
    installation,
    is_installed,
    plugin,
    uninstall,
)

__all__ = [
    "ContractDrift",
    "Installation",
    "install",
    "installation",
    "is_installed",
    "plugin",
    "uninstall",
]
