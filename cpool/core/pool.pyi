# SPDX-License-Identifier: Apache-2.0
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import disjoint_base

# One of: an (n, width) uint8 array, a bytes-like of n * width bytes together with
# hash_width=, or a sequence of equally long bytes. BlockHashes and its views export
# the first form.
_Hashes: TypeAlias = Any
# Any one-dimensional buffer of integers, or a sequence of int.
_BlockIds: TypeAlias = Any

class ContractError(ValueError, AssertionError):
    """A call broke the pool's contract; nothing was changed.

    It is both a ValueError, as our callers expect, and an AssertionError, which is what
    vLLM's pool raises at the same places.
    """

class BlockIdError(ContractError, IndexError):
    """A block id is out of range; nothing was changed."""

class SavedPoolError(ValueError):
    """A file is no saved pool, a damaged one, or one that this version cannot read."""

class Registration(NamedTuple):
    block_hash: bytes
    kv_cache_group_id: int
    num_tokens: int | None
    is_primary: bool

class EventSnapshot(NamedTuple):
    events: SnapshotRun
    sequence: int

class EventRun:
    @property
    def num_events(self) -> int: ...
    def expand(self, types: Any) -> list[Any]: ...
    def encode_run(self, legacy_array: bool = False) -> bytes: ...

@disjoint_base
class RemovedRun(EventRun): ...

@disjoint_base
class StoredRun(EventRun): ...

@disjoint_base
class SnapshotRun(EventRun):
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...

def block_ids(blocks: Iterable[Any]) -> list[int]: ...
def count_evictable(blocks: Iterable[Any]) -> int: ...

@disjoint_base
class KVCacheBlock:
    block_id: int
    ref_cnt: int
    is_null: bool
    pool: BlockPool | None
    prev_free_block: KVCacheBlock | None
    next_free_block: KVCacheBlock | None
    _block_hash: Any
    _block_hash_num_tokens: int | None
    def __init__(
        self,
        block_id: int,
        ref_cnt: int = 0,
        _block_hash: Any = None,
        _block_hash_num_tokens: int | None = None,
        prev_free_block: KVCacheBlock | None = None,
        next_free_block: KVCacheBlock | None = None,
        is_null: bool = False,
        *,
        pool: BlockPool | None = None,
    ) -> None: ...
    @property
    def block_hash(self) -> bytes | None: ...
    @property
    def block_hash_num_tokens(self) -> int | None: ...
    def set_block_hash(self, block_hash: bytes, num_tokens: int | None = None) -> None: ...
    def reset_hash(self) -> None: ...

class FreeKVCacheBlockQueue:
    num_free_blocks: int
    fake_free_list_head: KVCacheBlock
    fake_free_list_tail: KVCacheBlock
    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None: ...
    def popleft(self) -> KVCacheBlock: ...
    def popleft_n(self, n: int) -> list[KVCacheBlock]: ...
    def remove(self, block: KVCacheBlock) -> None: ...
    def append(self, block: KVCacheBlock) -> None: ...
    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None: ...
    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None: ...
    def get_all_free_blocks(self) -> list[KVCacheBlock]: ...
    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]: ...

class BlockHashToBlockMap:
    def __init__(self) -> None: ...
    def get_one_block(self, key: bytes) -> KVCacheBlock | None: ...
    def contain(self, key: bytes, block_id: int) -> bool: ...
    def insert(self, key: bytes, block: KVCacheBlock) -> None: ...
    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None: ...
    def __len__(self) -> int: ...  # distinct keys

