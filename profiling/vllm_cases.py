# SPDX-License-Identifier: Apache-2.0
"""What vLLM does with its block pool, timed inside one process; see vllm_speed.

A case is a generator: it builds what it needs, then does one round each time it is asked and
yields ``([nanoseconds of CPU], number of units, what was decided)``, one time for each title.
The decisions must be the same on every pool. Nothing here knows whose pool it is: this is
vLLM's own interface.
"""

import gc
import importlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path

from profiling.host_memory import BYTES_PER_BLOCK, back_memory, keep_heap_mapped

BLOCK_SIZE = 16
NUM_BLOCKS = 1_000_001  # a million and the null block
LONG_PROMPT = 100_000  # tokens
PREFILL = 2_048
SHARED_PREFIX = 1_024
CASES = {}  # name -> (titles, rounds, function)


def case(name, *titles, rounds=9):
    def add(function):
        CASES[name] = (titles, rounds, function)
        return function

    return add


def timed(function, *arguments):
    start = time.thread_time_ns()
    result = function(*arguments)
    return time.thread_time_ns() - start, result


def ids_of(blocks):
    return [block.block_id for block in blocks]


def settle():
    """As an engine does when it has started: what exists is no work for the collector."""
    gc.collect()
    gc.freeze()


def make_pool(num_blocks=NUM_BLOCKS, hash_block_size=BLOCK_SIZE):
    from vllm.v1.core import kv_cache_coordinator

    return kv_cache_coordinator.BlockPool(num_blocks, True, hash_block_size)


def make_hashes(count, seed):
    data = random.Random(seed).randbytes(32 * count)
    return [data[32 * i : 32 * i + 32] for i in range(count)]


class Hashed:
    """What registration reads of a request."""

    def __init__(self, block_hashes):
        self.block_hashes = block_hashes


# The pool alone. ---------------------------------------------------------------------------


def benchmark_block_pool(size):
    """Allocations and frees of one size, as in vLLM's benchmark_block_pool.py."""
    pool = make_pool(100_000)
    count = 50_000 // size
    settle()

    def get():
        return [pool.get_new_blocks(size) for _ in range(count)]

    def free(held):
        for blocks in held:
            pool.free_blocks(blocks)

    while True:
        allocating, held = timed(get)
        decided = [ids_of(blocks) for blocks in held]
        freeing, _ = timed(free, held)
        yield [allocating, freeing], count, decided


for _size in (10, 100, 1000):
    case(f"blocks_{_size}", f"get_new_blocks({_size})", f"free_blocks of {_size}")(
        lambda size=_size: benchmark_block_pool(size)
    )


@case("register", "cache_full_blocks, a million blocks, each", rounds=3)
def register():
    pool = make_pool()
    while True:
        blocks = pool.get_new_blocks(NUM_BLOCKS - 1)
        hashes = make_hashes(NUM_BLOCKS - 1, 1)
        settle()
        # The hashes took what was at hand; stock's keys and its map take more.
        back_memory(NUM_BLOCKS * BYTES_PER_BLOCK)

        nanoseconds, _ = timed(
            pool.cache_full_blocks, Hashed(hashes), blocks, 0, len(blocks), BLOCK_SIZE, 0
        )
        decided = pool.get_cached_block(hashes[-1], [0])[0].block_id
        yield [nanoseconds], len(blocks), decided
        pool.free_blocks(blocks)
        assert pool.reset_prefix_cache()


def full_pool(aged):
    """A pool of which every block is free and registered; in random order if aged."""
    pool = make_pool()
    rng = random.Random(2)
    hashes = make_hashes(2 * NUM_BLOCKS, 3)
    used = 0
    for _ in range(2 if aged else 1):
        held = []
        while pool.get_num_free_blocks():
            blocks = pool.get_new_blocks(min(64, pool.get_num_free_blocks()))
            request = Hashed(hashes[used : used + len(blocks)])
            pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_SIZE, 0)
            used += len(blocks)
            held += blocks
        if aged:
            rng.shuffle(held)
        for i in range(0, len(held), 64):
            pool.free_blocks(held[i : i + 64])
    del held, blocks
    settle()
    return pool, hashes[used - NUM_BLOCKS + 1 : used]


def look_up(pick, aged=True):
    """Look up what `pick` makes of the hashes in the pool: rng, hashes -> 50,000 hashes."""
    pool, hashes = full_pool(aged)
    rng = random.Random(4)
    while True:
        chosen = pick(rng, hashes)

        # As vLLM's managers do, keep the blocks and drop the list around each of them: with
        # all those lists alive half of the time would be the garbage collector's.
        def run(chosen=chosen, get=pool.get_cached_block):
            found = []
            for block_hash in chosen:
                if hit := get(block_hash, [0]):
                    found += hit
            return found

        nanoseconds, found = timed(run)
        yield [nanoseconds], len(chosen), ids_of(found)


