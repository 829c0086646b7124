"""Raise and clear alarms on the metrics that a trainer logs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mismatch_ext.host_names import PREFIX, HostNames
from mismatch_ext.metrics.growth import GROWTH_MEASURES
from mismatch_ext.metrics.names import MEASURES
from mismatch_ext.monitor.rules import Alarms, Rule, Side, WatchAction, logged_names, resolve
from mismatch_ext.monitor.state import Watch, read_state, state_of
from mismatch_ext.routing.agreement import ROUTING_MEASURES

Status = Literal["raised", "cleared"]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """What the monitor reports about a metric.

    Args:
        metric: Name of the metric in the log.
        step: Step of the log.
        value: The metric's value there; may be NaN or infinite.
        threshold: The bound that was passed; None if the value was not finite.
        side: On which side it was out of bounds.
        action: Action of the rule.
        status: `raised` or `cleared`.
        first_step: Step of the first log out of bounds.
        message: One sentence for a person.
    """

    metric: str
    step: int
    value: float
    threshold: float | None
    side: Side
    action: WatchAction
    status: Status
    first_step: int
    message: str

    @property
    def stops(self) -> bool:
        """Whether training is to end after this step."""
        return self.action == "stop" and self.status == "raised"

    @property
    def level(self) -> Literal["info", "warning"]:
        """Level of the event in the metrics file."""
        return "info" if self.status == "cleared" else "warning"

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-able data; a value that is not finite is None."""
        return dataclasses.asdict(self) | {"value": self.value if math.isfinite(self.value) else None}


STALENESS = PREFIX + "staleness_max"
"""This metric is in every log of a run whose rollouts may have been sampled with older weights."""
NUMERICS = PREFIX + "numerics/"
ANEW = "alarms_anew"
"""Name of the event that says which alarms a resumed run begins anew."""


