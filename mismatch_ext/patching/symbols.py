"""Find the symbol that a target names, and put a replacement into the same kind of place.

A target is "package.module:Attribute.path". Its last attribute is the *slot*: one entry in the `__dict__` of
a module or a class. The raw `__dict__` entry is kept, because `getattr` turns a staticmethod into a plain function and binds a
classmethod, and neither result can be put back.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mismatch_ext.errors import PatchDriftError, PatchError

MISSING: Any = object()
"""Stands for "no such entry", because a module may hold the value None."""

_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: built-in and extension types


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """One entry of one module's or class's `__dict__`, as it was when it was looked up.

    Args:
        target: "package.module:Attribute.path", as the patch gives it.
        owner: Module or class that a replacement is written to.
        attribute: Name of the entry.
        entry: The owner's own raw entry; MISSING when inherited or served by a module's `__getattr__`.
        raw: The raw entry, wherever it was found.
        definer: Module or class whose `__dict__` holds `raw`; the owner itself unless inherited.
    """

    target: str
    owner: ModuleType | type
    attribute: str
    entry: Any
    raw: Any
    definer: ModuleType | type

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the place that is written."""
        return id(self.owner), self.attribute

    @property
    def definer_key(self) -> tuple[int, str]:
        """Identity of the place that the present value comes from."""
        return id(self.definer), self.attribute

    @property
    def original(self) -> Any:
        """What a patch wraps: the function inside a descriptor, or the entry itself."""
        return self.raw if isinstance(self.owner, ModuleType) else unwrap_descriptor(self.raw)

    def current_entry(self) -> Any:
        """The owner's own raw entry now, or MISSING."""
        return vars(self.owner).get(self.attribute, MISSING)

    def rewrap(self, replacement: Any) -> Any:
        """Put a replacement into the same kind of descriptor as the original."""
        if isinstance(self.owner, ModuleType):
            return replacement
        if type(self.raw) in (staticmethod, classmethod):
            return type(self.raw)(replacement)
        if type(self.raw) is property and self.raw.fget is not None:
            return self.raw.getter(replacement)
        if type(self.raw) is functools.cached_property:
            cached: functools.cached_property[Any] = functools.cached_property(replacement)
            cached.__set_name__(self.owner, self.attribute)  # setattr on a class does not call it
            return cached
        return replacement


def unwrap_descriptor(raw: Any) -> Any:
    """Return the function inside a staticmethod, classmethod, property or cached_property.

    Anything else is returned unchanged. So are subclasses of these, because rebuilding one would lose what it adds.
    """
    if type(raw) in (staticmethod, classmethod):
        return raw.__func__
    if type(raw) is property and raw.fget is not None:
        return raw.fget
    if type(raw) is functools.cached_property:
        return raw.func
    return raw


def is_mutable_class(value: object) -> bool:
    """Whether a value is a class that accepts new attributes, unlike built-in and extension types."""
    return isinstance(value, type) and not value.__flags__ & _IMMUTABLE_TYPE


def import_target_module(target: str, context: str) -> None:
    """Import the module of a target.

    Raises:
        PatchDriftError: The module does not exist.
        ImportError: The module exists and fails to import; the error carries a note that names the target.
    """
    module_name = target.partition(":")[0]
    try:
        importlib.import_module(module_name)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (module_name == missing or module_name.startswith(missing + ".")):
            raise PatchDriftError(
                f"{context}: {target} is gone: there is no module {missing!r}. Nothing was patched."
            ) from error
        error.add_note(f"{context}: raised while importing {module_name} for {target}; nothing was patched")
        raise


def locate(target: str, context: str) -> Slot:
    """Find the slot of a target whose module is already imported.

    Args:
        target: "package.module:Attribute.path".
        context: Patch and peer version, for error messages.

    Raises:
        PatchDriftError: A name on the path does not exist.
        PatchError: The slot cannot be written and restored exactly.
    """
    module_name, _, path = target.partition(":")
    *parents, attribute = path.split(".")
    owner: Any = importlib.import_module(module_name)
    walked = module_name
    for parent in parents:
        following = getattr(owner, parent, MISSING)
        if following is MISSING:
            raise _gone(context, target, walked, parent)
        owner, walked = following, f"{walked}.{parent}"
    if not isinstance(owner, (ModuleType, type)):
        raise PatchError(
            f"{context}: {walked} in {target} is a {type(owner).__name__}; only attributes of modules and "
            "classes can be patched. Patch the class of the object instead."
        )
    entry, raw, definer = _look_up(owner, attribute)
    if raw is MISSING:
        raise _gone(context, target, walked, attribute)
    slot = Slot(target=target, owner=owner, attribute=attribute, entry=entry, raw=raw, definer=definer)
    _require_writable(slot, context)
    return slot


def _gone(context: str, target: str, walked: str, name: str) -> PatchDriftError:
    return PatchDriftError(
        f"{context}: {target} is gone: {walked} has no attribute {name!r}. Upstream moved or renamed it; the "
        "patch has to be written anew for this version. Nothing was patched."
    )


def _look_up(owner: ModuleType | type, attribute: str) -> tuple[Any, Any, ModuleType | type]:
    """Return (own entry, raw entry, where the raw entry was found)."""
    if isinstance(owner, type):
        for definer in owner.__mro__:
            if attribute in vars(definer):
                raw = vars(definer)[attribute]
                return (raw if definer is owner else MISSING), raw, definer
        return MISSING, MISSING, owner
    value = getattr(owner, attribute, MISSING)  # runs a lazy module's loader, which may fill the __dict__
    return vars(owner).get(attribute, MISSING), value, owner


def _require_writable(slot: Slot, context: str) -> None:
    """Refuse slots that Python would not let us restore exactly."""
    owner = slot.owner
    if isinstance(owner, type) and not is_mutable_class(owner):
        raise PatchError(f"{context}: {slot.target} is on {owner.__name__}, an immutable built-in type.")
    shadow = inspect.getattr_static(type(owner), slot.attribute, None)
    if hasattr(type(shadow), "__set__"):
        raise PatchError(
            f"{context}: {slot.target} is handled by a data descriptor of {type(owner).__name__}, so that a "
            "write does not reach its __dict__. It cannot be patched."
        )
    if slot.attribute == "__new__" and slot.entry is MISSING:
        # CPython keeps the slot function after `del cls.__new__`; object.__new__ then refuses arguments.
        raise PatchError(
            f"{context}: {slot.target} is inherited, and Python cannot undo setting __new__. Patch __init__, "
            f"or the class {slot.definer.__name__} that defines __new__."
        )
