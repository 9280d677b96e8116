# SPDX-License-Identifier: Apache-2.0
"""Memory may run out at any allocation: nothing may be half done afterwards."""

import numpy as np
import pytest

from cpool import BlockPool, hash_tokens
from cpool.prefix import FullAttention, Mamba, PrefixCache

testcapi = pytest.importorskip("_testcapi", reason="needs CPython's hook that refuses memory")

UNIT = 4
KNOWN = hash_tokens(range(45), UNIT)
NEW = hash_tokens(range(1000, 1045), UNIT)
ENOUGH_SUCCESSES = 8


def state_of(pool):
    return (
        pool.free_queue_ids().tolist(),
        np.maximum(pool.ref_cnts, 0).tolist(),
        [pool.registrations(block) for block in range(1, pool.num_gpu_blocks)],
    )


class World:
    """A cache that knows one prompt, a match of that, and a running request of another."""

    def __init__(self):
        self.pool = BlockPool(60, True, UNIT)
        self.cache = PrefixCache(self.pool, [FullAttention(16), Mamba(16)])
        first = self.cache.admit(self.cache.lookup(KNOWN, 44), 44, 45)
        self.cache.commit(first)
        self.cache.begin_step()
        self.cache.finish(first)
        self.request = self.cache.admit(self.cache.lookup(NEW, 44), 44, 45)
        self.match = self.cache.lookup(KNOWN, 44)
        assert self.match.partial_tails


def refuse_each_allocation(action, check, prepare=lambda world: None):
    """Run ``action`` in a new world, with the 1st, 2nd, 3rd ... allocation refused.

    CPython and numpy can do without some: several runs in a row must get through. ``check``
    sees the world after each failure, and its state before.
    """
    num_failures = num_successes = number = 0
    while num_successes < ENOUGH_SUCCESSES:
        assert number < 500, "500 refusals and no end"
        world = World()
        prepare(world)
        before = state_of(world.pool)
        testcapi.set_nomemory(number, number + 1)
        try:
            action(world)
            has_failed = False
        except MemoryError:
            has_failed = True
        finally:
            testcapi.remove_mem_hooks()
        number += 1
        if has_failed:
            num_failures += 1
            num_successes = 0
            check(world, before)
        else:
            num_successes += 1
        world.pool.check_consistency()
    assert num_failures > 0


def unchanged(world, before):
    assert state_of(world.pool) == before
    assert world.request.num_tokens == 44
    assert [len(row) for row in world.request.block_ids] == [3, 3]
    assert len(world.cache.take_copies()) == 0


def test_a_lookup_without_memory_changes_nothing():
    refuse_each_allocation(lambda world: world.cache.lookup(KNOWN, 44), unchanged)


def test_an_admission_without_memory_changes_nothing():
    refuse_each_allocation(lambda world: world.cache.admit(world.match, 1, 45), unchanged)


def test_an_append_without_memory_changes_nothing():
    refuse_each_allocation(
        lambda world: world.cache.append(world.request, 1),
        unchanged,
        prepare=lambda world: world.cache.commit(world.request),
    )


def test_a_commit_that_ran_out_of_memory_can_be_repeated():
    def repeat(world, before):
        cache, request = world.cache, world.request
        cache.commit(request)
        full, state = (row.tolist() for row in request.block_ids)
        registrations = world.pool.registrations
        assert [registrations(i)[0].num_tokens for i in full] == [16, 32, 44]
        assert registrations(state[-1])[0].num_tokens == 44
        assert cache.admit(cache.lookup(NEW, 44), 1, 45) is None
        cache.append(request, 1)
        # The state of the boundary is saved before the request goes on in its block.
        assert cache.take_copies().pairs[:, 0].tolist() == [state[-1]]

    refuse_each_allocation(lambda world: world.cache.commit(world.request), repeat)


def test_copies_are_not_lost_when_their_batch_cannot_be_made():
    def still_there(world, before):
        assert state_of(world.pool) == before
        assert len(world.cache.take_copies()) == 2

    refuse_each_allocation(
        lambda world: world.cache.take_copies(),
        still_there,
        prepare=lambda world: world.cache.admit(world.match, 1, 45),
    )


def test_a_request_that_could_not_be_finished_can_be_finished():
    def finish(world, before):
        world.cache.finish(world.request)
        assert world.pool.get_num_free_blocks() == 59

    refuse_each_allocation(lambda world: world.cache.finish(world.request), finish)
