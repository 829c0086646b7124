"""The state that the monitor keeps for each metric between two logs, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_ext.errors import RecordError
from mismatch_ext.monitor.rules import Side

STATE_VERSION = 1
_SIDES = ("above", "below", "non-finite")


@dataclass(kw_only=True)
class Watch:
    """Progress of one alarm.

    Args:
        name: Name under which the metric was first logged; None before that.
        beyond: Number of logs in a row out of bounds, while the alarm is not raised.
        back: Number of logs in a row on the healthy side of the clear level, while the alarm is raised.
        first_step: Step of the first log out of bounds, in the current streak or for the raised alarm.
        side: Side of the last log out of bounds, in the same streak or for the same alarm.
        raised: Whether the alarm is raised.
    """

    name: str | None = None
    beyond: int = 0
    back: int = 0
    first_step: int | None = None
    side: Side | None = None
    raised: bool = False

    def reset(self) -> None:
        """Forget the streak and the alarm, but keep the name."""
        self.beyond, self.back, self.first_step, self.side, self.raised = 0, 0, None, None, False


def state_of(watched: Mapping[str, tuple[Mapping[str, Any], Watch]]) -> dict[str, Any]:
    """Return rules and progress, by metric, as plain JSON-able data with a version."""
    entries = {metric: {"rule": dict(rule), **dataclasses.asdict(watch)} for metric, (rule, watch) in watched.items()}
    return {"version": STATE_VERSION, "alarms": entries}


def read_state(state: Any) -> dict[str, tuple[Mapping[str, Any], Watch]]:
    """Read what `state_of` returned.

    Raises:
        RecordError: The state is of another version, has a missing or unknown key, or holds a value that no monitor could
            have saved. The message names it and says what to do.
    """
    if not isinstance(state, Mapping):
        raise _damaged("the state", state, "a mapping")
    if state.get("version") != STATE_VERSION:
        raise RecordError(
            f"the state of the monitor is of version {state.get('version')!r}; this release reads version {STATE_VERSION}. "
            "Resume with the release of mismatch-ext that saved it, or from another checkpoint."
        )
    alarms = state.get("alarms")
    if set(state) != {"version", "alarms"} or not isinstance(alarms, Mapping):
        raise _damaged("the state", sorted(map(str, state)), "the keys alarms and version, alarms a mapping")
    return {metric: _entry(metric, entry) for metric, entry in alarms.items()}


def _entry(metric: str, entry: Any) -> tuple[Mapping[str, Any], Watch]:
    names = [f.name for f in dataclasses.fields(Watch)]
    if not isinstance(entry, Mapping) or set(entry) != {"rule", *names} or not isinstance(entry["rule"], Mapping):
        raise _damaged(metric, entry, f"a mapping with rule, {', '.join(names)}")
    for key in ("beyond", "back", "first_step"):
        value = entry[key]
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not whole and not (key == "first_step" and value is None):
            raise _damaged(f"{metric}.{key}", value, "an integer >= 0")
    if not isinstance(entry["raised"], bool):
        raise _damaged(f"{metric}.raised", entry["raised"], "true or false")
    if entry["name"] is not None and not isinstance(entry["name"], str):
        raise _damaged(f"{metric}.name", entry["name"], "text or null")
    # `first_step` and `side` are set if there is a streak or a raised alarm, and only then.
    active = entry["raised"] or entry["beyond"] > 0
    if (entry["first_step"] is not None) != active:
        raise _damaged(f"{metric}.first_step", entry["first_step"], "a step where a streak or an alarm is, else null")
    if entry["side"] not in (_SIDES if active else (None,)):
        raise _damaged(f"{metric}.side", entry["side"], " or ".join(_SIDES) if active else "null")
    if (entry["raised"] and entry["beyond"]) or (entry["back"] and not entry["raised"]):
        raise _damaged(f"{metric}.raised", entry["raised"], "an alarm or a streak, not both")
    return entry["rule"], Watch(**{name: entry[name] for name in names})


def _damaged(key: str, value: object, allowed: str) -> RecordError:
    return RecordError(
        f"the state of the monitor holds {key}={value!r}; expected {allowed}. The file is damaged, or is not such a state; "
        "resume from another checkpoint."
    )
