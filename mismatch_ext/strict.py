"""Strict loading of frozen dataclasses from mappings, JSON and YAML: nothing unknown, nothing of a wrong type."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from mismatch_ext.errors import ConfigError

Section = TypeVar("Section")
Action = Literal["error", "warn", "off"]


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise a `ConfigError` that names key, value and what is allowed, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key}: {value!r} is not allowed; allowed: {allowed}.")


def load_mapping(text: str | Path) -> Mapping[str, Any]:
    """Read the block as a mapping from a JSON or YAML text, or from the path of a JSON or YAML file."""
    source = "the mismatch block"
    if str(text).strip().lower().endswith((".json", ".yaml", ".yml")):
        path = Path(str(text).strip())
        source = f"mismatch file {path}"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}. Give the path of a JSON or YAML file.") from error
    data = _parse_json_or_yaml(str(text), source)
    if isinstance(data, Mapping) and set(data) == {"mismatch"}:
        data = data["mismatch"]
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: expected a mapping of sections, found {type(data).__name__} {data!r}.")
    return data


def _parse_json_or_yaml(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as json_error:
        try:
            import yaml
        except ImportError:
            raise ConfigError(
                f"{source} is not valid JSON ({json_error}); to read YAML, `pip install pyyaml`."
            ) from json_error
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{source} is neither valid JSON nor valid YAML: {error}") from error


def build(section: type[Section], data: Any, path: str) -> Section:
    """Build a frozen dataclass from a mapping, refusing what it does not know."""
    if isinstance(data, section):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected a mapping, found {type(data).__name__} {data!r}.")
    hints = typing.get_type_hints(section)
    known = [f.name for f in dataclasses.fields(section)]  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{path}: unknown key {key!r} (value {data[key]!r}); known keys: {', '.join(known)}.{hint}"
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


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [a for a in args if a is not type(None)]
        fitting = next((a for a in kinds if isinstance(a, type) and type(value) is a), kinds[0])
        return _convert(fitting, value, path)
    if origin is Literal:
        # YAML 1.1 reads a bare `off` as False, and no section has a boolean in a choice.
        value = "off" if value is False and "off" in args else value
        if value not in args or isinstance(value, bool):
            near = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
            hint_text = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{path}: {value!r} is not allowed; allowed: {', '.join(map(repr, args))}.{hint_text}")
        return value
    if origin is dict:
        return _convert_entries(args[1], value, path)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        note = " (YAML reads 1e-3 as text; write 1.0e-3)" if hint is float and isinstance(value, str) else ""
        raise ConfigError(f"{path}: expected {_name(hint)}, found {type(value).__name__} {value!r}{note}.")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{path}: {value!r} is not allowed; allowed: a finite number.")
    return value


def _convert_entries(hint: Any, value: Any, path: str) -> dict[str, Any]:
    """Convert a mapping of names that users choose, each to the same kind of value."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected a mapping, found {type(value).__name__} {value!r}.")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: key {key!r} is not allowed; allowed: text, found {type(key).__name__}.")
    return {key: _convert(hint, entry, f"{path}.{key}") for key, entry in value.items()}


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return getattr(hint, "__name__", str(hint))