class BlockPool:
    logger: logging.Logger
    event_types: Any  # as cpool.events.types; None: that module
    num_gpu_blocks: int
    hash_block_size: int
    enable_caching: bool
    enable_kv_cache_events: bool
    medium: str
    metrics_collector: Any
    kv_event_queue: list[Any]
    truthful_events: bool
    detailed_snapshots: bool
    event_groups: dict[int, tuple[str | None, int | None]]
    event_locality: str | None
    event_ownership: str | None
    num_event_batches: int
    reports_inserted_keys: bool
    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        medium: str = "GPU",
        *,
        truthful_events: bool = False,
        detailed_snapshots: bool = False,
        hash_width: int | None = None,
    ) -> None: ...
    # vLLM's names and decisions; blocks are handles.
    @property
    def null_block(self) -> KVCacheBlock: ...
    @property
    def blocks(self) -> Sequence[KVCacheBlock]: ...
    @property
    def free_block_queue(self) -> FreeKVCacheBlockQueue: ...
    @property
    def cached_block_hash_to_block(self) -> BlockHashToBlockMap: ...
    @property
    def cached_block_hashes_by_block(self) -> Mapping[int, set[bytes]]: ...
    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None: ...
    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None: ...
    def cache_partial_block(
        self,
        request: Any,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> bytes | None: ...
    def emit_cached_block_events(
        self, request: Any, num_cached_blocks: int, block_size: int, kv_cache_group_id: int
    ) -> None: ...
    def move_block_hashes(self, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None: ...
    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]: ...
    def unpin_blocks(
        self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]
    ) -> None: ...
    def touch(self, blocks: Sequence[KVCacheBlock]) -> None: ...
    def is_block_writable(self, block: KVCacheBlock) -> bool: ...
    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None: ...
    def evict_blocks(self, block_ids: Iterable[int]) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def get_num_free_blocks(self) -> int: ...
    def get_usage(self) -> float: ...
    def take_events(self) -> list[Any]: ...
    def take_event_runs(self, *, snapshot: bool = False) -> list[Any]: ...
    def snapshot_events(self) -> EventSnapshot: ...
    def _insert_block_hash(
        self, block_hash_with_group_id: bytes, block: KVCacheBlock, num_tokens: int | None
    ) -> None: ...
    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool: ...
    # Array twins: whole batches of block ids. All arguments are checked before anything
    # changes. Ids that come back are uint32, lookups int64 with -1 where missing.
    def get_new_block_ids(self, n: int) -> NDArray[np.uint32]: ...
    def touch_ids(self, ids: _BlockIds) -> None: ...
    def free_ids(self, ids: _BlockIds) -> None: ...
    def cache_full_ids(
        self,
        ids: _BlockIds,
        hashes: _Hashes,  # row i belongs to ids[i]
        kv_cache_group_id: int,
        block_size: int,
        first_block: int = 0,  # ids[i] ends at token (first_block + i + 1) * block_size
        *,
        parent_hash: bytes | None = None,
        token_ids: Any = None,
        lora_id: int | None = None,
        lora_name: str | None = None,
        extra_keys: Sequence[tuple[Any, ...] | None] | None = None,
        session_id: str | None = None,
    ) -> None: ...
    def cache_partial_id(
        self,
        block_id: int,
        block_hash: bytes,
        num_tokens: int,
        kv_cache_group_id: int,
        replace_existing_hashes: bool = False,
        *,
        parent_hash: bytes | None = None,
        token_ids: Any = None,
    ) -> None: ...
    def cache_partial_ids(
        self,
        ids: _BlockIds,
        hashes: _Hashes,
        num_tokens: Sequence[int] | NDArray[np.integer[Any]],
        kv_cache_group_id: int,
        *,
        parent_hashes: Sequence[bytes | None] | None = None,
        token_ids: Sequence[Any] | None = None,
    ) -> None: ...
    def find_ids(self, hashes: _Hashes, kv_cache_group_id: int) -> NDArray[np.int64]: ...
    def find_full_ids(
        self, hashes: _Hashes, kv_cache_group_id: int, block_size: int
    ) -> NDArray[np.int64]: ...  # only registrations whose num_tokens is a multiple of block_size
    def find_prefix_ids(self, hashes: _Hashes, kv_cache_group_id: int) -> NDArray[np.uint32]: ...
    def find_prefix_blocks(
        self, hashes: _Hashes, kv_cache_group_ids: Sequence[int]
    ) -> list[list[KVCacheBlock]]: ...
    def evict_ids(self, ids: _BlockIds) -> int: ...  # number of blocks that held a key
    def move_ids(self, src: int, dst: int) -> None: ...
    def free_queue_ids(self) -> NDArray[np.uint32]: ...  # in eviction order
    def registrations(self, block: KVCacheBlock | int) -> list[Registration]: ...
    # The whole state as a file.
    def save(self, path: str | PathLike[str]) -> None: ...
    @classmethod
    def load(cls, path: str | PathLike[str], metrics_collector: Any = None) -> Self: ...
    # What the pool holds.
    @property
    def nbytes(self) -> int: ...
    def __sizeof__(self) -> int: ...
    @property
    def states(self) -> NDArray[np.void]: ...
    @property
    def key_num_tokens(self) -> NDArray[np.uint32]: ...
    @property
    def ref_cnts(self) -> NDArray[np.int32]: ...
    @property
    def num_cached_keys(self) -> int: ...  # distinct (hash, group) keys
    @property
    def num_registrations(self) -> int: ...  # (key, block) pairs
    @property
    def num_evicted_blocks(self) -> int: ...  # blocks whose keys left by reuse or evict
    def table_stats(self) -> dict[str, int | float]: ...
    def check_consistency(self) -> None: ...
