# SPDX-License-Identifier: Apache-2.0
"""What cpool expects of the vLLM it is installed into, and how that differs from what it finds.

vLLM promises no stability for the classes that cpool replaces. For each release that cpool was
tested with, ``contracts/`` holds a description of them: every signature, every attribute, and
a digest of the code, so that a change inside a method counts as much as a new argument.
``python -m cpool.vllm.contract`` prints the description of the vLLM that is installed.
"""

import ast
import hashlib
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
from dataclasses import dataclass
from importlib import import_module, resources
from types import FunctionType

# Everything cpool replaces ...
REPLACED_CLASSES = {
    "vllm.v1.core.block_pool": ("BlockPool", "BlockHashToBlockMap"),
    "vllm.v1.core.kv_cache_utils": ("KVCacheBlock", "FreeKVCacheBlockQueue"),
    "vllm.v1.hisparse.block_pool": ("SharedEventQueueBlockPool",),
}
# ... and everything it calls.
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
    for module, name in replaced_names():
        entries |= describe_class(stock_object(module, name))
        entries[f"{name} code"] = code_digest(stock_object(module, name))
    for module, names in CALLED_CLASSES.items():
        for name in names:
            entries |= describe_class(stock_object(module, name))
    for module, names in CALLED_FUNCTIONS.items():
        for name in names:
            function = getattr(import_module(module), name, None)
            if function is not None:
                entries[name] = signature(function)
    events = import_module("vllm.distributed.kv_events")
    for name in EVENT_TYPES:
        entries[f"{name} fields"] = " ".join(getattr(events, name).__struct_fields__)
    entries["BlockPool attributes"] = " ".join(sorted(pool_attributes()))
    return entries


def replaced_names() -> list[tuple[str, str]]:
    return [(module, name) for module, names in REPLACED_CLASSES.items() for name in names]


def stock_object(module: str, name: str) -> object:
    return getattr(import_module(module), name)


def pool_attributes() -> list[str]:
    pool_type = stock_object("vllm.v1.core.block_pool", "BlockPool")
    return list(vars(pool_type(num_gpu_blocks=2, enable_caching=True, hash_block_size=16)))


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


def code_digest(cls: type) -> str:
    """Returns a digest of the source of ``cls`` that comments, docstrings and layout don't move."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
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


def docstring_span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]] | None:
    if not isinstance(node, ast.ClassDef | ast.FunctionDef) or ast.get_docstring(node) is None:
        return None
    text = node.body[0]
    return (text.lineno, text.col_offset), (text.end_lineno, text.end_col_offset)


if __name__ == "__main__":
    json.dump(describe(), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")
