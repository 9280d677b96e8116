# SPDX-License-Identifier: Apache-2.0
"""What cpool expects of the vLLM it is installed into, and how that differs from what it finds.

vLLM promises no stability for the classes that cpool replaces. For each release that cpool was
tested with, ``contracts/`` holds a description of them: every signature, every attribute, and
a digest of the code, so that a change inside a method counts as much as a new argument.
``python -m cpool.vllm`` prints the description of the vLLM that is installed.
"""

import ast
import hashlib
import inspect
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from types import FunctionType
from typing import Any

# Everything cpool replaces ...
REPLACED_CLASSES = {
    "vllm.v1.core.block_pool": ("BlockPool", "BlockHashToBlockMap"),
    "vllm.v1.core.kv_cache_utils": ("KVCacheBlock", "FreeKVCacheBlockQueue"),
    "vllm.v1.hisparse.block_pool": ("SharedEventQueueBlockPool",),
}
REPLACED_FUNCTIONS = {
    "vllm.v1.core.kv_cache_utils": ("get_request_block_hasher", "hash_block_tokens"),
    "vllm.utils.hashing": ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
}
# ... and everything it calls or reads.
CALLED_FUNCTIONS = {
    "vllm.v1.core.kv_cache_utils": (
        "generate_block_hash_extra_keys",
        "make_block_hash_with_group_id",
        "maybe_convert_block_hash",
        "resolve_block_hashes",
        "to_event_extra_keys",
    ),
    "vllm.multimodal.utils": ("get_mm_features_in_window",),
}
CALLED_CLASSES = {"vllm.v1.core.kv_cache_metrics": ("KVCacheMetricsCollector",)}
REQUEST_ATTRIBUTES = (
    "_all_token_ids",
    "all_token_ids",
    "block_hashes",
    "cache_salt",
    "lora_request",
    "mm_features",
    "prompt_embeds",
    "session_id",
)
EVENT_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


class ContractDrift(RuntimeError):
    """The vLLM at hand is none of those that cpool was tested with."""


@dataclass(frozen=True)
class Contract:
    release: str
    # One line per name, e.g. "BlockPool.touch" -> "(self, blocks)".
    entries: dict[str, str]

    def drift(self, found: dict[str, str]) -> list[str]:
        """Returns one line per entry in which ``found`` differs."""
        names = sorted(self.entries.keys() | found.keys())
        return [
            f"{name}: {expected} expected, {at_hand} found"
            for name in names
            if (expected := self.entries.get(name, "absent"))
            != (at_hand := found.get(name, "absent"))
        ]


def known_contracts() -> list[Contract]:
    """Returns the contract of each release that cpool was tested with, newest first."""
    contracts = [
        Contract(path.name.removesuffix(".json"), json.loads(path.read_text()))
        for path in (resources.files(__package__) / "contracts").iterdir()
        if path.name.endswith(".json")
    ]
    return sorted(contracts, key=lambda contract: release_order(contract.release), reverse=True)


def release_order(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release))


def find_contract(version: str, found: dict[str, str]) -> Contract:
    """Returns the contract that ``found``, a description of vLLM ``version``, keeps.

    A release that cpool doesn't know is accepted if all that cpool replaces and calls is what
    it was in one that it knows.

    Raises:
        ContractDrift: if it keeps none; says how it differs from the one closest to it.
    """
    contracts = known_contracts()
    for contract in contracts:
        if not contract.drift(found):
            return contract
    wanted = release_order(version)[:2]
    nearest = next((c for c in contracts if release_order(c.release)[:2] == wanted), contracts[0])
    releases = ", ".join(contract.release for contract in reversed(contracts))
    raise ContractDrift(
        f"vLLM {version} is none of the releases that cpool was tested with ({releases}). "
        f"Against {nearest.release} it differs in:\n  " + "\n  ".join(nearest.drift(found))
    )


def describe() -> dict[str, str]:
    """Describes the classes and functions of the vLLM that this process imports."""
    entries: dict[str, str] = {}
    for name, value in find_all(REPLACED_CLASSES):
        entries |= describe_class(value)
        entries[f"{name} code"] = code_digest(value)
    for name, value in find_all(REPLACED_FUNCTIONS):
        entries[name] = signature(value)
        entries[f"{name} code"] = code_digest(value)
    for _, value in find_all(CALLED_CLASSES):
        entries |= describe_class(value)
    for name, value in find_all(CALLED_FUNCTIONS):
        entries[name] = signature(value)
    events = import_module("vllm.distributed.kv_events")
    for name in EVENT_TYPES:
        entries[f"{name} fields"] = " ".join(getattr(events, name).__struct_fields__)
    entries["BlockPool attributes"] = " ".join(sorted(vars(make_pool())))
    entries["Request attributes"] = " ".join(
        name for name in REQUEST_ATTRIBUTES if hasattr(make_request(), name)
    )
    return entries


def find_all(names: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Any]]:
    """Yields what modules hold under the given names; drift() reports those that are absent."""
    for module_name, names_in_module in names.items():
        module = import_module(module_name)
        for name in names_in_module:
            if hasattr(module, name):
                yield name, getattr(module, name)


def make_pool() -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_gpu_blocks=2, enable_caching=True, hash_block_size=16)


def make_request() -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request("", [1], SamplingParams(max_tokens=1), None)


def describe_class(cls: type) -> dict[str, str]:
    entries = {}
    for name, value in vars(cls).items():
        # The other special methods depend on the Python in use, not on vLLM.
        if name.startswith("__") and name not in ("__init__", "__len__"):
            continue
        entry = f"{cls.__name__}.{name}"
        if isinstance(value, FunctionType):
            home = inspect.unwrap(value).__module__
            foreign = "" if home in (cls.__module__, None) else f" of {home}"
            entries[entry] = signature(value) + foreign
        elif isinstance(value, property):
            entries[entry] = "property"
        elif inspect.ismemberdescriptor(value):
            entries[entry] = "slot"
    return entries


def signature(function: FunctionType) -> str:
    """Returns names, kinds and defaults of the parameters, without annotations."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def code_digest(code: type | FunctionType) -> str:
    """Returns a digest of source that doesn't move with comments, docstrings and layout."""
    try:
        source = textwrap.dedent(inspect.getsource(code))
    except OSError:
        return "no source"
    lines = source.splitlines(keepends=True)
    dropped = [docstring_span(node) for node in ast.walk(ast.parse(source))]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            dropped.append((token.start, token.end))
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    kept = list(source)
    for span in filter(None, dropped):
        (first_line, first), (last_line, last) = span
        begin, end = starts[first_line - 1] + first, starts[last_line - 1] + last
        kept[begin:end] = [""] * (end - begin)
    # Trailing commas come and go with the layout.
    text = re.sub(r",([)\]}])", r"\1", re.sub(r"\s", "", "".join(kept)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def function_digest(function: object) -> str | None:
    """Returns the code digest of a plain function, and None for anything else.

    That is also what wraps another function: its source is the other's, what it adds is unknown.
    """
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return None
    return code_digest(function)


def docstring_span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]] | None:
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or ast.get_docstring(node) is None:
        return None
    text = node.body[0]
    return (text.lineno, text.col_offset), (text.end_lineno, text.end_col_offset)
