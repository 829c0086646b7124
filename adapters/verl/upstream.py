"""What this package holds on to in verl and what verl brings along: reads upstream.toml, the one list of it.

This module imports no verl, so that `mismatch-ext compat` can read it where none is installed.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from mismatch_ext.seams import Claim, Seam, exists

SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/"


def _claim(name: str) -> Claim:
    """Read "module:Attribute.path(first, parameters)"."""
    target, _, params = name.rstrip(")").partition("(")
    return exists(target, *filter(None, params.split(", ")))


def _hook(entry: dict[str, Any]) -> Seam:
    return Seam(
        name=entry["name"],
        features=tuple(entry.get("features", ["monitor"])),
        what=entry["what"],
        claims=tuple(map(_claim, entry["names"])),
        checked=entry["checked"],
        upstream=SOURCE + entry["file"],
        where=tuple(entry["where"]),
    )


_LIST = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SEAMS = tuple(map(_hook, _LIST["hook"]))
IMPORTS: dict[str, list[str]] = _LIST["imports"]
"""Names that are imported of peers, by module."""


def either(owner: Any, *spellings: str) -> Any:
    """Return the attribute by the first of its spellings that there is: verl may mend a name that it misspells."""
    for name in spellings:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise AttributeError(f"{owner!r} has none of {', '.join(spellings)}")
