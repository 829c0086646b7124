"""How numbers and lists are written in sentences and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantity(value: float | None, digits: int = 3) -> str:
    """Write a number with a few significant digits: 0.0123, 2.1e-6, 8.1, 12000; a dash for None."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if 1e-3 <= abs(value) < 1e6:
        text = f"{value:.{digits}g}"
        return f"{float(text):.0f}" if "e" in text else text
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def counted(number: int, what: str) -> str:
    """Write a count with its noun: "1 step", "2 steps"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def times(count: int) -> str:
    """Write how often something happened: "once", "3 times"."""
    return "once" if count == 1 else f"{count} times"


def joined(names: Sequence[str]) -> str:
    """Write a list: "a, b and c"."""
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + " and " + names[-1]