def some(rng, hashes):
    return rng.sample(hashes, 50_000)


def successive(rng, hashes):
    start = rng.randrange(len(hashes) - 50_000)
    return hashes[start : start + 50_000]


def unknown(rng, hashes):
    return make_hashes(50_000, rng.random())


case("hit", "get_cached_block, hit, random")(lambda: look_up(some))
case("hit_aged", "get_cached_block, hit, one request after the other, aged")(
    lambda: look_up(successive)
)
case("hit_fresh", "get_cached_block, hit, one request after the other, fresh")(
    lambda: look_up(successive, aged=False)
)
case("miss", "get_cached_block, miss, aged")(lambda: look_up(unknown))
case("miss_fresh", "get_cached_block, miss, fresh")(lambda: look_up(unknown, aged=False))


def allocate(aged):
    """Take blocks that are all registered, 64 a call; afterwards they go back as they were."""
    pool, _ = full_pool(aged)
    rng = random.Random(5)
    while True:

        def run():
            return [pool.get_new_blocks(64) for _ in range(500)]

        nanoseconds, held = timed(run)
        blocks = [block for batch in held for block in batch]
        del held
        request = Hashed(make_hashes(len(blocks), rng.random()))
        pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_SIZE, 0)
        decided = ids_of(blocks)
        if aged:
            rng.shuffle(blocks)
        pool.free_blocks(blocks)
        yield [nanoseconds], len(blocks), decided


case("evict_fresh", "get_new_blocks(64), evicting, fresh, a block")(lambda: allocate(False))
case("evict_aged", "get_new_blocks(64), evicting, aged, a block")(lambda: allocate(True))


AT_ONCE = "the same at once again, from warm caches"


@case("partial", "cache_partial_block again, 900 running requests", AT_ONCE)
def partial():
    pool = make_pool()
    blocks = pool.get_new_blocks(900)
    hashes = make_hashes(900 * 40, 6)
    requests = [Hashed(hashes[40 * i : 40 * i + 40]) for i in range(900)]
    settle()

    def run(cache=pool.cache_partial_block):
        return [
            cache(request, block, 38 * BLOCK_SIZE, 0, 50 * BLOCK_SIZE)
            for request, block in zip(requests, blocks, strict=True)
        ]

    run()
    while True:
        first, decided = timed(run)
        again, _ = timed(run)
        yield [first, again], 1, [key.hex() for key in decided]


@case("tails", "FullAttentionManager.cache_blocks again, 900 running requests", AT_ONCE)
def tails():
    """As above, the way that vLLM takes in each step of decoding."""
    import torch
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=50 * BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    manager = FullAttentionManager(
        spec, make_pool(), enable_caching=True, kv_cache_group_id=0,
        scheduler_block_size=50 * BLOCK_SIZE,
    )  # fmt: skip
    rng, hasher = random.Random(6), request_hasher()
    num_tokens = 38 * BLOCK_SIZE + 1
    requests = [
        make_request(str(i), [rng.randrange(128_000) for _ in range(num_tokens)], hasher)
        for i in range(900)
    ]
    for request in requests:
        manager.allocate_new_blocks(request.request_id, num_tokens, num_tokens)
    settle()

    def run(cache=manager.cache_blocks):
        for request in requests:
            cache(request, num_tokens, retention_interval=None, replay_boundaries=())

    run()
    while True:
        first, _ = timed(run)
        again, _ = timed(run)
        held = [manager.req_to_blocks[request.request_id][0] for request in requests]
        yield [first, again], 1, [(block.block_id, block.block_hash.hex()) for block in held]


def collect_garbage(num_blocks):
    """A full collection; the pool was empty when the engine called gc.freeze()."""
    pool = make_pool(num_blocks)
    settle()
    blocks = pool.get_new_blocks(num_blocks - 1)
    hashes = make_hashes(len(blocks), 7)
    pool.cache_full_blocks(Hashed(hashes), blocks, 0, len(blocks), BLOCK_SIZE, 0)
    pool.free_blocks(reversed(blocks))
    del blocks, hashes
    while True:
        nanoseconds, _ = timed(gc.collect)
        yield [nanoseconds], 1, pool.get_num_free_blocks()


case("gc_full", "full collection, a million blocks registered")(lambda: collect_garbage(NUM_BLOCKS))
case("gc_small", "full collection, a pool of 1,000 blocks")(lambda: collect_garbage(1_000))


