"""What named causes predict of each token, and what their remedies took away."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from mismatch_ext.doctor.noise import Noise
from mismatch_ext.doctor.sample import Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Foretold:
    """What named causes say of each token, to hold their remedies against.

    Args:
        error: Engine less oracle `[N]`.
        by: The error that each named cause predicts, by its key.
        noise: What rounding alone makes of them.
    """

    error: Floats
    by: Mapping[str, Floats]
    noise: Noise

    def slope(self, keys: Collection[str], after: Floats) -> float:
        """Return what a remedy took from the error over what the causes predict, 1 where they are the cause."""
        predicted, taken = self._predicted(keys), self.error - after
        trust = self.noise.trust(taken - predicted)
        return float((trust * taken * predicted).sum() / max(float((trust * predicted**2).sum()), 1e-300))

    def stays(self, keys: Collection[str], after: Floats) -> float:
        """Return what an error is after a remedy over what the causes predict, 1 where the remedy takes nothing away."""
        predicted = self._predicted(keys)
        trust = self.noise.trust(after - predicted)
        return float((trust * after * predicted).sum() / max(float((trust * predicted**2).sum()), 1e-300))

    def falls(self, keys: Collection[str], after: Floats) -> tuple[float, float]:
        """Return the parts of the error's mean size that the causes predict to go, and that went."""
        before = max(float(np.abs(self.error).mean()), 1e-300)
        rest = float(np.abs(self.error - self._predicted(keys)).mean())
        return 1 - rest / before, 1 - float(np.abs(after).mean()) / before

    def _predicted(self, keys: Collection[str]) -> Floats:
        return np.asarray(np.sum([self.by[key] for key in keys], axis=0), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Mended:
    """What the remedies of causes did on the same tokens.

    Args:
        causes: Keys of the causes.
        predicted, measured: Parts of the engine's error that they said would go, and that went.
        slope: What went over what they predict, token by token.
        left: The error then, in units of the trainer's own arithmetic.
    """

    causes: tuple[str, ...]
    predicted: float
    measured: float
    slope: float
    left: float
