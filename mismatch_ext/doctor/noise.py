"""How large a rounding error to expect at each token, and how likely it is that an error is only rounding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_ext.doctor.sample import Floats

# Nats: float32's own rounding of a log-probability.
FLOOR = 3e-7
# Median of |x| over the standard deviation of a normal distribution.
NORMAL = 0.6745
# Degrees of freedom of Student's t: rounding errors of a network have heavy tails.
FREEDOM = 2.0
# The engine's arithmetic may be somewhat worse than the trainer's.
ROOM = 1.2
# Log-likelihood of a sampled token that a cause makes impossible: near-ties cause a few of these.
IMPOSSIBLE = -30.0
# The tail begins at this quantile.
TAIL = 0.99


@dataclass(frozen=True, kw_only=True)
class Noise:
    r"""Rounding errors, whitened by how strongly each token's log-probability depends on its logits.

    When logits move by dz, log p moves by (onehot - p) . dz, so an error is about :math:`\sigma ||onehot - p||`.

    Args:
        weight: Divisor of each token's error `[N]`.
        scale: Robust standard deviation of the whitened errors of the trainer's own arithmetic in the engine's dtype.
        tail: The 99th percentile of their sizes, in units of `scale`.
        measured: Whether those errors lie above float32's own rounding.
    """

    weight: Floats
    scale: float
    tail: float
    measured: bool

    @classmethod
    def of(cls, own: Floats, spread: Floats) -> Noise:
        """Measure the noise on the trainer's own arithmetic.

        Args:
            own: The trainer's log-probabilities in the engine's dtype, less the oracle's `[N]`.
            spread: `LogitTable.spread` of the oracle `[N]`.
        """
        telling = spread > 1e-3
        sigma = float(np.median(np.abs(own[telling]) / spread[telling])) / NORMAL if telling.any() else 0.0
        weight = np.sqrt(spread**2 + (FLOOR / max(sigma, 1e-7)) ** 2)
        sizes = np.abs(own / weight)
        found = float(np.median(sizes)) / NORMAL
        scale = max(found, FLOOR)
        return cls(
            weight=weight,
            scale=scale,
            tail=max(float(np.quantile(sizes, TAIL)) / scale, 1.0),
            measured=found > FLOOR and sigma > 1e-6,
        )

    def ratio(self, errors: Floats) -> float:
        """Return the whitened median error over that of the trainer's own arithmetic: about 1 if it is only rounding."""
        return float(np.median(np.abs(errors / self.weight))) / NORMAL / self.scale

    def tail_ratio(self, errors: Floats) -> float:
        """Return the same ratio at the 99th percentile, which shows faults that hit few tokens."""
        return float(np.quantile(np.abs(errors / self.weight), TAIL)) / self.scale / self.tail

    def likelihood(self, errors: Floats) -> Floats:
        """Return the log-likelihood of each error as rounding, up to a constant `[N]`."""
        finite = np.isfinite(errors)
        x = np.where(finite, errors, 0.0) / self.weight / (ROOM * self.scale)
        return np.where(finite, -(FREEDOM + 1) / 2 * np.log1p(x * x / FREEDOM), IMPOSSIBLE)

    def trust(self, errors: Floats) -> Floats:
        """Return each token's weight in a slope `[N]`: smaller if its error is larger than rounding."""
        x = errors / self.weight / (ROOM * self.scale)
        return np.asarray(1 / (1 + x * x / FREEDOM) / self.weight**2)