class Monitor:
    """Watches the metrics of a run. With several processes, only the main one has a monitor, and tells the others to stop.

    Args:
        config: The `monitor` section.
        names: The host's names of its own metrics; None if it logs them under their roles' names.

    Raises:
        ConfigError: Two alarms name the same metric of this host.
    """

    def __init__(self, config: Alarms, names: HostNames | None = None) -> None:
        self.names = HostNames() if names is None else names
        self.rules = resolve(config, self.names)
        self._watches = {metric: Watch() for metric in self.rules}

    def observe(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Take one log of training, and return what changed.

        Args:
            step: Number of finished optimizer steps.
            metrics: The logged values by name. If a metric is absent or not a number, its alarm stays as it is.

        Returns:
            Alarms that were raised or cleared; the caller warns, writes and stops.
        """
        alarms = []
        for metric, rule in self.rules.items():
            watch = self._watches[metric]
            name, value = self._find(rule, watch, metrics)
            if name is None or value is None:
                continue
            watch.name = name
            alarm = _advance(rule, watch, step, name, value)
            if alarm is not None:
                alarms.append(alarm)
        return alarms

    def unwatched(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """Return a sentence, by metric, for each alarm in the user's block whose metric is not in the first log.

        Args:
            metrics: The logged values by name.
        """
        return {
            metric: f"mismatch.monitor.alarms.{metric}: the first log does not hold this metric, and unless a later one does it "
            f"is never watched; logged are {', '.join(sorted(metrics))}."
            for metric, rule in self.rules.items()
            if rule.named and not any(name in metrics for name in logged_names(metric, self.names))
        }

    @property
    def raised(self) -> list[str]:
        """Names, as in the log, of the metrics whose alarm is raised."""
        return [watch.name or metric for metric, watch in self._watches.items() if watch.raised]

    def describe(self) -> list[str]:
        """Return a line for each rule that is on, such as "k3_kl > 0.001 (3 logs in a row): warn"."""
        return [rule.describe() for rule in self.rules.values()]

    def resume(self, state: Mapping[str, Any] | None) -> list[tuple[str, list[str]]]:
        """Continue from the state of a checkpoint; None does nothing. Alarms that stopped training begin anew.

        Returns:
            For each event `ANEW` to be written: a sentence, and the metrics that it is about.

        Raises:
            RecordError: The state is of another version, or damaged; this monitor stays as it was.
        """
        if state is None:
            return []
        said = []
        if anew := self.load_state_dict(state):
            said.append((f"alarms begin anew, because their rules have changed: {', '.join(anew)}.", anew))
        if stops := self.rearm_stops():
            what = "alarms that stopped training begin anew, and stop it again if they are raised"
            said.append((f"{what}: {', '.join(stops)}.", stops))
        return said

    def rearm_stops(self) -> list[str]:
        """Reset the alarms that stopped training, because training goes on now; return their metrics."""
        found = [m for m, rule in self.rules.items() if rule.action == "stop" and self._watches[m].raised]
        for metric in found:
            self._watches[metric].reset()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the streaks and the raised alarms as JSON-able data; save it with the weights."""
        return state_of({metric: (rule.identity(), self._watches[metric]) for metric, rule in self.rules.items()})

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from what `state_dict` returned.

        If any key of a metric's rule has changed, the metric begins anew, so that a raised alarm is raised again under the new
        rule. A metric that was not watched before begins anew too. A metric that is no longer watched is forgotten.

        Returns:
            The metrics that were watched before and begin anew because their rule has changed.

        Raises:
            RecordError: The state is of another version, or damaged; this monitor stays as it was.
        """
        saved = read_state(state)
        fits = {m for m, rule in self.rules.items() if m in saved and dict(saved[m][0]) == rule.identity()}
        self._watches = {metric: saved[metric][1] if metric in fits else Watch() for metric in self.rules}
        for metric, watch in self._watches.items():
            if watch.name == metric != self.names.of(metric):
                watch.name = None  # another host or release logged the role under its own name: look for the name again
        return [metric for metric in self.rules if metric in saved and metric not in fits]

    def _find(self, rule: Rule, watch: Watch, metrics: Mapping[str, Any]) -> tuple[str | None, float | None]:
        """Return the name that a rule's metric has in this log, and its value; a name once found is used from then on."""
        if rule.default is not None and rule.default.superseded_by in metrics:
            return None, None
        names = _names(rule, self.names, metrics)
        for name in (watch.name,) if watch.name in names else names:
            if name in metrics and (value := _number(metrics[name])) is not None:
                return name, value
        return None, None


def _names(rule: Rule, names: HostNames, metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names under which a rule's metric may be in this log."""
    if rule.default is not None and rule.default.numerics and STALENESS in metrics:
        return (NUMERICS + rule.metric.removeprefix(PREFIX),)
    return logged_names(rule.metric, names)


def _number(value: Any) -> float | None:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _advance(rule: Rule, watch: Watch, step: int, name: str, value: float) -> Alarm | None:
    side = rule.side(value)
    if side is not None:
        watch.side, watch.back = side, 0
        if watch.raised:
            return None
        watch.beyond += 1
        if watch.first_step is None:
            watch.first_step = step
        if watch.beyond < rule.patience:
            return None
        watch.raised, watch.beyond = True, 0
        return _alarm(rule, watch, step, name, value, "raised")
    if not watch.raised:
        watch.reset()
        return None
    assert watch.side is not None
    watch.back = watch.back + 1 if rule.is_back(value, watch.side) else 0
    if watch.back < rule.patience:
        return None
    alarm = _alarm(rule, watch, step, name, value, "cleared")
    watch.reset()
    return alarm


def _alarm(rule: Rule, watch: Watch, step: int, name: str, value: float, status: Status) -> Alarm:
    assert watch.side is not None and watch.first_step is not None
    message = _raised if status == "raised" else _cleared
    return Alarm(
        metric=name,
        step=step,
        value=value,
        threshold=rule.threshold(watch.side),
        side=watch.side,
        action=rule.action,
        status=status,
        first_step=watch.first_step,
        message=message(rule, name, value, watch.side, watch.first_step, step),
    )


def _where(rule: Rule, side: Side) -> str:
    threshold = rule.threshold(side)
    return "not finite" if threshold is None else f"{side} {threshold:g}"


def _raised(rule: Rule, name: str, value: float, side: Side, first_step: int, step: int) -> str:
    streak = "" if rule.patience == 1 else f" for {rule.patience} logs in a row, since step {first_step}"
    text = f"{name} is {value:.4g} at step {step}, {_where(rule, side)}{streak}"
    short, default = name.removeprefix(NUMERICS).removeprefix(PREFIX), rule.default
    is_what = MEASURES[short].meaning if short in MEASURES else (GROWTH_MEASURES | ROUTING_MEASURES).get(short)
    text += f" ({is_what})" if is_what else ""
    # The built-in rule's text is used only for its own side and, if it depends on the threshold, for its own threshold.
    if default is None or default.main_side != side:
        return f"{text}; look at what else changed at step {first_step} in the log and in the report."
    if rule.threshold(side) in (default.above, default.below):
        text += f", which means that {default.meaning}"
    return f"{text}; {default.advice}."


def _cleared(rule: Rule, name: str, value: float, side: Side, first_step: int, step: int) -> str:
    logs = "" if rule.patience == 1 else f" for {rule.patience} logs in a row"
    return (
        f"{name} is {value:.4g} at step {step}, back{logs}; it was {_where(rule, side)} since step {first_step}, and that alarm "
        "is over."
    )
