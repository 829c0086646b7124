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


@pytest.mark.parametrize(
    ("placement", "target", "ratio", "baseline", "weights"),
    [
        # d = (0.2, -0.1), rho = (2, 3), prefix products c = (2, 6); k1: the path-wise gradient is the weight.
        ("loss", "sequence", "none", "none", (1, 1)),
        ("loss", "sequence", "token", "none", (2, 3)),
        ("loss", "sequence", "sequence", "none", (2, 6)),
        ("reward", "token", "none", "none", (0.2, -0.1)),
        ("reward", "token", "token", "none", (2 * 0.2, 3 * -0.1)),
        ("reward", "token", "sequence", "none", (2 * 0.2, 6 * -0.1)),
        ("reward", "sequence", "none", "none", (0.2 - 0.1, -0.1)),
        ("reward", "sequence", "token", "none", (2 * 0.1, 3 * -0.1)),
        ("reward", "sequence", "sequence", "none", (2 * 0.2 + 6 * -0.1, 6 * -0.1)),
        ("both", "sequence", "sequence", "none", (2 + 2 * 0.2 + 6 * -0.1, 6 + 6 * -0.1)),
        # The other row has d = (0.4, 0.6) and rho = 1 throughout, so its returns are (1.0, 0.6) for every ratio.
        ("reward", "sequence", "none", "leave_one_out", (0.1 - 1.0, -0.1 - 0.6)),
        ("reward", "sequence", "token", "leave_one_out", (2 * (0.1 - 1.0), 3 * (-0.1 - 0.6))),
        ("reward", "sequence", "sequence", "leave_one_out", (2 * 0.2 + 6 * -0.1 - 2 * 1.0, 6 * -0.1 - 6 * 0.6)),
        ("reward", "token", "token", "leave_one_out", (2 * (0.2 - 0.4), 3 * (-0.1 - 0.6))),
    ],
)
def test_gradients_by_hand(
    placement: str, target: str, ratio: str, baseline: str, weights: tuple[float, float]
) -> None:
    settings = KlConfig(estimator="k1", placement=placement, target=target, ratio=ratio, baseline=baseline)  # type: ignore[arg-type]
    logprobs = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]], dtype=torch.float64)
    ref = logprobs - torch.tensor([[0.2, -0.1], [0.4, 0.6]], dtype=torch.float64)
    behavior = logprobs - torch.tensor([[2.0, 3.0], [1.0, 1.0]], dtype=torch.float64).log()
    leaf = logprobs.requires_grad_()
    term = kl_terms(
        logprobs=leaf, ref_logprobs=ref, mask=torch.ones(2, 2), settings=settings, behavior=behavior, coef=10.0
    ).loss
    found = torch.autograd.grad(term.sum(), leaf)[0]
    assert found[0].tolist() == pytest.approx([10 * w for w in weights], rel=1e-12)
    # The value is coef * w * d whatever the placement.
    weight = {"none": (1, 1), "token": (2, 3), "sequence": (2, 6)}[ratio]
    assert term[0].tolist() == pytest.approx([10 * weight[0] * 0.2, 10 * weight[1] * -0.1], rel=1e-12)


def test_holes_are_no_actions() -> None:
    # Tokens 0 and 2 are actions, token 1 is a tool's output: returns 0.2 + 0.3 and 0.3; prefix products 2 and 2 * 3.
    logprobs = torch.zeros(1, 3, dtype=torch.float64)
    ref, behavior = -torch.tensor([[0.2, 9.0, 0.3]]).double(), -torch.tensor([[2.0, 50.0, 3.0]]).double().log()
    settings = KlConfig(estimator="k1", placement="reward", ratio="sequence", coef=1.0)
    found = gradient(logprobs, ref, behavior, torch.tensor([[1, 0, 1]]), settings)
    assert found[0].tolist() == pytest.approx([2 * 0.2 + 6 * 0.3, 0.0, 6 * 0.3], rel=1e-6)


