"""The penalty split into loss and reward, and what a host makes of it, by exact enumeration."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import kl_estimate, kl_penalty
from tests.oracles.kl.enumeration import Problem, Term, exact, moments

pytestmark = pytest.mark.numeric

MASK = torch.tensor([[1, 1, 1], [1, 0, 1]])


def draw() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logprobs, ref = (-2 + torch.rand(2, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return logprobs.requires_grad_(), ref


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("placement", ["loss", "reward", "both"])
def test_full_coefficient_on_each_side(estimator: str, placement: str) -> None:
    logprobs, ref = draw()
    config = KlConfig(estimator=estimator, placement=placement, coef=0.25)  # type: ignore[arg-type]
    penalty = kl_penalty(logprobs, ref, MASK, config)
    want = 0.25 * kl_estimate(logprobs, ref, estimator) * MASK
    zero = torch.zeros_like(ref)
    torch.testing.assert_close(penalty.loss, zero if placement == "reward" else want)
    torch.testing.assert_close(penalty.reward, zero if placement == "loss" else want.detach())
    assert not penalty.reward.requires_grad
    # The loss can always be sent backward, also where it is nothing.
    gradient, wanted = (torch.autograd.grad(x.sum(), logprobs, retain_graph=True)[0] for x in (penalty.loss, want))
    torch.testing.assert_close(gradient, zero if placement == "reward" else wanted)


def test_the_ratio_weighs_the_loss_and_not_the_reward() -> None:
    # rho = (2, 3, 5) in row 0 and (2, hole, 5) in row 1; the hole has no part in the product.
    logprobs, ref = draw()
    behavior = logprobs.detach() - torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64).log()
    plain = kl_estimate(logprobs, ref, "k3").detach() * MASK
    for ratio, weights in (("token", [[2, 3, 5], [2, 0, 5]]), ("sequence", [[2, 6, 30], [2, 0, 10]])):
        config = KlConfig(estimator="k3", placement="both", ratio=ratio, coef=1.0)  # type: ignore[arg-type]
        penalty = kl_penalty(logprobs, ref, MASK, config, behavior_logprobs=behavior)
        torch.testing.assert_close(penalty.loss, torch.tensor(weights, dtype=torch.float64) * plain)
        torch.testing.assert_close(penalty.reward, plain)


def test_the_token_target_cannot_be_a_reward() -> None:
    logprobs, ref = draw()
    for placement in ("reward", "both"):
        with pytest.raises(ConfigError, match="target='token'.*kl_surrogate"):
            kl_penalty(logprobs, ref, MASK, KlConfig(placement=placement, target="token", coef=1.0))  # type: ignore[arg-type]
    kl_penalty(logprobs, ref, MASK, KlConfig(placement="loss", target="token", coef=1.0))


def host(
    config: KlConfig, credit: Literal["returns", "response"], weight: Literal["none", "token", "prefix", "response"]
) -> Term:
    """Return a host's loss: the penalty's loss, and a policy gradient of the negated reward with the host's own ratio."""

    def term(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
        penalty = kl_penalty(
            logprobs, ref_logprobs, torch.ones(logprobs.shape), config, behavior_logprobs=behavior_logprobs
        )
        rewards = -penalty.reward
        returns = rewards.flip(1).cumsum(1).flip(1) if credit == "returns" else rewards.sum(1, keepdim=True)
        step = (logprobs - behavior_logprobs).detach()
        ratio = {
            "none": torch.ones_like(step),
            "token": step.exp(),
            "prefix": step.cumsum(1).exp(),
            "response": step.sum(1, keepdim=True).exp(),
        }[weight]
        return penalty.loss - ratio * returns * logprobs

    return term


def relative_bias(problem: Problem, term: Term) -> float:
    truth = exact(problem, "KL(pi||ref)", "sequence")[1]
    return float((moments(problem, term).gradient - truth).norm() / truth.norm())


@pytest.mark.parametrize(("estimator", "placement"), [("k1", "reward"), ("k1", "both"), ("k3", "both")])
@pytest.mark.parametrize("shape", [(2, 5), (3, 5), (4, 5), (2, 1), (3, 1), (4, 1)])
@pytest.mark.parametrize("credit", ["returns", "response"])
def test_a_host_that_credits_rewards_gets_the_gradient_of_the_kl(
    estimator: str, placement: str, shape: tuple[int, int], credit: Literal["returns", "response"]
) -> None:
    config = KlConfig(estimator=estimator, placement=placement, coef=1.0)  # type: ignore[arg-type]
    for seed in range(2):
        assert relative_bias(Problem.random(*shape, seed), host(config, credit, "none")) < 1e-9


@pytest.mark.parametrize(("estimator", "placement"), [("k1", "reward"), ("k3", "both")])
def test_off_policy_the_host_has_to_weigh_by_the_whole_response(estimator: str, placement: str) -> None:
    config = KlConfig(estimator=estimator, placement=placement, ratio="sequence", coef=1.0)  # type: ignore[arg-type]
    for seed in range(2):
        problem = Problem.random(3, 5, seed, lag=0.3)
        assert relative_bias(problem, host(config, "returns", "response")) < 1e-9
        assert relative_bias(problem, host(config, "response", "response")) < 1e-9
        for weight in ("none", "token", "prefix"):
            assert relative_bias(problem, host(config, "returns", weight)) > 0.02  # type: ignore[arg-type]


def test_half_the_coefficient_on_each_side_is_half_the_gradient() -> None:
    # A widespread summary of arXiv 2512.21852 has beta / 2 on each side; that is the gradient of half the KL.
    problem = Problem.random(3, 4, 0)
    truth = exact(problem, "KL(pi||ref)", "sequence")[1]
    half = moments(problem, host(KlConfig(estimator="k3", placement="both", coef=0.5), "returns", "none")).gradient
    torch.testing.assert_close(half, truth / 2, rtol=1e-9, atol=1e-12)
