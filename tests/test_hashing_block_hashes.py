# SPDX-License-Identifier: Apache-2.0
"""BlockHashes and its views against a list of bytes and a list of tokens."""

import copy
import gc
import hashlib
import io
import pickle
import sys
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cpool.hashing import BlockHasher, BlockHashes, BlockHashListWithBlockSize, hash_tokens

SIZE = 4
ROOT = BlockHasher(SIZE).root


def keys_at(start):
    """Extra keys that depend on the place alone, and exist for one block in three."""
    return (("mm", "image", start),) if start % (3 * SIZE) == 0 else None


def reference(token_ids):
    parent, hashes = ROOT, []
    for start in range(0, len(token_ids) - SIZE + 1, SIZE):
        block = (parent, tuple(token_ids[start : start + SIZE]), keys_at(start))
        parent = hashlib.sha256(pickle.dumps(block, protocol=5)).digest()
        hashes.append(parent)
    return hashes


def extra_keys(start, stop):
    assert stop == start + SIZE
    return keys_at(start)


def make(num_tokens):
    return BlockHashes(BlockHasher(SIZE), range(num_tokens), extra_keys)


TOKENS = st.lists(st.integers(0, 300_000), max_size=3 * SIZE)


class TokensChange(RuleBasedStateMachine):
    """Every way a request's tokens change, with views and buffers held all the while."""

    def __init__(self):
        super().__init__()
        self.token_ids = []
        self.hashes = BlockHashes(BlockHasher(SIZE))
        self.views = {scale: self.hashes.view(scale * SIZE) for scale in (1, 2, 3)}
        self.held = []  # (buffer, what it showed when it was opened)

    @rule(tokens=TOKENS)
    def append(self, tokens):
        self.hashes.append_tokens(tokens, extra_keys)
        self.token_ids += tokens

    @rule(token=st.integers(0, 300_000))
    def decode(self, token):
        self.hashes.append_token(token, extra_keys)
        self.token_ids.append(token)

    @rule(drafts=TOKENS, data=st.data())
    def speculate_and_roll_back(self, drafts, data):
        accepted = data.draw(st.integers(0, len(drafts)))
        self.append(drafts)
        del self.token_ids[len(self.token_ids) - len(drafts) + accepted :]
        self.hashes.truncate(len(self.token_ids), self.token_ids)

    @rule(data=st.data())
    def continue_session_from_a_boundary(self, data):
        kept = data.draw(st.integers(0, len(self.token_ids) // SIZE))
        del self.token_ids[kept * SIZE :]
        del self.hashes[kept:]

    @precondition(lambda self: len(self.token_ids) % SIZE == 0)
    @rule(tokens=TOKENS)
    def extend_as_vllm_does(self, tokens):
        more = self.token_ids + tokens[: len(tokens) // SIZE * SIZE]
        new = self.hashes.hasher.new_hashes(more, self.hashes, extra_keys)
        self.hashes.extend(new)
        self.token_ids = more

    @rule()
    def preempt_and_resume(self):
        self.hashes = self.hashes.copy()
        self.views = {scale: self.hashes.view(scale * SIZE) for scale in (1, 2, 3)}

    @rule(data=st.data())
    def fail(self, data):
        more = st.lists(st.integers(0, 9), max_size=2 * SIZE)
        bad = [*data.draw(more), "bad", *data.draw(more)]
        with pytest.raises(TypeError, match="is not an integer"):
            self.hashes.append_tokens(bad, extra_keys)

    @rule(scale=st.sampled_from([1, 2, 3]))
    def hold_a_buffer(self, scale):
        array = np.asarray(self.views[scale])
        self.held.append((array, array.copy()))

    @rule()
    def let_buffers_go(self):
        self.held.clear()

    @invariant()
    def agrees(self):
        expected = reference(self.token_ids)
        assert self.hashes == expected
        assert self.hashes.num_tokens == len(self.token_ids)
        for scale, view in self.views.items():
            coarse = expected[scale - 1 :: scale]
            assert list(view) == coarse
            assert len(view) == len(coarse)
            assert [bytes(row) for row in np.asarray(view)] == coarse
        for array, before in self.held:
            assert np.array_equal(array, before)


TestEveryWayTokensChange = TokensChange.TestCase
TestEveryWayTokensChange.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 40])
def test_it_reads_as_a_list_does(num_tokens):
    hashes, expected = make(num_tokens), reference(range(num_tokens))
    assert len(hashes) == len(expected) == num_tokens // SIZE
    assert list(hashes) == hashes[:] == hashes.tolist() == expected
    assert hashes == expected
    assert expected == hashes
    assert (hashes != expected) is False
    assert hashes != [*expected, b""]
    assert hashes != tuple(expected)
    assert hashes != 3
    for index in range(-len(expected), len(expected)):
        assert hashes[index] == expected[index]
        assert hashes.index(expected[index]) == expected.index(expected[index])
        assert expected[index] in hashes
        assert hashes.count(expected[index]) == 1
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError, match=f"block hash {index} of {len(expected)}"):
            hashes[index]
    for bounds in [slice(1, None), slice(None, -1), slice(None, None, -1), slice(1, 8, 3)]:
        assert hashes[bounds] == expected[bounds]
    assert list(reversed(hashes)) == expected[::-1]
    assert b"absent" not in hashes
    assert isinstance(hashes, Sequence)
    assert bool(hashes) == bool(expected)


