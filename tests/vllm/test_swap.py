# SPDX-License-Identifier: Apache-2.0
import pytest

pytest.importorskip("vllm", reason="needs a vLLM: tests/vllm/run --set own")

# Lists each name in a loaded module of vLLM that is still bound to something of stock's that
# was replaced. The pool module's own blocks are the exception, on purpose.
REMAINING = """
import sys
def remaining(stock):
    ids = {id(value) for value in stock}
    return sorted(
        f"{module_name}.{name}"
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("vllm") and isinstance(vars(module), dict)
        for name, value in list(vars(module).items())
        if id(value) in ids
        and (module_name, name) != ("vllm.v1.core.block_pool", "KVCacheBlock")
    )
"""
POOL_USERS = """
import vllm.v1.core.kv_cache_coordinator, vllm.v1.core.single_type_kv_cache_manager
import vllm.v1.hisparse.block_pool, vllm.v1.hisparse.coordinator
import vllm.v1.simple_kv_offload.manager, vllm.v1.core.sched.scheduler
import vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator
"""
PROOF = (
    REMAINING
    + """
import cpool, cpool.vllm
assert cpool.vllm.is_installed()
done = cpool.vllm.installation()
assert remaining([stock for stock, ours in done.replacements]) == []
from vllm.v1.core import kv_cache_coordinator, single_type_kv_cache_manager
from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool
assert issubclass(kv_cache_coordinator.BlockPool, cpool.BlockPool)
assert issubclass(SharedEventQueueBlockPool, cpool.BlockPool)
assert single_type_kv_cache_manager.SharedEventQueueBlockPool is SharedEventQueueBlockPool
owner = kv_cache_coordinator.BlockPool(8, True, 16)
pool = SharedEventQueueBlockPool(8, True, 16, event_owner=owner)
assert pool.get_new_blocks(1)[0].pool is pool
manager = single_type_kv_cache_manager.FullAttentionManager
assert manager.find_longest_cache_hit.__func__.__module__ == "cpool.vllm.managers"
from vllm.v1.request import Request
assert type(vars(Request)["append_output_token_ids"]).__name__ == "method_descriptor"
"""
)


def test_a_plugin_called_before_vllm_imports_its_pool_reaches_every_module(in_fresh_process):
    in_fresh_process("import cpool.vllm; cpool.vllm.plugin()" + POOL_USERS + PROOF)


def test_a_plugin_called_after_every_import_reaches_every_module(in_fresh_process):
    in_fresh_process(POOL_USERS + "import cpool.vllm; cpool.vllm.plugin()" + PROOF)


def test_a_plugin_called_in_the_order_of_an_engine_core_reaches_every_module(in_fresh_process):
    # The pool, its utilities and the managers are there already, the coordinator isn't.
    in_fresh_process(
        "import vllm.v1.core.single_type_kv_cache_manager; import cpool.vllm; cpool.vllm.plugin()"
        + POOL_USERS
        + PROOF
    )


def test_the_plugin_may_be_called_again_and_install_after_it(in_fresh_process):
    in_fresh_process(
        "import cpool.vllm; cpool.vllm.plugin(); cpool.vllm.plugin()"
        + POOL_USERS
        + "cpool.vllm.plugin(); assert cpool.vllm.install()"
        + PROOF
    )


def test_the_plugin_alone_imports_nothing_of_vllm(in_fresh_process):
    in_fresh_process(
        "import sys, cpool.vllm; cpool.vllm.plugin()\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'vllm']\n"
        "assert not cpool.vllm.is_installed()"
    )


@pytest.mark.parametrize("imports_before", [POOL_USERS, ""])
def test_uninstall_leaves_vllm_as_it_was(in_fresh_process, imports_before):
    in_fresh_process(
        imports_before
        + "import cpool, cpool.vllm; cpool.vllm.install()"
        + POOL_USERS
        + "done = cpool.vllm.installation()\n"
        + "vllm.v1.core.kv_cache_coordinator.BlockPool(8, True, 16)\n"
        + "manager = vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager\n"
        + "assert manager.find_longest_cache_hit.__func__.__module__ != manager.__module__\n"
        + "cpool.vllm.uninstall()\n"
        + REMAINING
        + """
assert not cpool.vllm.is_installed() and cpool.vllm.installation() is None
assert manager.find_longest_cache_hit.__func__.__module__ == manager.__module__
from vllm.v1.request import Request
assert Request.append_output_token_ids.__module__ == Request.__module__
assert remaining([ours for stock, ours in done.replacements]) == []
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SharedEventQueueBlockPool
assert issubclass(SharedEventQueueBlockPool, BlockPool)
assert not issubclass(BlockPool, cpool.BlockPool)
pool = BlockPool(8, True, 16)
assert isinstance(pool.get_new_blocks(1)[0], KVCacheBlock)
"""
    )


