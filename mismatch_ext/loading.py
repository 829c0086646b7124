"""Turns a block's JSON or YAML, given as text or as a file's path, into a mapping; a key given twice is an error."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatch_ext.errors import ConfigError
from mismatch_ext.strict import nothing_given, shown


def load_mapping(text: str | Path, source: str = "the mismatch block") -> Mapping[str, Any]:
    """Read the block as a mapping from a JSON or YAML text, or from the path of a JSON or YAML file.

    Args:
        text: The text, or the path; a `~` in front is the home folder.
        source: Name of the text in messages.

    Raises:
        ConfigError: The file cannot be read; or the text is neither JSON nor YAML, is nested too deeply, is not a mapping, or
            gives a key twice.
    """
    if str(text).strip().lower().endswith((".json", ".yaml", ".yml")):
        path = Path(str(text).strip())
        source = f"mismatch file {path}"
        try:
            text = path.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: there is no such user
            raise ConfigError(f"{source} cannot be read: {error}. Give the path of a JSON or YAML file.") from error
    try:
        data = _parse_json_or_yaml(str(text), source)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply to be read; no section has more than four levels.") from None
    if isinstance(data, Mapping) and set(data) == {"mismatch"}:
        data = data["mismatch"]
        if data is None:
            raise nothing_given("mismatch")
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: expected a mapping of sections, found {type(data).__name__} {shown(data)}.")
    return data


def _parse_json_or_yaml(text: str, source: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=functools.partial(_object, source))
    except ConfigError:
        raise
    except ValueError as json_error:  # also for numbers of more than 4300 digits
        try:
            import yaml
        except ImportError:
            raise ConfigError(
                f"{source} is not valid JSON ({json_error}); to read YAML, `pip install pyyaml`."
            ) from json_error
        try:
            return yaml.load(text, _yaml_loader(source))  # a SafeLoader
        except ConfigError:
            raise
        except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
            raise ConfigError(f"{source} is neither valid JSON nor valid YAML: {error}") from error


def _object(source: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Turn a JSON object's pairs into a mapping; refuse a key given twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _twice(source, key, found[key], value)
        found[key] = value
    return found


def _yaml_loader(source: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader, but a key given twice is refused; a merged-in key may be overridden."""

        def flatten_mapping(self, node: Any) -> None:
            seen: dict[Any, Any] = {}
            for key_node, value_node in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
                    continue
                key = self.construct_object(key_node)
                if key in seen:
                    values = (self.construct_object(part, deep=True) for part in (seen[key], value_node))
                    raise _twice(f"{source}, line {key_node.start_mark.line + 1}", key, *values)
                seen[key] = value_node
            super().flatten_mapping(node)

    return Loader


def _twice(source: str, key: Any, first: Any, second: Any) -> ConfigError:
    return ConfigError(
        f"{source}: key {key!r} is given twice, as {shown(first)} and as {shown(second)}; leave out one of the two."
    )
