# SPDX-License-Identifier: Apache-2.0
"""Made-up requests: prompts out of segments, after published measurements of real users.

Everything is drawn from one seed with integers only, so a seed gives the same tokens on every
machine and for every block size.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

from cpool.replay.records import Request, Trace
from cpool.replay.workload import agent, chat, rag, toolapi
from cpool.replay.workload.blocks import BlockNumbers
from cpool.replay.workload.sessions import Arrival

DEFAULT_BLOCK_SIZE = 16

# Each makes an endless stream of requests in order of time; beside it, how many to take.
PRESETS: dict[str, tuple[Callable[[Random], Iterator[Arrival]], int]] = {
    "agent": (agent.arrivals, 2_000),
    "chat": (chat.arrivals, 12_000),
    "rag": (rag.arrivals, 7_000),
    "toolapi": (toolapi.arrivals, 24_000),
}


def generate(
    preset: str, num_requests: int | None = None, seed: int = 0, block_size: int | None = None
) -> Trace:
    """A trace of made-up requests.

    Args:
        preset: One of ``PRESETS``.
        num_requests: How many; by default what the preset suggests.
        seed: Any number from 0.
        block_size: Tokens a block, by default 16. It decides the block ids, not the requests.
    """
    size = block_size or DEFAULT_BLOCK_SIZE
    arrivals, usual = PRESETS[preset]
    total = num_requests or usual
    num_made = 0

    def requests() -> Iterator[Request]:
        nonlocal num_made
        numbers = BlockNumbers(size)
        for arrival in islice(arrivals(Random(seed)), total):
            num_made += 1
            prompt = arrival.prompt
            hash_ids = numbers.of(prompt)
            yield Request(arrival.time, prompt.num_tokens, arrival.output_length, hash_ids)

    return Trace(
        f"made-up workload '{preset}', seed {seed}",
        "generated",
        size,
        "given" if block_size else "by default",
        requests(),
        fraction_read=lambda: num_made / total,
        parameters={"workload": preset, "requests": total, "seed": seed},
    )
