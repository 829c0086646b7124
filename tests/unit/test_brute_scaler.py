"""The loss scaler against `torch.amp.GradScaler`, with overflows, clipping, two optimizers, and resumes in both directions."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch
from torch.optim import SGD

from mismatch_ext.errors import PrecisionError
from mismatch_ext.precision.scaler import MAX_OVERFLOW_STREAK, MIN_SCALE, LossScaler

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 2600))]


class Side:
    """Three parameters, two optimizers and a scaler."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self.parameters = [torch.zeros(3, requires_grad=True) for _ in range(3)]
        self.optimizers = [SGD(self.parameters[:2], lr=0.1), SGD(self.parameters[2:], lr=0.05)]

    def step(self, gradients: list[torch.Tensor], optimizers: int, *, unscale: bool) -> None:
        self.scaler.scale(torch.ones(()))  # creates the scale, as the first loss does
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient * self.scaler.get_scale()
        for optimizer in self.optimizers[:optimizers]:
            if unscale:
                self.scaler.unscale_(optimizer)
            self.scaler.step(optimizer)
        self.scaler.update()


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_as_torch_does_and_counts_overflows(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    settings = {"init_scale": 2.0 ** rng.choice([0, 16, 30, 30]), "growth_interval": rng.choice([1, 2, 3, 7])}
    ours, torchs = Side(LossScaler("cpu", **settings)), Side(torch.amp.GradScaler("cpu", **settings))
    optimizers, often = rng.choice([1, 2]), rng.choice([0.1, 0.5, 1.0])
    steps = overflows = streak = 0
    for _ in range(rng.choice([5, 40, 60])):
        gradients = [torch.randn(3, generator=generator) for _ in range(3)]
        overflow, place = rng.random() < often, rng.randrange(3)
        if overflow:
            gradients[place][0] = rng.choice([math.inf, math.nan, -math.inf])
            overflow = optimizers == 2 or place < 2  # otherwise no optimizer reads it
        unscale = rng.random() < 0.4
        torchs.step(gradients, optimizers, unscale=unscale)
        steps, overflows, streak = steps + 1, overflows + overflow, streak + 1 if overflow else 0
        endless = overflow and (streak > MAX_OVERFLOW_STREAK or torchs.scaler.get_scale() < MIN_SCALE)
        if endless:
            with pytest.raises(PrecisionError, match="overflowed in"):
                ours.step(gradients, optimizers, unscale=unscale)
            return
        ours.step(gradients, optimizers, unscale=unscale)
        assert ours.scaler.get_scale() == torchs.scaler.get_scale()
        assert all(map(torch.equal, ours.parameters, torchs.parameters))
        counts = ours.scaler.steps, ours.scaler.overflow_steps, ours.scaler.overflow_streak
        assert counts == (steps, overflows, streak)
        if rng.random() < 0.2:
            state = json.loads(json.dumps(ours.scaler.state_dict()))
            ours.scaler = LossScaler("cpu", **settings)
            ours.scaler.load_state_dict(state)
            if rng.random() < 0.5:
                torchs.scaler = torch.amp.GradScaler("cpu", **settings)
                torchs.scaler.load_state_dict(state)
