"""The exact KL over the vocabulary: value, gradient, tiny and huge differences, masks, and the surrogate by enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mismatch_ext import kl as kl_module
from mismatch_ext.errors import NonFiniteLogprobError, RecordError
from mismatch_ext.kl import kl_full

pytestmark = pytest.mark.numeric


def naive(logits: Tensor, reference: Tensor) -> Tensor:
    """The definition, as a float64 oracle."""
    a, b = logits.double().log_softmax(-1), reference.double().log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


def pair(*shape: int, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator)
    return logits, logits + spread * torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("shape", [(5, 7), (2, 2, 3, 4)])
@pytest.mark.parametrize("chunk", [1, 100])
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


@pytest.mark.parametrize("spread", [1e-2, 1e-4])
def test_tiny_divergences_keep_their_digits_in_float32(spread: float) -> None:
    logits, reference = pair(16, 2000, spread=spread)
    oracle = naive(logits, reference)
    assert float((kl_full(logits=logits, ref_logits=reference) / oracle - 1).abs().max()) < 1e-3


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


@pytest.mark.parametrize("value", [math.nan])
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
