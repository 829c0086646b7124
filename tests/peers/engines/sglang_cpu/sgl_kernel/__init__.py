"""Stands in for SGLang's compiled kernels, which do not import without CUDA: names can be fetched, none can be called.

`$KERNEL_STUB_LOG`, when set, gets a line "GET name" or "CALL name" each time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

# The newest that any supported SGLang asks for.
__version__ = "0.4.10"
__path__: list[str] = []

# SGLang falls back on torch where `sgl_kernel.scalar_type` is missing, so only these submodules exist.
SUBMODULES = ("sgl_kernel.kvcacheio", "sgl_kernel.speculative", "sgl_kernel.utils")


def note(line: str) -> None:
    """Append a line to the log; short appends of several processes do not mix."""
    if path := os.environ.get("KERNEL_STUB_LOG"):
        with open(path, "a") as log:
            log.write(line + "\n")


def names_of(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`."""

    def fetch(name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        note(f"GET {module}.{name}")

        def kernel(*args: Any, **kwargs: Any) -> NoReturn:
            note(f"CALL {module}.{name}")
            raise NotImplementedError(f"{module}.{name} is a stub: this process has no SGLang kernels.")

        kernel.__name__ = name
        return kernel

    return fetch


class Submodules(MetaPathFinder, Loader):
    """Finds and makes the submodules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return a spec for one of `SUBMODULES`."""
        return ModuleSpec(fullname, self, is_package=True) if fullname in SUBMODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Let names be fetched from it."""
        module.__getattr__ = names_of(module.__name__)  # type: ignore[method-assign]


__getattr__ = names_of(__name__)
sys.meta_path.append(Submodules())
