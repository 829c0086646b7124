"""Alarms: thresholds on the metrics that a trainer logs, the state between two logs, and what is said of them.

    rules = rules_of(block.monitor, names)
    state, alarms = watch(state, metrics, rules, step)

A value that is not finite is out of bounds under any rule. An alarm is over after as many logs in
bounds as raised it. All built-in alarms only warn, and each says where its threshold comes from.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mismatch_ext.errors import ConfigError, suggestion
from mismatch_ext.names import EVALUATION, MEANING, PREFIX, HostNames
from mismatch_ext.states import from_json, state

if TYPE_CHECKING:
    from mismatch_ext.config import MonitorConfig

Side = Literal["above", "below", "non-finite"]

PATIENCE = 3
STALENESS = PREFIX + "staleness_max"
"""This metric is in every log of a run whose rollouts may have been sampled with older weights."""
NUMERICS = PREFIX + "numerics/"
GROWTH = frozenset(PREFIX + name for name in ("k3_growth_low", "log_odds_growth_low"))
ANEW = "alarms_anew"
"""Name of the event that says which alarms a resumed run begins anew."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When a metric is out of bounds, or not finite, for how many logs in a row, and what happens then.

    `metric` is a name in the log, with or without the prefix `mismatch/`, or a role for which the host has its own name.
    """

    metric: str
    above: float | None = None
    below: float | None = None
    patience: int = PATIENCE  # logs in a row that raise the alarm, and that clear it
    action: Literal["warn", "stop"] = "warn"
    source: str = ""  # where the threshold comes from
    meaning: str = ""  # what an alarm means; follows "which means that"
    advice: str = ""
    advice_replayed: str = ""  # instead of `advice`, where the engine's routes are replayed; "" if that is the same
    superseded_by: str | None = None  # a metric that says the same; this rule is not watched where a log holds it
    # About numerics: where rollouts may be stale it watches `mismatch/numerics/...` alone, as drift is nobody's fault.
    numerics: bool = False
    named: bool = False  # whether the block names the metric
    logged: tuple[str, ...] = ()  # names under which the metric may be logged

    @property
    def bounds(self) -> str:
        """What is out of bounds: "> 0.001", "< 0.3", "> 2 or < 0.5", or "not finite"."""
        parts = [f"{sign} {bound:g}" for sign, bound in ((">", self.above), ("<", self.below)) if bound is not None]
        return " or ".join(parts) or "not finite"

    def describe(self) -> str:
        """Return the rule in a few words: "k3_kl > 0.001 (3 logs in a row): warn"."""
        logs = "1 log" if self.patience == 1 else f"{self.patience} logs in a row"
        return f"{self.metric.removeprefix(PREFIX)} {self.bounds} ({logs}): {self.action}"

    def advised(self, replays: bool) -> str:
        """Return what to do, in a run that `replays` the engine's routes or does not."""
        return self.advice_replayed if replays and self.advice_replayed else self.advice

    def side(self, value: float) -> Side | None:
        """Return the side on which a value is out of bounds; None if it is in bounds."""
        if not math.isfinite(value):
            return "non-finite"
        if self.above is not None and value > self.above:
            return "above"
        return "below" if self.below is not None and value < self.below else None


def _built_in() -> dict[str, Rule]:
    """Read the built-in rules, by logged metric or role."""
    table = tomllib.loads(Path(__file__).with_name("alarms.toml").read_text(encoding="utf-8"))
    ours = {PREFIX + name: entry for name, entry in table["ours"].items()}
    return {metric: Rule(metric=metric, **entry) for metric, entry in (ours | table["host"]).items()}


def _bound(rule: Rule) -> float:
    """Return the one bound of a rule."""
    bound = rule.below if rule.above is None else rule.above
    assert bound is not None
    return bound


DEFAULTS = _built_in()
"""The built-in rules, by logged metric or role."""
HEALTHY_K3 = _bound(DEFAULTS[PREFIX + "k3_kl"])
"""k3 of a healthy run is below this, nats per token."""
STALE_ABS_DIFF = _bound(DEFAULTS[PREFIX + "logp_abs_diff_mean"])
"""Stale weights make a mean |Δlogp| above this, nat."""
PHANTOM = _bound(DEFAULTS[PREFIX + "phantom_clip_frac"])
"""In runs as fast as their controls a clip stops a smaller share of tokens at an unchanged policy."""
FEW_MOVED = _bound(DEFAULTS[PREFIX + "engine_moved_frac"])
"""Share of elements: if fewer move at a step, a change takes about ten steps and more to arrive in the engine."""
SKIPPED = _bound(DEFAULTS[PREFIX + "overflow_streak"])
"""A float16 loss scale that starts too high skips at most so many steps in a row."""


def logged_names(metric: str, names: HostNames) -> tuple[str, ...]:
    """Return the names under which a rule's metric may be logged: its own, which goes first, its role's, and with the prefix."""
    return tuple(dict.fromkeys((metric, names.of(metric), PREFIX + metric)))


