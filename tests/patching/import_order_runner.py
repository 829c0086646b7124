"""Do the named actions in the named order in a fresh process; print the outcome of each and the final state.

Run as: python import_order_runner.py FOLDER_OF_mismatch_ext FOLDER_OF_UPSTREAM ACTION...

Only the patch engine is imported, without the rest of the package, which keeps one order at 0.1 s.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

_, PACKAGE_DIR, UPSTREAM_DIR, *ACTIONS = sys.argv

package = types.ModuleType("mismatch_ext")
package.__path__ = [PACKAGE_DIR]
sys.modules["mismatch_ext"] = package
sys.path.insert(0, UPSTREAM_DIR)

from mismatch_ext.errors import PatchConflictError  # noqa: E402
from mismatch_ext.patching import Patch, PatchSet, applied  # noqa: E402


def make(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def wrapper(*args: Any) -> str:
        return f"!{original(*args)}"

    return wrapper


PATCH = Patch(
    name="upst/greet",
    peer="upst",
    supports="==1.2.0",
    target="upst.core:greet",
    make=make,
    upstream="https://example.org/upst/issues/1",
    reason="The result lacks its exclamation mark.",
    not_covered="Everything else.",
    remove_when="upst shouts by itself.",
)
FIRST, SECOND = PatchSet(PATCH), PatchSet(PATCH)


def raise_inside() -> None:
    try:
        with applied(PATCH):
            assert importlib.import_module("upst.core").greet("me") == "!stock me"
            raise KeyError("inside")
    except KeyError:
        pass


DO: dict[str, Callable[[], object]] = {
    "import": lambda: importlib.import_module("upst.core"),
    "by_value": lambda: importlib.import_module("upst.consumer"),  # from upst.core import greet
    "patch": FIRST.apply,
    "again": SECOND.apply,
    "revert": FIRST.revert,
    "raise": raise_inside,
}


def attempt(action: str) -> str:
    try:
        DO[action]()
    except PatchConflictError:
        return "conflict"
    return "ok"


def state(module: str) -> str:
    if module not in sys.modules:
        return "-"
    return {"stock me": "stock", "!stock me": "patched"}[sys.modules[module].greet("me")]


outcomes = [attempt(action) for action in ACTIONS]
assert "torch" not in sys.modules, "the patch engine has to stay importable without torch"
print(*outcomes, "|", state("upst.core"), state("upst.consumer"))
