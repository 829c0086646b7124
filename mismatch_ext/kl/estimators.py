"""Elementwise estimators of the KL divergence between policy and reference, accurate for tiny and for huge log-ratios.

Shapes: any; all arguments of one call have the same shape.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.metrics.numerics import k3 as exact_k3
from mismatch_ext.metrics.numerics import output_dtype

ESTIMATORS = ("k1", "k2", "k3", "abs")
# Largest exponent in a loss. The square of e^30 = 1e13, summed over a million tokens, still fits a float32 gradient norm. A
# token that the policy samples exceeds it with a probability below 1e-13.
LARGEST_EXPONENT = 30.0


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return a KL estimate of each token, with its own path-wise gradient.

    With d = logprobs - ref_logprobs of a token sampled from the policy pi (Schulman 2020, "Approximating KL
    Divergence"; gradients: "A Comedy of Estimators", arXiv 2512.21852):

    | estimator | value              | gradient w.r.t. logprobs | mean of the value over pi                         |
    |-----------|--------------------|--------------------------|---------------------------------------------------|
    | k1        | d                  | 1                        | KL(pi||ref), exact                                |
    | k2        | d^2 / 2            | d                        | biased: KL + O(d^3)                               |
    | k3        | exp(-d) - 1 + d    | 1 - exp(-d)              | KL(pi||ref), exact if pi > 0 wherever ref > 0     |
    | abs       | abs(d)             | sign(d)                  | biased: at least KL, of order d where KL is d^2   |

    The gradient is that of the value only. The mean of the value has another gradient, because the sampled tokens
    depend on the policy: see `kl_surrogate`. docs/kl.md has the average of each estimator's own gradient, and its bias.

    Numerics: the difference and everything after it is float64. k3 is `expm1(-d) + d`, or its series where that cancels.
    Its relative error is below 1e-6 down to abs(d) = 1e-6 and less, where `exp(-d) - 1 + d` in float32 is 100 % wrong. For
    d < -30, k3 continues along its tangent at d = -30: the value stays finite in float32 (1.1e17 at d = -1e4) and keeps
    growing, and the gradient stays at 1 - e^30, never zero. verl clamps to +-10 instead, which biases the value and makes
    the gradient zero beyond. The gradient of a float16 `logprobs` is float16 and can still overflow.

    Args:
        logprobs: log pi of the sampled tokens, nats; any shape, any float dtype.
        ref_logprobs: log pi_ref of the same tokens, same shape. A constant: it gets no gradient.
        estimator: "k1", "k2", "k3" or "abs".

    Returns:
        The estimates in nats, same shape, float32, or float64 if an input is float64. NaN and infinity give a value that
        is not finite; functions that take a mask refuse them instead.

    Raises:
        ConfigError: Unknown estimator; for `full`, which needs logits, use `kl_full`.
        RecordError: Shapes differ, or an input is not floating point.
    """
    require_estimator(estimator)
    for name, tensor in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        require_float(name, tensor)
    if logprobs.shape != ref_logprobs.shape:
        raise RecordError(
            f"logprobs {list(logprobs.shape)}, ref_logprobs {list(ref_logprobs.shape)}: the two must have one shape."
        )
    estimate = estimate_from_log_ratio(logprobs.double() - ref_logprobs.detach().double(), estimator)
    return estimate.to(output_dtype(logprobs, ref_logprobs))


def estimate_from_log_ratio(log_ratio: Tensor, estimator: str) -> Tensor:
    """Return the estimate of each float64 log-ratio d, differentiable in d."""
    result: Tensor = _Estimate.apply(log_ratio, estimator)
    return result


def require_estimator(estimator: str) -> None:
    """Raise ConfigError unless the estimator is one of sampled tokens."""
    if estimator == "full":
        raise ConfigError(
            "estimator 'full' is exact over the vocabulary and needs logits; use mismatch_ext.kl.kl_full, or one of "
            f"{', '.join(ESTIMATORS)} for sampled tokens."
        )
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator {estimator!r} is not known; known: {', '.join(ESTIMATORS)} and full.")


def require_float(name: str, tensor: Tensor) -> None:
    """Raise RecordError unless the tensor is floating point."""
    if not tensor.is_floating_point():
        raise RecordError(f"{name} has dtype {tensor.dtype}; log-probabilities must be floating point.")


class _Estimate(torch.autograd.Function):
    """Value and derivative of an estimate, each in a form that does not cancel."""

    @staticmethod
    def forward(ctx: Any, log_ratio: Tensor, estimator: str) -> Tensor:
        value, derivative = _value_and_derivative(log_ratio, estimator)
        ctx.save_for_backward(derivative)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (derivative,) = ctx.saved_tensors
        return grad * derivative, None


def _value_and_derivative(d: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    if estimator == "k1":
        return d.clone(), torch.ones_like(d)
    if estimator == "k2":
        return 0.5 * d * d, d.clone()
    if estimator == "abs":
        return d.abs(), d.sign()
    cut = (-d).clamp(max=LARGEST_EXPONENT)
    beyond = (-d - LARGEST_EXPONENT).clamp(min=0)
    return exact_k3(cut) + beyond * math.expm1(LARGEST_EXPONENT), -torch.expm1(cut)
