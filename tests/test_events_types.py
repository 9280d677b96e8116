# SPDX-License-Identifier: Apache-2.0
"""Event classes, with msgspec and without."""

import subprocess
import sys

import pytest

from cpool.events.types import AllBlocksCleared, BlockRemoved, BlockStored, external_hash

WITHOUT_MSGSPEC = """
import sys
sys.modules["msgspec"] = sys.modules["zmq"] = None  # importing them raises ImportError
import cpool
from cpool.events.types import BlockRemoved, BlockStored

pool = cpool.BlockPool(5, True, 2, True, truthful_events=True)
ids = pool.get_new_block_ids(2)
pool.cache_full_ids(ids, [b"a" * 32, b"b" * 32], 0, 4, token_ids=list(range(8)))
pool.evict_ids(ids[:1])
stored, removed = pool.take_events()
assert isinstance(stored, BlockStored) and isinstance(removed, BlockRemoved)
assert stored.block_hashes[:1] == removed.block_hashes
assert stored.kv_cache_spec_kind is None
assert removed == BlockRemoved(stored.block_hashes[:1], "GPU", 0)
assert len({stored, removed, removed}) == 2
(resident,) = pool.snapshot_events().events
assert resident.block_hashes == stored.block_hashes[1:]
for name in ("wire", "publisher"):
    try:
        __import__(f"cpool.events.{name}")
    except ImportError as error:
        assert "pip install 'cpool[events]'" in str(error)
    else:
        raise AssertionError(f"cpool.events.{name} needs what is not there")
"""


def test_a_pool_needs_no_msgspec_for_its_events():
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_MSGSPEC], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_events_compare_and_hash_by_content():
    removed = BlockRemoved([1], "GPU", group_idx=0)
    assert removed == BlockRemoved([1], "GPU", group_idx=0)
    assert removed != BlockRemoved([2], "GPU", group_idx=0)
    stored = BlockStored([1], None, [1, 2], 2, None, "GPU", None)
    same = BlockStored([1], None, [1, 2], 2, None, "GPU", None)
    assert len({removed, stored, same, AllBlocksCleared(), AllBlocksCleared()}) == 3


def test_fields_may_be_set_later():
    stored = BlockStored([1], None, [], 2, None, "GPU", None)
    stored.kv_cache_spec_kind = "full_attention"
    assert stored.kv_cache_spec_kind == "full_attention"


@pytest.mark.parametrize(
    ("setting", "expected"), [("1", 2**64 - 2), ("0", b"\x01" * 24 + b"\xff" * 7 + b"\xfe")]
)
def test_a_digest_is_an_integer_or_whole(monkeypatch, setting, expected):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", setting)
    assert external_hash(b"\x01" * 24 + b"\xff" * 7 + b"\xfe") == expected
