"""Simulated response lengths, to see when a surge detector fires on them.

Shapes: S steps, B responses per batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mismatch_ext.config import LrConfig
from mismatch_ext.lr import LrState, Measurement, lr_step

Array = NDArray[np.float64]
Curve = Callable[[np.random.Generator, int], Array]
"""Median response length per step `[S]`, from a generator and S."""


def flat(rng: np.random.Generator, steps: int) -> Array:
    """No trend."""
    return np.full(steps, 1000.0)


def wandering(rng: np.random.Generator, steps: int) -> Array:
    """No trend, but batches resemble their neighbours: log-length is AR(1) with coefficient 0.95 and standard deviation 0.15."""
    noise, log_level = rng.normal(size=steps) * 0.15, np.zeros(steps)
    for step in range(1, steps):
        log_level[step] = 0.95 * log_level[step - 1] + np.sqrt(1 - 0.95**2) * noise[step]
    return 1000.0 * np.exp(log_level)


def surging(rng: np.random.Generator, steps: int) -> Array:
    """From 1000 to 3500 tokens over steps 100 to 130, as in arXiv 2602.01826 (from 1000 to 3000-4000 at about 100)."""
    lengths: Array = np.interp(np.arange(steps), [100, 130], [1000.0, 3500.0])
    return lengths


def stepping(rng: np.random.Generator, steps: int) -> Array:
    """From 1000 to 3500 tokens at step 100."""
    return np.where(np.arange(steps) < 100, 1000.0, 3500.0)


def growing(rng: np.random.Generator, steps: int) -> Array:
    """From 1000 to 3000 tokens, evenly over all steps."""
    return np.linspace(1000.0, 3000.0, steps)


def spiking(rng: np.random.Generator, steps: int) -> Array:
    """One batch in 50 with six times the length, at least one after step 60."""
    spikes = rng.random(steps) < 0.02
    spikes[rng.integers(60, steps)] = True
    spikes &= ~np.roll(spikes, 1) & ~np.roll(spikes, 2)
    return np.where(spikes, 6000.0, 1000.0)


def saturating(rng: np.random.Generator, steps: int) -> Array:
    """A surge that starts near the length limit: from 4500 to 15750 tokens over steps 100 to 130."""
    return 4.5 * surging(rng, steps)


def measurements(
    level: Array, rng: np.random.Generator, *, responses: int = 64, spread: float = 0.7, limit: float = 8192.0
) -> list[Measurement]:
    """Return the measurement of a batch of responses per step: log-normal lengths around the level, cut off at the limit.

    Args:
        level: Median length per step `[S]`.
        rng: Source of randomness.
        responses: B.
        spread: Standard deviation of a response's log-length.
        limit: Length limit in tokens.
    """
    lengths = level[:, None] * np.exp(spread * rng.normal(size=(len(level), responses)))
    cut = lengths >= limit
    means, fractions = np.minimum(lengths, limit).mean(axis=1), cut.mean(axis=1)
    return [
        Measurement(step=step, value=float(mean), truncated=float(fraction))
        for step, (mean, fraction) in enumerate(zip(means, fractions, strict=True))
    ]


def first_surge(config: LrConfig, batches: list[Measurement]) -> tuple[int, int] | None:
    """Return the step of the surge and the step at which it was found; None if there is no surge."""
    state = LrState(trigger=config.trigger)
    for batch in batches:
        statistics = {config.trigger: batch.value, "truncated_fraction": batch.truncated}
        state, _ = lr_step(state, statistics, config, step=batch.step)
        if state.surge_step is not None:
            return state.surge_step, batch.step
    return None
