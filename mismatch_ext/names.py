"""Names of metrics: our own (names.toml), and the hosts' own that reports and alarms read.

Of the hosts' metrics, the rest of the core asks for a `Role` and knows no host. Their names are here and not in the adapters,
because a report must work where no host is installed. An adapter writes its names into the header of a run; so does a training
loop of your own (`"names": {"length": "my/length"}`).
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

PREFIX = "mismatch/"
"""Prefix of our own metrics in the log of every host."""
EVALUATION = "eval_"
"""What transformers and TRL put in front of the names of an evaluation's metrics."""
TAUS = (1.1, 2.0)
"""Thresholds of F(tau), the fraction of tokens whose ratio of probabilities, or its inverse, exceeds tau."""
PARTS_OF_STALE = ("numerics/", "stale/")
"""What figures of the gap's parts begin with where rollouts may be of older weights."""

PARTS_OF_CACHE = ("cached/", "fresh/")
"""What figures of the gap begin with, of responses whose prompt the engine took from its prefix cache, and of the others."""


@dataclass(frozen=True)
class Measure:
    """One scalar: its formula, how to read it, and its names elsewhere (empty where there is none)."""

    formula: str
    meaning: str
    verl: str = ""
    trl: str = ""


_TABLES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
SHORT: tuple[str, ...] = tuple(_TABLES["short"])
"""Our metrics that consoles and loggers get by default, without prefix; the metrics file has all of them."""
MEASURES = {name: Measure(**entry) for name, entry in _TABLES["gap"].items()}
CORRECTION_MEASURES = {name: Measure(**entry) for name, entry in _TABLES["correction"].items()}
SAMPLE_MEASURES: dict[str, str] = _TABLES["sample"]
GROWTH_MEASURES: dict[str, str] = _TABLES["growth"]
MITIGATION_MEASURES: dict[str, str] = _TABLES["mitigations"]
STALENESS_MEASURES: dict[str, str] = _TABLES["staleness"]
ROUTING_MEASURES: dict[str, str] = _TABLES["routing"]
OTHER_LOGS: dict[str, dict[str, str]] = _TABLES["logs"]
"""By framework without an adapter, the names in its log, with the figure of ours or the role that each is."""
MEANING = {name: measure.meaning for name, measure in (CORRECTION_MEASURES | MEASURES).items()}
MEANING |= SAMPLE_MEASURES | GROWTH_MEASURES | MITIGATION_MEASURES | ROUTING_MEASURES
"""What each of our metrics is, by its name without prefix."""


class Role(StrEnum):
    """A metric that every host logs, under a name of its own."""

    REWARD = "reward"
    LENGTH = "length"
    LEARNING_RATE = "learning_rate"
    LOSS = "loss"
    GRAD_NORM = "grad_norm"
    ENTROPY = "entropy"


@dataclass(frozen=True, kw_only=True)
class HostNames:
    """Names in the log of one host, by role; the defaults are the roles' own names, for a training loop of your own."""

    reward: str = "reward"
    length: str = "length"
    learning_rate: str = "learning_rate"
    loss: str = "loss"
    grad_norm: str = "grad_norm"
    entropy: str = "entropy"
    next_rate: bool = False

    def of(self, name: str) -> str:
        """Return this host's name for a role; any other name stays as it is."""
        return str(getattr(self, name)) if name in _ROLES else name

    def role(self, name: str) -> str:
        """Return the role that a name of this host has; any other name stays as it is."""
        return next((str(role) for role in Role if self.of(role) == name), name)

    def to_dict(self) -> dict[str, Any]:
        """Return the names as JSON-able data, for the key `names` of a header."""
        return dataclasses.asdict(self)


_ROLES = frozenset(Role)

TRL = HostNames(length="completions/mean_length")
"""TRL's GRPO, RLOO and similar trainers; the names of loss, rate and norm come from transformers."""

# The score is the reward function's value, like TRL's reward; from `critic/rewards/mean` the KL penalty is already subtracted.
VERL = HostNames(
    reward="critic/score/mean",
    length="response_length/mean",
    learning_rate="actor/lr",
    loss="actor/loss",
    grad_norm="actor/grad_norm",
    entropy="actor/entropy",
)
"""verl with our engine, which logs the learning rate that was applied; stock verl logs that of the next step."""

HOSTS = {"TRL": TRL, "verl": VERL}
"""Hosts with an adapter, by their names on the page of metrics."""


def names_of(header: Mapping[str, Any]) -> HostNames:
    """Return the names that a run's header has; the roles' own names where it has none, or another release's."""
    named, fields = header.get("names"), dataclasses.fields(HostNames)
    if not isinstance(named, Mapping):
        return HostNames()
    return HostNames(**{f.name: named[f.name] for f in fields if isinstance(named.get(f.name), type(f.default))})


def own_name(logged: str) -> str | None:
    """Return the name without prefix of one of our metrics, of training or an evaluation; None for any other metric."""
    name = logged.removeprefix(EVALUATION)
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None
