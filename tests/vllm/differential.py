# SPDX-License-Identifier: Apache-2.0
"""Stock's pool and ours side by side in one process: building, observing and comparing them."""

import importlib
from collections.abc import Iterable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import block_pool, kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

import cpool
from cpool.vllm import contract, managers
from cpool.vllm.pool import pool_class

StockBlockPool = block_pool.BlockPool
assert not issubclass(StockBlockPool, cpool.BlockPool), "the stock side must be stock"
version = importlib.import_module("vllm.version").__version__
RELEASE = contract.find_contract(version, contract.describe()).release
OurBlockPool = pool_class(RELEASE)

init_none_hash(sha256)

# They look at whose pool they are called with, so stock's side is still stock.
REPLACED = managers.replace_methods()
assert len(REPLACED) == len(managers.METHODS)


def stock_method(owner: type, name: str) -> Any:
    """Returns what stood where a batch version stands now."""
    return next(stock for of, known, stock in REPLACED if (of, known) == (owner, name))


class Metrics:
    """Records each call that a pool makes on its metrics collector, in order."""

    sample_rate = 1.0

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_block_allocated(self, block: Any) -> None:
        self.calls.append(("allocated", block.block_id, block.ref_cnt))

    def on_block_accessed(self, block: Any) -> None:
        self.calls.append(("accessed", block.block_id, block.ref_cnt))

    def on_block_evicted(self, block: Any) -> None:
        self.calls.append(("evicted", block.block_id, block.block_hash))

    def reset(self) -> None:
        self.calls.append(("reset",))


def make_request(name: str, tokens: Iterable[int], hash_block_size: int, **kwargs) -> Request:
    return Request(
        name,
        list(tokens),
        SamplingParams(max_tokens=64),
        None,
        block_hasher=get_request_block_hasher(hash_block_size, sha256),
        **kwargs,
    )


def build_managers(make_manager: Any) -> tuple[Any, Any]:
    """Builds the same KV-cache manager twice, on stock's pool and on ours."""
    stock = make_manager()
    kv_cache_coordinator.BlockPool = OurBlockPool
    try:
        ours = make_manager()
    finally:
        kv_cache_coordinator.BlockPool = StockBlockPool
    assert type(stock.block_pool) is StockBlockPool
    assert type(ours.block_pool) is OurBlockPool
    return stock, ours


def observe(pool: Any, keys: Iterable[bytes], events: list[Any]) -> dict[str, Any]:
    """Returns all that decides what a pool does next, in a form that two pools can share.

    Args:
        keys: every key that was ever registered.
        events: what ``take_events`` returned.
    """
    hash_map = pool.cached_block_hash_to_block
    return {
        "free queue": [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
        "num free": pool.get_num_free_blocks(),
        "usage": pool.get_usage(),
        "ref counts": [b.ref_cnt for b in pool.blocks],
        "primary keys": [(b.block_hash, b.block_hash_num_tokens) for b in pool.blocks],
        "extra keys": {
            b.block_id: found
            for b in pool.blocks
            if (found := set(pool.cached_block_hashes_by_block.get(b.block_id, ())))
        },
        "first block of each key": {
            key: getattr(hash_map.get_one_block(key), "block_id", None) for key in keys
        },
        "num keys": len(hash_map),
        "events": in_comparable_order(events),
        "metrics": pool.metrics_collector.calls if pool.metrics_collector else None,
    }


def in_comparable_order(events: list[Any]) -> list[Any]:
    """Sorts each run of removals: stock removes a block's extra keys in the order of a set."""
    ordered: list[Any] = []
    run: list[Any] = []
    for event in [*events, None]:
        if type(event).__name__ == "BlockRemoved":
            run.append(event)
            continue
        ordered += sorted(run, key=repr)
        run = []
        ordered.append(event)
    return ordered[:-1]


def assert_same(stock: dict[str, Any], ours: dict[str, Any], step: str) -> None:
    for name, expected in stock.items():
        assert ours[name] == expected, f"{name} differ after {step}"
