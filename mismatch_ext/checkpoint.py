"""This package's file in a checkpoint: `mismatch.json`, written atomically, with one version for all states.

A resumed run goes on under its present configuration, and the user is told which settings have changed. If a state started from a
changed setting (a KL coefficient, a loss scale, an alarm), it starts again. Otherwise it goes on under the new value.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mismatch_ext.errors import RecordError, RunDirectoryError
from mismatch_ext.files import write_whole

STATE_FILE = "mismatch.json"
SCHEMA = 2
"""Version of the file and of every state in it."""


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write JSON-able state; if this process is killed, the file holds the old state or the new one.

    If it cannot be written, that is a warning, because the trainer's own checkpoint must not be lost with it. An older state
    at that path is removed then, so that nobody resumes from it with newer weights.
    """
    text = json.dumps({"schema": SCHEMA, **state})
    try:
        write_whole(path, text.encode(), make_folder=True)
    except RunDirectoryError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        with contextlib.suppress(Warning):  # a user may turn warnings into errors
            warnings.warn(
                f"mismatch: {error} The trainer's checkpoint is whole, but a run that resumes from it starts without the state "
                "of this package: KL coefficient, learning-rate rule, loss scale and alarms.",
                stacklevel=2,
            )


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the state in a checkpoint, None for a stock host's, which has no file; raises RecordError for other versions."""
    if not path.is_file():
        return None
    remedy = "Resume from another checkpoint, or remove this file to start with new states."
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}. {remedy}") from error
    except ValueError as error:
        raise RecordError(f"{path} is damaged: it is no JSON ({error}). {remedy}") from error
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise RecordError(
            f"{path} holds {state!r:.80}; this release of mismatch-ext reads a JSON object of schema {SCHEMA}. {remedy}"
        )
    for name, part in state.items():
        if part is not None and type(part) is not (int if name in ("schema", "weight_version") else dict):
            raise RecordError(f"{path} is damaged: {name} is {part!r:.80}. {remedy}")
    return state


def changed_settings(saved: Mapping[str, Any] | None, present: Mapping[str, Any]) -> str | None:
    """Return a sentence that names the settings that differ from a checkpoint's; None if none do.

    The monitor reports changes of its own rules.
    """
    if saved is None:
        return None
    before, now = ({**block, "monitor": None} for block in (saved, present))
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
            yield f"mismatch.{name} was {before!r:.80} and is {now!r:.80}"
