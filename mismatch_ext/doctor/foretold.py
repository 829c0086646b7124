"""What named causes predict for each token, and how much of the error their remedies removed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from mismatch_ext.doctor.noise import Noise
from mismatch_ext.doctor.sample import Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Foretold:
    """What named causes predict for each token; their remedies are compared with it.

    Args:
        error: Engine less oracle `[N]`.
        by: The error that each named cause predicts, by its key.
        noise: The errors that rounding alone makes.
    """

    error: Floats
    by: Mapping[str, Floats]
    noise: Noise

    def slope(self, keys: Collection[str], after: Floats) -> float:
        """Return the error that a remedy removed over the error that the causes predict: 1 if they are the cause."""
        predicted, taken = self._predicted(keys), self.error - after
        trust = self.noise.trust(taken - predicted)
        return float((trust * taken * predicted).sum() / max(float((trust * predicted**2).sum()), 1e-300))

    def stays(self, keys: Collection[str], after: Floats) -> float:
        """Return the error after a remedy over the error that the causes predict: 1 if the remedy removed nothing."""
        predicted = self._predicted(keys)
        trust = self.noise.trust(after - predicted)
        return float((trust * after * predicted).sum() / max(float((trust * predicted**2).sum()), 1e-300))

    def falls(self, keys: Collection[str], after: Floats) -> tuple[float, float]:
        """Return which part of the mean absolute error should disappear by the causes' prediction, and which part did."""
        before = max(float(np.abs(self.error).mean()), 1e-300)
        rest = float(np.abs(self.error - self._predicted(keys)).mean())
        return 1 - rest / before, 1 - float(np.abs(after).mean()) / before

    def _predicted(self, keys: Collection[str]) -> Floats:
        return np.asarray(np.sum([self.by[key] for key in keys], axis=0), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Mended:
    """The effect of the causes' remedies on the same tokens.

    Args:
        causes: Keys of the causes.
        predicted, measured: The part of the engine's error that should have disappeared, and the part that did.
        slope: Removed error over predicted error, fitted token by token.
        left: The error that is left, in units of the trainer's own rounding.
    """

    causes: tuple[str, ...]
    predicted: float
    measured: float
    slope: float
    left: float