def rules_of(monitor: MonitorConfig, names: HostNames | None = None, *, replays: bool = False) -> dict[str, Rule]:
    """Return the rules that are on, by metric: the built-in ones, refined by the section, and its own. Raises ConfigError.

    A run that `replays` the engine's routes is not advised to do so.
    """
    host = HostNames() if names is None else names
    asked: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in monitor.alarms:
        metric = _metric(name, host)
        same = {metric, metric.removeprefix(PREFIX), *logged_names(metric, host)}
        if other := next((taken[known] for known in sorted(same) if known in taken), None):
            raise ConfigError(
                f"mismatch.monitor.alarms: {other!r} and {name!r} name one metric; leave out one of the two."
            )
        taken |= dict.fromkeys(same, name)
        asked[metric] = name
    rules = dict(DEFAULTS) if monitor.default_alarms else {}
    for metric, name in asked.items():
        alarm = monitor.alarms[name]
        if alarm.action == "off":
            rules.pop(metric, None)
            continue
        given = {key: value for key, value in dataclasses.asdict(alarm).items() if value is not None}
        rule = replace(DEFAULTS.get(metric, Rule(metric=metric)), named=True, **given)
        if metric not in DEFAULTS and rule.above is None and rule.below is None:
            known = ", ".join(key.removeprefix(PREFIX) for key in DEFAULTS)
            raise ConfigError(
                f"mismatch.monitor.alarms.{name}: above=None and below=None, but this metric has no built-in threshold; give one "
                f"of the two, or refine one of: {known}."
            )
        if rule.above is not None and rule.below is not None and rule.below >= rule.above:
            raise ConfigError(
                f"mismatch.monitor.alarms.{name}.below: {rule.below!r} is not allowed; allowed: x < above ({rule.above:g})."
            )
        rules[metric] = rule
    order = [metric for metric in (*DEFAULTS, *asked) if metric in rules]
    return {
        metric: replace(rules[metric], logged=logged_names(metric, host), advice=rules[metric].advised(replays))
        for metric in dict.fromkeys(order)
    }


def _metric(name: str, host: HostNames) -> str:
    """Return the built-in rules' name for a metric; the name itself if they have none."""
    if not name or name.startswith(EVALUATION):
        raise ConfigError(
            f"mismatch.monitor.alarms: {name!r} is not allowed; allowed: a metric of the training logs, such as 'k3_kl'."
        )
    return next((known for known in (name, PREFIX + name, host.role(name)) if known in DEFAULTS), name)


def built_in(logged: str, names: HostNames) -> Rule | None:
    """Return the built-in rule on a metric, given by its name in a log; None if there is none."""
    if not logged or logged.startswith(EVALUATION):
        return None  # no alarm of ours: the event is another's, or odd
    return DEFAULTS.get(_metric(logged.replace(NUMERICS, PREFIX, 1), names))


# The state between two logs.


@state
class Watch:
    """Progress of one alarm."""

    rule: tuple[float | None, float | None, int, str]  # bounds, patience and action of the rule that it belongs to
    name: str | None = None  # under which the metric was first logged
    beyond: int = 0  # logs in a row out of bounds, while the alarm is not raised
    back: int = 0  # logs in a row in bounds, while the alarm is raised
    first_step: int | None = None  # of the first log out of bounds, in the current streak or for the raised alarm
    side: Side | None = None  # of the last log out of bounds, likewise
    raised: bool = False


@state
class AlarmState:
    """Progress of all alarms, by metric; `to_json` makes JSON of it."""

    watches: dict[str, Watch] = dataclasses.field(default_factory=dict)

    @property
    def raised(self) -> list[str]:
        """Names, as in the log, of the metrics whose alarm is raised."""
        return [watch.name or metric for metric, watch in self.watches.items() if watch.raised]


def _new(rule: Rule) -> Watch:
    return Watch(rule=(rule.above, rule.below, rule.patience, rule.action))


def resumed(saved: Any, rules: Mapping[str, Rule]) -> tuple[AlarmState, list[tuple[str, list[str]]]]:
    """Return the state that a checkpoint holds, and for each event `ANEW` a sentence and its metrics.

    An alarm begins anew if any key of its rule has changed, or if it stopped training, because training goes on now.
    """
    watches = dict(from_json(AlarmState, saved, "monitor").watches)
    changed = [m for m, rule in rules.items() if m in watches and watches[m].rule != _new(rule).rule]
    stopped = [
        m
        for m, rule in rules.items()
        if m in watches and rule.action == "stop" and watches[m].raised and m not in changed
    ]
    watching = {m: watches[m] for m in rules if m in watches and m not in changed}
    for metric in watching:
        if metric in stopped:
            watching[metric] = replace(_new(rules[metric]), name=watching[metric].name)
        if watching[metric].name == metric and rules[metric].logged[1] != PREFIX + metric:
            # Another host logged the role under its own name: look for the name again.
            watching[metric] = replace(watching[metric], name=None)
    notes = []
    if changed:
        notes.append((f"alarms begin anew, because their rules have changed: {', '.join(changed)}.", changed))
    if stopped:
        what = "alarms that stopped training begin anew, and stop it again if they are raised"
        notes.append((f"{what}: {', '.join(stopped)}.", stopped))
    return AlarmState(watches=watching), notes


