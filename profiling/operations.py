# SPDX-License-Identifier: Apache-2.0
"""What is measured, defined once for all implementations.

An operation is a generator: it prepares its arguments, yields ``(function, list of argument
tuples)``, gets back what the calls returned, checks that, and returns block ids. Only the calls
are timed. The ids must be the same for every implementation: the pools take the same decisions,
or the figures compare nothing.

A session walks one pool through its life. *Fresh*: blocks are in the order of their ids.
*Aged*: filled, freed in random order and reused until order in queue, table and memory has
nothing to do with ids.
"""

from collections import deque

import numpy as np

REQUEST_BLOCKS = 64
PREFIX_BLOCKS = 6_250  # 100,000 tokens in blocks of 16
PREFIX_REPEATS = 20
NUM_COLD_PREFIXES = 4
CACHE_FLUSH_BYTES = 64 << 20  # more than caches hold

OPERATIONS = {}  # name -> (title, function)
SETUPS = {}


def operation(title):
    def add(function):
        OPERATIONS[function.__name__] = (title, function)
        return function

    return add


def setup(function):
    SETUPS[function.__name__] = function
    return function


class Session:
    """One pool and what must be known of it to check results.

    Args:
        interface: Class from `interfaces`.
        make_pool: Makes a pool: called with the number of blocks and the hash width.
        num_blocks: Size of the pool.
        hash_width: Bytes of a block hash.
        keys_per_block: 1 for full blocks alone; the rest are partial entries.
        sample_blocks: Blocks that one sample works on, a multiple of the request's.
        aging_passes: How often every block is reused on the way to the aged state.
    """

    def __init__(
        self, interface, make_pool, num_blocks, hash_width, keys_per_block, sample_blocks,
        aging_passes, seed=0,
    ):  # fmt: skip
        self.make = lambda: interface(make_pool, num_blocks, hash_width)
        self.api = None
        self.num_blocks = num_blocks
        self.hash_width = hash_width
        self.keys_per_block = keys_per_block
        self.sample_blocks = sample_blocks
        self.aging_passes = aging_passes
        self.rng = np.random.default_rng(seed)
        self.rows = np.zeros((num_blocks, hash_width), np.uint8)  # primary key of each block
        self.has_key = np.zeros(num_blocks, bool)
        self.held = deque()  # requests of blocks with keys, in order of allocation
        self.held_without_key = []
        self.taken = []  # blocks of this round
        self.arguments = []
        self.junk = np.ones(CACHE_FLUSH_BYTES // 8, np.int64)

    @property
    def num_requests(self):
        return self.sample_blocks // REQUEST_BLOCKS

    def flush_caches(self):
        self.junk += 1

    def new_rows(self, count):
        data = self.rng.bytes(count * self.hash_width)
        return np.frombuffer(data, np.uint8).reshape(count, self.hash_width)

    def take(self, count):
        """Allocate without timing; the blocks lose their keys."""
        blocks = self.api.allocate(count)
        ids = self.api.ids_of(blocks)
        self.has_key[ids] = False
        return blocks, ids

    def register(self, blocks, ids):
        """Register blocks under new keys without timing, as many keys each as the session has."""
        rows = self.new_rows(len(ids))
        self.api.register(*self.api.register_arguments(blocks, rows))
        self.rows[ids] = rows
        self.has_key[ids] = True
        for _ in range(self.keys_per_block - 1):
            for arguments in self.api.partial_arguments(ids, self.new_rows(len(ids))):
                self.api.register_partial(*arguments)

    def pick(self, count):
        """Ids of ``count`` different blocks with keys, in random order."""
        wanted = min(2 * count + 1000, 4 * self.num_blocks)
        ids = np.unique(self.rng.integers(1, self.num_blocks, wanted))
        ids = ids[self.has_key[ids]]
        if len(ids) < count:
            ids = np.flatnonzero(self.has_key)
        ids = self.rng.permutation(ids)[:count]
        require(len(ids) == count, f"{len(ids)} blocks have keys, {count} are needed")
        return ids

    def as_requests(self, ids):
        return [self.api.blocks(batch) for batch in in_requests(ids.astype(np.uint32))]

    def find_ids(self, rows):
        found = [self.api.find(*self.api.find_arguments(batch)) for batch in in_requests(rows)]
        return np.concatenate([self.api.found_ids(batch) for batch in found])


def require(condition, text):
    if not condition:
        raise AssertionError(text)


def require_equal(got, wanted, what):
    require(
        len(got) == len(wanted) and bool((np.asarray(got) == np.asarray(wanted)).all()),
        f"{what}: other blocks than expected",
    )


def in_requests(sequence):
    return [sequence[i : i + REQUEST_BLOCKS] for i in range(0, len(sequence), REQUEST_BLOCKS)]


def concatenated_ids(session, batches):
    return np.concatenate([session.api.ids_of(blocks) for blocks in batches])


# Fresh ------------------------------------------------------------------------------------


@operation("construct")
def construct(session):
    session.api = None
    (session.api,) = yield session.make, [()]
    require(session.api.pool.get_num_free_blocks() == session.num_blocks - 1, "blocks are missing")
    return np.array([session.num_blocks])


def allocate_sample(session):
    session.taken = yield session.api.allocate, [(REQUEST_BLOCKS,)] * session.num_requests
    ids = concatenated_ids(session, session.taken)
    require(len(np.unique(ids)) == session.sample_blocks, "a block was handed out twice")
    return ids


@operation("allocate, fresh")
def allocate_fresh(session):
    ids = yield from allocate_sample(session)
    require_equal(ids, ids[0] + np.arange(len(ids)), "allocation from a fresh pool")
    return ids


def register_sample(session):
    ids = concatenated_ids(session, session.taken)
    rows = session.new_rows(len(ids))
    arguments = [
        session.api.register_arguments(blocks, part)
        for blocks, part in zip(session.taken, in_requests(rows), strict=True)
    ]
    yield session.api.register, arguments
    session.rows[ids] = rows
    session.has_key[ids] = True
    require_equal(session.find_ids(rows), ids, "look-up of what was registered")
    return ids


@operation("register full, fresh")
def register_fresh(session):
    ids = yield from register_sample(session)
    session.held.extend(session.taken)
    return ids


@setup
def fill(session):
    """Register all blocks that are still free."""
    while free := session.api.pool.get_num_free_blocks():
        blocks, ids = session.take(min(REQUEST_BLOCKS, free))
        session.register(blocks, ids)
        session.held.append(blocks)


@operation("look up hit, sequential")
def find_sequential(session):
    # Ids and keys in the order of registration, which is the order in memory.
    first = int(session.rng.integers(1, session.num_blocks - session.sample_blocks))
    ids = np.arange(first, first + session.sample_blocks)
    ids = ids[session.has_key[ids]]
    return (yield from find_known(session, ids))


def find_known(session, ids):
    arguments = [session.api.find_arguments(rows) for rows in in_requests(session.rows[ids])]
    found = yield session.api.find, arguments
    require_equal(np.concatenate([session.api.found_ids(batch) for batch in found]), ids, "look-up")
    return ids


@operation("free, in order")
def free_fresh(session):
    session.taken = [session.held.popleft() for _ in range(session.num_requests)]
    return (yield from free_sample(session))


def free_sample(session):
    before = session.api.pool.get_num_free_blocks()
    ids = concatenated_ids(session, session.taken)
    yield session.api.free, [(blocks,) for blocks in session.taken]
    require(session.api.pool.get_num_free_blocks() == before + len(ids), "blocks were not freed")
    return ids


@operation("allocate with eviction, fresh")
def allocate_evicting_fresh(session):
    ids = yield from allocate_sample(session)
    require(session.has_key[ids].all(), "blocks without keys were handed out")
    session.has_key[ids] = False
    session.held_without_key.extend(session.taken)
    return ids


# Aged -------------------------------------------------------------------------------------


@setup
def age(session):
    """Free all in random order; then reuse every block, as often as the session says."""
    api = session.api
    held = [*session.held, *session.held_without_key]
    session.held.clear()
    session.held_without_key.clear()
    free_in_random_order(session, held)
    for _ in range(session.aging_passes):
        held = []
        while free := api.pool.get_num_free_blocks():
            blocks, ids = session.take(min(REQUEST_BLOCKS, free))
            session.register(blocks, ids)
            held.append(blocks)
        free_in_random_order(session, held)
    require(session.has_key[1:].all(), "a block of an aged pool has no key")


def free_in_random_order(session, held):
    blocks = session.api.join(held)
    held.clear()
    order = session.rng.permutation(len(blocks))
    for part in in_requests(order):
        session.api.free(session.api.select(blocks, part))


@operation("look up hit, random")
def find_random(session):
    return (yield from find_known(session, session.pick(session.sample_blocks)))


@operation("look up miss")
def find_missing(session):
    rows = session.new_rows(session.sample_blocks)
    arguments = [session.api.find_arguments(batch) for batch in in_requests(rows)]
    found = yield session.api.find, arguments
    ids = np.concatenate([session.api.found_ids(batch) for batch in found])
    require_equal(ids, np.full(len(rows), -1), "look-up of keys that do not exist")
    return ids


def prefix_rows(session):
    # The blocks of a prefix, then one that is missing.
    ids = session.pick(PREFIX_BLOCKS)
    return ids, np.concatenate([session.rows[ids], session.new_rows(1)])


@operation("prefix of 6,250 blocks, cold")
def find_prefix_cold(session):
    prefixes = [prefix_rows(session) for _ in range(NUM_COLD_PREFIXES)]
    found = yield (
        session.api.find_prefix,
        [session.api.find_arguments(rows) for _, rows in prefixes],
    )
    for (ids, _), blocks in zip(prefixes, found, strict=True):
        require_equal(session.api.found_ids(blocks), ids, "prefix")
    return np.concatenate([ids for ids, _ in prefixes])


@operation("prefix of 6,250 blocks, warm")
def find_prefix_warm(session):
    ids, rows = prefix_rows(session)
    arguments = session.api.find_arguments(rows)
    session.api.find_prefix(*arguments)
    found = yield session.api.find_prefix, [arguments] * PREFIX_REPEATS
    require_equal(session.api.found_ids(found[-1]), ids, "prefix")
    return np.tile(ids, PREFIX_REPEATS)


@operation("touch, aged")
def touch(session):
    ids = session.pick(session.sample_blocks)
    session.taken = session.as_requests(ids)
    before = session.api.pool.get_num_free_blocks()
    yield session.api.touch, [(blocks,) for blocks in session.taken]
    require(session.api.pool.get_num_free_blocks() == before - len(ids), "blocks stayed free")
    return ids


@operation("free, shuffled")
def free_shuffled(session):
    blocks = session.api.join(session.taken)
    order = session.rng.permutation(len(blocks))
    session.taken = [session.api.select(blocks, part) for part in in_requests(order)]
    return (yield from free_sample(session))


@operation("allocate with eviction, aged")
def allocate_evicting_aged(session):
    ids = yield from allocate_sample(session)
    rows = session.rows[ids[session.has_key[ids]]]
    session.has_key[ids] = False
    require((session.find_ids(rows) == -1).all(), "keys of reused blocks are still there")
    return ids


@operation("register full, aged")
def register_aged(session):
    return (yield from register_sample(session))


@operation("register extra keys")
def register_extra(session):
    """The partial entries of blocks that have full keys; only with several keys a block."""
    ids = concatenated_ids(session, session.taken)
    ids = np.repeat(ids, session.keys_per_block - 1)
    rows = session.new_rows(len(ids))
    yield session.api.register_partial, session.api.partial_arguments(ids, rows)
    require_equal(session.find_ids(rows), ids, "look-up of extra keys")
    return ids


@operation("free, aged")
def free_aged(session):
    return (yield from free_sample(session))


@operation("register partial")
def register_partial(session):
    session.taken, ids = [], []
    for _ in range(session.num_requests // 4 or 1):
        blocks, block_ids = session.take(REQUEST_BLOCKS)
        session.taken.append(blocks)
        ids.append(block_ids)
    ids = np.concatenate(ids)
    rows = session.new_rows(len(ids))
    session.arguments = session.api.partial_arguments(ids, rows)
    yield session.api.register_partial, session.arguments
    session.rows[ids] = rows
    session.has_key[ids] = True
    require_equal(session.find_ids(rows), ids, "look-up of partial entries")
    return ids


@operation("register partial, again")
def register_partial_again(session):
    ids = concatenated_ids(session, session.taken)
    yield session.api.register_partial, session.arguments
    require_equal(session.find_ids(session.rows[ids]), ids, "look-up of partial entries")
    for blocks in session.taken:
        session.api.free(blocks)
    session.arguments = []
    return ids


@operation("evict")
def evict(session):
    ids = session.pick(session.sample_blocks)
    batches = in_requests(ids.astype(np.uint32))
    yield session.api.evict, [session.api.evict_arguments(batch) for batch in batches]
    require((session.find_ids(session.rows[ids]) == -1).all(), "evicted keys are still there")
    for batch in batches:
        session.register(session.api.blocks(batch), batch)
    return ids


@operation("move")
def move(session):
    targets, target_ids = [], []
    for _ in range(session.num_requests // 4 or 1):
        blocks, ids = session.take(REQUEST_BLOCKS)
        targets.append(blocks)
        target_ids.append(ids)
    target_ids = np.concatenate(target_ids)
    source_ids = session.pick(len(target_ids))
    rows = session.rows[source_ids]
    yield session.api.move, session.api.move_arguments(source_ids, target_ids)
    require_equal(session.find_ids(rows), target_ids, "look-up of moved keys")
    session.rows[target_ids] = rows
    session.has_key[target_ids] = True
    for blocks in targets:
        session.api.free(blocks)
    for batch in in_requests(source_ids.astype(np.uint32)):
        session.register(session.api.blocks(batch), batch)
    return target_ids


@operation("reset")
def reset(session):
    (done,) = yield session.api.reset, [()]
    require(done is True, "the pool was not reset")
    session.has_key[:] = False
    require((session.find_ids(session.rows[1:1001]) == -1).all(), "a key survived the reset")
    return np.arange(session.num_blocks)


@setup
def verify(session):
    """The order of eviction, to be compared; cpool looks at itself, too."""
    ids = session.api.queue_ids()
    if hasattr(session.api.pool, "check_consistency"):
        session.api.pool.check_consistency()
    return ids


def phases(rounds, construct_rounds, keys_per_block):
    """(names of set-ups and operations, how often to walk through them), in order."""
    extra = ["register_extra"] if keys_per_block > 1 else []
    return [
        (["construct"], construct_rounds),
        (["allocate_fresh", "register_fresh"], rounds),
        (["fill"], 1),
        (["find_sequential", "free_fresh"], rounds),
        (["allocate_evicting_fresh"], rounds),
        (["age"], 1),
        (
            [
                "find_random", "find_missing", "find_prefix_cold", "find_prefix_warm",
                "touch", "free_shuffled", "allocate_evicting_aged", "register_aged",
                *extra, "free_aged", "register_partial", "register_partial_again",
                "evict", "move",
            ],
            rounds,
        ),
        (["verify"], 1),
        (["reset"], 1),
    ]  # fmt: skip


def sample_size(num_blocks, rounds, largest):
    """Blocks a sample: all rounds together must fit into a fresh pool."""
    fitting = (num_blocks - 1) // (rounds + 1)
    return max(REQUEST_BLOCKS, min(largest, fitting) // REQUEST_BLOCKS * REQUEST_BLOCKS)
