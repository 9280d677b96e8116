# SPDX-License-Identifier: Apache-2.0
"""Random operations on a small pool with events on, and consumers that check the stream."""

import hashlib
import random

import numpy as np

import cpool
from cpool.events.types import AllBlocksCleared, BlockRemoved, BlockStored

HASH_BLOCK_SIZE = 2
BLOCK_SIZE = 4
GROUPS = (0, 1)


class Request:
    """A prompt and its hashes, with what events ask of a request."""

    lora_request = None
    mm_features = ()
    cache_salt = None
    prompt_embeds = None

    def __init__(self, token_ids, session_id=None):
        self.all_token_ids = list(token_ids)
        self.session_id = session_id
        self.block_hashes = []
        self.prefix_of = {}
        digest = b""
        for end in range(HASH_BLOCK_SIZE, len(token_ids) + 1, HASH_BLOCK_SIZE):
            digest = hashlib.sha256(digest + bytes(token_ids[end - HASH_BLOCK_SIZE : end])).digest()
            self.block_hashes.append(digest)
            self.prefix_of[digest] = tuple(token_ids[:end])

    def full_hashes(self):
        step = BLOCK_SIZE // HASH_BLOCK_SIZE
        return self.block_hashes[step - 1 :: step]


def pool_keys(pool):
    """The pool's keys: set of (digest, group)."""
    return {
        (key[:-4], int.from_bytes(key[-4:], "big"))
        for key in pool.cached_block_hash_to_block._cache
    }


class Consumer:
    """Keeps a set of (hash, group), as an index of what is resident would."""

    def __init__(self):
        self.keys = set()

    def apply(self, events):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.keys.clear()
            elif isinstance(event, BlockStored):
                self.keys |= {(digest, event.group_idx) for digest in event.block_hashes}
            else:
                self.keys -= {(digest, event.group_idx) for digest in event.block_hashes}


class StrictConsumer(Consumer):
    """As Consumer, and every event must be true when it comes."""

    def __init__(self, prefix_of):
        super().__init__()
        self.prefix_of = prefix_of  # digest -> all tokens up to it
        self.num_clears = 0
        self.num_stored = 0
        self.num_parents = 0

    def apply(self, events):
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.num_clears += 1
            elif isinstance(event, BlockStored):
                self.check_stored(event)
            else:
                assert isinstance(event, BlockRemoved)
                for digest in event.block_hashes:
                    assert (digest, event.group_idx) in self.keys, "removal of an unknown key"
            super().apply([event])

    def check_stored(self, event):
        self.num_stored += 1
        assert event.block_hashes, "a store with no blocks"
        parent = event.parent_block_hash
        if parent is not None:
            self.num_parents += 1
            assert (parent, event.group_idx) in self.keys, "the parent was never published"
        for digest in event.block_hashes:
            assert (digest, event.group_idx) not in self.keys, "second store of a resident key"
        if not event.token_ids:
            return
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        last = self.prefix_of[event.block_hashes[-1]]
        assert last[-len(event.token_ids) :] == tuple(event.token_ids)
        for i, digest in enumerate(event.block_hashes[::-1]):
            assert self.prefix_of[digest] == last[: len(last) - i * size]
        if parent is not None:
            assert self.prefix_of[parent] == last[: -len(event.token_ids)]


