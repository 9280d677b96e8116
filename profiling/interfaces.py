# SPDX-License-Identifier: Apache-2.0
"""How the operations call a pool: by block ids, or by vLLM's methods with block objects.

Stock vLLM and cpool's vLLM-named methods run through the same class. Attributes named after an
operation are what is timed: wherever one method of the pool does the job, they are that method
itself, so that no wrapper is measured. ``*_arguments`` puts arguments into the form in which
callers hold them; it is not timed.
"""

import numpy as np

BLOCK_SIZE = 16  # tokens; boundaries stand equally far apart
BATCH = 64  # tails that an engine registers in one step
GROUP = 0
GROUPS = [GROUP]


class Request:
    """What registration reads of an engine's request."""

    __slots__ = ("block_hashes",)

    def __init__(self, block_hashes):
        self.block_hashes = block_hashes


class Ids:
    """cpool's batch methods: arrays in, arrays out."""

    def __init__(self, make_pool, num_blocks, hash_width):
        self.pool = pool = make_pool(num_blocks, hash_width)
        self.allocate = pool.get_new_block_ids
        self.register = pool.cache_full_ids
        self.register_partial = pool.cache_partial_ids
        self.find = pool.find_ids
        self.find_prefix = pool.find_prefix_ids
        self.touch = pool.touch_ids
        self.evict = pool.evict_ids
        self.move = pool.move_ids
        self.reset = pool.reset_prefix_cache

    def free(self, blocks):
        self.pool.free_ids(blocks[::-1])

    def blocks(self, ids):
        return ids

    def join(self, batches):
        return np.concatenate(batches)

    def select(self, blocks, order):
        return blocks[order]

    def register_arguments(self, blocks, rows):
        return blocks, rows, GROUP, BLOCK_SIZE

    def partial_arguments(self, ids, rows):
        tails = np.full(len(ids), BLOCK_SIZE)
        parts = [slice(start, start + BATCH) for start in range(0, len(ids), BATCH)]
        return [(ids[part], rows[part], tails[part], GROUP) for part in parts]

    def find_arguments(self, rows):
        return rows, GROUP

    def evict_arguments(self, ids):
        return (ids,)

    def move_arguments(self, sources, targets):
        return list(zip(sources.tolist(), targets.tolist(), strict=True))

    def ids_of(self, blocks):
        return blocks.astype(np.int64)

    def found_ids(self, found):
        return found.astype(np.int64)

    def queue_ids(self):
        return self.pool.free_queue_ids()


class Handles:
    """vLLM's methods: stock's, or cpool's of the same names."""

    def __init__(self, make_pool, num_blocks, hash_width):
        self.pool = pool = make_pool(num_blocks, hash_width)
        self.allocate = pool.get_new_blocks
        self.register = pool.cache_full_blocks
        self.register_partial = pool.cache_partial_block
        self.touch = pool.touch
        self.evict = pool.evict_blocks
        self.move = pool.move_block_hashes
        self.reset = pool.reset_prefix_cache
        get = pool.get_cached_block

        def find(hashes):
            return [get(block_hash, GROUPS) for block_hash in hashes]

        def find_prefix(hashes):
            found = []
            for block_hash in hashes:
                blocks = get(block_hash, GROUPS)
                if blocks is None:
                    break
                found.append(blocks)
            return found

        self.find = find
        self.find_prefix = find_prefix

    def free(self, blocks):
        self.pool.free_blocks(reversed(blocks))

    def blocks(self, ids):
        of = self.pool.blocks
        return [of[id] for id in ids.tolist()]

    def join(self, batches):
        return [block for batch in batches for block in batch]

    def select(self, blocks, order):
        return [blocks[i] for i in order.tolist()]

    def register_arguments(self, blocks, rows):
        request = Request([row.tobytes() for row in rows])
        return request, blocks, 0, len(blocks), BLOCK_SIZE, GROUP

    def partial_arguments(self, ids, rows):
        return [
            (Request([row.tobytes()]), block, BLOCK_SIZE, GROUP, BLOCK_SIZE)
            for block, row in zip(self.blocks(ids), rows, strict=True)
        ]

    def find_arguments(self, rows):
        return ([row.tobytes() for row in rows],)

    def evict_arguments(self, ids):
        return (set(ids.tolist()),)

    def move_arguments(self, sources, targets):
        return list(zip(self.blocks(sources), self.blocks(targets), strict=True))

    def ids_of(self, blocks):
        return np.array([block.block_id for block in blocks], dtype=np.int64)

    def found_ids(self, found):
        return np.array(
            [-1 if blocks is None else blocks[0].block_id for blocks in found], dtype=np.int64
        )

    def queue_ids(self):
        return self.ids_of(self.pool.free_block_queue.get_all_free_blocks())


def stock_pool():
    from vllm.v1.core.block_pool import BlockPool

    def make(num_blocks, hash_width, **options):
        return BlockPool(num_blocks, True, BLOCK_SIZE, **options)

    return make


def cpool_pool():
    from cpool import BlockPool

    def make(num_blocks, hash_width, **options):
        return BlockPool(num_blocks, True, BLOCK_SIZE, hash_width=hash_width, **options)

    return make


# Name in reports -> (interface, what returns a function that makes a pool).
IMPLEMENTATIONS = {
    "stock": (Handles, stock_pool),
    "handles": (Handles, cpool_pool),
    "ids": (Ids, cpool_pool),
}
