# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias, final

# One entry per block, or a function of a block's first token index and the index after its
# last. vLLM's keys of a block are a tuple of tuples, or None.
_ExtraKeys: TypeAlias = Sequence[Any] | Callable[[int, int], Any] | None

ALGORITHMS: tuple[str, ...]
DEFAULT_SEED: str

def default_root(algorithm: str) -> bytes: ...

@final
class BlockHasher:
    hash_block_size: int
    algorithm: str
    hash_width: int
    root: bytes
    def __new__(
        cls, hash_block_size: int, algorithm: str = "sha256", *, root: bytes | None = None
    ) -> Self: ...
    @property
    def digest_source(self) -> str: ...
    def new_hashes(
        self, token_ids: Any, block_hashes: Sequence[bytes], extra_keys: _ExtraKeys = None
    ) -> list[bytes]: ...
