# SPDX-License-Identifier: Apache-2.0
"""BlockHasher and hash_tokens against pickle, cbor2, hashlib and xxhash themselves."""

import array
import hashlib
import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpool.hashing import ALGORITHMS, BlockHasher, default_root, hash_tokens

cbor2 = pytest.importorskip("cbor2", reason="optional package cbor2 is missing")
xxhash = pytest.importorskip("xxhash", reason="optional package xxhash is missing")

EDGES = [s * (1 << b) + d for b in (0, 5, 8, 16, 31, 32, 39, 63) for s in (1, -1) for d in (-1, 0)]
TOKENS = st.one_of(
    st.integers(0, 2**18), st.sampled_from(EDGES), st.integers(-(2**64), 2**64), st.booleans()
)
# Sampled values are the same objects each time, which a pickle tells from equal ones.
SHARED = ["lora", "mm", "9f" * 32, "ä" * 127, "s" * 255, "s" * 256, b"d" * 255, b"d" * 256]
SHARED += [(), ("mm", "x", 5), "", b"", "\ud800", 1.5, frozenset([1])]
LEAVES = st.one_of(
    st.sampled_from(SHARED),
    st.none(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from(EDGES),
    st.integers(),
    st.booleans(),
)
TUPLES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=5).map(tuple), max_leaves=12)
KEYS = st.one_of(st.none(), TUPLES, st.lists(LEAVES, max_size=3))


def reference(token_ids, size, algorithm, root, extra_keys=None):
    """Hash block by block, in plain Python."""
    parent, hashes = root, []
    for i in range(len(token_ids) // size):
        keys = extra_keys[i] if extra_keys is not None else None
        block = (parent, tuple(token_ids[i * size : (i + 1) * size]), keys)
        if algorithm.endswith("_cbor"):
            message = cbor2.dumps(block, canonical=True)
        else:
            message = pickle.dumps(block, protocol=5)
        if algorithm.startswith("xxhash"):
            parent = xxhash.xxh3_128_digest(message)
        else:
            parent = hashlib.sha256(message).digest()
        hashes.append(parent)
    return hashes


@pytest.fixture(params=ALGORITHMS)
def algorithm(request):
    return request.param


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(ALGORITHMS),
    st.lists(TOKENS, max_size=80),
    st.integers(1, 40),
    st.lists(KEYS, min_size=5, max_size=5).map(lambda keys: keys * 16),
)
def test_hashes_are_those_of_the_serializers_themselves(algorithm, token_ids, size, keys):
    extra_keys = keys[: len(token_ids) // size]
    try:
        expected = reference(token_ids, size, algorithm, default_root(algorithm), extra_keys)
    except Exception:
        with pytest.raises(TypeError, match="extra keys of block"):
            hash_tokens(token_ids, size, algorithm, extra_keys=extra_keys)
    else:
        assert hash_tokens(token_ids, size, algorithm, extra_keys=extra_keys) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4, 23, 24, 255, 256, 257, 5000, 13_000, 21_824, 21_860])
def test_every_header_length_of_a_block(algorithm, size):
    # From 13 000 tokens of 5 bytes on, a pickle takes more than one frame; with 3-byte tokens
    # the last two sizes lie on both sides of that limit.
    for token in (300, 100_000):
        token_ids = [token] * (2 * size)
        expected = reference(token_ids, size, algorithm, default_root(algorithm))
        assert hash_tokens(token_ids, size, algorithm) == expected