def test_what_changes_has_no_hash_value():
    for mutable in (make(4), make(4).view(8)):
        with pytest.raises(TypeError, match="unhashable"):
            hash(mutable)


@pytest.mark.parametrize("scale", [1, 2, 3, 11])
@pytest.mark.parametrize("make_hashes", [make, lambda n: make(n)[:]])
def test_a_view_reads_as_the_list_of_its_boundaries(make_hashes, scale):
    hashes = make_hashes(43)
    view = BlockHashListWithBlockSize(hashes, SIZE, scale * SIZE)
    expected = hashes[:][scale - 1 :: scale]
    assert (view.scale_factor, view.block_hashes is hashes) == (scale, True)
    assert list(view) == view[:] == expected
    assert view == expected
    assert view[1:] == expected[1:]
    assert view[::-1] == expected[::-1]
    for index in range(-len(expected), len(expected)):
        assert view[index] == expected[index]
    for index in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError, match=f"block hash {index} of {len(expected)}"):
            view[index]
    with pytest.raises(TypeError):
        view["0"]


def test_a_view_follows_a_plain_list():
    hashes = make(40)[:]
    view = BlockHashListWithBlockSize(hashes, SIZE, 2 * SIZE)
    del hashes[4:]
    assert list(view) == [hashes[1], hashes[3]]
    hashes += [b"5", b"6"]
    assert list(view) == [hashes[1], hashes[3], b"6"]


@pytest.mark.parametrize(("fine", "coarse"), [(16, 24), (16, 8), (16, 0), (0, 16), (16, -16)])
def test_a_view_at_no_multiple_is_refused(fine, coarse):
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match=f"target_block_size {coarse} is not a multiple"):
            BlockHashListWithBlockSize([], fine, coarse)


def test_buffers_are_read_only_and_copy_nothing():
    hashes = make(40)
    rows, coarse = np.asarray(hashes), np.asarray(hashes.view(3 * SIZE))
    assert (rows.shape, rows.dtype, rows.strides) == ((10, 32), np.uint8, (32, 1))
    assert (coarse.shape, coarse.strides) == ((3, 32), (96, 1))
    assert coarse.ctypes.data == rows.ctypes.data + 64
    assert np.asarray(hashes).ctypes.data == rows.ctypes.data
    assert not rows.flags.writeable
    assert bytes(hashes) == b"".join(hashes)
    with memoryview(hashes.view(3 * SIZE)) as buffer:
        assert buffer.readonly
        assert buffer.format == "B"
        assert not buffer.c_contiguous
        assert buffer.tobytes() == b"".join(hashes.view(3 * SIZE))
    with pytest.raises(BufferError, match="not contiguous"):
        hashlib.sha256(hashes.view(3 * SIZE))
    with pytest.raises(BufferError, match="only a view of BlockHashes"):
        memoryview(BlockHashListWithBlockSize(hashes[:], SIZE, SIZE))
    with pytest.raises((BufferError, TypeError)):
        io.BytesIO(b"x").readinto(hashes)
    assert np.asarray(make(3)).shape == (0, 32)
    assert np.asarray(make(8).view(12)).shape == (0, 32)


def test_a_buffer_outlives_its_sequence():
    hashes = make(400)
    expected = hashes[:]
    rows = np.asarray(hashes.view(2 * SIZE))
    del hashes
    gc.collect()
    assert [bytes(row) for row in rows] == expected[1::2]


