"""KL terms against a reference in loops, over random settings, shapes, dtypes, masks, groups and garbage under the mask."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import ESTIMATORS, KlConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import kl_baseline, kl_full, kl_terms
from tests.oracles.brute import kl as brute
from tests.oracles.kl.facts import PLAIN

pytestmark = pytest.mark.numeric

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 620))]


class Case:
    """Random settings and a random batch."""

    def __init__(self, seed: int, *, full: bool = False) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        pick = self.rng.choice
        self.asked = brute.Asked(
            estimator="full" if full else pick(list(ESTIMATORS)),
            placement=pick(["loss", "reward", "both"]),
            target=pick(["token", "sequence"]),
            ratio=pick(["none", "token", "sequence"]),
            baseline=pick(["none", "leave_one_out"]),
            coef=pick([1.0, 0.03]),
        )
        self.shape = pick([1, 2, 3, 6]), pick([1, 2, 5, 11])
        self.dtype = pick([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
        self.mask = torch.rand(self.shape, generator=self.generator) < pick([1.0, 0.7, 0.4])
        scale = pick([1e-5, 0.01, 0.3, 2.0])
        base = -torch.rand(self.shape, generator=self.generator, dtype=torch.float64) * 4
        self.logprobs = base.to(self.dtype)
        self.reference = (self.logprobs.double() + scale * self.noise(*self.shape)).to(self.dtype)
        self.behavior = (self.logprobs.double() + 0.3 * scale * self.noise(*self.shape)).to(self.dtype)
        self.groups = torch.randint(0, 3, self.shape[:1], generator=self.generator) if pick([True, False]) else None
        self.outer = self.noise(*self.shape)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def settings(self, **changed: str) -> KlConfig:
        return KlConfig(**{**vars(self.asked), **changed})

    def blotted(self, values: Tensor) -> Tensor:
        """Return the values with garbage under the mask."""
        garbage = self.rng.choice([0.0, math.nan, math.inf, -math.inf])
        return torch.where(self.mask, values, torch.tensor(garbage, dtype=values.dtype))

    def group_list(self) -> list[int]:
        return [0] * self.shape[0] if self.groups is None else self.groups.tolist()

    def expect(self, found: Tensor, leaf: Tensor, want: Tensor, exact_leaf: Tensor) -> None:
        """Compare the terms, and their gradients under random weights."""
        tolerance = 1e-10 if found.dtype == torch.float64 else 3e-6
        of_gradient = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}.get(leaf.dtype, tolerance)
        relative(found, want.detach(), tolerance)
        relative(gradient(found.double() * self.outer, leaf), gradient(want * self.outer, exact_leaf), of_gradient)
        assert not found[~self.mask].any() and not gradient(found.double() * self.outer, leaf)[~self.mask].any()


def gradient(weighed: Tensor, leaf: Tensor) -> Tensor:
    if not weighed.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(weighed.sum(), leaf, retain_graph=True, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else torch.nan_to_num(found)


def relative(found: Tensor, want: Tensor, tolerance: float, scale: float = 1.0) -> None:
    assert float(((found.detach().double() - want).abs() / (scale + want.abs())).max()) <= tolerance


def sampled(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leaf of the package, the float64 one of the reference, and the reference's estimates."""
    leaf, exact = case.blotted(case.logprobs).requires_grad_(), case.logprobs.double().requires_grad_()
    return leaf, exact, PLAIN[case.asked.estimator](exact - case.reference.double())


