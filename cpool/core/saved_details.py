# SPDX-License-Identifier: Apache-2.0
"""What `detailed_snapshots` keeps, as arrays of a saved pool.

    tokens      uint8: the token ids of each detail, one after the other
    texts       uint8: JSON, for each detail a list of
                    dtype and number of its token ids; tokens in a block;
                    lora_id, lora_name, session_id;
                    [block of the registration, its extra keys], where it has some

JSON has no tuples and no bytes, which extra keys may hold: ``{"tuple": [...]}`` and
``{"bytes": "hex"}`` stand for them.
"""

import json
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from cpool.core.contract import ContractError, SavedPoolError

TOKEN_DTYPES = ("|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8")
MAX_BYTES = (1 << 32) - 1  # Of each array.
MAX_DEPTH = 32  # Of lists and tuples in each other.


class Detail(NamedTuple):
    """What the events of one registration carried beside hashes."""

    token_ids: Any
    size: int
    lora_id: int | None
    lora_name: str | None
    session_id: str | None
    extra_keys: dict[int, Any]


def encode(value: Any, depth: int = 0) -> Any:
    """A value as JSON knows it.

    Raises:
        ContractError: It is of another kind, or nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ContractError(
            f"the details of a block hold lists more than {MAX_DEPTH} deep, which cannot be saved"
        )
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, depth + 1) for item in value]}
    raise ContractError(
        f"the details of a block hold a {type(value).__name__}, which cannot be saved"
    )


def decode(value: Any, depth: int = 0) -> Any:
    """What ``encode`` was given. Raises ValueError if it can have been nothing."""
    if depth > MAX_DEPTH:
        raise ValueError(f"lists more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [decode(item, depth + 1) for item in value]
    if isinstance(value, dict):
        if len(value) == 1 and isinstance(value.get("tuple"), list):
            return tuple([decode(item, depth + 1) for item in value["tuple"]])
        if len(value) == 1 and isinstance(value.get("bytes"), str):
            return bytes.fromhex(value["bytes"])
        raise ValueError(f"{sorted(value)} names no kind of value")
    return value


def pack(details: list[Detail]) -> dict[str, Any]:
    """The arrays that hold some details.

    Raises:
        ContractError: A detail is of a kind that no file can hold, or they are too large.
    """
    rows, tokens = [], []
    for detail in details:
        ids = np.ascontiguousarray(detail.token_ids)
        ids = ids.astype(ids.dtype.newbyteorder("<"), copy=False)
        if ids.ndim != 1 or ids.dtype.str not in TOKEN_DTYPES:
            raise ContractError(
                f"token ids of {ids.ndim} dimensions and dtype {ids.dtype} cannot be saved"
            )
        tokens.append(ids.view(np.uint8))
        extra_keys = [[encode(row), encode(keys)] for row, keys in detail.extra_keys.items()]
        check_names(detail.lora_id, detail.lora_name, detail.session_id)
        names = [encode(name) for name in detail[1:5]]
        rows.append([ids.dtype.str, len(ids), *names, extra_keys])
    arrays = {
        "tokens": np.concatenate(tokens) if tokens else np.empty(0, np.uint8),
        "texts": np.frombuffer(json.dumps(rows).encode(), np.uint8),
    }
    for name, array in arrays.items():
        if len(array) > MAX_BYTES:
            raise ContractError(f"{len(array)} bytes of {name}; the limit is {MAX_BYTES}")
    return arrays


def unpack(tokens: Any, texts: Any) -> list[Detail]:
    """The details in such arrays.

    Raises:
        SavedPoolError: There are none in them.
    """
    details, start = [], 0
    try:
        for row in json.loads(texts.tobytes()):
            dtype, count, size, lora_id, lora_name, session_id, extra_keys = row
            if dtype not in TOKEN_DTYPES or not all(is_count(each) for each in (count, size)):
                raise ValueError(f"{count!r} token ids of {dtype!r}, {size!r} in a block")
            stop = start + count * np.dtype(dtype).itemsize
            if stop > len(tokens):
                raise ValueError(f"token ids up to byte {stop} of {len(tokens)}")
            check_names(lora_id, lora_name, session_id)
            ids = tokens[start:stop].copy().view(dtype)
            if not all(is_count(block) for block, _ in extra_keys):
                raise ValueError(f"extra keys of blocks {[block for block, _ in extra_keys]}")
            keys = {block: decode(value) for block, value in extra_keys}
            details.append(Detail(ids, size, lora_id, lora_name, session_id, keys))
            start = stop
    except (ValueError, TypeError, RecursionError) as error:
        raise SavedPoolError(f"detail {len(details)} cannot be read: {error}") from None
    if start != len(tokens):
        raise SavedPoolError(f"{len(tokens)} bytes of token ids; the details have {start}")
    return details


def check_names(lora_id: Any, lora_name: Any, session_id: Any) -> None:
    """Raises ContractError, which is a ValueError, for names of a kind that events never have."""
    if lora_id is not None and type(lora_id) is not int:
        raise ContractError(f"lora_id {lora_id!r} cannot be saved: it is no int")
    for what, name in (("lora_name", lora_name), ("session_id", session_id)):
        if name is not None and type(name) is not str:
            raise ContractError(f"{what} {name!r} cannot be saved: it is no str")


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_BYTES
