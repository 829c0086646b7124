"""Strict loading of frozen dataclasses from mappings: unknown keys and wrong types are errors.

A section's name with nothing after it (`lr:` in YAML, `null` in JSON, None in a mapping) is an error, because some mean "on, with
its defaults" by it and others "off". A dataclass that is built in Python is checked in the same way, and there None is off.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.names import MEANT

Section = TypeVar("Section")
Action = Literal["error", "warn", "off"]

_shortened = reprlib.Repr()
_shortened.maxdict = _shortened.maxlist = _shortened.maxtuple = 30
_shortened.maxstring = _shortened.maxother = 300


def shown(value: object) -> str:
    """Return a value as text for messages: like `repr`, but with bounded length and depth."""
    return _shortened.repr(value)


def suggestion(given: object, allowed: Iterable[object]) -> str:
    """Return " Did you mean 'x'?" with the nearest allowed name; "" if none is near."""
    names = [str(name) for name in allowed]
    given = given if isinstance(given, str) else shown(given)
    lowered = given.strip().lower()
    near = [name for name in names if lowered == name.lower() or MEANT.get(lowered.removeprefix("torch.")) == name]
    near = near or difflib.get_close_matches(given, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise a `ConfigError` that names key, value and what is allowed, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}: {value!r} is not allowed; allowed: {allowed}.")


def build(section: type[Section], data: Any, path: str) -> Section:
    """Build a frozen dataclass from a mapping, and refuse unknown keys.

    Raises:
        ConfigError: Unknown or missing key, wrong type, value out of range; names key, value and what is allowed.
    """
    if isinstance(data, section):
        return data
    if data is None:
        raise nothing_given(path)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{path}: expected a mapping, found {type(data).__name__} {shown(data)}; give its keys, or {{}} for its defaults. "
            "Left out, it is off."
        )
    hints = typing.get_type_hints(section)
    known = [f.name for f in dataclasses.fields(section)]  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise ConfigError(
                f"{path}: unknown key {shown(key)} (value {shown(data[key])}); known keys: {', '.join(known)}."
                f"{suggestion(key, known)}"
            )
    missing = [
        f.name
        for f in dataclasses.fields(section)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in data
    ]
    if missing:
        raise ConfigError(
            f"{path}: missing key {missing[0]!r}; it has no default, allowed: {_name(hints[missing[0]])}."
        )
    return section(**{key: _convert(hints[key], value, f"{path}.{key}") for key, value in data.items()})


def settle(section: Any, path: str) -> None:
    """Check the fields of a dataclass as `build` does, for one that is built in Python; converts them in place.

    Raises:
        ConfigError: Wrong type, or value out of range; names key, value and what is allowed.
    """
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if value is not None or type(None) not in typing.get_args(hints[field.name]):
            object.__setattr__(section, field.name, _convert(hints[field.name], value, f"{path}.{field.name}"))


def nothing_given(path: str) -> ConfigError:
    """Return the error for a key with nothing after it."""
    key = path.rpartition(".")[2]
    return ConfigError(
        f"{path}: nothing is given, which could mean on or off; allowed: a mapping. Write `{key}: {{}}` for the defaults, or "
        "leave the key out to switch it off."
    )


def plain(section: Any) -> dict[str, Any]:
    """Return a frozen dataclass as the mapping from which `build` would make it; absent sections are left out."""
    hints = typing.get_type_hints(type(section))
    found = {}
    for field in dataclasses.fields(section):
        value, kinds = getattr(section, field.name), typing.get_args(hints[field.name])
        if value is None and any(map(dataclasses.is_dataclass, kinds)):
            continue
        if isinstance(value, dict):
            value = {key: plain(entry) if dataclasses.is_dataclass(entry) else entry for key, entry in value.items()}
        found[field.name] = plain(value) if dataclasses.is_dataclass(value) else value
    return found


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [a for a in args if a is not type(None)]
        # For a plain setting, None is a value like any other; for a section it is not.
        if value is None and type(None) in args and not any(map(dataclasses.is_dataclass, kinds)):
            return None
        if len(kinds) == 1:
            return _convert(kinds[0], value, path)
        kind = float if type(value) is int and float in kinds else type(value)
        if kind not in kinds:
            expected = " or ".join(map(_name, kinds))
            raise ConfigError(f"{path}: expected {expected}, found {type(value).__name__} {shown(value)}.")
        return _convert(kind, value, path)
    if origin is Literal:
        # YAML 1.1 reads a bare `off` as False, and no section has a boolean in a choice.
        value = "off" if value is False and "off" in args else value
        if value not in args or isinstance(value, bool):
            allowed = ", ".join(map(repr, args))
            raise ConfigError(f"{path}: {shown(value)} is not allowed; allowed: {allowed}.{suggestion(value, args)}")
        return value
    if origin is dict:
        return _convert_entries(args[1], value, path)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) <= sys.float_info.max else math.inf
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        note = " (YAML reads 1e-3 as text; write 1.0e-3)" if hint is float and _is_number(value) else ""
        raise ConfigError(f"{path}: expected {_name(hint)}, found {type(value).__name__} {shown(value)}{note}.")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{path}: {value!r} is not allowed; allowed: a finite number.")
    return value


def _convert_entries(hint: Any, value: Any, path: str) -> dict[str, Any]:
    """Convert a mapping from names that users choose to values of one kind."""
    if value is None:
        raise nothing_given(path)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected a mapping, found {type(value).__name__} {shown(value)}.")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: key {shown(key)} is not allowed; allowed: text, found {type(key).__name__}.")
    return {key: _convert(hint, entry, f"{path}.{key}") for key, entry in value.items()}


def _is_number(value: Any) -> bool:
    """Whether a text is a number, as Python reads it."""
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return getattr(hint, "__name__", str(hint))
