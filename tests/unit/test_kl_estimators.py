"""Elementwise KL estimates against 60-digit arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from typing import get_args, get_type_hints

import pytest
import torch

from mismatch_ext.config import ESTIMATORS, KlConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.kl import LARGEST_EXPONENT, _value_and_derivative, kl_estimate

pytestmark = pytest.mark.numeric

getcontext().prec = 60
SIZES = [1e-12, 1e-6, 9e-6, 1.1e-5, 1.0, 29.9]


def exact(d: float, estimator: str) -> tuple[Decimal, Decimal]:
    """Return value and derivative of an estimator to 60 digits."""
    x = Decimal(d)
    return {
        "k1": (x, Decimal(1)),
        "k2": (x * x / 2, x),
        "k3": ((-x).exp() - 1 + x, 1 - (-x).exp()),
        "abs": (abs(x), Decimal(1).copy_sign(x)),
    }[estimator]


def value_and_gradient(d: float, estimator: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an estimate and its gradient where logprobs - ref_logprobs is exactly d."""
    logprobs = torch.tensor([d], dtype=dtype, requires_grad=True)
    value = kl_estimate(logprobs=logprobs, ref_logprobs=torch.zeros(1, dtype=dtype), estimator=estimator)
    return value, torch.autograd.grad(value.sum(), logprobs)[0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sign", [1, -1])
def test_value_and_gradient_are_exact_at_every_scale(estimator: str, size: float, sign: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
        d = torch.tensor(sign * size, dtype=dtype).item()
        want_value, want_gradient = exact(d, estimator)
        value, gradient = value_and_gradient(d, estimator, dtype)
        assert value.dtype == dtype
        assert abs(Decimal(value.item()) / want_value - 1) < tolerance
        assert abs(Decimal(gradient.item()) / want_gradient - 1) < tolerance


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_huge_differences_stay_finite_with_a_gradient(estimator: str, dtype: torch.dtype) -> None:
    for d in (1e4, -1e4, 200.0, -200.0):
        value, gradient = value_and_gradient(d, estimator, dtype)
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.isfinite(value).all()
        assert gradient.abs().item() > 0.99
        if dtype != torch.float16:  # -1e13 is beyond float16: inf there is what a loss scaler looks for
            assert torch.isfinite(gradient).all()


def test_beyond_saturation_k3_is_its_tangent() -> None:
    # At x = -d: e^30 - 1 - 30 + (x - 30)(e^30 - 1). At d = -1e4 that is 1.0655e17, the documented 1.1e17.
    for d in (-30.5, -31.0, -1e4):
        value, gradient = value_and_gradient(d, "k3", torch.float64)
        slope = math.exp(LARGEST_EXPONENT) - 1
        assert value.item() == pytest.approx(slope - LARGEST_EXPONENT + (-d - LARGEST_EXPONENT) * slope, rel=1e-12)
        assert gradient.item() == pytest.approx(-slope, rel=1e-12)


def test_the_reference_is_a_constant() -> None:
    policy, ref = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    kl_estimate(logprobs=policy, ref_logprobs=ref, estimator="k2").sum().backward()
    assert ref.grad is None
    assert policy.grad is not None and policy.grad.tolist() == [-1.0, -1.0]


def test_non_finite_inputs_never_look_finite() -> None:
    bad = torch.tensor([math.nan, math.inf, -math.inf])
    for estimator in ESTIMATORS:
        assert not torch.isfinite(kl_estimate(logprobs=bad, ref_logprobs=torch.zeros(3), estimator=estimator)).any()
        assert not torch.isfinite(kl_estimate(logprobs=torch.zeros(3), ref_logprobs=bad, estimator=estimator)).any()


def test_wrong_arguments_are_named() -> None:
    x = torch.zeros(2)
    with pytest.raises(ConfigError, match=f"'nonsense' is not allowed; allowed: {', '.join(ESTIMATORS)}"):
        kl_estimate(logprobs=x, ref_logprobs=x, estimator="nonsense")
    with pytest.raises(RecordError, match=r"logprobs \[2\], ref_logprobs \[3\]"):
        kl_estimate(logprobs=x, ref_logprobs=torch.zeros(3), estimator="k1")


def test_the_section_takes_the_estimators_that_have_a_formula() -> None:
    assert {*ESTIMATORS, "full"} == {*get_args(get_type_hints(KlConfig)["estimator"])}
    with pytest.raises(ConfigError, match="estimator 'nonsense' has no formula"):
        _value_and_derivative(torch.zeros(1), "nonsense")
