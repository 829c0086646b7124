"""Learning-rate control against the rule in plain Python, over random schedules, statistics, skipped steps and resumed runs."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from mismatch_ext.lr import LrConfig, LrControl, LrController
from tests.oracles.brute.lr import Asked, Rule

pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("ignore::UserWarning")]

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 520))]
SCALE = {"response_length": 10.0, "mismatch_kl": 0.002, "grad_norm": 1.0, "f_tau": 0.02}
STEPS = 40
SCHEDULES: tuple[Callable[[Any], Any], ...] = (
    lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    lambda optimizer: schedules.MultiplicativeLR(optimizer, lambda step: 0.95),
    lambda optimizer: schedules.ExponentialLR(optimizer, 0.9),
    lambda optimizer: schedules.CosineAnnealingLR(optimizer, STEPS),
    lambda optimizer: schedules.CosineAnnealingWarmRestarts(optimizer, 5),
    lambda optimizer: schedules.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 2, cycle_momentum=False),
    lambda optimizer: schedules.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4, cycle_momentum=False),
    lambda optimizer: schedules.MultiStepLR(optimizer, [2, 5, 6], 0.3),
    lambda optimizer: schedules.SequentialLR(
        optimizer,
        [schedules.LinearLR(optimizer, 0.1, 1.0, 4), schedules.ExponentialLR(optimizer, 0.9)],
        [4],
    ),
)


class Side:
    """Two weights in two groups, whose steps of plain SGD show the rate that was applied."""

    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        self.weights = [torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        groups = [{"params": [weight], "lr": rate} for weight, rate in zip(self.weights, (0.05, 0.1), strict=True)]
        self.optimizer = torch.optim.SGD(groups, lr=0.05)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.schedule = schedule(self.optimizer)

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self) -> list[float]:
        """Return how far each weight moved at a gradient of 1: the rate that was applied."""
        before = [float(weight.detach()) for weight in self.weights]
        for weight in self.weights:
            weight.grad = torch.ones_like(weight)
        self.optimizer.step()
        return [start - float(weight.detach()) for start, weight in zip(before, self.weights, strict=True)]

    def load(self, other: Side) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.schedule.load_state_dict(copy.deepcopy(other.schedule.state_dict()))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_applied_rate_is_the_schedules_times_the_rules(seed: int) -> None:
    rng = random.Random(seed)
    trigger, period = rng.choice(list(SCALE)), rng.choice([None, None, 3, 7])
    window, ratio = rng.choice([1, 2, 4, 6]), rng.choice([1.2, 2.0])
    decay, floor, warmup = rng.choice([0.5, 0.9, 0.3]), rng.choice([0.1, 0.5]), rng.choice([0, 2, 5])
    watched = {} if period else {"trigger": trigger, "surge_ratio": ratio, "baseline_window": window}
    config = LrConfig(decay=decay, floor=floor, period=period, **watched)
    rule = Rule(Asked(trigger=trigger, decay=decay, floor=floor, period=period, surge_ratio=ratio,
                      baseline_window=window, warmup_steps=warmup))  # fmt: skip
    schedule = rng.choice(SCHEDULES)
    plain, side = Side(schedule), Side(schedule)
    control = LrControl(side.optimizer, LrController(config, warmup_steps=warmup), scheduler=side.schedule)
    level, step, cuts, last = 1.0, 0, rng.random() < 0.5 and trigger == "response_length", 1.0
    for _ in range(STEPS):
        if rng.random() < 0.75:
            level *= rng.choice([1.5, 3.0, 0.4]) if rng.random() < 0.08 else 1.0
            value = min(SCALE[trigger] * level * (1 + 0.2 * rng.random()), 1.0 if trigger == "f_tau" else 1e9)
            cut = min(1.0, 0.1 * level) if cuts else None
            control.update(**{trigger: value}, **({"truncated_fraction": cut} if cuts else {}))  # type: ignore[arg-type]
            rule.measure(step, value, cut)
        if rng.random() < 0.15:  # resume: a new optimizer, a new schedule, a new control
            saved = json.loads(json.dumps(control.state_dict()))
            resumed = Side(schedule)
            resumed.load(side)
            control.remove()
            control = LrControl(
                resumed.optimizer, LrController(config, warmup_steps=warmup), scheduler=resumed.schedule
            )
            control.load_state_dict(saved)
            side = resumed
        expected = rule.multiplier(step)
        assert control.multiplier == pytest.approx(expected, rel=1e-12) and expected <= last
        last = expected
        if rng.random() < 0.2:
            continue  # a step that is skipped, as on an overflow
        rates = plain.rates
        plain.step()
        assert side.step() == pytest.approx([rate * expected for rate in rates], rel=1e-9, abs=1e-12)
        step += 1
        plain.schedule.step()
        side.schedule.step()
        assert side.rates == plain.rates
