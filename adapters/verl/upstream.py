"""What this package holds on to in verl and what verl brings along: reads upstream.toml, the one list of it.

This module imports no verl, so that `mismatch-ext compat` can read it where none is installed.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from mismatch_ext.seams import read_seams

SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/"


_LIST = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SEAMS = read_seams(_LIST["hook"], {"verl": SOURCE})
IMPORTS: dict[str, list[str]] = _LIST["imports"]
"""Names that are imported of peers, by module."""


def either(owner: Any, *spellings: str) -> Any:
    """Return the attribute by the first of its spellings that there is: verl may mend a name that it misspells."""
    for name in spellings:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise AttributeError(f"{owner!r} has none of {', '.join(spellings)}")
