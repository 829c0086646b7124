"""The failed checks of a run under `mismatch.level: observe`, read from its metrics file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mismatch_ext.log_reading import RunData
from mismatch_ext.verdicts import EVENT


@dataclass(frozen=True, kw_only=True)
class Observed:
    """The findings of one check.

    Attributes:
        check: Its name.
        first_step: Step of the first finding.
        times: The check failed at least so often: not every finding is written, but each written one says its number.
        message: Message of the first finding.
    """

    check: str
    first_step: int
    times: int
    message: str


def level_of_run(run: RunData) -> str:
    """Return `mismatch.level` of a run; a header without it means the default."""
    config = run.header.get("config")
    level = config.get("level") if isinstance(config, Mapping) else None
    return level if isinstance(level, str) else "enforce"


def observed(run: RunData) -> list[Observed]:
    """Return the findings of a run, one per check, in the order of their first steps."""
    found: dict[str, Observed] = {}
    for event in run.events:
        data = event.data
        if event.name != EVENT or not isinstance(data, dict):
            continue
        check, message = str(data.get("check", "")), str(data.get("message", ""))
        count = data.get("count")
        times = count if isinstance(count, int) and not isinstance(count, bool) else 1
        first = found.get(check)
        if first is None:
            found[check] = Observed(check=check, first_step=event.step, times=times, message=message)
        else:
            found[check] = replace(first, times=max(first.times, times))
    return sorted(found.values(), key=lambda one: one.first_step)
