"""Lines of a start-up banner and of a closing summary that all host trainers share."""

from __future__ import annotations

import logging
from pathlib import Path

from mismatch_ext.config import LrConfig
from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.monitor import Monitor, closing_lines
from mismatch_ext.rundata import read_run

logger = logging.getLogger(__name__)


def monitor_lines(monitor: Monitor, run_dir: Path) -> list[str]:
    """Return the lines that say what is watched, and where it is written."""
    named = [rule.describe() for rule in monitor.rules.values() if rule.named]
    built_in = len(monitor.rules) - len(named)
    said = [*named, *([f"{built_in} built-in ones (python -m mismatch_ext.monitor)"] if built_in else [])]
    return [f"  alarms     {'; '.join(said) or 'none'}", f"  metrics    {run_dir}"]


def print_closing(run_dir: Path) -> None:
    """Print what happened in a run; training has ended well by then, so that a metrics file which is lost is only said."""
    try:
        print("\n".join(closing_lines(read_run(run_dir))), flush=True)
    except RunDirectoryError as error:
        logger.warning("The summary of the run cannot be printed: %s", error)


def rule_of(lr: LrConfig) -> str:
    """Return what lowers the learning rate, in a few words."""
    watched = f"a surge of {lr.trigger}"
    if lr.rule == "reactive":
        return f"times {lr.decay:g} at {watched}, at least {lr.cooldown} steps apart, floor {lr.floor:g}"
    every = (
        f"every {lr.period} steps" if lr.period is not None else f"every {lr.period_factor:g} x the step of {watched}"
    )
    return f"times {lr.decay:g} {every}, counted from {lr.count_from}, floor {lr.floor:g}"
