"""KL terms by hand, and at the edges; tests/unit/test_brute_kl.py compares them with loops on random batches."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import ESTIMATORS, KlConfig
from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, RecordError
from mismatch_ext.kl import kl_terms
from mismatch_ext.testing import Problem, Term, exact, moments

pytestmark = pytest.mark.numeric


def draw(seed: int, rows: int = 4, length: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs, ref_logprobs, behavior [rows, length], and a mask with holes."""
    generator = torch.Generator().manual_seed(seed)
    base = -1 - torch.rand(rows, length, generator=generator, dtype=torch.float64)
    ref, behavior = (base + 0.5 * torch.randn(base.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return base, ref, behavior, torch.rand(base.shape, generator=generator) < 0.7


def gradient(
    logprobs: Tensor, ref: Tensor, behavior: Tensor, mask: Tensor, settings: KlConfig, **rest: Tensor
) -> Tensor:
    leaf = logprobs.detach().clone().requires_grad_()
    term = kl_terms(logprobs=leaf, ref_logprobs=ref, mask=mask, settings=settings, behavior=behavior, **rest).loss  # type: ignore[arg-type]
    return torch.autograd.grad(term.sum(), leaf)[0]


@pytest.mark.parametrize("placement", ["loss", "reward", "both"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_extreme_values_stay_finite(estimator: str, placement: str) -> None:
    for ratio in ("none", "token", "sequence"):
        settings = KlConfig(estimator=estimator, placement=placement, ratio=ratio, coef=0.5)  # type: ignore[arg-type]
        for ref_gap in (1e4, -1e4, 200.0, -200.0):
            logprobs, ref, behavior, mask = (t.float() if t.is_floating_point() else t for t in draw(0))
            mask[0, 0] = True
            ref[0, 0], behavior[0, 0] = logprobs[0, 0] + ref_gap, logprobs[0, 0] - ref_gap
            assert torch.isfinite(gradient(logprobs, ref, behavior, mask, settings)).all()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "ref_logprobs", "behavior"])
def test_an_unmasked_value_that_is_not_finite_is_named(name: str, bad: float) -> None:
    tensors: dict[str, Any] = {key: torch.zeros(2, 3) for key in ("logprobs", "ref_logprobs", "behavior")}
    tensors[name][1, 2] = bad
    reason = {"ref_logprobs": "infinite"} if bad == -math.inf else {}
    with pytest.raises(NonFiniteLogprobError, match=rf"{name}\[1, 2\] .*{bad}.*{reason.get(name, '')}"):
        kl_terms(**tensors, mask=torch.ones(2, 3), settings=KlConfig(coef=1.0))


def test_wrong_arguments_are_named() -> None:
    x, mask, full = torch.zeros(2, 3), torch.ones(2, 3), KlConfig(coef=1.0, estimator="full")
    for settings, rest, message in (
        (KlConfig(), {}, "mismatch.kl.coef is not set"),
        (KlConfig(coef=1.0, ratio="token"), {}, "ratio='token' needs behavior"),
        (full, {}, "'full' needs the logits"),
    ):
        with pytest.raises(ConfigError, match=message):
            kl_terms(logprobs=x, ref_logprobs=x, mask=mask, settings=settings, **rest)  # type: ignore[arg-type]
    for wrong, rest, message in (
        (mask[:, :2], {}, r"mask \[2, 2\]"),
        (mask, {"groups": torch.zeros(3, dtype=torch.long)}, r"groups \[3\]"),
    ):
        with pytest.raises(RecordError, match=message):
            kl_terms(logprobs=x, ref_logprobs=x, mask=wrong, settings=KlConfig(coef=1.0), **rest)  # type: ignore[arg-type]


# A KL among the rewards, which a trainer credits to earlier tokens.


def rewarded(settings: KlConfig, credit: str, weight: str) -> Term:
    """Return a trainer's loss: the term, and a policy gradient of the negated reward with the trainer's own ratio."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior: Tensor) -> Tensor:
        loss, reward = kl_terms(
            logprobs=logprobs, ref_logprobs=ref_logprobs, mask=torch.ones(logprobs.shape), settings=settings
        )
        returns = -reward.flip(1).cumsum(1).flip(1) if credit == "returns" else -reward.sum(1, keepdim=True)
        steps = (logprobs - behavior).detach()
        ratio = {
            "none": torch.ones_like(steps),
            "token": steps.exp(),
            "prefix": steps.cumsum(1).exp(),
            "response": steps.sum(1, keepdim=True).exp(),
        }[weight]
        return loss - ratio * returns * logprobs

    return term


def relative_bias(problem: Problem, term: Term) -> float:
    truth = exact(problem, "KL(pi||ref)", "sequence")[1]
    return float((moments(problem, term).gradient - truth).norm() / truth.norm())


@pytest.mark.parametrize(("estimator", "placement"), [("k1", "reward"), ("k1", "both"), ("k3", "both")])
@pytest.mark.parametrize("shape", [(4, 5), (3, 1)])
@pytest.mark.parametrize("credit", ["returns", "response"])
def test_a_trainer_that_credits_rewards_gets_the_gradient_of_the_kl(
    estimator: str, placement: str, shape: tuple[int, int], credit: Literal["returns", "response"]
) -> None:
    settings = KlConfig(estimator=estimator, placement=placement, reward_path="rewards", coef=1.0)  # type: ignore[arg-type]
    for seed in range(2):
        assert relative_bias(Problem.random(*shape, seed), rewarded(settings, credit, "none")) < 1e-9


def test_off_policy_the_trainer_has_to_weigh_by_the_whole_response() -> None:
    settings = KlConfig(estimator="k1", placement="reward", reward_path="rewards", coef=1.0)
    problem = Problem.random(3, 5, 0, lag=0.3)
    assert relative_bias(problem, rewarded(settings, "returns", "response")) < 1e-9
    for weight in ("none", "token", "prefix"):
        assert relative_bias(problem, rewarded(settings, "returns", weight)) > 0.02
