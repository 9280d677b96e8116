# SPDX-License-Identifier: Apache-2.0
"""Assigning a pool's number of free blocks, which on stock is a plain attribute.

Code sets it to 0 to see what happens when blocks run out. cpool's count is a fact, so the
difference is withheld: a pool that met such an assignment becomes a :func:`withholding_pool`
until everything is given back; before that no allocation pays for it.
"""

from typing import Any

from cpool.core.pool import PoolFreeQueue


class WithholdingMixin:
    """What a pool does differently while it withholds some of its free blocks."""

    num_withheld: int

    def get_num_free_blocks(self) -> int:
        return super().get_num_free_blocks() - self.num_withheld

    def get_usage(self) -> float:
        return 1.0 - self.get_num_free_blocks() / (self.num_gpu_blocks - 1)

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        return super().get_new_blocks(num_blocks)


def withholding_pool(pool_class: type) -> type:
    return type(f"Withholding{pool_class.__name__}", (WithholdingMixin, pool_class), {})


class StockFreeQueue(PoolFreeQueue):
    """A pool's free queue whose length can be assigned, as stock's can."""

    @property
    def num_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    @num_free_blocks.setter
    def num_free_blocks(self, count: int) -> None:
        pool = self._pool
        num_withheld = getattr(pool, "num_withheld", 0) + pool.get_num_free_blocks() - count
        if not isinstance(pool, WithholdingMixin):
            pool.__class__ = withholding_pool(type(pool))
        pool.num_withheld = num_withheld
        if not num_withheld:
            pool.__class__ = type(pool).__bases__[1]