class Driver:
    """Does random, mostly sensible things to a pool."""

    def __init__(self, seed, num_blocks=14, with_inserts=True, **pool_arguments):
        self.random = random.Random(seed)
        self.pool = cpool.BlockPool(
            num_blocks, True, HASH_BLOCK_SIZE, enable_kv_cache_events=True, **pool_arguments
        )
        self.held = []  # handles, one for each reference that we hold
        self.with_inserts = with_inserts
        self.requests = [
            # Few tokens, so that prompts share prefixes of every length.
            Request([self.random.choice((7, 8)) for _ in range(20)])
            for _ in range(4)
        ]
        self.prefix_of = {}
        for request in self.requests:
            self.prefix_of |= request.prefix_of

    def step(self):
        frequent = [self.register, self.register_ids, self.partial, self.partial_id]
        frequent += [self.allocate, self.free]
        others = [self.touch, self.evict, self.move, self.insert, self.rare]
        operation = self.random.choice(2 * frequent + others)
        operation()

    def free_of_hash(self):
        return [block for block in self.held if block.block_hash is None]

    def allocate(self):
        count = self.random.randint(0, min(4, self.pool.get_num_free_blocks()))
        if self.random.random() < 0.5:
            self.held += self.pool.get_new_blocks(count)
        else:
            ids = self.pool.get_new_block_ids(count)
            self.held += [self.pool.blocks[int(id)] for id in ids]

    def may_take(self, num_tokens):
        """Blocks that a key for so many tokens may be registered on."""
        return [
            block
            for block in dict.fromkeys(self.held)
            if block.block_hash is None
            or (
                block.block_hash_num_tokens is not None and block.block_hash_num_tokens < num_tokens
            )
        ]

    def choose_range(self):
        request = self.random.choice(self.requests)
        first = self.random.choice((0, 0, 1, 2))
        candidates = self.may_take((first + 1) * BLOCK_SIZE)
        self.random.shuffle(candidates)
        count = min(len(candidates), self.random.randint(1, 3), 5 - first)
        chosen = candidates[:count]
        if chosen and self.random.random() < 0.2:
            chosen[self.random.randrange(len(chosen))] = self.pool.null_block
        return request, first, chosen

    def register(self):
        request, first, chosen = self.choose_range()
        if not chosen:
            return
        mask = None
        if self.random.random() < 0.3:
            mask = [self.random.random() < 0.6 for _ in chosen]
        self.pool.cache_full_blocks(
            request,
            [self.pool.null_block] * first + chosen,
            first,
            first + len(chosen),
            BLOCK_SIZE,
            self.random.choice(GROUPS),
            mask,
        )

    def register_ids(self):
        request, first, chosen = self.choose_range()
        if not chosen:
            return
        if self.random.random() < 0.1 and len(chosen) < 5 - first:
            chosen.append(chosen[-1])  # the block is replaced by its own batch
        hashes = request.full_hashes()
        tokens = request.all_token_ids[first * BLOCK_SIZE : (first + len(chosen)) * BLOCK_SIZE]
        self.pool.cache_full_ids(
            [block.block_id for block in chosen],
            hashes[first : first + len(chosen)],
            self.random.choice(GROUPS),
            BLOCK_SIZE,
            first,
            parent_hash=hashes[first - 1] if first else None,
            token_ids=np.array(tokens) if self.random.random() < 0.5 else tokens,
        )

    def choose_boundary(self):
        request = self.random.choice(self.requests)
        num_tokens = HASH_BLOCK_SIZE * self.random.randint(1, len(request.block_hashes))
        return request, num_tokens, self.random.random() < 0.2

    def partial(self):
        if not self.held:
            return
        request, num_tokens, replace = self.choose_boundary()
        self.pool.cache_partial_block(
            request,
            self.random.choice(self.held),
            num_tokens,
            self.random.choice(GROUPS),
            BLOCK_SIZE,
            replace,
        )

    def partial_id(self):
        if not self.held:
            return
        request, num_tokens, replace = self.choose_boundary()
        start = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        self.pool.cache_partial_id(
            self.random.choice(self.held).block_id,
            request.block_hashes[num_tokens // HASH_BLOCK_SIZE - 1],
            num_tokens,
            self.random.choice(GROUPS),
            replace,
            parent_hash=request.block_hashes[start // HASH_BLOCK_SIZE - 1] if start else None,
            token_ids=request.all_token_ids[start:num_tokens],
        )

    def free(self):
        self.random.shuffle(self.held)
        count = self.random.randint(0, len(self.held))
        freed, self.held = self.held[:count], self.held[count:]
        if self.random.random() < 0.5:
            self.pool.free_blocks(freed)
        else:
            self.pool.free_ids([block.block_id for block in freed])

    def touch(self):
        request = self.random.choice(self.requests)
        found = self.pool.get_cached_block(self.random.choice(request.block_hashes), [0])
        if found:
            self.pool.touch(found)
            self.held += found

    def evict(self):
        ids = [self.random.randrange(1, len(self.pool.blocks)) for _ in range(2)]
        if self.random.random() < 0.5:
            self.pool.evict_blocks(set(ids))
        else:
            self.pool.evict_ids(ids)

    def move(self):
        targets = [
            block
            for block in self.free_of_hash()
            if not self.pool.cached_block_hashes_by_block.get(block.block_id)
        ]
        if targets:
            source = self.pool.blocks[self.random.randrange(1, len(self.pool.blocks))]
            target = self.random.choice(targets)
            if source is not target:
                self.pool.move_block_hashes(source, target)

    def insert(self):
        if self.held and self.with_inserts:
            request = self.random.choice(self.requests)
            digest = self.random.choice(request.block_hashes)
            self.pool._insert_block_hash(
                digest + (0).to_bytes(4, "big"), self.random.choice(self.held), None
            )

    def rare(self):
        choice = self.random.random()
        if choice < 0.3:
            self.pool.free_blocks(self.held)
            self.held = []
            self.pool.reset_prefix_cache()
        elif choice < 0.5 and self.held:
            block = self.held.pop()
            self.pool.unpin_blocks([block], self.on_reuse)
        elif choice < 0.8:
            request = self.random.choice(self.requests)
            num_hits = len(self.pool.find_prefix_ids(request.full_hashes(), 0))
            self.pool.emit_cached_block_events(request, num_hits, BLOCK_SIZE, 0)
        elif self.held:
            self.random.choice(self.held).reset_hash()

    def on_reuse(self, block):
        request = self.random.choice(self.requests)
        if block.block_hash is None and self.random.random() < 0.5:
            self.pool.cache_partial_block(request, block, HASH_BLOCK_SIZE, 0, BLOCK_SIZE)
