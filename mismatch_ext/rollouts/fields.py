"""Strict reading of a response's fields: an error names a missing or malformed field and its place in the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mismatch_ext.errors import RecordError


def ensure_keys(row: Mapping[str, Any], needed: Iterable[str], where: str, says: str) -> None:
    """Refuse a row that lacks keys.

    Args:
        row: The row.
        needed: Keys that it must have, with a value other than None.
        where: Its place in the file.
        says: The end of the message: what the row should hold, and how to get it.

    Raises:
        RecordError: Keys are missing; names them all.
    """
    missing = sorted(key for key in needed if row.get(key) is None)
    if missing:
        raise RecordError(f"{where} has no {', '.join(missing)}; {says}.")


def token_ids(row: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    """Return a field's token ids.

    Raises:
        RecordError: The field is not a list of integers >= 0.
    """
    found = row[key]
    if not isinstance(found, list) or not all(type(token) is int and token >= 0 for token in found):
        raise RecordError(f"{where}: {key} must be a list of token ids >= 0.")
    return tuple(found)


def flags(row: Mapping[str, Any], key: str, where: str) -> tuple[bool, ...]:
    """Return a field's mask.

    Raises:
        RecordError: The field is not a list of true and false, or of ones and zeros.
    """
    found = row[key]
    if not isinstance(found, list) or not all(value in (0, 1) for value in found):
        raise RecordError(f"{where}: {key} must be a list of true and false.")
    return tuple(map(bool, found))


def logprobs(row: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
    """Return a field's log-probabilities, NaN for null.

    Raises:
        RecordError: The field is not a list of numbers and nulls.
    """
    found = row[key]
    if not isinstance(found, list) or not all(value is None or type(value) in (int, float) for value in found):
        raise RecordError(f"{where}: {key} must be a list of numbers, null where the policy did not sample.")
    return tuple(math.nan if value is None else float(value) for value in found)
