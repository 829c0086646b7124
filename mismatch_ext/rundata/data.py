"""The data of a run directory: its lines by kind, and the questions that a report asks of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_ext.host_names import HostNames, Role, names_of


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of one optimizer step and split; None marks a value that was NaN or infinite."""

    segment: int
    step: int
    split: str
    metrics: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class ProfileRecord:
    """Profiles of one step and split: name -> {edges, count, abs_diff_mean, abs_diff_max, k3_mean}."""

    segment: int
    step: int
    split: str
    profiles: dict[str, dict[str, list[float | None]]]


@dataclass(frozen=True, kw_only=True)
class ScatterRecord:
    """A sample of tokens as both sides saw them: natural-log probabilities, equal lengths."""

    segment: int
    step: int
    split: str
    rollout_logprobs: tuple[float, ...]
    old_logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something that happened: a weight-sync verdict, an overflow, a recovery, an engine that died."""

    segment: int
    step: int
    level: str
    name: str
    message: str
    data: Any = None


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """The line a run writes last; a run that was killed has none.

    `of` says what ended: a training, or an evaluation without a training. If lines follow the end of an evaluation (a training
    began after all), they undo it. Only a training undoes the end of a failed evaluation; the next evaluation does not.
    """

    segment: int
    step: int
    status: str
    message: str
    of: str = "training"


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Everything read from one run directory, in step order; later segments replace earlier ones."""

    path: Path
    headers: tuple[dict[str, Any], ...] = ()
    steps: tuple[StepRecord, ...] = ()
    profiles: tuple[ProfileRecord, ...] = ()
    scatters: tuple[ScatterRecord, ...] = ()
    events: tuple[EventRecord, ...] = ()
    ends: tuple[EndRecord, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def splits(self) -> list[str]:
        """Splits that have step lines, train first."""
        return sorted({record.split for record in self.steps}, key=lambda split: (split != "train", split))

    @property
    def last_step(self) -> int:
        """The last step that has a line; 0 if no step has one."""
        return max((record.step for record in self.steps), default=0)

    def logged(self, split: str | None = None) -> set[str]:
        """Return the names of all metrics that a split logged; of all splits if none is given."""
        return {name for record in self.steps if split in (None, record.split) for name in record.metrics}

    def count(self, split: str) -> int:
        """Return the number of steps of a split."""
        return sum(record.split == split for record in self.steps)

    def logs(self, name: str, split: str = "train") -> tuple[int, int]:
        """Return the number of steps at which a metric was logged, and the number of those at which it was not finite."""
        values = [r.metrics[name] for r in self.steps if r.split == split and name in r.metrics]
        return len(values), values.count(None)

    @property
    def header(self) -> dict[str, Any]:
        """Header of the last segment, or an empty dict when none could be read."""
        return self.headers[-1] if self.headers else {}

    @property
    def names(self) -> HostNames:
        """The names that the host of this run gives its own metrics."""
        return names_of(self.header)

    def series(self, name: str, split: str = "train") -> tuple[list[int], list[float | None]]:
        """Return the steps at which a metric was logged and its values, None where it was not finite.

        Args:
            name: The name under which the metric was logged; or its `Role`, which works for every host.
            split: "train" or "eval/<name>".
        """
        logged = self.names.of(name) if isinstance(name, Role) else name
        rows = [r for r in self.steps if r.split == split and logged in r.metrics]
        steps, values = [r.step for r in rows], [r.metrics[logged] for r in rows]
        if name is Role.LEARNING_RATE and self.names.next_rate:
            # The host logs at each step the rate of the next step; the last value belongs to a step that was not taken.
            logged_at = dict(zip(steps, values, strict=True))
            steps = [step for step in steps if step - 1 in logged_at]
            values = [logged_at[step - 1] for step in steps]
        return steps, values

    def falls(self, name: str, split: str = "train") -> list[tuple[int, float]]:
        """Return the steps at which a metric fell below its previous log, with its values there; a value of 0 does not count."""
        rows = [(r.step, r.metrics[name]) for r in self.steps if r.split == split and name in r.metrics]
        pairs = zip(rows, rows[1:], strict=False)
        return [(step, b) for (_, a), (step, b) in pairs if a and b and b < a]
