# SPDX-License-Identifier: Apache-2.0
"""Time of block hashing against stock vLLM 0.32, in one run.

Run it where vLLM is installed:

    PYTHONPATH=. python profiling/hashing.py [--rounds 15] [--hash-block-size 16]

Both sides hash the same tokens and must give the same hashes. They take turns (A B A B), and
time is CPU time of the thread, so that neighbours on the machine disturb less; still, expect
10-20 % of noise. A figure is the median over the rounds, with the lower and upper quartile.

    prompt     ns a token for a 100,000-token prompt. "loop" is vLLM's hash_block_tokens on
               slices of a list, "request" its hasher on a vLLM Request, which is what serving
               pays; ours are hash_tokens and the hasher for requests.
    decode     ns a token for appending 2,048 tokens one by one to a request of 1,000, the
               loop that does it included. "request" is append_output_token_ids of vLLM's
               Request, stock's with stock's hasher against what cpool.vllm installs;
               "unhashed request" is stock's without a hasher, and "stock hasher" the
               difference, to be compared with BlockHashes.append_token. "empty loop" calls
               a built-in method that does nothing: no append can take less.
    digest     ns for a block of one token, its digest taken from C and by the Python function.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from cpool.hashing import ALGORITHMS, BlockHasher, BlockHashes, hash_tokens
from cpool.vllm.hashing import get_request_block_hasher
from cpool.vllm.request import append_method

NUM_PROMPT_TOKENS = 100_000
NUM_DECODE_TOKENS = 2_048
VOCABULARY = 128_000


def cpu_ns(function: Callable[[], object]) -> int:
    start = time.thread_time_ns()
    function()
    return time.thread_time_ns() - start


def take_turns(
    makers: dict[str, Callable[[], Callable[[], object]]], rounds: int, per: int
) -> dict[str, list[float]]:
    """Time each maker's function once a round; what the maker itself does is not timed."""
    times: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(rounds):
        for name, make in makers.items():
            times[name].append(cpu_ns(make()) / per)
    return times


def spread(samples: list[float]) -> str:
    low, middle, high = statistics.quantiles(samples, n=4)
    return f"{middle:8.1f} ({low:.1f}-{high:.1f})"


def make_request(token_ids: list[int], hasher: Callable | None = None) -> Request:
    parameters = SamplingParams(max_tokens=NUM_DECODE_TOKENS + 1)
    return Request("request", token_ids, parameters, None, block_hasher=hasher)


def stock_loop(hash_fn: Callable, token_ids: list[int], size: int) -> list[bytes]:
    parent, hashes = None, []
    for start in range(0, len(token_ids) - size + 1, size):
        block = token_ids[start : start + size]
        parent = kv_cache_utils.hash_block_tokens(hash_fn, parent, block)
        hashes.append(parent)
    return hashes


def prompt_times(hash_fn, stock, ours, hasher, token_ids, size, rounds):
    request = make_request(token_ids)
    makers = {
        "stock loop": lambda: lambda: stock_loop(hash_fn, token_ids, size),
        "hash_tokens": lambda: (
            lambda: hash_tokens(token_ids, size, hasher.algorithm, root=hasher.root)
        ),
        "stock request": lambda: lambda: stock(request),
        "our request": lambda: lambda: ours(request),
    }
    expected = stock(request)
    for name, make in makers.items():
        if list(make()()) != expected:
            raise AssertionError(f"{name} gives other hashes than stock")
    return take_turns(makers, rounds, len(token_ids))


def decode_times(stock, ours, hasher, token_ids, rounds):
    prompt, output = token_ids[:1000], token_ids[-NUM_DECODE_TOKENS:]
    stock_append = Request.append_output_token_ids
    our_append = append_method(Request, stock_append)

    def decode_request(append, request_hasher):
        request = make_request(prompt, request_hasher)
        Request.append_output_token_ids = append

        def run():
            for token in output:
                request.append_output_token_ids(token)
            return request.block_hashes

        return run

    def decode_sequence():
        hashes = BlockHashes(hasher, prompt)

        def run():
            for token in output:
                hashes.append_token(token)
            return hashes

        return run

    def empty_loop():
        flags = {}

        def run():
            for token in output:
                flags.get(token)

        return run

    makers = {
        "stock request": lambda: decode_request(stock_append, stock),
        "our request": lambda: decode_request(our_append, ours),
        "unhashed request": lambda: decode_request(stock_append, None),
        "append_token": decode_sequence,
        "empty loop": empty_loop,
    }
    try:
        expected = makers["stock request"]()()
        if not (makers["our request"]()() == makers["append_token"]()() == expected):
            raise AssertionError("decode appends give other hashes than stock")
        times = take_turns(makers, rounds, len(output))
    finally:
        Request.append_output_token_ids = stock_append
    unhashed = statistics.median(times["unhashed request"])
    times["stock hasher"] = [sample - unhashed for sample in times["stock request"]]
    return times


def digest_times(hasher, rounds):
    """Compare the two ways to a digest by hashing 2,000 blocks of one token each way."""
    token_ids = list(range(2000))
    one = BlockHasher(1, hasher.algorithm, root=hasher.root)
    by_python = BlockHasher(1, hasher.algorithm, root=hasher.root)
    by_python._native_digest = False
    return take_turns(
        {
            one.digest_source: lambda: lambda: one.new_hashes(token_ids, []),
            by_python.digest_source: lambda: lambda: by_python.new_hashes(token_ids, []),
        },
        rounds,
        len(token_ids),
    )


def report(title: str, times: dict[str, list[float]], pairs: list[tuple[str, str]]) -> None:
    for name, samples in times.items():
        print(f"  {title:7} {name:16} {spread(samples)} ns")
    for stock, ours in pairs:
        ratio = statistics.median(times[stock]) / statistics.median(times[ours])
        print(f"  {title:7} {stock} / {ours}: {ratio:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hash-block-size", type=int, default=16)
    arguments = parser.parse_args()
    size, rounds = arguments.hash_block_size, arguments.rounds
    rng = random.Random(0)
    token_ids = [rng.randrange(VOCABULARY) for _ in range(NUM_PROMPT_TOKENS)]
    for algorithm in ALGORITHMS:
        hash_fn = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(hash_fn)
        stock = kv_cache_utils.get_request_block_hasher(size, hash_fn)
        hasher = BlockHasher(size, algorithm, root=kv_cache_utils.NONE_HASH)
        ours = get_request_block_hasher(size, hash_fn)
        print(f"{algorithm} (digests: {hasher.digest_source}, {size} tokens a block)")
        report(
            "prompt",
            prompt_times(hash_fn, stock, ours, hasher, token_ids, size, rounds),
            [("stock loop", "hash_tokens"), ("stock request", "our request")],
        )
        report(
            "decode",
            decode_times(stock, ours, hasher, token_ids, rounds),
            [("stock request", "our request"), ("stock hasher", "append_token")],
        )
        report("digest", digest_times(hasher, rounds), [])


if __name__ == "__main__":
    main()
