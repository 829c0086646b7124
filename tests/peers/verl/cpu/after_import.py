"""Changes to modules that are not imported yet, and would be slow or circular to import now; and modules that are missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class AfterImport(MetaPathFinder):
    """Changes a module when it is imported, however late that is, or now where it is already."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name, self.change = name, change
        if name in sys.modules:
            change(sys.modules[name])
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Find the module as everybody else would, and change it after it has run."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self.change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class Missing(MetaPathFinder):
    """Lets the import of a module, and of all below it, fail in some processes."""

    def __init__(self, name: str, here: Callable[[], bool], message: str) -> None:
        self.name, self.here, self.message = name, here, message
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Fail for the module and all that is below it."""
        if (name == self.name or name.startswith(f"{self.name}.")) and self.here():
            raise ImportError(f"{self.message}: {name}")
        return None
