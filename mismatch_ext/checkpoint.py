"""This package's file in a checkpoint: `mismatch.json`, written atomically, with one version for all states.

A resumed run goes on under its present configuration, and the user is told which settings have changed. If a state started from a
changed setting (a KL coefficient, a loss scale, an alarm), it starts again. Otherwise it goes on under the new value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatch_ext.errors import RecordError
from mismatch_ext.files import write_whole

STATE_FILE = "mismatch.json"
SCHEMA = 2
"""Version of the file and of every state in it."""


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write JSON-able state; if this process is killed, the file holds the old state or the new one."""
    write_whole(path, json.dumps({"schema": SCHEMA, **state}).encode(), make_folder=True)


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the state in a checkpoint; None if there is no file, as in a checkpoint of a stock host.

    Every part is a mapping or null, and its owner checks what it holds. Raises RecordError for another version or a damaged file.
    """
    if not path.is_file():
        return None
    remedy = "Resume from another checkpoint, or remove this file to start with new states."
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}. {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: it is no JSON ({error}). {remedy}") from error
    if not isinstance(state, dict):
        raise RecordError(f"{path} is damaged: found {_short(state)}; allowed: a JSON object. {remedy}")
    if type(state.get("schema")) is not int or state["schema"] != SCHEMA:
        raise RecordError(
            f"{path} has schema {_short(state.get('schema'))}; this release of mismatch-ext reads {SCHEMA}. {remedy}"
        )
    for name, part in state.items():
        allowed = int if name in ("schema", "weight_version") else dict
        if part is not None and type(part) is not allowed:
            what = "an integer" if allowed is int else "a JSON object or null"
            raise RecordError(f"{path} is damaged: {name} is {_short(part)}; allowed: {what}. {remedy}")
    return state


def changed_settings(saved: Mapping[str, Any] | None, present: Mapping[str, Any]) -> str | None:
    """Return a sentence that names the settings (`MismatchConfig.to_dict`) that differ from a checkpoint's; None if none do.

    The monitor is not compared: it reports changes of its own rules, and nothing else in it has a state.
    """
    if saved is None:
        return None
    before, now = ({"level": "enforce", **block, "monitor": None} for block in (saved, present))
    changes = [change for name in {**before, **now} for change in _changes(before.get(name), now.get(name), name)]
    if not changes:
        return None
    return f"the checkpoint was saved under other settings: {'; '.join(changes)}. The present ones hold from here on."


def _changes(before: Any, now: Any, name: str) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in (key for key in now if key in before):  # other keys are another release's
            yield from _changes(before[key], now[key], f"{name}.{key}")
    elif before != now:
        if "." not in name and (before is None or now is None):
            before, now = ("absent" if value is None else "given" for value in (before, now))
            yield f"mismatch.{name} was {before} and is {now}"
        else:
            yield f"mismatch.{name} was {_short(before)} and is {_short(now)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