def test_pickle_at_each_length_around_the_limit_of_a_frame():
    root = default_root("sha256")
    empty = len(pickle.dumps((root, (300,) * 4, None), protocol=5)) - 4 * 3 - 11
    lengths = set()
    for size in range((65536 - empty) // 3 - 4, (65536 - empty) // 3 + 4):
        for num_wide in range(3):  # tokens of 5 bytes, the others have 3
            token_ids = [300] * (size - num_wide) + [100_000] * num_wide
            lengths.add(empty + 3 * size + 2 * num_wide)
            assert hash_tokens(token_ids, size) == reference(token_ids, size, "sha256", root)
    assert lengths >= set(range(65536 - 6, 65536 + 6))


@pytest.mark.parametrize("native_digest", [True, False])
@pytest.mark.parametrize("native_encoding", [True, False])
def test_each_fallback_gives_the_same_hashes(algorithm, native_digest, native_encoding):
    hasher = BlockHasher(16, algorithm)
    hasher._native_digest = native_digest and hasher._native_digest
    hasher._native_encoding = native_encoding and hasher._native_encoding
    token_ids = [(i * 7919) % 150_000 for i in range(400)]
    keys = [(("lora", "a", "/a"),), None] * 12 + [(("mm", "c" * 64, 5),)]
    expected = reference(token_ids, 16, algorithm, hasher.root, keys)
    assert hasher.new_hashes(token_ids, [], keys) == expected


def test_this_pickler_is_known(algorithm):
    # Otherwise every test of pickled blocks would only compare pickle with itself.
    assert BlockHasher(16, algorithm)._native_encoding


@pytest.mark.parametrize("typecode", "bBhHiIlLqQ")
def test_buffers_of_every_integer_type_hash_as_their_values(algorithm, typecode):
    bits = 8 * array.array(typecode).itemsize
    low = -(1 << bits - 1) if typecode.islower() else 0
    values = [low, low + 1, 0, 1, 100, low + (1 << bits) - 1, low + (1 << bits) - 2, 7]
    expected = reference(values, 2, algorithm, default_root(algorithm))
    buffer = array.array(typecode, values)
    assert hash_tokens(buffer, 2, algorithm) == expected
    assert hash_tokens(np.array(buffer), 2, algorithm) == expected
    assert hash_tokens(memoryview(buffer), 2, algorithm) == expected
    every_third = np.zeros(3 * len(values), dtype=np.array(buffer).dtype)
    every_third[::3] = values
    assert hash_tokens(every_third[::3], 2, algorithm) == expected
    assert hash_tokens(np.array(buffer)[::-1], 2, algorithm) == reference(
        values[::-1], 2, algorithm, default_root(algorithm)
    )


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros((2, 2), np.int64),
        np.zeros(4),
        np.zeros(4, bool),
        np.zeros(4, ">i4"),
        np.array(3),
    ],
)
def test_other_buffers_are_refused(buffer):
    with pytest.raises(TypeError, match="not one dimension of native integers"):
        hash_tokens(buffer, 2)


def test_numpy_scalars_in_a_list_hash_as_pickle_writes_them():
    token_ids = list(np.arange(8))
    assert hash_tokens(token_ids, 4) == reference(token_ids, 4, "sha256", default_root("sha256"))
    assert hash_tokens(token_ids, 4) != hash_tokens(range(8), 4)


def test_pickle_tells_one_string_twice_from_two_equal_strings():
    name = "adapter" * 3
    twin = "".join(["adapter"] * 3)
    assert name == twin
    assert name is not twin
    for keys in [(("lora", name, name),), (("lora", name, twin),)]:
        for algorithm in ALGORITHMS:
            expected = reference([1, 2, 3, 4], 2, algorithm, default_root(algorithm), [keys, keys])
            assert hash_tokens([1, 2, 3, 4], 2, algorithm, extra_keys=[keys, keys]) == expected
    one = hash_tokens([1, 2], 2, extra_keys=[(("lora", name, name),)])
    two = hash_tokens([1, 2], 2, extra_keys=[(("lora", name, twin),)])
    assert one != two
    assert hash_tokens([1, 2], 2, "sha256_cbor", extra_keys=[(("lora", name, name),)]) == (
        hash_tokens([1, 2], 2, "sha256_cbor", extra_keys=[(("lora", name, twin),)])
    )


@pytest.mark.parametrize("count", [1, 2, 60, 61, 62, 63, 64, 300])
def test_keys_of_many_strings(algorithm, count):
    # A pickle's memo, and the bytes we write keys to, have their limits in this range.
    for length in (2, 30, 250):
        keys = (*(str(i).rjust(length) for i in range(count)),) * 2
        expected = reference([1, 2], 2, algorithm, default_root(algorithm), [keys])
        assert hash_tokens([1, 2], 2, algorithm, extra_keys=[keys]) == expected


