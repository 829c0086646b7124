"""This package's file in a checkpoint, beside the host's own files: `mismatch.json`, written atomically and read strictly.

A resumed run goes on under its present configuration, and the user is told which settings have changed. The state that belongs to
a changed setting is handled in one of three ways. If the state started from that setting (a KL coefficient, a loss scale, an
alarm), it starts again. If the state has no meaning under the new setting (another rule of the learning rate), it is refused.
Otherwise it goes on under the new value.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatch_ext.errors import RecordError
from mismatch_ext.files import write_whole

STATE_FILE = "mismatch.json"
SCHEMA = 1
# The monitor is not compared: it reports changes of its rules itself, and nothing else in it has a state.
_NOT_COMPARED = ("monitor",)


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state, with its schema; if this process is killed, the file still contains the old state or the new one.

    Args:
        path: The file; a missing folder is created.
        state: JSON-able data.

    Raises:
        RunDirectoryError: The file cannot be written.
    """
    write_whole(path, json.dumps({"schema": SCHEMA, **state}).encode(), make_folder=True)


def read_state(path: Path) -> dict[str, Any] | None:
    """Return this package's state in a checkpoint; None if there is no file, as in a checkpoint of a stock host.

    Every part is a mapping, or null if there was nothing to save. The owner of a part checks its contents.

    Raises:
        RecordError: The file is damaged, unreadable or from another version of this package; names the file and what to do.
    """
    if not path.is_file():
        return None
    remedy = (
        "Resume from another checkpoint; or remove this file, to resume the host's own state and begin anew with ours."
    )
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}. {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is damaged: it is no JSON ({error}). {remedy}") from error
    if not isinstance(state, dict):
        raise RecordError(f"{path} is damaged: found {_short(state)}; allowed: a JSON object with `schema`. {remedy}")
    schema = state.get("schema")
    if isinstance(schema, bool) or schema != SCHEMA:
        raise RecordError(
            f"{path} has schema {_short(schema)}; this release of mismatch-ext reads {SCHEMA}. Resume with the release that "
            f"saved it. {remedy}"
        )
    for name, part in state.items():
        allowed = int if name in ("schema", "weight_version") else dict
        if part is not None and (not isinstance(part, allowed) or isinstance(part, bool)):
            what = "an integer" if allowed is int else "a JSON object or null"
            raise RecordError(f"{path} is damaged: {name} is {_short(part)}; allowed: {what}. {remedy}")
    return state


def changed_settings(saved: Mapping[str, Any] | None, present: Mapping[str, Any]) -> str | None:
    """Return a sentence that names the settings which differ from those of a checkpoint; None if none differ.

    Args:
        saved: The block in the checkpoint, from `MismatchConfig.to_dict`; None if the checkpoint has none, because a stock host
            or a release that kept no block saved it.
        present: The block of this run, from `MismatchConfig.to_dict`.
    """
    if saved is None:
        return None
    before, now = ({"level": "enforce", **block} for block in (saved, present))
    compared = [name for name in {**before, **now} if name not in _NOT_COMPARED]
    found = [change for name in compared for change in _changes(before.get(name), now.get(name), f"mismatch.{name}")]
    if not found:
        return None
    return f"the checkpoint was saved under other settings: {'; '.join(found)}. The present ones hold from here on."


def _changes(before: Any, now: Any, name: str) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in now:
            if key in before:  # otherwise another release saved it
                yield from _changes(before[key], now[key], f"{name}.{key}")
    elif (list(before) if isinstance(before, tuple) else before) != (list(now) if isinstance(now, tuple) else now):
        given = [value is not None for value in (before, now)]
        if name.count(".") == 1 and not all(given):
            yield f"{name} was {'given' if given[0] else 'absent'} and is {'given' if given[1] else 'absent'}"
        else:
            yield f"{name} was {_short(before)} and is {_short(now)}"


def random_state(generator: random.Random) -> dict[str, Any]:
    """Return the state of a random-number generator as JSON-able data."""
    version, numbers, gauss = generator.getstate()
    return {"version": version, "numbers": list(numbers), "gauss": gauss}


def load_random_state(generator: random.Random, state: Any) -> None:
    """Let a generator go on from a saved state.

    Raises:
        RecordError: The state is not one from `random_state`; the generator stays as it was.
    """
    try:
        generator.setstate((state["version"], tuple(state["numbers"]), state["gauss"]))
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise RecordError(
            f"the state of the choice of measured passes is damaged: {_short(state)} ({error}); expected version, numbers and "
            "gauss, as Python's random.Random has them. Resume from another checkpoint."
        ) from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
