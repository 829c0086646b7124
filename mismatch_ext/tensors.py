"""Checks of the log-probabilities and masks that enter: one shape, floating point, zeros and ones, finite where they count."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mismatch_ext.errors import NonFiniteLogprobError, RecordError

_CAUSES = {
    "ref_logprobs": "The reference gives a sampled token no probability: the KL divergence is infinite.",
    "logprobs": "A token that was sampled cannot have probability 0 under the policy.",
    "behavior": "A token cannot have been sampled with probability 0.",
}
"""What -inf means, by the name of the tensor that holds it."""


def checked_mask(name: str, mask: Tensor, shape: str = "[B, T]", **logprobs: Tensor) -> Tensor:
    """Return a mask as booleans; raise RecordError unless mask and log-probabilities are of one shape and fitting dtypes."""
    tensors = {**logprobs, name: mask}
    if len({x.shape for x in tensors.values()}) != 1 or mask.dim() != len(shape.split(",")):
        listed = ", ".join(f"{key} {list(x.shape)}" for key, x in tensors.items())
        raise RecordError(f"{listed}: all must have one shape {shape}.")
    expect_float(**logprobs)
    if mask.dtype == torch.bool:
        return mask
    chosen = mask != 0
    if not torch.equal(chosen.to(mask.dtype), mask):
        raise RecordError(f"{name} holds values other than 0 and 1; weights belong in the loss, not here.")
    return chosen


def expect_float(**logprobs: Tensor) -> None:
    """Raise RecordError if log-probabilities are not floating point."""
    for name, values in logprobs.items():
        if not values.is_floating_point():
            raise RecordError(f"{name} has dtype {values.dtype}; log-probabilities must be floating point.")


def expect_finite(mask: Tensor, **logprobs: Tensor) -> None:
    """Raise NonFiniteLogprobError if a value under the mask is NaN or infinite; names tensor, row and position."""
    broken = {name: mask & ~torch.isfinite(values) for name, values in logprobs.items()}
    if not bool(torch.stack([places.any() for places in broken.values()]).any()):  # one wait for the device
        return
    name, places = next((name, places) for name, places in broken.items() if bool(places.any()))
    row, position = places.nonzero()[0].tolist()
    value = float(logprobs[name][row, position])
    raise non_finite(name, row, position, value, int(places.sum()), int(mask.sum()))


def non_finite(name: str, row: int, position: int, value: float, broken: int, count: int) -> NonFiniteLogprobError:
    """Return the error for the first of the values that are not finite."""
    cause = _CAUSES.get(name) if value == -math.inf else None
    return NonFiniteLogprobError(
        f"{name}[{row}, {position}] (row, position) is {value}, and {broken} of {count} unmasked values are not finite. "
        f"{cause or 'An overflow in half precision or broken weights cause this.'} A position without a log-probability must be "
        "masked."
    )


def output_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if one of the tensors is, otherwise float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