def test_keys_with_more_memo_entries_than_a_byte_counts(algorithm):
    keys = tuple(chr(0x100 + i) for i in range(270))
    keys += keys[-3:]
    expected = reference([1, 2], 2, algorithm, default_root(algorithm), [keys])
    assert hash_tokens([1, 2], 2, algorithm, extra_keys=[keys]) == expected


@pytest.mark.parametrize("depth", [1, 7, 8, 9, 10, 50])
def test_keys_of_nested_tuples(algorithm, depth):
    keys = "innermost"
    for _ in range(depth):
        keys = (keys,)
    expected = reference([1, 2], 2, algorithm, default_root(algorithm), [keys])
    assert hash_tokens([1, 2], 2, algorithm, extra_keys=[keys]) == expected


def test_keys_that_hold_their_own_root_share_its_memo_entry():
    root = bytes(range(32))
    keys = (("parent", root),)
    expected = reference([1, 2, 3], 1, "sha256", root, [keys] * 3)
    assert hash_tokens([1, 2, 3], 1, root=root, extra_keys=[keys] * 3) == expected


def test_keys_that_change_between_blocks_are_read_for_each():
    keys = ["a"]

    def extra_keys(start, stop):
        keys[0] = f"tokens {start} to {stop}"
        return keys

    expected = reference(
        range(6),
        2,
        "sha256",
        default_root("sha256"),
        [["tokens 0 to 2"], ["tokens 2 to 4"], ["tokens 4 to 6"]],
    )
    assert hash_tokens(range(6), 2, extra_keys=extra_keys) == expected


def test_a_growing_sequence_gets_only_its_new_hashes(algorithm):
    hasher = BlockHasher(4, algorithm)
    token_ids, hashes = [], []
    for i in range(50):
        token_ids.append(i * 1000)
        new = hasher.new_hashes(token_ids, hashes)
        assert len(new) == (1 if len(token_ids) % 4 == 0 else 0)
        hashes.extend(new)
    assert hashes == reference(token_ids, 4, algorithm, hasher.root)