def test_baseline_is_the_mean_of_the_others_of_the_group_at_the_same_action() -> None:
    # Row 1 is padded on the left; its first action belongs with the first actions of the others. Rows 0-2 are a group;
    # the third action exists in row 0 only, so it has no baseline; row 3 is alone.
    d = torch.tensor([[1.0, 2.0, 4.0], [99.0, 8.0, 16.0], [32.0, 99.0, 99.0], [64.0, 128.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 0]])
    settings = KlConfig(estimator="k1", placement="reward", target="token", baseline="leave_one_out", coef=1.0)
    zeros = torch.zeros_like(d)
    found = gradient(zeros, -d, zeros, mask, settings, groups=torch.tensor([7, 7, 7, 2]))
    want = [[1 - (8 + 32) / 2, 2 - 16, 4], [0, 8 - (1 + 32) / 2, 16 - 2], [32 - (1 + 8) / 2, 0, 0], [64, 128, 0]]
    assert found.tolist() == want


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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logprobs", "ref_logprobs", "behavior"])
def test_an_unmasked_value_that_is_not_finite_is_named(name: str, bad: float) -> None:
    tensors: dict[str, Any] = {key: torch.zeros(2, 3) for key in ("logprobs", "ref_logprobs", "behavior")}
    tensors[name][1, 2] = bad
    reason = {"ref_logprobs": "infinite"} if bad == -math.inf else {}
    with pytest.raises(NonFiniteLogprobError, match=rf"{name}\[1, 2\] .*{bad}.*{reason.get(name, '')}"):
        kl_terms(**tensors, mask=torch.ones(2, 3), settings=KlConfig(coef=1.0))


def test_wrong_arguments_are_named() -> None:
    x, mask, full = torch.zeros(2, 3), torch.ones(2, 3), KlConfig(coef=1.0, estimator="full")
    logits = torch.zeros(2, 3, 5), torch.zeros(2, 3, 5)
    for settings, rest, message in (
        (KlConfig(), {}, "mismatch.kl.coef is not set"),
        (KlConfig(), {"coef": math.nan}, "coef nan"),
        (KlConfig(coef=1.0, ratio="token"), {}, "ratio='token' needs behavior"),
        (full, {}, "'full' needs the logits"),
        (full, {"logits": logits, "baseline": x}, "no baseline"),
        (KlConfig(coef=1.0, baseline="none"), {"baseline": x}, "baseline='none'"),
    ):
        with pytest.raises(ConfigError, match=message):
            kl_terms(logprobs=x, ref_logprobs=x, mask=mask, settings=settings, **rest)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'k1' needs log-probabilities under the reference"):
        kl_terms(logprobs=x, ref_logprobs=None, mask=mask, settings=KlConfig(coef=1.0))
    for wrong, rest, message in (
        (mask[:, :2], {}, r"mask \[2, 2\]"),
        (mask / 2, {}, "other than 0 and 1"),
        (mask, {"groups": torch.zeros(3, dtype=torch.long)}, r"groups \[3\]"),
        (mask, {"baseline": torch.zeros(2, 2)}, r"baseline \[2, 2\]"),
    ):
        with pytest.raises(RecordError, match=message):
            kl_terms(logprobs=x, ref_logprobs=x, mask=wrong, settings=KlConfig(coef=1.0), **rest)  # type: ignore[arg-type]


def test_a_batch_without_a_token_is_all_zero() -> None:
    logprobs, ref, behavior, mask = draw(0)
    assert not gradient(logprobs, ref, behavior, torch.zeros_like(mask), KlConfig(estimator="k3", coef=1.0)).any()


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
@pytest.mark.parametrize("shape", [(2, 5), (4, 5), (3, 1)])
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


def test_half_the_coefficient_on_each_side_is_half_the_gradient() -> None:
    # A widespread summary of arXiv 2512.21852 has beta / 2 on each side; that is the gradient of half the KL.
    problem = Problem.random(3, 4, 0)
    truth = exact(problem, "KL(pi||ref)", "sequence")[1]
    settings = KlConfig(estimator="k3", placement="both", reward_path="rewards", coef=0.5)
    half = moments(problem, rewarded(settings, "returns", "none")).gradient
    torch.testing.assert_close(half, truth / 2, rtol=1e-9, atol=1e-12)
