# SPDX-License-Identifier: Apache-2.0
"""vLLM's request block hasher on cpool.hashing: the same bytes, without Python per block."""

from collections.abc import Callable
from typing import Any

from vllm.utils import hashing as vllm_hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from cpool.hashing import ALGORITHMS, BlockHasher
from cpool.vllm.contract import function_digest
from cpool.vllm.request import RequestHasher, append_method

stock_request_block_hasher = kv_cache_utils.get_request_block_hasher
generate_block_hash_extra_keys = kv_cache_utils.generate_block_hash_extra_keys

# Of Request.append_output_token_ids and of update_block_hashes, which it calls.
KNOWN_DIGESTS = ("66515024b9f8e78d", "1defff07f788d872")

HashRequest = Callable[[Any], list[bytes]]


def get_request_block_hasher(
    hash_block_size: int, caching_hash_fn: Callable[[Any], bytes]
) -> HashRequest:
    """Returns a function that hashes the blocks a request has completed since the last call.

    Args:
        hash_block_size: tokens per block.
        caching_hash_fn: one of vLLM's hash functions; with any other, or before vLLM has set
            its root hash, the result is vLLM's own hasher.
    """
    return make_hasher(hash_block_size, caching_hash_fn, extra_keys_from)


def get_request_block_hasher_030(
    hash_block_size: int, caching_hash_fn: Callable[[Any], bytes]
) -> HashRequest:
    """As :func:`get_request_block_hasher`, for releases up to 0.30.

    Once a request has hashes, those look at its last multimodal input alone.
    """
    return make_hasher(hash_block_size, caching_hash_fn, extra_keys_from_030)


def request_block_hasher(release: str) -> Callable[..., HashRequest]:
    """Returns the function that hashes as vLLM ``release`` does, e.g. "0.32.0"."""
    if int(release.split(".")[1]) <= 30:
        return get_request_block_hasher_030
    return get_request_block_hasher


def make_hasher(
    hash_block_size: int, caching_hash_fn: Callable[[Any], bytes], extra_keys: Callable[..., Any]
) -> HashRequest:
    algorithm = algorithm_of(caching_hash_fn)
    root = getattr(kv_cache_utils, "NONE_HASH", None)
    if algorithm is None or root is None:
        return stock_request_block_hasher(hash_block_size, caching_hash_fn)
    hasher = BlockHasher(hash_block_size, algorithm, root=root)
    return RequestHasher(hasher, extra_keys)


def algorithm_of(hash_function: Callable[[Any], bytes]) -> str | None:
    for name in ALGORITHMS:
        if getattr(vllm_hashing, name, None) is hash_function:
            return name
    return None


def extra_keys_from(request: Any, first_token: int) -> Callable[[int, int], Any] | None:
    """Returns a function of a block's bounds that gives its extra keys, for blocks in order.

    None if no block from ``first_token`` on can have any.
    """
    # A scan from the first multimodal input finds the same ones as one from a later start.
    return extra_keys_after(request, first_token, mm_index=0)


def extra_keys_from_030(request: Any, first_token: int) -> Callable[[int, int], Any] | None:
    return extra_keys_after(request, first_token, mm_index=-1 if first_token else 0)


def extra_keys_after(
    request: Any, first_token: int, mm_index: int
) -> Callable[[int, int], Any] | None:
    has_extra_keys = (
        request.lora_request
        or request.mm_features
        or (first_token == 0 and request.cache_salt)
        or request.prompt_embeds is not None
    )
    if not has_extra_keys:
        return None

    def extra_keys(start: int, end: int) -> Any:
        nonlocal mm_index
        keys, mm_index = generate_block_hash_extra_keys(request, start, end, mm_index)
        return keys

    return extra_keys


def replace_methods() -> list[tuple[type, str, Any]]:
    """Puts a compiled method in the place of Request's own that appends decoded tokens.

    Only where the code it stands for is the code it was written after.

    Returns:
        Class, name and what was there before, for each method replaced.
    """
    stock = Request.append_output_token_ids
    if tuple(map(function_digest, (stock, Request.update_block_hashes))) != KNOWN_DIGESTS:
        return []
    Request.append_output_token_ids = append_method(Request, stock)
    return [(Request, "append_output_token_ids", stock)]
