# SPDX-License-Identifier: Apache-2.0
"""Print the golden cases: events and the bytes that vLLM's own encoder makes of them.

    python tests/golden_events.py > tests/golden_events.json

Run it with the Python of an environment that has vLLM 0.32.0.
"""

import json
import sys

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

DIGEST = bytes(range(32))


def stored(**changes):
    fields = {
        "block_hashes": [1, 2**32, 2**64 - 1],
        "parent_block_hash": None,
        "token_ids": [0, 127, 128, 255, 256, 65535, 65536, 2**31],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return BlockStored(**(fields | changes))


CASES = [
    ("empty batch", [], 0.0, None),
    ("bare store", [stored()], 1764430000.25, 0),
    (
        "self-describing store",
        [
            stored(
                parent_block_hash=2**63,
                lora_id=3,
                lora_name="adapter",
                medium="CPU",
                extra_keys=[("salt",), None, (("image", -4), "adapter")],
                group_idx=1,
                kv_cache_spec_kind="sliding_window",
                kv_cache_spec_sliding_window=4096,
                locality="LOCAL",
                ownership="disk",
                session_id="s-1",
            )
        ],
        1764430000.5,
        1,
    ),
    ("bytes hashes", [stored(block_hashes=[DIGEST], parent_block_hash=DIGEST[::-1])], 2.0, 0),
    ("no medium", [stored(medium=None), BlockRemoved([5], None)], 3.0, None),
    (
        "removals",
        [
            BlockRemoved([2**64 - 2], "GPU", group_idx=0),
            BlockRemoved([DIGEST], "GPU", group_idx=70000, locality="REMOTE", ownership="disk"),
        ],
        4.0,
        300,
    ),
    ("clear", [AllBlocksCleared()], 5.0, 0),
    ("many events", [BlockRemoved([i], "GPU", group_idx=0) for i in range(20)], 6.0, 0),
    ("many blocks", [stored(block_hashes=list(range(300)), token_ids=list(range(300)))], 7.0, 0),
]


def plain(value):
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def describe(event):
    fields = {name: plain(getattr(event, name)) for name in event.__struct_fields__}
    return {"type": type(event).__name__, **fields}


encoder = msgspec.msgpack.Encoder()
json.dump(
    [
        {
            "name": name,
            "timestamp": timestamp,
            "data_parallel_rank": rank,
            "events": [describe(event) for event in events],
            "payload": encoder.encode(KVEventBatch(timestamp, events, rank)).hex(),
        }
        for name, events, timestamp, rank in CASES
    ],
    sys.stdout,
    indent=1,
)
