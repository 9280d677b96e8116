# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from cpool.core.pool import BlockPool
from cpool.prefix.explain import Explanation, PartialTail
from cpool.prefix.groups import Group, Layout, Match

# One of: an (n, width) uint8 array, a bytes-like of n * width bytes, or a sequence of
# equally long bytes. BlockHashes and its views are among them.
_Hashes: TypeAlias = Any

@final
class PrefixMatch:
    cache: PrefixCache
    hashes: _Hashes
    num_tokens: int
    max_tokens: int
    longest: int
    num_hashes: int
    @property
    def block_ids(self) -> tuple[NDArray[np.uint32], ...]: ...
    @property
    def partial_tails(self) -> tuple[PartialTail, ...]: ...
    @property
    def shared_prefix_boundary(self) -> int: ...
    def explain(self) -> Explanation: ...

@final
class Request:
    cache: PrefixCache | None
    hashes: _Hashes
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    @property
    def is_running(self) -> bool: ...
    @property
    def block_ids(self) -> tuple[NDArray[np.uint32], ...]: ...

@final
class CopyBatch:
    cache: PrefixCache | None
    pairs: NDArray[np.uint32]
    group_ids: NDArray[np.uint32]
    def __len__(self) -> int: ...

@final
class PrefixCache:
    pool: BlockPool
    layout: Layout
    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[Group],
        *,
        match: Match | None = None,
        remember_evictions: int = 0,
    ) -> None: ...
    @property
    def groups(self) -> tuple[Group, ...]: ...
    @property
    def match_unit(self) -> int: ...
    def lookup(self, hashes: _Hashes, max_tokens: int | None = None) -> PrefixMatch: ...
    def reach(
        self, hashes: _Hashes, kv_cache_group_id: int, max_tokens: int, *, drop: bool = True
    ) -> int: ...
    def admit(
        self,
        match: PrefixMatch,
        num_new_tokens: int,
        num_prompt_tokens: int,
        *,
        reserve: int = 0,
    ) -> Request | None: ...
    def append(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        num_computed_tokens: int | None = None,
        reserve: int = 0,
    ) -> tuple[NDArray[np.uint32], ...] | None: ...
    def commit(self, request: Request, num_computed_tokens: int | None = None) -> None: ...
    def finish(self, request: Request) -> None: ...
    def preempt(self, request: Request) -> None: ...
    def begin_step(self) -> None: ...
    def take_copies(self) -> CopyBatch: ...
    def copies_done(self, batch: CopyBatch) -> None: ...
    def chunk_end(
        self,
        start: int,
        num_new_tokens: int,
        num_prompt_tokens: int,
        *,
        num_tokens: int | None = None,
        boundary: int = 0,
    ) -> int: ...
    def num_blocks_to_admit(self, match: PrefixMatch, num_new_tokens: int) -> int: ...
    def eviction_of(self, digest: bytes, kv_cache_group_id: int) -> tuple[int, int] | None: ...
    def digests(self, hashes: _Hashes) -> NDArray[np.uint8]: ...
    @property
    def num_evictions(self) -> int: ...
