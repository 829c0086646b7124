"""Reading single fields of a server's answer, with checked types, and messages that quote little of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from reprlib import Repr
from typing import Any, TypeGuard

from mismatch_ext.errors import RecordError

MAX_TOKEN_ID = 2**31 - 1
SHOWN = 120
"""Largest number of characters of a server's value that a message quotes."""

_repr = Repr()
_repr.maxstring = _repr.maxother = SHOWN
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = 4
_repr.maxlevel = 3


def brief(value: object) -> str:
    """Return a short representation of a value that a server sent."""
    text = _repr.repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def refuse(request: str, field: str, value: object, allowed: str) -> RecordError:
    """Return the error for a field whose value is not allowed; `allowed` ends the sentence and may say what to change."""
    return RecordError(f"request {request}, {field}: found {brief(value)}; allowed: {allowed}.")


def mapping(value: object, request: str, field: str) -> Mapping[Any, Any]:
    """Return a field that must be a JSON object."""
    if not isinstance(value, Mapping):
        raise refuse(request, field, value, "an object")
    return value


def sequence(value: object, request: str, field: str) -> Sequence[Any]:
    """Return a field that must be a JSON array; the in-process engine sends tuples too."""
    if not isinstance(value, (list, tuple)):
        raise refuse(request, field, value, "a list")
    return value


def count(value: object, request: str, field: str) -> int:
    """Return a field that must be an integer from 0 to 2^31 - 1."""
    if not is_integer(value) or not 0 <= int(value) <= MAX_TOKEN_ID:
        raise refuse(request, field, value, f"an integer from 0 to {MAX_TOKEN_ID}")
    return int(value)


def token_ids(value: object, request: str, field: str) -> tuple[int, ...]:
    """Return a field that must be a list of token ids."""
    ids = sequence(value, request, field)
    if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID:
        return tuple(ids)
    for position, token in enumerate(ids):
        if not is_integer(token) or not 0 <= int(token) <= MAX_TOKEN_ID:
            raise refuse(request, f"{field}[{position}]", token, f"a token id from 0 to {MAX_TOKEN_ID}")
    return tuple(int(token) for token in ids)


def is_integer(value: object) -> TypeGuard[Integral]:
    """Tell whether a value is an integer and not a boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def number(value: object) -> float | None:
    """Return a number as a float, or None when it is not a number."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
