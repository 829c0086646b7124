"""Read the exact versions that a stack's environment is built from."""

from __future__ import annotations

import re

from packaging.utils import canonicalize_name


def pinned(text: str) -> dict[str, str]:
    """Return the versions of a file of pins, by canonical name."""
    found = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", text, re.MULTILINE))
    return {canonicalize_name(name): version for name, version in found.items()}