def test_a_later_shorter_buffer_does_not_uncover_an_earlier_one():
    hashes = make(40)
    earlier, expected = np.asarray(hashes), hashes[:]
    hashes.truncate(20)
    later = np.asarray(hashes)
    hashes.append_tokens([0] * 20)
    assert [bytes(row) for row in earlier] == expected
    assert [bytes(row) for row in later] == expected[:5]


def test_rows_behind_an_open_buffer_are_written_in_place():
    hashes = make(40)
    hashes.append_tokens(range(SIZE))  # makes room ahead
    rows = np.asarray(hashes)
    hashes.append_tokens(range(SIZE))
    assert np.asarray(hashes).ctypes.data == rows.ctypes.data
    hashes.truncate(40)
    hashes.append_tokens(range(SIZE))
    assert np.asarray(hashes).ctypes.data != rows.ctypes.data


def test_without_open_buffers_rows_are_used_again():
    hashes = make(40)
    place = np.asarray(hashes).ctypes.data
    hashes.truncate(0)
    hashes.append_tokens(range(40))
    assert np.asarray(hashes).ctypes.data == place


def test_truncating_inside_a_hashed_block_needs_its_tokens():
    hashes = make(22)
    before = hashes.tolist()
    with pytest.raises(ValueError, match="tokens 12 to 13 are needed again"):
        hashes.truncate(14)
    with pytest.raises(ValueError, match="tokens 12 to 13 are needed again"):
        hashes.truncate(14, range(13))
    with pytest.raises(TypeError, match="token 13 is not an integer"):
        hashes.truncate(14, [*range(13), "x"])
    for out_of_range in (-1, 23):
        with pytest.raises(ValueError, match=f"num_tokens is {out_of_range}"):
            hashes.truncate(out_of_range)
    assert (hashes.tolist(), hashes.num_tokens) == (before, 22)
    hashes.truncate(21)  # among the tokens that wait
    assert hashes.num_tokens == 21
    hashes.truncate(14, range(14))
    assert hashes.num_tokens == 14
    hashes.append_tokens([14, 15], extra_keys)
    assert hashes == before[:4]


def test_hashes_made_elsewhere_are_checked_before_any_is_appended():
    hashes = make(8)
    good = bytes(32)
    for bad, error in [(b"short", ValueError), ("x" * 32, TypeError), (None, TypeError)]:
        with pytest.raises(error):
            hashes.extend([good, bad])
    assert len(hashes) == 2
    hashes.append(good)
    hashes.extend(hashes)
    assert hashes == [*reference(range(8)), good, *reference(range(8)), good]
    hashes.append_token(1)
    with pytest.raises(ValueError, match="1 tokens wait for a full block"):
        hashes.extend([good])
    assert (len(hashes), hashes.num_tokens) == (6, 25)


def test_deleting_is_for_the_end_alone():
    hashes = make(42)
    with pytest.raises(TypeError, match="from a place to the end"):
        del hashes[0]
    for bounds in (slice(0, 2), slice(None, None, 2), slice(None, None, -1)):
        with pytest.raises(ValueError, match="from a place to the end"):
            del hashes[bounds]
    assert hashes.num_tokens == 42
    del hashes[-2:]
    assert (hashes, hashes.num_tokens) == (reference(range(32)), 32)
    hashes.clear()
    assert (len(hashes), hashes.num_tokens) == (0, 0)


@pytest.mark.parametrize(
    "twin", [copy.copy, BlockHashes.copy, lambda h: pickle.loads(pickle.dumps(h))]
)
def test_a_copy_goes_its_own_way(twin):
    hashes = make(42)
    other = twin(hashes)
    assert other == hashes
    assert other.num_tokens == 42
    other.append_tokens([42, 43], extra_keys)
    hashes.append_tokens([0, 0], extra_keys)
    assert other == reference(range(44))
    assert hashes != other


def test_a_hash_costs_its_width():
    token_ids = range(16 * 10_000)
    hash_tokens(range(16), 16)
    tracemalloc.start()
    hashes = hash_tokens(token_ids, 16)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(hashes) == 10_000
    assert hashes.nbytes == 320_000
    assert 320_000 <= used < 321_000
    assert 320_000 <= sys.getsizeof(hashes) < 321_000


def test_a_sequence_that_its_own_keys_function_changes_is_left_alone():
    hashes = make(8)

    def meddle(start, stop):
        hashes.append_tokens(range(SIZE))

    with pytest.raises(ValueError, match="changed by its own extra_keys function"):
        hashes.append_tokens(range(SIZE), meddle)
    assert len(hashes) == 3
