# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

def cache_blocks_method(
    cls: type, stock: Callable[..., None], keeps_last_token: bool
) -> Callable[..., None]: ...
def allocate_slots_method(
    cls: type,
    stock: Callable[..., object],
    coordinators: frozenset[type],
    kinds: tuple[type, type, type],
    waiting: object,
    preempted: object,
    keeps_last_token: bool,
) -> Callable[..., object]: ...
