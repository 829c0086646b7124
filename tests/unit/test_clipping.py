"""What a clip on pi_trainer / pi_engine stops at the weights that sampled."""

from __future__ import annotations

import pytest
import torch

from mismatch_ext.drift import clip_metrics, clip_sums, stopped_by_clip


@pytest.mark.parametrize("low, high", [(0.2, 0.28), (3e-4, 4e-4)])
def test_stopped_tokens_are_those_without_gradient(low: float, high: float) -> None:
    """By autograd through PPO's own expression."""
    generator = torch.Generator().manual_seed(0)
    log_ratio = (torch.randn(4000, generator=generator, dtype=torch.float64) * 2 * high).requires_grad_()
    advantages = torch.randn(4000, generator=generator, dtype=torch.float64)
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    loss.sum().backward()
    assert log_ratio.grad is not None
    stopped = stopped_by_clip(log_ratio.detach(), advantages, low, high)
    assert torch.equal(stopped, log_ratio.grad == 0)
    assert 0.1 < stopped.double().mean() < 0.6


def test_figures_are_those_by_hand() -> None:
    trainer = torch.tensor([[-1.0, -2.0, 9.0], [-0.5, -1.0, -1.5]])
    engine = torch.tensor([[-1.3, -2.0, 0.0], [-0.2, -1.0, -1.6]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    found = clip_metrics(clip_sums(trainer=trainer, engine=engine, advantages=torch.tensor([1.0, -1.0]), mask=mask))
    # Up by 0.3 where reinforced is beyond 1.2; down by 0.3 where discouraged is below 0.8; all others are inside.
    assert found["phantom_clip_frac"] == pytest.approx(2 / 5)
    assert found["advantage_gap"] == pytest.approx(0.3 / 2 - (-0.3 + 0.1) / 3)


def test_of_sequences_the_mean_of_a_response_is_clipped() -> None:
    trainer, engine = torch.zeros(2, 4), torch.zeros(2, 4)
    trainer[0, 0] = 0.5  # a mean of 0.125, inside; one token beyond
    mask = torch.ones(2, 4, dtype=torch.bool)
    advantages = torch.tensor([1.0, -1.0])
    assert clip_sums(trainer=trainer, engine=engine, advantages=advantages, mask=mask)["stopped"] == 1
    assert clip_sums(trainer=trainer, engine=engine, advantages=advantages, mask=mask, sequences=True)["stopped"] == 0
