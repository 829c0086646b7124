"""The exact KL over the vocabulary: value, gradient, tiny and huge differences, masks, and the surrogate by enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mismatch_ext import kl as kl_module
from mismatch_ext.config import KlConfig
from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.kl import kl_full, kl_terms
from mismatch_ext.testing import Tree

pytestmark = pytest.mark.numeric


def naive(logits: Tensor, reference: Tensor) -> Tensor:
    """The definition, as a float64 oracle."""
    a, b = logits.double().log_softmax(-1), reference.double().log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


def pair(*shape: int, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator)
    return logits, logits + spread * torch.randn(*shape, generator=generator)


def test_two_tokens_by_hand() -> None:
    # pi = (1/2, 1/2), ref = (1/4, 3/4): KL = 1/2 log 2 + 1/2 log(2/3) = 1/2 log(4/3).
    kl = kl_full(logits=torch.zeros(1, 2), ref_logits=torch.tensor([[0.0, math.log(3)]]))
    assert kl.item() == pytest.approx(math.log(4 / 3) / 2, rel=1e-6)


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 11), (2, 2, 3, 4)])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_value_and_gradient_are_autograds(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], chunk: int) -> None:
    monkeypatch.setattr(kl_module, "CPU_CHUNK", chunk * shape[-1])
    logits, reference = (x.double() for x in pair(*shape))
    logits.requires_grad_()
    outer = torch.randn(shape[:-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for temperature in (1.0, 0.7):
        ours = kl_full(logits=logits, ref_logits=reference, temperature=temperature)
        theirs = naive(logits / temperature, reference / temperature)
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
        (a,), (b,) = (torch.autograd.grad((kl * outer).sum(), logits) for kl in (ours, theirs))
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-13)


def test_a_slice_of_a_batch_is_read_in_place() -> None:
    logits, reference = pair(2, 5, 9)
    whole = logits.clone().requires_grad_()
    kl = kl_full(logits=whole[:, :-1], ref_logits=reference[:, :-1])
    assert torch.allclose(kl.double(), naive(logits, reference)[:, :-1], rtol=1e-5)
    kl.sum().backward()
    assert whole.grad is not None and not whole.grad[:, -1].any() and whole.grad[:, :-1].any()


@pytest.mark.parametrize("spread", [1e-2, 1e-3, 1e-4])
def test_tiny_divergences_keep_their_digits_in_float32(spread: float) -> None:
    logits, reference = pair(16, 2000, spread=spread)
    oracle = naive(logits, reference)
    assert float((kl_full(logits=logits, ref_logits=reference) / oracle - 1).abs().max()) < 1e-3
    if spread == 1e-4:  # which the plain form in float32 does not: this is what is guarded against
        a, b = logits.log_softmax(-1), reference.log_softmax(-1)
        assert float(((a.exp() * (a - b)).sum(-1) / oracle - 1).abs().max()) > 0.1


def test_gradient_of_a_tiny_divergence() -> None:
    logits, reference = pair(4, 500, spread=1e-4)
    exact = logits.double().requires_grad_()
    (oracle,) = torch.autograd.grad(naive(exact, reference).sum(), exact)
    logits.requires_grad_()
    (ours,) = torch.autograd.grad(kl_full(logits=logits, ref_logits=reference).sum(), logits)
    assert float((ours.double() - oracle).norm() / oracle.norm()) < 5e-3


def test_far_apart_and_impossible_tokens() -> None:
    logits, reference = torch.zeros(1, 6), torch.zeros(1, 6)
    logits[:, 0], reference[:, 0] = -150.0, 5.0  # float32 has no number for pi of token 0, and ref gives it nearly all
    assert kl_full(logits=logits, ref_logits=reference).item() == pytest.approx(
        naive(logits, reference).item(), rel=1e-6
    )
    logits[:, 0] = -math.inf  # impossible under the policy alone: the limit of the same
    assert kl_full(logits=logits, ref_logits=reference).item() == pytest.approx(naive(logits[:, 1:], reference[:, 1:]).item()
        + math.log((5 + math.exp(5)) / 5), rel=1e-6)  # fmt: skip
    reference[:, 0] = -math.inf  # impossible under both, as a vocabulary's padding is
    assert kl_full(logits=logits, ref_logits=reference).item() == pytest.approx(0.0, abs=1e-7)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(kl_full(logits=logits, ref_logits=reference).sum(), logits)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_has_no_value_is_named(value: float) -> None:
    logits, reference = pair(2, 3, 5)
    logits[1, 2, 0] = value
    with pytest.raises(NonFiniteLogprobError, match=r"position \[1, 2\]"):
        kl_full(logits=logits, ref_logits=reference)
    logits, reference = pair(2, 3, 5)
    reference[0, 1, 4] = -math.inf
    with pytest.raises(NonFiniteLogprobError, match=r"position \[0, 1\].*none under the reference"):
        kl_full(logits=logits, ref_logits=reference)


def test_shapes_are_checked() -> None:
    logits, reference = pair(2, 3, 5)
    with pytest.raises(RecordError, match="one floating-point shape"):
        kl_full(logits=logits, ref_logits=reference[:, :2])
    with pytest.raises(RecordError, match="mask"):
        kl_full(logits=logits, ref_logits=reference, mask=torch.ones(3, 2))
    with pytest.raises(RecordError, match="temperature"):
        kl_full(logits=logits, ref_logits=reference, temperature=0.0)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10_000), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([1.0, 1e4])
)
def test_mask_dtype_and_range(seed: int, dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    clean, reference = ((scale * torch.randn(3, 4, 6, generator=generator)).to(dtype) for _ in range(2))
    mask = torch.rand(3, 4, generator=generator) < 0.6
    dirty = torch.where(mask[..., None], clean, torch.tensor(math.nan, dtype=dtype))
    results = []
    for logits in (clean.clone().requires_grad_(), dirty.clone().requires_grad_()):
        kl = kl_full(logits=logits, ref_logits=reference, mask=mask)
        assert kl.dtype == torch.float32 and not kl[~mask].any() and bool((kl >= 0).all())
        kl.sum().backward()
        assert logits.grad is not None and logits.grad.dtype == dtype and not logits.grad[~mask].any()
        results.append((kl, logits.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    oracle = naive(clean, reference)[mask]
    # float32 holds logits of a few 1e4, and their logsumexp, to 1e-3: so far off are probabilities where two logits are equal.
    rounding = 4 * scale * torch.finfo(torch.float32).eps
    assert torch.allclose(results[0][0][mask].double(), oracle, rtol=max(2e-4, rounding), atol=max(1e-4, scale * 1e-6))


# The surrogate, by exact enumeration of every response of a tabular policy.


class Case:
    """Random policy, reference and rollout policy over all responses, float64."""

    def __init__(self, vocab: int, horizon: int, seed: int) -> None:
        self.tree = Tree(vocab, horizon)
        generator = torch.Generator().manual_seed(seed)
        size = (self.tree.prefixes, vocab)
        self.policy = torch.randn(size, generator=generator, dtype=torch.float64)
        self.reference = self.policy + 0.7 * torch.randn(size, generator=generator, dtype=torch.float64)
        self.rollout = self.policy + 0.4 * torch.randn(size, generator=generator, dtype=torch.float64)
        self.policy.requires_grad_()

    def truth(self) -> Tensor:
        """The gradient of KL(pi||ref) of whole responses."""
        logprobs, reference = self.tree.logprobs(self.policy).sum(1), self.tree.logprobs(self.reference).sum(1)
        return torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), self.policy)[0]

    def token_truth(self, visits: Tensor) -> Tensor:
        """The gradient of sum_t KL(pi(.|prefix)||ref(.|prefix)) with the visits of a policy held fixed."""
        probability = self.tree.logprobs(visits).sum(1).exp().detach()
        kl = naive(self.policy, self.reference)[self.tree.states].sum(1)
        return torch.autograd.grad((probability * kl).sum(), self.policy)[0]

    def moments(self, config: KlConfig, off_policy: bool) -> tuple[Tensor, float]:
        """Expected gradient of the surrogate, and its spread over single responses."""
        sampler = self.rollout if off_policy else self.policy.detach()
        behavior = self.tree.logprobs(sampler)
        probability = behavior.sum(1).exp()
        logprobs = self.tree.logprobs(self.policy)
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        given_behavior = behavior if config.ratio != "none" else None
        if config.estimator == "full":
            states = self.tree.states
            logits = self.policy[states], self.reference[states]
            terms = kl_terms(
                logprobs=logprobs, ref_logprobs=None, mask=mask, settings=config, behavior=given_behavior, logits=logits
            ).loss
        else:
            reference = self.tree.logprobs(self.reference)
            terms = kl_terms(
                logprobs=logprobs, ref_logprobs=reference, mask=mask, settings=config, behavior=given_behavior
            ).loss
        rows = torch.stack([torch.autograd.grad(t, self.policy, retain_graph=True)[0] for t in terms.sum(1)])
        mean = (probability[:, None, None] * rows).sum(0)
        return mean, float((probability[:, None, None] * (rows - mean) ** 2).sum().sqrt())


def error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


FULL = {"estimator": "full", "baseline": "none", "coef": 1.0}


@pytest.mark.parametrize(("vocab", "horizon"), [(2, 1), (3, 1), (4, 1), (2, 5), (3, 3)])
@pytest.mark.parametrize("seed", [0, 1])
def test_surrogate_is_unbiased_where_it_says_so(vocab: int, horizon: int, seed: int) -> None:
    case = Case(vocab, horizon, seed)
    sequence = KlConfig(**FULL, placement="both", target="sequence", ratio="none")
    assert error(case.moments(sequence, False)[0], case.truth()) < 1e-9
    weighted = KlConfig(**FULL, placement="both", target="sequence", ratio="sequence")
    assert error(case.moments(weighted, True)[0], case.truth()) < 1e-9
    for placement in ("loss", "both"):
        token = KlConfig(**FULL, placement=placement, target="token", ratio="none")  # type: ignore[arg-type]
        assert error(case.moments(token, False)[0], case.token_truth(case.policy.detach())) < 1e-9
        assert error(case.moments(token, True)[0], case.token_truth(case.rollout)) < 1e-9
    if horizon > 1:
        for placement, ratio in (("loss", "none"), ("reward", "none"), ("both", "token")):
            biased = KlConfig(**FULL, placement=placement, target="sequence", ratio=ratio)  # type: ignore[arg-type]
            assert error(case.moments(biased, ratio == "token")[0], case.truth()) > 1e-2, (placement, ratio)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_spreads_less_than_the_sampled_estimators(seed: int) -> None:
    case = Case(3, 3, seed)
    for target in ("token", "sequence"):
        full = KlConfig(**FULL, placement="both", target=target)  # type: ignore[arg-type]
        spread = case.moments(full, False)[1]
        for estimator, placement in (("k1", "reward"), ("k3", "both")):
            config = KlConfig(estimator=estimator, placement=placement, target=target, baseline="none", coef=1.0)  # type: ignore[arg-type]
            assert spread < case.moments(config, False)[1], (target, estimator)


def test_leave_one_out_keeps_the_expectation() -> None:
    case = Case(2, 3, 0)
    logprobs, states = case.tree.logprobs(case.policy), case.tree.states
    probability = logprobs.detach().sum(1).exp()
    config = KlConfig(estimator="full", placement="both", target="sequence", baseline="leave_one_out", coef=1.0)
    total = torch.zeros_like(case.policy)
    count = len(states)
    for a in range(count):  # all pairs of two independent responses
        for b in range(count):
            rows = [a, b]
            mask = torch.ones(2, states.shape[1], dtype=torch.bool)
            logits = case.policy[states[rows]], case.reference[states[rows]]
            terms = kl_terms(logprobs=logprobs[rows], ref_logprobs=None, mask=mask, settings=config, logits=logits).loss
            (gradient,) = torch.autograd.grad(terms.sum() / 2, case.policy, retain_graph=True)
            total += probability[a] * probability[b] * gradient
    assert error(total, case.truth()) < 1e-9
