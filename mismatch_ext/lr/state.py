"""The state that a learning-rate controller carries from step to step, as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mismatch_ext.errors import RecordError
from mismatch_ext.lr.surge import Level, Measurement, SurgeState

STATE_VERSION = 1
_TRIGGERS = ("response_length", "mismatch_kl", "grad_norm", "f_tau")


@dataclass(frozen=True, kw_only=True)
class LrState:
    """State of an `LrController`, without its settings.

    Args:
        trigger: The controller's trigger.
        step: Last step that the controller was asked for; before that, one less than the first step.
        measured_step: Step of the last measurement.
        triggers: Surges found, 0 or 1.
        surge_step: Step of the surge.
        found_step: Step at which that surge was found; it is later, because of smoothing.
        surge: The detector's state.
    """

    trigger: str
    step: int = -1
    measured_step: int | None = None
    triggers: int = 0
    surge_step: int | None = None
    found_step: int | None = None
    surge: SurgeState = field(default_factory=SurgeState)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON-able data with a version."""
        data = {"version": STATE_VERSION, **dataclasses.asdict(self)}
        data["surge"]["history"] = [[m.step, m.value, m.truncated] for m in self.surge.history]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LrState:
        """Read what `to_dict` returned.

        Raises:
            RecordError: The data have another version, a missing or unknown key, or a value that no controller could have
                saved. The message names it and says what to do.
        """
        _keys(data, {"version", *(f.name for f in dataclasses.fields(cls))}, "the state")
        if data["trigger"] not in _TRIGGERS:
            raise _damaged("trigger", data["trigger"], " or ".join(_TRIGGERS))
        for key in ("step", "triggers", "measured_step", "surge_step", "found_step"):
            least = -1 if key == "step" else 0
            whole = isinstance(data[key], int) and not isinstance(data[key], bool) and data[key] >= least
            if not whole and not (data[key] is None and key.endswith("_step")):
                raise _damaged(key, data[key], f"an integer >= {least}")
        surge = data["surge"]
        _keys(surge, {f.name for f in dataclasses.fields(SurgeState)}, "surge", versioned=False)
        if not isinstance(surge["history"], (list, tuple)):
            raise _damaged("surge.history", surge["history"], "a list")
        found = SurgeState(
            history=tuple(_measurement(entry) for entry in surge["history"]),
            baseline=_level(surge["baseline"], "surge.baseline"),
            truncated_baseline=_level(surge["truncated_baseline"], "surge.truncated_baseline"),
        )
        return cls(**{**{k: v for k, v in data.items() if k != "version"}, "surge": found})


def _keys(data: Any, expected: set[str], what: str, *, versioned: bool = True) -> None:
    if not isinstance(data, Mapping):
        raise _damaged(what, data, "a mapping")
    if versioned and data.get("version") != STATE_VERSION:
        raise RecordError(
            f"the state of a learning-rate controller is of version {data.get('version')!r}; this release reads version "
            f"{STATE_VERSION}. Resume with the release of mismatch-ext that saved it, or from another checkpoint."
        )
    if set(data) != expected:
        wrong = [f"unknown {key!r}" for key in data if key not in expected]
        wrong += [f"missing {key!r}" for key in sorted(expected - set(data))]
        raise RecordError(
            f"{what} of a learning-rate controller cannot be loaded: {', '.join(wrong)}; expected {sorted(expected)}. Give "
            "what `to_dict` returned, or resume from another checkpoint."
        )


def _measurement(entry: Any) -> Measurement:
    if not isinstance(entry, (list, tuple)) or len(entry) != 3:
        raise _damaged("surge.history", entry, "entries [step, value, truncated fraction]")
    step, value, truncated = entry
    if not isinstance(step, int) or not _number(value) or not (truncated is None or _number(truncated)):
        raise _damaged("surge.history", entry, "entries [step, value, truncated fraction]")
    return Measurement(step=step, value=value, truncated=truncated)


def _level(data: Any, key: str) -> Level | None:
    if data is None:
        return None
    _keys(data, {"center", "spread"}, key, versioned=False)
    for name, value in data.items():
        if not _number(value):
            raise _damaged(f"{key}.{name}", value, "a number >= 0")
    return Level(center=data["center"], spread=data["spread"])


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _damaged(key: str, value: object, allowed: str) -> RecordError:
    return RecordError(
        f"the state of a learning-rate controller holds {key}={value!r}; expected {allowed}. The file is damaged, or is not "
        "such a state; resume from another checkpoint."
    )
