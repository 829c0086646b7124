"""Merge the built-in alarms with those of the `monitor` section, which win."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mismatch_ext.errors import ConfigError
from mismatch_ext.host_names import PREFIX, HostNames
from mismatch_ext.monitor.defaults import DEFAULTS, PATIENCE, DefaultRule, bounds_text

Side = Literal["above", "below", "non-finite"]
WatchAction = Literal["warn", "stop"]
HEALTHY_SHARE = 0.8
SECTION = "mismatch.monitor.alarms"


class Asked(Protocol):
    """The settings of one metric's alarm, such as `mismatch_ext.config.AlarmConfig`; None keeps the built-in value of a key."""

    @property
    def above(self) -> float | None: ...
    @property
    def below(self) -> float | None: ...
    @property
    def patience(self) -> int | None: ...
    @property
    def action(self) -> Literal["warn", "stop", "off"] | None: ...


class Alarms(Protocol):
    """The settings of all alarms, such as `mismatch_ext.config.MonitorConfig`."""

    @property
    def alarms(self) -> Mapping[str, Asked]: ...
    @property
    def default_alarms(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One alarm with all its keys settled.

    Args:
        metric: Name in the log, that name without the prefix `mismatch/`, or a role for which the host has its own name.
        above: Values greater than this are out of bounds.
        below: Values less than this are out of bounds.
        clear_above: An alarm of `above` may clear at values up to this, if they are in bounds.
        clear_below: An alarm of `below` may clear at values from this on, if they are in bounds.
        patience: Number of logs in a row that raise the alarm, and that clear it.
        action: What the alarm does.
        named: Whether the block names the metric.
        default: The built-in rule that this one is or refines.
    """

    metric: str
    above: float | None
    below: float | None
    clear_above: float | None
    clear_below: float | None
    patience: int
    action: WatchAction
    named: bool
    default: DefaultRule | None

    def side(self, value: float) -> Side | None:
        """Return the side on which a value is out of bounds; None if it is in bounds."""
        if not math.isfinite(value):
            return "non-finite"
        if self.above is not None and value > self.above:
            return "above"
        return "below" if self.below is not None and value < self.below else None

    def is_back(self, value: float, side: Side) -> bool:
        """Tell whether a value has come back from a side by the margin that hysteresis needs."""
        if self.side(value) is not None:
            return False
        from_above = self.clear_above is None or value <= self.clear_above
        from_below = self.clear_below is None or value >= self.clear_below
        if side == "non-finite":
            # With two bounds there is no single direction back, so that any value in bounds is back.
            return (from_above and from_below) or (self.above is not None and self.below is not None)
        return from_above if side == "above" else from_below

    def threshold(self, side: Side) -> float | None:
        """Return the bound of a side; None for values that are not finite."""
        return {"above": self.above, "below": self.below, "non-finite": None}[side]

    def identity(self) -> dict[str, Any]:
        """Return, as JSON-able data, the settings that must be the same for a saved state to fit."""
        names = ("above", "below", "clear_above", "clear_below", "patience", "action")
        return {name: getattr(self, name) for name in names}

    def describe(self) -> str:
        """Return the rule in a few words: "k3_kl > 0.001 (3 logs in a row): warn"."""
        bounds = bounds_text(self.above, self.below)
        logs = "1 log" if self.patience == 1 else f"{self.patience} logs in a row"
        return f"{self.metric.removeprefix(PREFIX)} {bounds} ({logs}): {self.action}"


def logged_names(metric: str, names: HostNames) -> tuple[str, ...]:
    """Return the names under which a rule's metric may be logged: its own, its role's, and its own with the prefix.

    If a log holds a metric of exactly the rule's name, the rule means that metric, even if the name is also a role.

    Args:
        metric: The rule's metric.
        names: The host's names for its own metrics.
    """
    return tuple(dict.fromkeys((metric, names.of(metric), PREFIX + metric)))


def resolve(config: Alarms, names: HostNames | None = None) -> dict[str, Rule]:
    """Return the rules that are on, by metric: the built-in ones first, then the others that the section names.

    Args:
        config: The `monitor` section.
        names: The host's names for its own metrics; None if no host is known yet.

    Raises:
        ConfigError: A rule is contradictory, has no threshold, or is given twice; the message names the metric.
    """
    spelled: dict[str, str] = {}
    taken: dict[str, str] = {}
    host = HostNames() if names is None else names
    for name in config.alarms:
        metric = _canonical(name, host)
        same = {metric, metric.removeprefix(PREFIX), *logged_names(metric, host)}
        if other := next((taken[known] for known in sorted(same) if known in taken), None):
            raise ConfigError(f"{SECTION}: {other!r} and {name!r} name one metric; leave out one of the two.")
        taken |= dict.fromkeys(same, name)
        spelled[metric] = name
    rules = {}
    for metric in dict.fromkeys((*DEFAULTS, *spelled)):
        if metric in spelled or config.default_alarms:
            name = spelled.get(metric, metric)
            rule = _rule(name, metric, config.alarms.get(name), DEFAULTS.get(metric))
            if rule is not None:
                rules[metric] = rule
    return rules


def _canonical(name: str, host: HostNames) -> str:
    """Return the built-in rules' name for a metric; the name itself if they have none."""
    if not name or name.startswith("eval_"):
        raise ConfigError(
            f"{SECTION}: {name!r} is not allowed; allowed: a metric of the training logs, such as 'k3_kl'."
        )
    for known in (PREFIX + name, host.role(name)):
        if name not in DEFAULTS and known in DEFAULTS:
            return known
    return name


def _rule(name: str, metric: str, alarm: Asked | None, default: DefaultRule | None) -> Rule | None:
    above, below = (default.above, default.below) if default else (None, None)
    patience = default.patience if default else PATIENCE
    if alarm is None:
        action = None
    else:
        above = above if alarm.above is None else alarm.above
        below = below if alarm.below is None else alarm.below
        patience = patience if alarm.patience is None else alarm.patience
        action = alarm.action
    if action == "off":
        return None
    if default is None and above is None and below is None:
        known = ", ".join(key.removeprefix(PREFIX) for key in DEFAULTS)
        raise ConfigError(
            f"{SECTION}.{name}: above={None!r} and below={None!r}, but this metric has no built-in threshold; give one of the "
            f"two, or refine one of: {known}."
        )
    key = f"{SECTION}.{name}"
    if above is not None and below is not None and below >= above:
        raise ConfigError(f"{key}.below: {below!r} is not allowed; allowed: x < above ({above:g}).")
    clear_above, clear_below = _clear_levels(above, below)
    return Rule(
        metric=metric,
        above=above,
        below=below,
        clear_above=clear_above,
        clear_below=clear_below,
        patience=patience,
        action=action or "warn",
        named=alarm is not None,
        default=default,
    )


def _clear_levels(above: float | None, below: float | None) -> tuple[float | None, float | None]:
    over = None if above is None else _eased(above, above > 0)
    under = None if below is None else _eased(below, below < 0)
    if above is None or below is None or over is None or under is None:
        return over, under
    middle = below + (above - below) / 2
    return max(middle, over), min(middle, under)


def _eased(bound: float, towards_zero: bool) -> float:
    return bound * HEALTHY_SHARE if towards_zero else bound / HEALTHY_SHARE