# vLLM's manager and scheduler on it. -------------------------------------------------------


def cache_config(num_blocks):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )


def request_hasher():
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    os.environ["PYTHONHASHSEED"] = "0"
    kv_cache_utils.init_none_hash(sha256)
    return kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, sha256)


def make_request(name, tokens, hasher):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    parameters = SamplingParams(max_tokens=100_000, ignore_eos=True)
    return Request(name, tokens, parameters, None, block_hasher=hasher)


class Serving:
    """vLLM's KVCacheManager over a million blocks that are all registered."""

    def __init__(self):
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        self.rng = random.Random(8)
        self.hasher = request_hasher()
        self.num_requests = 0
        self.manager = KVCacheManager(
            cache_config(NUM_BLOCKS), 131_072, BLOCK_SIZE, BLOCK_SIZE, log_stats=False
        )
        pool = self.manager.block_pool
        hashes = make_hashes(NUM_BLOCKS - 1, 9)
        blocks = pool.get_new_blocks(len(hashes))
        pool.cache_full_blocks(Hashed(hashes), blocks, 0, len(blocks), BLOCK_SIZE, 0)
        self.rng.shuffle(blocks)
        pool.free_blocks(blocks)

    def tokens(self, count):
        return [self.rng.randrange(128_000) for _ in range(count)]

    def request(self, tokens):
        self.num_requests += 1
        return make_request(str(self.num_requests), tokens, self.hasher)

    def allocate(self, request, hit):
        """Schedule what get_computed_blocks left of a prompt; returns ids of new blocks."""
        blocks, num_hit, _ = hit
        new = self.manager.allocate_slots(
            request, request.num_tokens - num_hit, num_hit, blocks, full_sequence_must_fit=True
        )
        request.num_computed_tokens = request.num_tokens
        return new.get_block_ids()

    def admit(self, request):
        hit = self.manager.get_computed_blocks(request)
        return hit[1], self.allocate(request, hit)


@case("create", f"Request of {LONG_PROMPT:,} tokens: create")
def create_request():
    serving = Serving()
    settle()
    while True:
        tokens = serving.tokens(LONG_PROMPT)
        nanoseconds, request = timed(serving.request, tokens)
        yield [nanoseconds], 1, request.block_hashes[-1].hex()


@case(
    "long",
    f"Request of {LONG_PROMPT:,} tokens: match and allocate_slots, no hit",
    f"Request of {LONG_PROMPT:,} tokens: get_computed_blocks, all but a block hit",
    f"Request of {LONG_PROMPT:,} tokens: allocate_slots, all but a block hit",
    f"Request of {LONG_PROMPT:,} tokens: free",
)
def long_request():
    """The life of a long request, evicting; then that of one with the same prompt."""
    serving = Serving()
    manager = serving.manager
    settle()
    while True:
        tokens = serving.tokens(LONG_PROMPT)
        first, second = serving.request(tokens), serving.request(tokens)
        admitting, decided = timed(serving.admit, first)
        matching, hit = timed(manager.get_computed_blocks, second)
        adopting, new = timed(serving.allocate, second, hit)
        assert hit[1] == LONG_PROMPT - BLOCK_SIZE
        decided = [decided, hit[0].get_block_ids(), new]
        manager.free(second)
        freeing, _ = timed(manager.free, first)
        yield [admitting, matching, adopting, freeing], 1, decided


@case("prefill", f"Prefill of {PREFILL:,} tokens, {SHARED_PREFIX:,} of them shared")
def prefill():
    serving = Serving()
    shared = serving.tokens(SHARED_PREFIX)
    settle()
    while True:
        requests = [
            serving.request(shared + serving.tokens(PREFILL - SHARED_PREFIX)) for _ in range(50)
        ]

        def run(requests=requests):
            return [serving.admit(request) for request in requests]

        nanoseconds, decided = timed(run)
        for request in requests:
            serving.manager.free(request)
        yield [nanoseconds], len(requests), decided


def decode_steps(manager, requests):
    """Rounds of one decode step of all requests, whose prompts have their slots."""

    def run():
        # Not timed apart: a token must arrive before there is a slot to find for the next.
        decided = []
        for request in requests:
            new = manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
            decided.append(new.get_block_ids(allow_none=True))
        return decided

    settle()
    while True:
        for request in requests:
            request.append_output_token_ids(7)
        manager.new_step_starts()
        nanoseconds, decided = timed(run)
        end_step(manager)
        yield [nanoseconds], len(requests), decided


def end_step(manager):
    # The copies of partial hits have run: their blocks are not needed any more.
    _, kept = manager.take_kv_cache_block_copies()
    manager.block_pool.free_blocks(kept)


