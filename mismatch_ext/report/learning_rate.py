"""Plots of learning-rate control: the rate that was applied, and its multiplier."""

from __future__ import annotations

from collections.abc import Mapping

from mismatch_ext.host_names import Role
from mismatch_ext.log_reading import RunData
from mismatch_ext.report.charts import Figure, present
from mismatch_ext.report.lines import over_steps
from mismatch_ext.report.summary import PREFIX

MULTIPLIER = PREFIX + "lr_multiplier"


def learning_rate(runs: Mapping[str, RunData]) -> tuple[Figure, ...]:
    """Plot rate and multiplier of the runs that control their rate; nothing if none does."""
    controlled = {name: run for name, run in runs.items() if run.series(MULTIPLIER)[0]}
    if not controlled:
        return ()
    return present(
        over_steps(
            runs,
            "learning-rate",
            Role.LEARNING_RATE,
            "Learning rate",
            "rate",
            "The rate that each step applied: the schedule's, times the multiplier.",
            log=True,
        ),
        over_steps(
            controlled,
            "lr-multiplier",
            MULTIPLIER,
            "Multiplier",
            "multiplier",
            "Halved every period, by default down to 0.1; 1 until a surge of the lengths above, unless a period is given.",
        ),
    )
