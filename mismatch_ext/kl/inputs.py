"""Shared parts of the masked KL functions: checks, importance ratios, and rows that hold several sequences.

Shapes: B rows, T tokens, S sequences (= B unless rows are packed), L longest sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_ext.config import KlConfig
from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, RecordError
from mismatch_ext.kl.estimators import LARGEST_EXPONENT, output_dtype, require_estimator, require_float
from mismatch_ext.metrics.numerics import as_bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """Checked inputs in float64, exactly 0 at masked tokens.

    Args:
        mask: bool `[B, T]`, or `[S, L]` once unpacked.
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
        ConfigError: A preset leaves the KL term to the host, the estimator is not one for sampled tokens, there is no
            coefficient, or there is an importance ratio without `behavior_logprobs`.
    """
    if config.preset is not None:
        raise ConfigError(
            f"mismatch.kl.preset={config.preset!r} leaves the KL term to the host; there is nothing to compute here."
        )
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """The place of each unmasked token of packed rows in a batch that has one sequence per row.

    Args:
        places: Index of each unmasked token in the flattened rows `[n]`.
        sequences: The token's sequence, in order of row and id `[n]`.
        positions: The token's number among the unmasked tokens of that sequence `[n]`.
        shape: (B, T).
    """

    places: Tensor
    sequences: Tensor
    positions: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, sequence_ids: Tensor, mask: Tensor) -> Packing:
        """Read the layout from the id of each token's sequence `[B, T]`; ids of masked tokens are not read."""
        if sequence_ids.shape != mask.shape or sequence_ids.is_floating_point():
            raise RecordError(
                f"sequence_ids {list(sequence_ids.shape)} of {sequence_ids.dtype}: an integer tensor of mask's shape "
                f"{list(mask.shape)} is needed."
            )
        places = mask.flatten().nonzero()[:, 0]
        keys = torch.stack([places // max(mask.shape[1], 1), sequence_ids.flatten()[places].long()], dim=1)
        sequences, counts = torch.unique(keys, dim=0, return_inverse=True, return_counts=True)[1:]
        order = torch.argsort(sequences, stable=True)
        starts = counts.cumsum(0) - counts
        positions = torch.empty_like(order)
        positions[order] = torch.arange(len(order), device=order.device) - starts[sequences[order]]
        return cls(places=places, sequences=sequences, positions=positions, shape=(mask.shape[0], mask.shape[1]))

    @property
    def count(self) -> int:
        """Number of sequences with an unmasked token."""
        return int(self.sequences.max()) + 1 if len(self.sequences) else 0

    def unpack(self, tokens: Tokens) -> Tokens:
        """Return the tokens with one sequence per row `[S, L]`."""
        behavior = tokens.behavior_logprobs
        return Tokens(
            mask=self.spread(tokens.mask),
            logprobs=self.spread(tokens.logprobs),
            ref_logprobs=self.spread(tokens.ref_logprobs),
            behavior_logprobs=None if behavior is None else self.spread(behavior),
            dtype=tokens.dtype,
        )

    def pack(self, values: Tensor) -> Tensor:
        """Return per-token values `[S, L]`, put back to their places in the packed rows; other places are 0."""
        flat = values.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_put((self.places,), values[self.sequences, self.positions]).view(self.shape)

    def spread(self, tensor: Tensor) -> Tensor:
        """Return per-token values of the packed rows `[B, T]` with one sequence per row `[S, L]`."""
        length = int(self.positions.max()) + 1 if len(self.positions) else 0
        return tensor.new_zeros(self.count, length).index_put(
            (self.sequences, self.positions), tensor.flatten()[self.places]
        )


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
