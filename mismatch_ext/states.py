"""States that are saved in checkpoints: frozen dataclasses, to and from JSON by their types.

    @state
    class KlState:
        coef: float
        integral: float = 0.0

    data = to_json(KlState(coef=0.1))  # JSON-able
    from_json(KlState, data, "kl")  # {"integral": "x"} raises RecordError: kl.integral: Input should be a valid number

A field that must be in a range says so with `Annotated[float, Field(gt=0)]`. What is not finite must be None.
`mismatch.json` has one version for all states (`checkpoint.SCHEMA`).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypeVar, dataclass_transform

import pydantic
from pydantic.dataclasses import dataclass

from mismatch_ext.errors import RecordError

State = TypeVar("State")

_CONFIG = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
def state(cls: type[State]) -> type[State]:
    """Make a class a frozen dataclass whose fields are checked by their types."""
    checked: Any = dataclass(frozen=True, kw_only=True, config=_CONFIG)(cls)
    return checked  # type: ignore[no-any-return]


def to_json(value: Any) -> dict[str, Any]:
    """Return a state as JSON-able data."""
    return dataclasses.asdict(value)


def from_json(cls: type[State], data: Any, name: str) -> State:
    """Return the state that `to_json` saved; `name` is its part of the checkpoint, for messages. Raises RecordError."""
    try:
        # From text, a list may be a tuple.
        return pydantic.TypeAdapter(cls).validate_json(json.dumps(data))
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        field = ".".join(map(str, (name, *wrong["loc"])))
        raise RecordError(
            f"{field}: {wrong['msg']} (found {wrong['input']!r:.80}). Resume from another "
            "checkpoint, or remove mismatch.json to start with new states."
        ) from None
