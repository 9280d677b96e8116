# SPDX-License-Identifier: Apache-2.0
"""Requests that grow by our method and by stock's hold the same tokens and hashes."""

import random

import pytest

pytest.importorskip("vllm", reason="needs a vLLM: tests/vllm/run --set own")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from cpool.hashing import ALGORITHMS
from cpool.vllm.hashing import replace_methods, request_block_hasher, stock_request_block_hasher
from cpool.vllm.request import RequestHasher, append_method

from .differential import RELEASE

STOCK = Request.append_output_token_ids
OURS = append_method(Request, STOCK)
SIZE = 8


def image(offset, length):
    return MultiModalFeatureSpec(None, "image", "9f" * 32, PlaceholderRange(offset, length))


@pytest.fixture(params=ALGORITHMS)
def hashers(request):
    function = get_hash_fn_by_name(request.param)
    kv_cache_utils.init_none_hash(function)
    ours = request_block_hasher(RELEASE)(SIZE, function)
    assert type(ours) is RequestHasher
    return stock_request_block_hasher(SIZE, function), ours


def make_pair(hashers, cls=Request, *, adapter=False, images=(), salt=None, num_tokens=100):
    return [
        cls(
            "request",
            list(range(1000, 1000 + num_tokens)),
            SamplingParams(max_tokens=1000),
            None,
            mm_features=[image(offset, length) for offset, length in images],
            lora_request=LoRARequest("sql", 1, "/adapters/sql") if adapter else None,
            cache_salt=salt,
            block_hasher=hasher,
        )
        for hasher in hashers
    ]


def assert_same(stock, ours):
    assert ours.block_hashes == stock.block_hashes
    assert type(ours.block_hashes) is list
    assert ours._all_token_ids == stock._all_token_ids
    assert ours._output_token_ids == stock._output_token_ids


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("salt", [None, "tenant-7"])
@pytest.mark.parametrize("images", [(), [(5, 20), (25, 3), (60, 45)]])
def test_a_request_grows_the_same_hashes_token_by_token(hashers, adapter, salt, images):
    stock, ours = make_pair(hashers, adapter=adapter, images=images, salt=salt)
    assert len(ours.block_hashes) == 12
    for token in range(50):
        assert STOCK(stock, token) is OURS(ours, token) is None
        assert_same(stock, ours)
    assert len(ours.block_hashes) == 18


def test_a_salt_reaches_the_first_block_that_decoding_completes(hashers):
    salted, unsalted = (make_pair(hashers, salt=salt, num_tokens=5) for salt in ("tenant-7", None))
    for stock, ours in (salted, unsalted):
        for token in range(4):
            STOCK(stock, token)
            OURS(ours, token)
        assert_same(stock, ours)
    assert salted[1].block_hashes != unsalted[1].block_hashes


def test_requests_go_the_same_way_whatever_happens_to_them(hashers):
    rng = random.Random(4)
    stock, ours = pair = make_pair(hashers)
    end_of_images = 0
    for _ in range(400):
        event = rng.randrange(6)
        tokens = [rng.randrange(1 << rng.randint(1, 70)) for _ in range(rng.randrange(20))]
        if event == 0:
            STOCK(stock, tokens)
            OURS(ours, tokens)
        elif event == 1:  # a session goes on from what was computed
            kept = rng.randint(end_of_images, max(end_of_images, len(stock._all_token_ids)))
            for one in pair:
                del one._all_token_ids[kept:]
                del one.block_hashes[kept // SIZE :]
                one._output_token_ids.clear()
                one._all_token_ids.extend(tokens)
                one.update_block_hashes()
        elif event == 2 and rng.random() < 0.1:
            offset = max(end_of_images, len(stock._all_token_ids)) + 3
            end_of_images = offset + 5
            for one in pair:
                one.mm_features.append(image(offset, 5))
        elif event == 3:
            STOCK(stock, token_ids=tokens)
            OURS(ours, token_ids=tokens)
        else:
            for token in tokens:
                STOCK(stock, token)
                OURS(ours, token)
        assert_same(stock, ours)


@pytest.mark.parametrize("bad", ["x", 1.5, None, [1, "x"]])
def test_what_is_no_token_has_the_same_effect(hashers, bad):
    stock, ours = make_pair(hashers, num_tokens=3)
    outcomes = []
    for append, request in ((STOCK, stock), (OURS, ours)):
        try:
            append(request, bad)
            outcomes.append(None)
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] is outcomes[1]
    assert_same(stock, ours)


def test_a_request_without_hasher_gets_no_hashes():
    stock, ours = make_pair([None, None])
    for token in range(20):
        STOCK(stock, token)
        OURS(ours, token)
    assert_same(stock, ours)
    assert ours.block_hashes == []


def test_hashes_that_another_function_makes_are_kept():
    made = [lambda request: [b"h"] * (request.num_tokens - 100)] * 2
    stock, ours = make_pair(made)
    for token in range(3):
        STOCK(stock, token)
        OURS(ours, token)
    assert_same(stock, ours)
    assert len(ours.block_hashes) == 6


class CountingRequest(Request):
    num_updates = 0

    def update_block_hashes(self):
        self.num_updates += 1
        super().update_block_hashes()


def test_a_subclass_that_updates_its_hashes_otherwise_is_heard(hashers):
    stock, ours = make_pair(hashers, CountingRequest)
    for token in range(20):
        STOCK(stock, token)
        OURS(ours, token)
    assert_same(stock, ours)
    assert ours.num_updates == stock.num_updates == 21


def test_the_method_takes_what_stocks_takes():
    stock, ours = make_pair([None, None])
    for arguments, named in (((), {}), ((1, 2), {}), ((1,), {"token_ids": 1}), ((), {"ids": 1})):
        for append, request in ((STOCK, stock), (OURS, ours)):
            with pytest.raises(TypeError, match="append_output_token_ids"):
                append(request, *arguments, **named)
    assert_same(stock, ours)


def test_a_request_that_changed_in_vllm_keeps_its_method(monkeypatch):
    def append_output_token_ids(self, token_ids, final=False):
        raise NotImplementedError

    monkeypatch.setattr(Request, "append_output_token_ids", append_output_token_ids)
    assert replace_methods() == []
    assert Request.append_output_token_ids is append_output_token_ids
