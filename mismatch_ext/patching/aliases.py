"""Find names that hold a function or class by value: after `from upstream import f`, a patch of `upstream.f` does not change `f`.

The search sees names in loaded modules, other names in the same class, and subclasses. It cannot see copies in closures, default
arguments, containers and instances.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mismatch_ext.patching.symbols import Slot


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A name in a loaded module or a class.

    Args:
        key: Identity of the module or class and the attribute, as `Slot.key`.
        name: "module:attribute" or "module:Class.attribute".
    """

    key: tuple[int, str]
    name: str


def is_named_callable(value: object) -> bool:
    """Whether a value is a function or class, which modules import by value."""
    return callable(value) and isinstance(getattr(value, "__qualname__", None), str)


def find_holders(objects: list[Any]) -> Mapping[int, list[Holder]]:
    """Find every loaded module that holds one of some objects, in one pass and without attribute access.

    Args:
        objects: Objects to look for by identity; the caller keeps them alive.

    Returns:
        The holders of each object, by the object's id.
    """
    found: dict[int, list[Holder]] = {id(value): [] for value in objects}
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        for attribute, value in list(vars(module).items()):
            if id(value) in found:
                found[id(value)].append(Holder(key=(id(module), attribute), name=f"{name}:{attribute}"))
    return found


def class_holders(slot: Slot) -> list[Holder]:
    """Find the other attributes of a class, own or inherited, that hold the same function or descriptor."""
    if isinstance(slot.owner, ModuleType) or not (callable(slot.raw) or hasattr(type(slot.raw), "__get__")):
        return []
    return [
        Holder(key=(id(cls), name), name=f"{cls.__module__}:{cls.__qualname__}.{name}")
        for cls in slot.owner.__mro__
        for name, value in list(vars(cls).items())
        if value is slot.raw and name != slot.attribute
    ]
