# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any, Self, final

from cpool.hashing import BlockHasher

@final
class RequestHasher:
    hasher: BlockHasher
    extra_keys: Callable[[Any, int], Any]
    def __new__(cls, hasher: BlockHasher, extra_keys: Callable[[Any, int], Any]) -> Self: ...
    def __call__(self, request: Any) -> list[bytes]: ...

def append_method(cls: type, stock: Callable[..., None]) -> Callable[..., None]: ...
