"""What preparing a configuration for a run has changed in it, kept in the configuration itself, so that it can be taken back.

One configuration may serve several runs, with another `mismatch` config for each. The next run must start from verl's settings as
the user wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

ABSENT = object()
"""Stands for the value of a setting that a configuration does not have."""

Change = tuple[tuple[Any, ...], Any, Any]
"""The keys that lead to a setting, and its value before and after, as they are written: interpolations are not resolved."""


def written(config: DictConfig) -> Any:
    """Return a configuration as plain data, with its interpolations as text."""
    return OmegaConf.to_container(config, resolve=False)


def to_text(before: Any, after: Any) -> str:
    """Return the changes between two configurations, from `written`, as text that OmegaConf leaves alone."""
    entries = []
    for path, old, new in _differences(before, after, ()):
        values = {"before": old, "after": new}
        entries.append({"path": path} | {name: value for name, value in values.items() if value is not ABSENT})
    # A dollar sign in JSON's own notation: OmegaConf would resolve "${...}" within the text.
    return json.dumps(entries).replace("$", "\\u0024")


def take_back(config: DictConfig, text: str) -> None:
    """Undo changes, from `to_text`, in a configuration; a setting that has another value by now keeps it."""
    with open_dict(config):
        for entry in reversed(json.loads(text)):
            *parents, key = entry["path"]
            parent = _at(config, parents)
            if parent is None:
                continue
            present = written(parent).get(key, ABSENT)
            if present is ABSENT or present != entry.get("after", ABSENT):
                continue
            if "before" in entry:
                parent[key] = entry["before"]
            else:
                del parent[key]


def _at(config: DictConfig, path: list[Any]) -> DictConfig | None:
    """Return the part of a configuration at a path; None if it has none."""
    part: Any = config
    for key in path:
        part = part.get(key) if isinstance(part, DictConfig) else None
    return part if isinstance(part, DictConfig) else None


def _differences(before: Any, after: Any, path: tuple[Any, ...]) -> Iterator[Change]:
    """Yield each changed setting; a mapping that is new goes before its entries, so that it is taken back after them."""
    if isinstance(after, Mapping):
        if not isinstance(before, Mapping):
            yield path, before, {}
            before = {}
        for key in {**before, **after}:
            yield from _differences(before.get(key, ABSENT), after.get(key, ABSENT), (*path, key))
    elif before is ABSENT or before != after:
        yield path, before, after
