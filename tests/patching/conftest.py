"""A made-up upstream package with a version, and patches for it."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mismatch_ext.patching import Patch, active_patches

CORE = """
def greet(name="you"):
    return f"stock {name}"

class Base:
    def method(self):
        return "method"
    @staticmethod
    def static():
        return "static"
    @classmethod
    def named(cls):
        return cls.__name__

class Child(Base):
    pass

class Engine:
    def run(self):
        return "stock"
"""

FILES = {
    "upst/__init__.py": "",
    "upst/core.py": CORE,
    "upst/user.py": "from upst.core import greet\n",
    "upst-1.2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: upst\nVersion: 1.2.0+cpu\n",
}


def bang(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its result shows it."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> str:
        return f"!{original(*args, **kwargs)}"

    return wrapper


class Upstream:
    """The imported package, and how it looked when it was stock."""

    def __init__(self) -> None:
        self.core = importlib.import_module("upst.core")

    def load(self, name: str) -> ModuleType:
        return importlib.import_module(f"upst.{name}")

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Return a copy of the `__dict__` of every module and class of the package."""
        found: dict[str, dict[str, Any]] = {}
        todo: list[tuple[str, Any]] = [(n, m) for n, m in sys.modules.items() if n.startswith("upst")]
        while todo:
            name, holder = todo.pop()
            found[name] = dict(vars(holder))
            todo += [
                (f"{name}.{key}", value)
                for key, value in vars(holder).items()
                if isinstance(value, type) and value.__module__.startswith("upst")
            ]
        return found

    def assert_same(self, before: dict[str, dict[str, Any]]) -> None:
        """Compare with a snapshot by identity: the same names, and the very same objects."""
        after = self.snapshot()
        assert after.keys() == before.keys()
        for name, entries in before.items():
            assert after[name].keys() == entries.keys(), name
            changed = [key for key, value in entries.items() if after[name][key] is not value]
            assert changed == [], f"{name}: {changed}"

    def patch(self, target: str, **changes: Any) -> Patch:
        """Declare a valid patch, named after its target unless told otherwise."""
        slug = target.partition(":")[2].replace(".", "_").strip("_").lower()
        fields: dict[str, Any] = {
            "name": f"upst/{slug}",
            "peer": "upst",
            "supports": ">=1.0,<=1.2.0",
            "observed": "greetings are louder",
            "target": target,
            "make": bang,
            "upstream": "https://example.org/upst/issues/1",
            "reason": "The result lacks its exclamation mark.",
            "not_covered": "Everything else.",
            "remove_when": "upst shouts by itself.",
        }
        return Patch(**(fields | changes))


@pytest.fixture
def upstream_dir(tmp_path: Path) -> Path:
    """Write the package and its metadata into a folder that can be put on sys.path."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def upstream(upstream_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
    """Import a fresh copy of the package; check at the end that the test left no patch applied."""
    monkeypatch.syspath_prepend(str(upstream_dir))
    yield Upstream()
    for name in [name for name in sys.modules if name == "upst" or name.startswith("upst.")]:
        del sys.modules[name]
    assert active_patches() == []