@pytest.mark.parametrize("seed", SEEDS)
def test_terms_of_a_loss(seed: int) -> None:
    case = Case(seed)
    leaf, exact, kl = sampled(case)
    mask = case.rng.choice([case.mask, case.mask.long(), case.mask.float()])
    behavior = case.blotted(case.behavior) if case.asked.ratio != "none" or seed % 3 == 0 else None
    terms = kl_terms(
        logprobs=leaf,
        ref_logprobs=case.blotted(case.reference),
        mask=mask,
        settings=case.settings(),
        behavior=behavior,
        groups=case.groups,
    )
    want = brute.loss_terms(case.asked, exact, kl, case.behavior.double(), case.mask, case.group_list())
    case.expect(terms.loss, leaf, want, exact)
    assert not terms.reward.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_terms_among_the_rewards(seed: int) -> None:
    case = Case(seed)
    if case.asked.placement == "loss":
        return  # nothing of it is a reward
    leaf, exact, kl = sampled(case)
    settings = case.settings(target="sequence", ratio="none", reward_path="rewards")
    terms = kl_terms(logprobs=leaf, ref_logprobs=case.blotted(case.reference), mask=case.mask, settings=settings)
    loss, reward = brute.reward_terms(case.asked, kl, case.mask)
    case.expect(terms.loss, leaf, loss, exact)
    relative(terms.reward, reward, 3e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_baseline_of_all_rows_serves_each_row(seed: int) -> None:
    case = Case(seed)
    asked = brute.Asked(**{**vars(case.asked), "placement": "both", "baseline": "leave_one_out"})
    settings = KlConfig(**vars(asked))
    leaf, exact, kl = sampled(case)
    reference, behavior = case.blotted(case.reference), case.blotted(case.behavior)
    baseline = kl_baseline(
        logprobs=leaf, ref_logprobs=reference, mask=case.mask, settings=settings, behavior=behavior, groups=case.groups
    )
    rows = [
        kl_terms(
            logprobs=leaf[row : row + 1],
            ref_logprobs=reference[row : row + 1],
            mask=case.mask[row : row + 1],
            settings=settings,
            behavior=behavior[row : row + 1],
            baseline=baseline[row : row + 1],
        ).loss
        for row in range(len(leaf))
    ]
    want = brute.loss_terms(asked, exact, kl, case.behavior.double(), case.mask, case.group_list())
    case.expect(torch.cat(rows), leaf, want, exact)


class Vocabulary:
    """Random logits of a policy and of a reference; an id may be impossible for the policy, or for both."""

    def __init__(self, case: Case) -> None:
        pick = case.rng.choice
        size, self.temperature = pick([2, 7, 30]), pick([1.0, 0.7, 2.0])
        self.dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
        self.distance = pick([1e-4, 0.1, 3.0])
        policy = case.noise(*case.shape, size) * pick([0.1, 2.0])
        reference = policy + self.distance * case.noise(*case.shape, size)
        if size > 2 and pick([True, False, False]):
            policy[..., 1] = -math.inf
            if pick([True, False]):
                reference[..., 1] = -math.inf
        self.reference = reference.to(self.dtype)
        self.leaf, self.exact = (
            policy.to(self.dtype).to(dtype, copy=True).requires_grad_() for dtype in (self.dtype, torch.float64)
        )
        self.kl = brute.divergence(self.exact, self.reference.double(), self.temperature)
        self.tolerance = 1e-7 if self.dtype == torch.float64 else 2e-3

    def expect_gradient(self, found: Tensor, want: Tensor, leaf: Tensor, exact: Tensor, floor: float) -> None:
        got, true = gradient(found, leaf).double(), gradient(want, exact)
        assert float((got - true).abs().max()) <= self.tolerance * (floor + float(true.abs().max()))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_exact_divergence(seed: int) -> None:
    case = Case(seed, full=True)
    logits = Vocabulary(case)
    found = kl_full(logits=logits.leaf, ref_logits=logits.reference, mask=case.mask, temperature=logits.temperature)
    want = torch.where(case.mask, logits.kl, 0.0)
    relative(found, want.detach(), 10 * logits.tolerance, scale=1e-4 * logits.distance**2 + 1e-6)
    logits.expect_gradient(found.double() * case.outer, want * case.outer, logits.leaf, logits.exact, floor=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_terms_of_the_exact_divergence(seed: int) -> None:
    case = Case(seed, full=True)
    if case.asked.placement == "reward" and case.asked.target == "token":
        with pytest.raises(ConfigError, match="no gradient"):
            case.settings()
        return
    logits = Vocabulary(case)
    first = (logits.exact / logits.temperature).log_softmax(-1).detach()[..., 0].to(logits.dtype)
    leaf, exact = (first.to(dtype, copy=True).requires_grad_() for dtype in (logits.dtype, torch.float64))
    behavior = (first.double() + 0.1 * case.noise(*case.shape)).to(logits.dtype)
    found = kl_terms(
        logprobs=leaf,
        ref_logprobs=None,
        mask=case.mask,
        settings=case.settings(),
        behavior=behavior,
        groups=case.groups,
        logits=(logits.leaf, logits.reference),
        temperature=logits.temperature,
    ).loss
    want = brute.loss_terms(case.asked, exact, logits.kl, behavior.double(), case.mask, case.group_list())
    relative(found, want.detach(), logits.tolerance, scale=1e-3)
    for ours, theirs in ((leaf, exact), (logits.leaf, logits.exact)):
        logits.expect_gradient(found.double() * case.outer, want * case.outer, ours, theirs, floor=1e-3)
