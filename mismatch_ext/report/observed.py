"""Read from the metrics file of a run that only observed what `enforce` would have done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mismatch_ext.rundata import RunData
from mismatch_ext.verdicts import EVENT, STOP


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The findings of one check.

    Attributes:
        check: Its name.
        kind: `stop`, `apply` or `failed`, as in `mismatch_ext.verdicts.Finding`.
        first_step: Step of the first finding.
        times: The check found this at least so often: not every finding is written, but each written one says its number.
        message: Message of the first finding.
    """

    check: str
    kind: str
    first_step: int
    times: int
    message: str


def level_of_run(run: RunData) -> str:
    """Return `mismatch.level` of a run; a header without it means the default."""
    config = run.header.get("config")
    level = config.get("level") if isinstance(config, Mapping) else None
    return level if isinstance(level, str) else "enforce"


def observed(run: RunData) -> list[Observed]:
    """Return the findings of a run, one per check and kind: first those that would have stopped it, each group by step."""
    found: dict[tuple[str, str], Observed] = {}
    for event in run.events:
        data = event.data
        if event.name != EVENT or not isinstance(data, dict):
            continue
        check, kind, message = (str(data.get(key, "")) for key in ("check", "kind", "message"))
        count = data.get("count")
        times = count if isinstance(count, int) and not isinstance(count, bool) else 1
        first = found.get((check, kind))
        if first is None:
            found[check, kind] = Observed(check=check, kind=kind, first_step=event.step, times=times, message=message)
        else:
            found[check, kind] = replace(first, times=max(first.times, times))
    return sorted(found.values(), key=lambda one: (one.kind != STOP, one.first_step))


def first_stop(run: RunData) -> Observed | None:
    """Return the finding at which `enforce` would have ended a run, or None."""
    return next((one for one in observed(run) if one.kind == STOP), None)
