# SPDX-License-Identifier: Apache-2.0
"""What a prefix cache refuses, it refuses before anything changes."""

from typing import Any

import pytest

from cpool import BlockPool, ContractError, hash_tokens
from cpool.prefix import FullAttention, Mamba, PrefixCache

from .support import dump

UNIT = 4
MOST_HOLDERS = (1 << 31) - 1
PROMPT = hash_tokens(range(45), UNIT)


class Hooks:
    """A metrics collector that writes counts which are not its own."""

    def __init__(self) -> None:
        self.full: Any = None  # a block, or None for each that is handed out

    def on_block_allocated(self, block: Any) -> None:
        (self.full or block).ref_cnt = MOST_HOLDERS

    def ignore(self, block: Any) -> None:
        pass

    on_block_accessed = on_block_evicted = ignore


class World:
    """A running request whose state has to be saved before it goes on, and a match of it."""

    def __init__(self, hooks: Any = None) -> None:
        self.pool = BlockPool(60, True, UNIT)
        self.cache = PrefixCache(self.pool, [FullAttention(16), Mamba(16)])
        self.request = self.cache.admit(self.cache.lookup(PROMPT, 44), 44, 45)
        self.cache.commit(self.request)
        self.cache.begin_step()
        self.match = self.cache.lookup(PROMPT, 44)
        assert len(self.match.partial_tails) == 2
        self.state = self.pool.blocks[int(self.request.block_ids[1][-1])]
        self.pool.metrics_collector = hooks

    def seen(self) -> Any:
        rows = [row.tolist() for row in self.request.block_ids]
        return dump(self.pool), rows, self.request.num_tokens


def test_a_state_with_as_many_holders_as_can_be_counted_is_not_copied() -> None:
    world = World()
    world.state.ref_cnt = MOST_HOLDERS
    before = world.seen()
    message = rf"^ref_cnt of block {world.state.block_id} is {MOST_HOLDERS}; 1 more would pass"
    with pytest.raises(ContractError, match=message):
        world.cache.append(world.request, 4)
    assert world.seen() == before
    assert len(world.cache.take_copies()) == 0
    world.state.ref_cnt = MOST_HOLDERS - 1
    assert world.cache.append(world.request, 4) is not None
    assert world.state.ref_cnt == MOST_HOLDERS


def test_blocks_that_no_token_reads_stay_when_the_state_cannot_be_copied() -> None:
    """An append frees them first of all."""
    world = World()
    old = int(world.request.block_ids[0][0])
    cache = PrefixCache(world.pool, [FullAttention(16), Mamba(16)])
    other = cache.admit(cache.lookup(hash_tokens(range(1000, 1045), UNIT), 44), 16, 45)
    cache.append(other, 16)  # the first state is let go by the next append
    cache.append(other, 12)
    cache.commit(other)
    tail = world.pool.blocks[int(other.block_ids[1][-1])]
    tail.ref_cnt = MOST_HOLDERS
    before = dump(world.pool), [row.tolist() for row in other.block_ids]
    assert before[1][1][1] != 0  # a state that goes
    with pytest.raises(ContractError, match="1 more would pass"):
        cache.append(other, 4)
    assert (dump(world.pool), [row.tolist() for row in other.block_ids]) == before
    assert world.pool.blocks[old].ref_cnt == 1


@pytest.mark.parametrize("which", ["a hit", "a shared tail"])
def test_blocks_with_as_many_holders_as_can_be_counted_are_not_admitted(which: str) -> None:
    world = World()
    full = world.match.block_ids[0]
    block = world.pool.blocks[int(full[0] if which == "a hit" else full[-1])]
    block.ref_cnt = MOST_HOLDERS
    before = world.seen()
    with pytest.raises(ContractError, match=f"ref_cnt of block {block.block_id} is"):
        world.cache.admit(world.match, 1, 45)
    assert world.seen() == before
    assert len(world.cache.take_copies()) == 0


def test_counts_that_a_hook_writes_meanwhile_do_not_wrap_round() -> None:
    hooks = Hooks()
    world = World(hooks)
    num_held = (world.pool.ref_cnts[1:] > 0).sum()
    with pytest.raises(ContractError, match="1 more would pass"):
        world.cache.admit(world.match, 1, 45)  # the copies' targets have all those holders
    # Those two have one holder less, and are whoever's the others are.
    assert (world.pool.ref_cnts[1:] > 0).sum() == num_held + 2
    assert (world.pool.ref_cnts == MOST_HOLDERS - 1).sum() == 2
    hooks.full = world.state
    before = world.request.block_ids[1].tolist(), world.pool.get_num_free_blocks()
    with pytest.raises(ContractError, match=f"ref_cnt of block {world.state.block_id} is"):
        world.cache.append(world.request, 4)
    after = world.request.block_ids[1].tolist(), world.pool.get_num_free_blocks()
    assert after == before
    assert world.state.ref_cnt == MOST_HOLDERS
    world.pool.check_consistency()


@pytest.mark.parametrize("pool", [None, 5, "pool", BlockPool])
def test_a_cache_over_no_pool_names_what_was_given(pool: Any) -> None:
    with pytest.raises(TypeError, match=f"pool must be a BlockPool, not {type(pool).__name__}"):
        PrefixCache(pool, [FullAttention(UNIT)])


@pytest.mark.parametrize("groups", [None, 5, FullAttention(UNIT)], ids=repr)
def test_groups_that_are_no_sequence_are_named(groups: Any) -> None:
    with pytest.raises(TypeError, match=f"groups must be .*, not {type(groups).__name__}"):
        PrefixCache(BlockPool(8, True, UNIT), groups)
