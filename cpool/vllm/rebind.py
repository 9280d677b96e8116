# SPDX-License-Identifier: Apache-2.0
"""Replacing a class wherever it is bound, whatever was imported before and whatever comes later.

``from vllm.v1.core.block_pool import BlockPool`` copies a reference into the importing module,
so setting the attribute of the defining module alone reaches only the modules imported
afterwards. This file knows nothing of pools.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

# This package holds stock objects and their replacements side by side.
OWN_PACKAGE = __package__.partition(".")[0]


def replace_everywhere(
    replacements: Sequence[tuple[object, object]], keep: Mapping[str, frozenset[str]]
) -> int:
    """Binds the new object wherever a loaded module binds the old one.

    Args:
        replacements: pairs of old and new object, compared by identity.
        keep: names that stay as they are, by module.

    Returns:
        The number of names that were bound anew.
    """
    new_objects = {id(old): new for old, new in replacements}
    num_bound = 0
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        is_ours = module_name == OWN_PACKAGE or module_name.startswith(OWN_PACKAGE + ".")
        if is_ours or not isinstance(namespace, dict):
            continue
        kept = keep.get(module_name, frozenset())
        for name, value in list(namespace.items()):
            if id(value) in new_objects and name not in kept:
                namespace[name] = new_objects[id(value)]
                num_bound += 1
    return num_bound


def execute_again(module_name: str) -> ModuleType:
    """Runs a module's source once more, into a module that ``sys.modules`` doesn't know.

    A class statement that ran with the stock base class can't be given another one, as the
    layouts differ; its source, run again, finds the replacement.
    """
    spec = importlib.util.find_spec(module_name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls ``action`` once, as soon as the module of that name has been executed."""

    def __init__(self, module_name: str, action: Callable[[], None]) -> None:
        self.module_name = module_name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module_name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LoaderWithAction(spec.loader, self)
        return spec

    def place(self) -> None:
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class LoaderWithAction(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, hook: ImportHook) -> None:
        self.loader = loader
        self.hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is what it would be without us.
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if self.hook in sys.meta_path:
            self.hook.remove()
            self.hook.action()