def test_a_stock_pool_that_exists_before_install_goes_on_working(in_fresh_process):
    in_fresh_process(
        """
from vllm.v1.core.block_pool import BlockPool
stock = BlockPool(8, True, 16)
import cpool.vllm; cpool.vllm.install()
block, other = stock.get_new_blocks(2)
for copy in (block, other):
    stock._insert_block_hash(b"k" * 36, copy, num_tokens=16)
assert stock.get_cached_block(b"k" * 32, [int.from_bytes(b"kkkk", "big")]) == [block]
stock.free_blocks([block, other])
assert stock.reset_prefix_cache()
"""
    )


# A plugin has put something in the place of a method before the first pool is built.
PATCHED = """
import functools, importlib, unittest.mock
import cpool, cpool.vllm; cpool.vllm.install()
from vllm.v1.core import kv_cache_coordinator
module_name, class_name, name = {method!r}.split()
owner = getattr(importlib.import_module("vllm.v1.core." + module_name), class_name)
stock = vars(owner)[name]
patched = {patched}
setattr(owner, name, patched)
assert isinstance(kv_cache_coordinator.BlockPool(8, True, 16), cpool.BlockPool)
from vllm.v1.core.kv_cache_manager import KVCacheManager
assert vars(owner)[name] is patched
assert KVCacheManager.allocate_slots.__module__ == {home!r}
"""
KV_CACHE_MANAGER = "vllm.v1.core.kv_cache_manager"


@pytest.mark.parametrize(
    "patched",
    [
        "functools.wraps(stock)(lambda *args, **kwargs: stock(*args, **kwargs))",
        "unittest.mock.MagicMock(__module__=stock.__module__)",
    ],
    ids=["wrapped", "mocked"],
)
@pytest.mark.parametrize(
    "method",
    [
        "kv_cache_manager KVCacheManager allocate_slots",
        "kv_cache_coordinator KVCacheCoordinator cache_blocks",
        "single_type_kv_cache_manager MambaManager cache_blocks",
    ],
)
def test_a_method_that_was_patched_before_is_left_and_called(in_fresh_process, method, patched):
    in_fresh_process(PATCHED.format(method=method, patched=patched, home=KV_CACHE_MANAGER))


def test_cpool_disable_keeps_stock(in_fresh_process):
    in_fresh_process(
        "import cpool.vllm; cpool.vllm.plugin()"
        + POOL_USERS
        + "assert not cpool.vllm.is_installed()",
        CPOOL_DISABLE="1",
    )


@pytest.mark.parametrize(("setting", "truthful"), [("1", True), ("0", False), ("", False)])
def test_truthful_events_are_those_of_pools_with_events(in_fresh_process, setting, truthful):
    in_fresh_process(
        "import cpool.vllm; cpool.vllm.plugin()"
        + POOL_USERS
        + f"""
from vllm.v1.core.kv_cache_coordinator import BlockPool
from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool
for on in (False, True):
    owner = BlockPool(8, True, 16, enable_kv_cache_events=on)
    pools = [owner, BlockPool(8, True, 16, on)]
    pools.append(SharedEventQueueBlockPool(8, True, 16, on, event_owner=owner))
    assert [pool.truthful_events for pool in pools] == 3 * [on and {truthful}]
    assert [pool.enable_kv_cache_events for pool in pools] == 3 * [on]
""",
        CPOOL_TRUTHFUL_EVENTS=setting,
    )


DRIFTED = """
from vllm.v1.core.block_pool import BlockPool
def free_blocks(self, ordered_blocks, prepend=False): pass
BlockPool.free_blocks = free_blocks
import cpool.vllm
"""


def test_a_vllm_that_drifted_is_refused_with_what_drifted(in_fresh_process):
    said = in_fresh_process(
        DRIFTED
        + """
try:
    cpool.vllm.plugin()
except cpool.vllm.ContractDrift as drift:
    print(drift)
assert not cpool.vllm.is_installed()
"""
    )
    assert "BlockPool.free_blocks: (self, ordered_blocks) expected" in said
    assert "(self, ordered_blocks, prepend=False) of __main__ found" in said
    assert "CPOOL_STRICT=0" in said


def test_without_strictness_a_drifted_vllm_runs_on_stock_with_a_warning(in_fresh_process):
    said = in_fresh_process(
        DRIFTED + "cpool.vllm.plugin(); assert not cpool.vllm.is_installed()", CPOOL_STRICT="0"
    )
    assert "cpool is not used, vLLM keeps its own block pool" in said
    assert "BlockPool.free_blocks: (self, ordered_blocks) expected" in said