@case("decode", "Decode step: allocate_slots(request, 1)")
def decode():
    serving = Serving()
    requests = [serving.request(serving.tokens(200 + i % BLOCK_SIZE)) for i in range(256)]
    for request in requests:
        serving.admit(request)
    yield from decode_steps(serving.manager, requests)


@case("decode_hybrid", "Decode step: the same, full attention and Mamba in blocks of 1,600 tokens")
def decode_hybrid():
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    size, num_prompt_tokens = 100 * BLOCK_SIZE, 1_000
    full = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    mamba = MambaSpec(
        block_size=size, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )
    groups = [KVCacheGroupSpec(["layer 0"], full), KVCacheGroupSpec(["layer 1"], mamba)]
    manager = KVCacheManager(
        KVCacheConfig(num_blocks=10_000, kv_cache_tensors=[], kv_cache_groups=groups),
        131_072, size, BLOCK_SIZE, log_stats=False,
    )  # fmt: skip
    rng, hasher = random.Random(12), request_hasher()
    requests = [
        make_request(
            str(i), [rng.randrange(128_000) for _ in range(num_prompt_tokens + i % size)], hasher
        )
        for i in range(256)
    ]
    for request in requests:
        # As the scheduler cuts a prompt: at its last hash, where its state is kept.
        last = (request.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        for num_new_tokens in (last, request.num_tokens - last):
            manager.new_step_starts()
            assert manager.allocate_slots(request, num_new_tokens) is not None
            request.num_computed_tokens += num_new_tokens
            end_step(manager)
    yield from decode_steps(manager, requests)


def make_scheduler(num_requests):
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.structured_output import StructuredOutputManager

    from profiling.vllm_engine import MODEL_CONFIG

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    caching = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_requests,
            max_num_batched_tokens=8_192,
            max_model_len=4_096,
            enable_chunked_prefill=True,
            async_scheduling=False,
            is_encoder_decoder=False,
        ),
        model_config=ModelConfig(
            model=str(folder), dtype="float16", skip_tokenizer_init=True, max_model_len=4_096
        ),
        cache_config=caching,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    caching.num_gpu_blocks = 100_001
    register_all_kvcache_specs(config)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache_config(caching.num_gpu_blocks),
        block_size=BLOCK_SIZE,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


def schedule(num_requests):
    """Steps of decoding; the model runner returns at once with a token for every request."""
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler = make_scheduler(num_requests)
    hasher = request_hasher()
    rng = random.Random(10)

    def step():
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[
                [7] if scheduler.requests[name].num_computed_tokens
                >= scheduler.requests[name].num_tokens else []
                for name in names
            ],
        )  # fmt: skip
        scheduler.update_from_output(output, ran)
        return output

    for i in range(num_requests):
        tokens = [rng.randrange(32_000) for _ in range(100 + i % 32)]
        scheduler.add_request(make_request(str(i), tokens, hasher))
    while any(request.num_output_tokens == 0 for request in scheduler.requests.values()):
        step()
    settle()

    def run():
        return [step() for _ in range(BLOCK_SIZE)]

    while True:
        nanoseconds, outputs = timed(run)
        decided = [output.scheduled_cached_reqs.new_block_ids for output in outputs]
        yield [nanoseconds], BLOCK_SIZE, [len(scheduler.running), decided]


for _count in (256, 1024):
    case(f"schedule_{_count}", f"schedule and update_from_output, {_count} sequences")(
        lambda count=_count: schedule(count)
    )


def serve(commands, answers):
    """Answer each line: the name of a case begins it, an empty line asks for a round."""
    rounds = None
    for line in commands:
        try:
            name = line.strip()
            if name:
                del rounds
                gc.unfreeze()
                gc.collect()
                rounds = CASES[name][2]()
                answer = {}
            else:
                back_memory()
                nanoseconds, units, decided = next(rounds)
                checksum = zlib.crc32(json.dumps(decided).encode())
                answer = {"ns": [one / units for one in nanoseconds], "checksum": checksum}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main():
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # All that vLLM's side needs is there before cpool comes, as in an engine.
    importlib.import_module("vllm.v1.core.kv_cache_manager")
    if sys.argv[1] == "cpool":
        import cpool.vllm

        cpool.vllm.install()
    pool = type(make_pool(10))
    answers.write(json.dumps({"pool": f"{pool.__module__}.{pool.__qualname__}"}) + "\n")
    answers.flush()
    keep_heap_mapped()
    serve(sys.stdin, answers)
    # Without a word of what libraries of vLLM leave behind.
    os._exit(0)


if __name__ == "__main__":
    main()
