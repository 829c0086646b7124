"""Control of the learning rate against a plain optimizer and a reference in loops.

Random rules, statistics, schedules of torch, tensor rates, skipped steps, second micro-batches, and resumes in both orders.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedules

from mismatch_ext.config import LrConfig
from mismatch_ext.lr import LrControl
from tests.oracles.brute.rate import Rule

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # torch: scheduler before optimizer, after a skipped step

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 2500))]
TYPICAL = {"response_length": 10.0, "mismatch_kl": 0.002, "grad_norm": 1.0, "f_tau": 0.02}
STEPS = 50

SCHEDULES: Mapping[str, Callable[[Optimizer], Any]] = {
    "none": lambda _: None,
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: schedules.StepLR(o, 3, 0.5),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, STEPS),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 5),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=STEPS + 2, cycle_momentum=False),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=4, cycle_momentum=False),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1.0, 4), schedules.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.1, 3), schedules.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


def section(rng: random.Random) -> LrConfig:
    """Return a random `lr` section; one with a period watches for nothing."""
    keys: dict[str, Any] = {"decay": rng.choice([0.5, 0.9, 0.3]), "floor": rng.choice([0.1, 0.5, 1.0])}
    if rng.random() < 0.4:
        keys["period"] = rng.choice([1, 3, 7])
    else:
        keys |= {"trigger": rng.choice(list(TYPICAL)), "surge_ratio": rng.choice([1.2, 2.0])}
        keys["baseline_window"] = rng.choice([1, 2, 4, 6])
    if rng.random() < 0.5:
        keys["warmup_steps"] = rng.choice([0, 3])
    return LrConfig(**keys)


class Side:
    """Parameters with a constant gradient of 1, so that a step moves each by its rate."""

    def __init__(self, schedule: str, groups: int, *, tensor_rates: bool) -> None:
        self.kind = {"schedule": schedule, "groups": groups, "tensor_rates": tensor_rates}
        self.parameters = [torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(groups)]
        rates = [torch.tensor(0.05 * (group + 1), dtype=torch.float64) for group in range(groups)]
        self.optimizer = SGD(
            [
                {"params": [parameter], "lr": rate if tensor_rates else float(rate)}
                for parameter, rate in zip(self.parameters, rates, strict=True)
            ],
            lr=0.05,
        )
        self.plateau, self.schedule = schedule == "plateau", SCHEDULES[schedule](self.optimizer)

    def reborn(self) -> Side:
        """Return the same in a new process, with the parameters, but without the states of optimizer and schedule."""
        side = Side(**self.kind)
        for new, old in zip(side.parameters, self.parameters, strict=True):
            new.data.copy_(old.data)
        return side

    def state(self) -> list[dict[str, Any]]:
        return [copy.deepcopy(part.state_dict()) for part in (self.optimizer, self.schedule) if part is not None]

    def load(self, state: list[dict[str, Any]]) -> None:
        for part, saved in zip((self.optimizer, self.schedule), state, strict=False):
            part.load_state_dict(saved)

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self) -> list[float]:
        """Step, and return how far each parameter went."""
        before = [float(parameter) for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        return [start - float(parameter) for start, parameter in zip(before, self.parameters, strict=True)]

    def scheduled(self) -> None:
        if self.schedule is not None:
            self.schedule.step(*([1.0] if self.plateau else []))


@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_has_the_schedules_rate_times_the_rules_multiplier(seed: int) -> None:
    rng = random.Random(seed)
    config, warmup = section(rng), rng.choice([0, 2, 5])
    kind = {"schedule": rng.choice(list(SCHEDULES)), "groups": rng.choice([1, 2]), "tensor_rates": rng.random() < 0.15}
    plain, steered = Side(**kind), Side(**kind)

    def controlled(step: int) -> LrControl:
        return LrControl(config, steered.optimizer, warmup=warmup, step=step)

    control = controlled(0)
    rule = Rule(
        period=config.period,
        decay=config.decay,
        floor=config.floor,
        trigger=config.trigger,
        surge_ratio=config.surge_ratio,
        window=config.baseline_window,
        warmup=warmup if config.warmup_steps is None else config.warmup_steps,
    )
    step, measured, level, multiplier, says_truncated = 0, -1, 1.0, 1.0, rng.random() < 0.5
    for _ in range(rng.choice([12, 30, STEPS])):
        if rng.random() < 0.75:
            level *= rng.choice([1.5, 3.0, 0.4]) if rng.random() < 0.08 else 1.0
            highest = 1.0 if config.trigger == "f_tau" else 1e9
            statistic = min(TYPICAL[config.trigger] * level * (1 + 0.2 * rng.random()), highest)
            truncated = min(1.0, 0.1 * level) if says_truncated else None
            control.collect({config.trigger: statistic, "truncated_fraction": truncated})
            control.lead()
            if measured != step:
                measured = step
                rule.see(step, statistic, truncated)
            if rng.random() < 0.2:  # a second micro-batch of the step does not count
                control.collect({config.trigger: min(5 * statistic, highest), "truncated_fraction": truncated})
                control.lead()
        if rng.random() < 0.15:
            state, others = json.loads(json.dumps(control.state_dict())), steered.state()
            control.close()
            steered, control_first = steered.reborn(), rng.random() < 0.5
            if not control_first:
                steered.load(others)
            control = controlled(0 if control_first else step)
            control.load_state_dict(state)
            if control_first:
                steered.load(others)
        want = rule.multiplier(step)
        assert abs(control.multiplier - want) <= 1e-12
        assert want <= multiplier + 1e-12, "the multiplier rose"
        multiplier = want
        if rng.random() < 0.2:
            continue  # the step overflowed
        rates = plain.rates()
        plain.step()
        with control.applied():
            moved = steered.step()
        assert moved == pytest.approx([rate * want for rate in rates], rel=1e-9, abs=1e-12)
        if steered.schedule is not None and not steered.plateau:
            logged = [float(rate) * control.last_multiplier for rate in steered.schedule.get_last_lr()]
            assert logged == pytest.approx([rate * want for rate in rates], rel=1e-9, abs=1e-12)
        step += 1
        plain.scheduled()
        steered.scheduled()
        assert steered.rates() == plain.rates()
