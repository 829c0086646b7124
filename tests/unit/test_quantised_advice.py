"""Bounds that keep a share of tokens, against Monte Carlo."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.quantised.advice import level, token_bound

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(("sigma", "mean"), [(0.01, 0.0), (0.02, -2e-4), (0.1, 0.001), (0.0, 0.0)])
def test_bounds_keep_what_they_say(sigma: float, mean: float) -> None:
    size = math.log(token_bound(sigma=sigma, mean=mean, keep=0.8))
    d = mean + sigma * torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    assert float((d.abs() <= size).double().mean()) == pytest.approx(0.8 if sigma else 1.0, abs=0.01)


def test_the_level_follows_the_length() -> None:
    assert [level(sigma=0.02, length=n, keep=0.9) for n in (100, 2000, 20_000)] == ["sequence", "token", "geometric"]


def test_bounds_follow_a_measured_tail() -> None:
    """Of 1,000 tokens 15 are off by 2 nats: a normal one's bound of 99 % would cut hardly any of these, the measured one does."""
    measured = [0.01 * (-1) ** n for n in range(985)] + [2.0] * 15
    assert token_bound(sigma=0.245, keep=0.99) > 1.8
    assert token_bound(sigma=0.245, keep=0.98, measured=measured) == pytest.approx(math.exp(0.01))
    assert token_bound(sigma=0.245, keep=0.99, measured=measured) == pytest.approx(math.exp(2))
