"""DPPO's trust regions against the paper's formula, token by token, and in your own loop by the current policy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext import Run
from mismatch_ext.correction import correct
from mismatch_ext.errors import ConfigError, RecordError
from tests.unit.loops import PROMPTS, rewards_of, sides

DPPO = ("dppo_tv", "dppo_kl")


def divergence(loss: str, p: float, q: float) -> float:
    """Return the divergence of the two outcomes "this token" and "another"."""
    if loss == "dppo_tv":
        return abs(p - q)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


@pytest.mark.parametrize("loss", DPPO)
@pytest.mark.parametrize("bounds", [0.05, (0.02, 0.2)])
def test_a_token_is_stopped_as_the_paper_says(loss: str, bounds: Any) -> None:
    draws = torch.Generator().manual_seed(1)
    policy, engine = (torch.rand(40, 25, generator=draws, dtype=torch.float64) * 0.98 + 0.01 for _ in range(2))
    engine = torch.where(torch.rand(40, 25, generator=draws) < 0.5, policy * 0.9 + engine * 0.1, engine)
    advantages = torch.randn(40, generator=draws, dtype=torch.float64)
    advantages[0] = 0.0
    mask = torch.rand(40, 25, generator=draws) < 0.9
    found = correct(
        old_logprobs=policy.log(),
        rollout_logprobs=engine.log(),
        response_mask=mask,
        config={"preset": loss, "divergence": bounds, "upper": 3.0},
        advantages=advantages,
    )
    low, high = bounds if isinstance(bounds, tuple) else (bounds, bounds)
    expected = torch.zeros_like(policy)
    for row, place in mask.nonzero().tolist():
        p, q, advantage = float(policy[row, place]), float(engine[row, place]), float(advantages[row])
        d = divergence(loss, p, q)
        stopped = p > q and d > high if advantage > 0 else p < q and d > low
        expected[row, place] = 0.0 if stopped else min(p / q, 3.0)
    torch.testing.assert_close(found.as_multiplier().double(), expected, atol=1e-12, rtol=1e-9)
    kept = expected[mask] != 0
    assert 0.2 < float(kept.double().mean()) < 0.95
    assert found.metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - float(kept.double().mean()))


@pytest.mark.parametrize("loss", DPPO)
def test_a_sure_token_is_judged_exactly(loss: str) -> None:
    # Both policies are all but sure: 1 - p is far below what 1 - exp(log p) keeps in float32.
    policy, engine = (
        torch.tensor([[-1e-9, 0.0]], dtype=torch.float64),
        torch.tensor([[-2e-9, 0.0]], dtype=torch.float64),
    )
    found = correct(
        old_logprobs=policy,
        rollout_logprobs=engine,
        response_mask=torch.ones(1, 2),
        config=loss,
        advantages=torch.ones(1),
    )
    assert bool(found.mask.all())


def test_its_gate_needs_advantages_and_its_bounds_a_loss() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(RecordError, match="loss='dppo_tv' needs advantages"):
        correct(old_logprobs=-ones, rollout_logprobs=-ones, response_mask=ones, config="dppo_tv")
    with pytest.raises(ConfigError, match="divergence is the bound of loss='dppo_tv' and 'dppo_kl'"):
        correct(
            old_logprobs=-ones, rollout_logprobs=-ones, response_mask=ones, config={"preset": "tis", "divergence": 1.0}
        )


def test_the_gate_follows_the_current_policy(tmp_path: Path) -> None:
    """Two steps on one batch: what the first step moved too far, the second leaves alone."""
    block = {"correction": {"preset": "dppo_tv", "divergence": 0.02}, "monitor": {"weight_sync": "off"}}
    trainer, rollout = sides(noise=0.0, rate=0.1)
    with Run(block, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        with torch.no_grad():
            old = run.score(batch)
        run.measure(batch, old=old)
        advantages = rewards_of(batch)
        stopped = []
        for _ in range(3):
            logprobs = run.score(batch)
            weights = run.correct(batch, logprobs, advantages=advantages[:, 0]).as_multiplier()
            stopped.append(int(((weights == 0) & batch.response_mask).sum()))
            run.step(-(weights * advantages * logprobs)[batch.response_mask].mean())
        away = torch.where(advantages > 0, logprobs > batch.rollout_logprobs, logprobs < batch.rollout_logprobs)
        assert bool(away[(weights == 0) & batch.response_mask].all())
    assert stopped[0] == 0 and stopped[1] > 0
