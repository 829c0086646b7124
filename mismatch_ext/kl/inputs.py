"""Shared parts of the masked KL functions: checks and importance ratios.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, RecordError
from mismatch_ext.kl.estimators import LARGEST_EXPONENT, require_estimator, require_float
from mismatch_ext.metrics.numerics import as_bool, output_dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Checked inputs in float64, exactly 0 at masked tokens.

    Args:
        mask: bool `[B, T]`.
        logprobs: With gradient, which is exactly 0 at masked tokens.
        ref_logprobs: Detached.
        behavior_logprobs: Detached, or None if the policy itself sampled.
        dtype: dtype of results.
    """

    mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    behavior_logprobs: Tensor | None
    dtype: torch.dtype

    def ratio(self, level: str) -> Tensor:
        """Return the detached weight of each token: 1, pi/mu, or the product of pi/mu up to and including the token.

        The exponent is cut at `LARGEST_EXPONENT`, so that a product with a KL estimate stays finite in float32.
        """
        if level == "none" or self.behavior_logprobs is None:
            return torch.ones_like(self.ref_logprobs)
        return self.log_ratio(level).clamp(max=LARGEST_EXPONENT).exp()

    def log_ratio(self, level: str) -> Tensor:
        """Return the logarithm of `ratio` before it is cut; needs `behavior_logprobs`."""
        assert self.behavior_logprobs is not None
        step = self.logprobs.detach() - self.behavior_logprobs
        return step.cumsum(-1) if level == "sequence" else step


def checked_tokens(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, behavior_logprobs: Tensor | None) -> Tokens:
    """Check shapes, dtypes and unmasked values, and set masked values to 0.

    Raises:
        RecordError: Shapes differ, a dtype is not floating point, or the mask holds values other than 0 and 1.
        NonFiniteLogprobError: An unmasked value is NaN or infinite; names tensor, row and position.
    """
    named = {"logprobs": logprobs, "ref_logprobs": ref_logprobs}
    if behavior_logprobs is not None:
        named["behavior_logprobs"] = behavior_logprobs
    shapes = {**named, "mask": mask}
    if len({tuple(tensor.shape) for tensor in shapes.values()}) != 1 or mask.dim() != 2:
        listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in shapes.items())
        raise RecordError(f"{listed}: all must have one shape [B, T].")
    for name, tensor in named.items():
        require_float(name, tensor)
    mask = as_bool("mask", mask)
    for name, tensor in named.items():
        require_finite(name, tensor.detach(), mask)
    blank = {
        # `where` comes before any arithmetic, so that NaN * 0 enters neither values nor gradients.
        name: torch.where(mask, tensor if name == "logprobs" else tensor.detach(), 0.0).double()
        for name, tensor in named.items()
    }
    return Tokens(
        mask=mask,
        logprobs=blank["logprobs"],
        ref_logprobs=blank["ref_logprobs"],
        behavior_logprobs=blank.get("behavior_logprobs"),
        dtype=output_dtype(*named.values()),
    )


def checked_coef(config: KlConfig, coef: float | None, behavior_logprobs: Tensor | None) -> float:
    """Check what a configuration needs, and return its coefficient.

    Raises:
        ConfigError: The estimator is not one for sampled tokens, there is no coefficient, or there is an importance ratio
            without `behavior_logprobs`.
    """
    require_estimator(config.estimator)
    if config.ratio != "none" and behavior_logprobs is None:
        raise ConfigError(
            f"mismatch.kl.ratio={config.ratio!r} needs behavior_logprobs, the log-probabilities under the policy that "
            "sampled; pass them, or set ratio='none' when the policy itself sampled."
        )
    chosen = config.coef if coef is None else coef
    if chosen is None:
        raise ConfigError("mismatch.kl.coef is not set; set it, or pass coef= (the host's own, or a controller's).")
    if not (math.isfinite(chosen) and chosen >= 0):
        raise ConfigError(f"coef {chosen!r} is not allowed; allowed: a finite number >= 0.")
    return chosen


def require_finite(name: str, values: Tensor, mask: Tensor) -> None:
    """Raise NonFiniteLogprobError, with the place and a likely cause, if an unmasked value is NaN or infinite."""
    broken = mask & ~torch.isfinite(values)
    if not broken.any():
        return
    row, position = (int(x) for x in broken.nonzero()[0])
    value = float(values[row, position])
    reasons = {
        "ref_logprobs": "The reference gives a sampled token no probability: the KL divergence is infinite.",
        "logprobs": "A token that was sampled cannot have probability 0 under the policy.",
        "behavior_logprobs": "A token cannot have been sampled with probability 0.",
    }
    broken_model = "An overflow in half precision or broken weights cause this."
    reason = reasons.get(name, broken_model) if value == -math.inf else broken_model
    raise NonFiniteLogprobError(
        f"{name}[{row}, {position}] (row, position) is {value}, and {int(broken.sum())} of {int(mask.sum())} unmasked "
        f"values are not finite. {reason} A position without a log-probability must be masked."
    )