class ReadOnlyList:
    """A sequence without a buffer, as vLLM's ConstantList."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.parametrize("kind", [list, tuple, ReadOnlyList, np.array, range])
def test_new_hashes_reads_any_sequence_from_where_it_was(kind):
    values = range(40) if kind is range else kind(list(range(40)))
    expected = reference(range(40), 4, "sha256", default_root("sha256"))
    hasher = BlockHasher(4)
    assert hasher.new_hashes(values, expected[:3]) == expected[3:]
    assert hasher.new_hashes(values, tuple(expected)) == []


def test_bad_tokens_are_named_with_their_place(algorithm):
    for bad in (1.5, "x", None, b"1", 2 + 0j):
        with pytest.raises(TypeError, match=r"token 5 is not an integer"):
            hash_tokens([0, 1, 2, 3, 4, bad, 6, 7], 4, algorithm)
        with pytest.raises(TypeError, match=r"token 9 is not an integer"):  # behind the blocks
            hash_tokens([0] * 9 + [bad], 4, algorithm)
        hasher = BlockHasher(4, algorithm)
        with pytest.raises(TypeError, match=r"token 9 is not an integer"):
            hasher.new_hashes([0] * 9 + [bad] * 3, [bytes(hasher.hash_width)] * 2)


def test_a_token_without_cbor_is_named_with_its_place():
    with pytest.raises(TypeError, match=r"token 6, .* has no encoding"):
        hash_tokens([0, 1, 2, 3, 4, 5, np.int64(6), 7], 4, "sha256_cbor")
    with pytest.raises(TypeError, match=r"token 1, .* has no encoding"):
        hash_tokens([0, np.int64(6)], 4, "sha256_cbor")


def test_keys_without_encoding_are_named_with_their_block(algorithm):
    keys = [None, (("mm", lambda: 0, 3),)]
    with pytest.raises(TypeError, match=r"extra keys of block 1 \(tokens 4 to 7\)"):
        hash_tokens(range(8), 4, algorithm, extra_keys=keys)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_keys_is_refused(count):
    with pytest.raises(ValueError, match=f"extra_keys has {count} entries for 2 blocks"):
        hash_tokens(range(8), 4, extra_keys=[None] * count)


def test_an_error_in_a_keys_function_comes_through():
    with pytest.raises(ZeroDivisionError):
        hash_tokens(range(8), 4, extra_keys=lambda start, stop: 1 // start)


def test_a_list_that_shrinks_under_the_hasher_is_refused():
    token_ids = list(range(40))

    def extra_keys(start, stop):
        del token_ids[10:]

    with pytest.raises(ValueError, match="lost tokens"):
        hash_tokens(token_ids, 4, extra_keys=extra_keys)


def test_parents_of_another_width_are_refused(algorithm):
    width = BlockHasher(4, algorithm).hash_width
    with pytest.raises(ValueError, match=f"has {width} bytes, not 20"):
        BlockHasher(4, algorithm, root=bytes(20))
    with pytest.raises(ValueError, match=f"has {width} bytes, not 0"):
        BlockHasher(4, algorithm).new_hashes(range(8), [b""])
    with pytest.raises(TypeError, match="must be bytes, not str"):
        BlockHasher(4, algorithm, root="x" * width)


@pytest.mark.parametrize("size", [0, -1, 1 << 40])
def test_block_sizes_out_of_range_are_refused(size):
    with pytest.raises(ValueError, match=f"hash_block_size is {size}"):
        BlockHasher(size)


@pytest.mark.parametrize("name", ["md5", "", None, ["sha256"]])
def test_unknown_algorithms_are_refused(name):
    with pytest.raises(ValueError, match="not one of sha256, sha256_cbor"):
        BlockHasher(16, name)


def test_a_hasher_survives_pickling(algorithm):
    hasher = BlockHasher(8, algorithm)
    twin = pickle.loads(pickle.dumps(hasher))
    assert (twin.root, twin.hash_block_size, twin.algorithm) == (hasher.root, 8, algorithm)


def run_in_new_process(code, seed=None):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if seed is not None:
        env["PYTHONHASHSEED"] = seed
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


def root_in_new_process(algorithm, seed):
    code = f"from cpool.hashing import default_root as r; print(r({algorithm!r}).hex())"
    return run_in_new_process(code, seed)


def test_the_root_is_secret_for_xxhash_alone_unless_a_seed_is_set(algorithm):
    same = root_in_new_process(algorithm, None) == root_in_new_process(algorithm, None)
    assert same != algorithm.startswith("xxhash")
    assert root_in_new_process(algorithm, "7") == root_in_new_process(algorithm, "7")
    assert root_in_new_process(algorithm, "7") != root_in_new_process(algorithm, "8")


def test_two_hashers_of_a_process_share_their_root(algorithm):
    assert BlockHasher(4, algorithm).root == BlockHasher(8, algorithm).root


def run_without(module, code):
    """Run code in a process in which `module` cannot be imported."""
    hide = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
"""
    return run_in_new_process(hide + textwrap.dedent(code)).splitlines()


def test_cbor_of_the_usual_kinds_needs_no_cbor2():
    code = """
        from cpool.hashing import hash_tokens
        keys = [(("mm", "x", -3),), None]
        print(hash_tokens(range(8), 4, "sha256_cbor", extra_keys=keys)[-1].hex())
        try:
            hash_tokens([2**70] * 4, 4, "sha256_cbor")
        except ModuleNotFoundError as error:
            print(error)
    """
    keys = [(("mm", "x", -3),), None]
    expected = reference(range(8), 4, "sha256_cbor", default_root("sha256_cbor"), keys)
    last_hash, message = run_without("cbor2", code)
    assert last_hash == expected[-1].hex()
    assert "cpool[hashing]" in message


def test_xxhash_is_asked_for_by_name_when_it_is_missing():
    code = """
        from cpool.hashing import hash_tokens
        hash_tokens(range(8), 4)
        try:
            hash_tokens(range(8), 4, "xxhash")
        except ModuleNotFoundError as error:
            print(error)
    """
    (message,) = run_without("xxhash", code)
    assert "cpool[hashing]" in message


def test_without_openssl_in_reach_hashlib_takes_over():
    code = """
        from cpool.hashing import BlockHasher
        hasher = BlockHasher(4)
        print(hasher.digest_source, hasher.new_hashes(range(8), [])[-1].hex())
    """
    expected = reference(range(8), 4, "sha256", default_root("sha256"))
    assert run_without("_hashlib", code) == [f"hashlib {expected[-1].hex()}"]
