"""New figures beside those of an evidence file that was measured before, on the same CPU with the same versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def pairs(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each interval, or number without one, that both have."""
    if isinstance(before, dict) and isinstance(now, dict):
        if {"value", "low", "high"} <= set(before) & set(now):
            yield path, before, now
            return
        for key in before:
            if key in now:
                yield from pairs(before[key], now[key], f"{path}, {key}" if path else key)
    elif all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (before, now)):
        yield path, before, now


def compared(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return a line for each figure that has moved, and those of them whose intervals do not overlap.

    A figure has moved when the value before lies outside of the interval now, or, without one, is more than twice or less than
    half of what it is now. Records of another CPU or other versions are not compared.
    """
    moved: list[str] = []
    apart: list[str] = []
    # Two kinds of CPU may have one name, as virtual machines give it.
    kinds = [[record["machine"].get(key) for key in ("cpu", "instruction_sets")] for record in (before, now)]
    if kinds[0] != kinds[1] or before["versions"] != now["versions"]:
        return moved, apart
    for path, old, new in pairs(before["figures"], now["figures"]):
        line = f"{now['name']}: {path}: {old} before, {new} now"
        if isinstance(old, dict):
            moved += [] if new["low"] <= old["value"] <= new["high"] else [line]
            apart += [line] if old["high"] < new["low"] or new["high"] < old["low"] else []
        elif not (abs(old) <= 2 * abs(new) and abs(new) <= 2 * abs(old) and old * new >= 0):
            moved.append(line)
    return moved, apart
