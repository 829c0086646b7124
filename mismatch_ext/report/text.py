"""How numbers and names are written in the report."""

from __future__ import annotations

import math


def quantity(value: float | None, digits: int = 3) -> str:
    """Write a number with a few significant digits: 0.0123, 2.1e-6, 8.1, 12000; a dash for None."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if 1e-3 <= abs(value) < 1e6:
        text = f"{value:.{digits}g}"
        return f"{float(text):.0f}" if "e" in text else text
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"