# A log.


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """An alarm that was raised, or is over."""

    metric: str  # as it is logged
    step: int
    value: float  # may be NaN or infinite
    threshold: float | None  # the bound that was passed; None if the value was not finite
    side: Side
    action: Literal["warn", "stop"]
    status: Literal["raised", "cleared"]
    first_step: int  # of the first log out of bounds
    message: str  # one sentence for a person

    @property
    def stops(self) -> bool:
        """Whether training is to end after this step."""
        return self.action == "stop" and self.status == "raised"

    @property
    def level(self) -> Literal["info", "warning"]:
        """Level of the event in the metrics file."""
        return "info" if self.status == "cleared" else "warning"


def watch(
    state: AlarmState, metrics: Mapping[str, Any], rules: Mapping[str, Rule], step: int
) -> tuple[AlarmState, list[Alarm]]:
    """Take a log of training, after `step` steps, and return the new state and the alarms that were raised or are over."""
    watches, alarms = dict(state.watches), []
    for metric, rule in rules.items():
        before = watches.get(metric, _new(rule))
        for name in _names(rule, before.name, metrics):
            if (value := _number(metrics.get(name))) is not None:
                watches[metric], status = _advance(replace(before, name=name), rule, value, step)
                if status is not None:
                    # What an alarm that is over was about is known before.
                    about = watches[metric] if status == "raised" else before
                    alarms.append(_alarm(rule, about, name, value, step, status))
                break
    return AlarmState(watches=watches), alarms


def unwatched(rules: Mapping[str, Rule], metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence, by metric, for each alarm in the user's block whose metric is not in the first log."""
    logged = [name.removeprefix(PREFIX) for name in sorted(metrics)]
    return {
        metric: f"mismatch.monitor.alarms.{metric}: the first log does not hold this metric, and unless a later one does it "
        f"is never watched.{suggestion(metric.removeprefix(PREFIX), logged)}"
        for metric, rule in rules.items()
        if rule.named and not any(name in metrics for name in rule.logged)
    }


def _names(rule: Rule, name: str | None, metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names under which a rule's metric may be in this log; one under which it was logged is used from then on."""
    if rule.superseded_by in metrics:
        return ()
    names = rule.logged
    if rule.numerics and STALENESS in metrics:
        names = (NUMERICS + rule.metric.removeprefix(PREFIX),)
    return (name,) if name in names else names


def _number(value: Any) -> float | None:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _advance(watch: Watch, rule: Rule, value: float, step: int) -> tuple[Watch, Literal["raised", "cleared"] | None]:
    side = rule.side(value)
    if side is None:
        watch = replace(watch, back=watch.back + 1)
        if watch.raised and watch.back < rule.patience:
            return watch, None
        return replace(_new(rule), name=watch.name), "cleared" if watch.raised else None
    watch = replace(watch, side=side, back=0)
    if watch.raised:
        return watch, None
    first = step if watch.first_step is None else watch.first_step
    watch = replace(watch, beyond=watch.beyond + 1, first_step=first)
    if watch.beyond < rule.patience:
        return watch, None
    return replace(watch, raised=True, beyond=0), "raised"


def _alarm(rule: Rule, about: Watch, name: str, value: float, step: int, status: Literal["raised", "cleared"]) -> Alarm:
    side, first_step = about.side, about.first_step
    assert side is not None and first_step is not None
    threshold = {"above": rule.above, "below": rule.below, "non-finite": None}[side]
    where = "not finite" if threshold is None else f"{side} {threshold:g}"
    row = "" if rule.patience == 1 else f" for {rule.patience} logs in a row"
    if status == "raised":
        since = f"{row}, since step {first_step}" if row else ""
        message = f"{name} is {value:.4g} at step {step}, {where}{since}{_explained(rule, name, side, threshold, first_step)}."
    else:
        message = f"{name} is {value:.4g} at step {step}, back{row}; it was {where} since step {first_step}, and that alarm is "
        message += "over."
    return Alarm(
        metric=name,
        step=step,
        value=value,
        threshold=threshold,
        side=side,
        action=rule.action,
        status=status,
        first_step=first_step,
        message=message,
    )


def _explained(rule: Rule, name: str, side: Side, threshold: float | None, first_step: int) -> str:
    """Return what the metric is, what the alarm means, and what to do."""
    short, default = name.removeprefix(NUMERICS).removeprefix(PREFIX), DEFAULTS.get(rule.metric)
    text = f" ({MEANING[short]})" if short in MEANING else ""
    # The built-in rule's text is used only for its own side and, if it depends on the threshold, for its own threshold.
    if default is None or side != _main_side(default):
        return f"{text}; look at what else changed at step {first_step} in the log and in the report"
    if threshold in (default.above, default.below):
        text += f", which means that {default.meaning}"
    return f"{text}; {rule.advice}"


def _main_side(default: Rule) -> Side:
    if default.above is not None:
        return "above"
    return "non-finite" if default.below is None else "below"
