"""Checks what a line of a metrics file holds, and says why a line cannot be used. `mismatch_ext.stream` documents the format."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn, TypeGuard

SCHEMA = 1
LEVELS = ("info", "warning", "error")
STATUSES = ("completed", "failed")
ENDED = ("training", "evaluation")
SPLIT_PATTERN = re.compile(r"train|eval/\S.*")
# Largest integer that JSON readers in other languages keep exactly.
MAX_STEP = 2**53
# Rounding may put a log-probability this far above 0; a larger number is not a log-probability.
MAX_LOGPROB = 1e-2
PROFILE_COLUMNS = ("abs_diff_mean", "abs_diff_max", "k3_mean")


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse one line as a strict JSON object; raises ValueError with the reason when it is not one."""
    try:
        # json.loads builds a new decoder for each call, which is slow; but only it reads other encodings than UTF-8.
        plain = line[:1] == b"{" and line[1:2] != b"\0"
        value = _DECODER.decode(line.decode("utf-8", "surrogatepass")) if plain else json.loads(line, **_STRICT)
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"not strict JSON ({name})")


_STRICT: dict[str, Any] = {"parse_constant": _refuse_constant}
_DECODER = json.JSONDecoder(**_STRICT)


def is_resume_step(value: object) -> TypeGuard[int]:
    """Tell whether a header's `resume_step` is a step."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(line: dict[str, Any], key: str) -> int:
    """Return a line's whole number >= 0, such as a step or a segment; raises ValueError with the reason when it is not one."""
    value = line.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_STEP:
        raise ValueError(f"{key} is {short(value)}, not a non-negative integer")
    return value


def text_of(line: dict[str, Any], key: str, allowed: tuple[str, ...] | re.Pattern[str] | None = None) -> str:
    """Return a line's text; raises ValueError with the reason when it is not text, or not an allowed one."""
    value = line.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {short(value)}, not text")
    if isinstance(allowed, tuple) and value not in allowed:
        raise ValueError(f"{key} is {short(value)}, not one of {', '.join(allowed)}")
    if isinstance(allowed, re.Pattern) and not allowed.fullmatch(value):
        raise ValueError(f"{key} is {short(value)}, not 'train' or 'eval/<name>'")
    return value


def short(value: object) -> str:
    """Return a value as text for a sentence, cut to at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_number(value: object) -> bool:
    """Tell whether a JSON value is a number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def finite(value: Any) -> float | None:
    """Return a number as a float; None if it is NaN, infinite or too large for a float."""
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def logprobs(line: dict[str, Any], key: str) -> tuple[float, ...]:
    """Return a line's list of log-probabilities, in nats; raises ValueError with the reason when an entry is not one."""
    values = line.get(key)
    if not isinstance(values, list):
        raise ValueError(f"{key} is {short(values)}, not a list")
    numbers = []
    for value in values:
        number = finite(value) if is_number(value) else None
        if number is None or number > MAX_LOGPROB:
            raise ValueError(f"{key} holds {short(value)}, which is no log-probability")
        numbers.append(number)
    return tuple(numbers)


def profile(name: str, value: Any) -> dict[str, list[float | None]]:
    """Return the columns of one profile: all have one length, and `edges` is one longer (or equal, if the last bin is open).

    Raises:
        ValueError: The columns are malformed; the message gives the reason.
    """
    if not isinstance(value, dict) or not all(isinstance(value.get(k), list) for k in ("edges", "count")):
        raise ValueError(f"profile {name!r} lacks edges or counts")
    columns: dict[str, list[float | None]] = {}
    bins = len(value["count"])
    for key in ("edges", "count", *PROFILE_COLUMNS):
        column = value.get(key, [None] * bins)
        if not isinstance(column, list) or not all(v is None or is_number(v) for v in column):
            raise ValueError(f"profile {name!r}: {key} is not a list of numbers")
        if len(column) not in ((bins, bins + 1) if key == "edges" else (bins,)):
            raise ValueError(f"profile {name!r}: {key} has {len(column)} entries for {bins} bins")
        columns[key] = [None if v is None else finite(v) for v in column]
    if any(edge is None for edge in columns["edges"]) or any(n is None or n < 0 for n in columns["count"]):
        raise ValueError(f"profile {name!r}: edges and counts must be finite and not negative")
    return columns
