"""What the servers of vLLM and SGLang say when they refuse a request."""

from __future__ import annotations

import json
from typing import Any

NOT_FINITE = "Out of range float values"
"""Part of vLLM's answer when a log-probability is NaN or infinite."""


def words(text: str, most: int) -> str:
    """Return what a server says in the body of an error: the field that holds its message, otherwise the beginning of the text.

    Args:
        text: The body.
        most: Largest number of characters that are returned.
    """
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text
    while isinstance(found, dict):
        found = next((found[key] for key in ("error", "message", "detail") if found.get(key)), str(found))
    return " ".join(str(found).split())[:most]
