"""Causes, and how well each of them predicts the engine's error, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mismatch_ext.doctor.noise import Noise
from mismatch_ext.doctor.rungs import FLOAT32
from mismatch_ext.doctor.sample import Floats, Sample

DRAWS = 400
# To be named, a cause needs this gain in likelihood (nats) and this z-score, on the responses that it was not fitted on.
LEAST_GAIN, LEAST_Z = 20.0, 5.0
# Below this z-score a cause is not even mentioned as a hint.
HINT_Z = 3.5
# Allowed range of the slope: the engine's error over the predicted error.
SLOPES = (0.8, 1.25)
LEAST_SHARE = 0.01
# Two causes are told apart only if the better one is better in this share of the bootstrap draws,
SURE = 0.975
# and if their predictions differ by at least this part of rounding, because fitted parameters are never exact.
ALIKE = 0.1
# A grid's best parameter is refined unless it is worse than no cause at all by this many nats per token.
NEARLY = 0.02
# Refinement goes on past its steps while it is worth this many nats over all fitted tokens, for at most so many more steps.
TOLD, MORE_STEPS = 1.0, 8
# Two causes with the same reported log-probabilities: the first draws other tokens, the second does not.
OTHER_HEAT, BEFORE_HEAT = "temperature", "raw_logprobs"
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Cause:
    """Something that an engine may do differently from the trainer.

    Args:
        key: A short name, by which its remedy is found.
        family: Causes of one family resemble each other: sampling, reporting, config, weights, cache, prompt or experts.
        said: A sentence; `{x}` stands for the parameter.
        predict: Maps a parameter to the log-probabilities `[N]` that the oracle would give with this cause; -inf for tokens that
            it makes impossible.
        grid: Parameters to try; they must be positive if they are refined.
        steps: Steps of refinement between the neighbours on the grid; more are made while the tokens tell the parameters apart. 0
            for parameters that are counts or indices of a list.
        neutral: The parameter at which nothing changes.
        decimals: Significant digits of the parameter in the sentence.
        names: If the parameter is an index, the texts that the sentence shows instead.
        screen: Like `predict`, but only for some of the fitted responses, with NaN for all other tokens; chooses the parameter
            when a prediction is expensive. None uses `predict`.
    """

    key: str
    family: str
    said: str
    predict: Callable[[float], Floats]
    grid: tuple[float, ...] = (1.0,)
    steps: int = 0
    neutral: float | None = None
    decimals: int = 3
    names: tuple[str, ...] = ()
    screen: Callable[[float], Floats] | None = None

    def sentence(self, x: float) -> str:
        """Return the sentence with a parameter."""
        return self.said.format(x=self.names[int(x)] if self.names else f"{x:.{self.decimals}g}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """How well one cause predicts the error.

    Args:
        cause: The cause.
        x: Its parameter.
        delta: The error that it predicts `[N]`; -inf where it makes a sampled token impossible.
        gain: Gain in log-likelihood, in nats, on the responses that it was not fitted on.
        z: The gain divided by its standard deviation over bootstrap draws of responses.
        slope, low, high: Error over predicted error, and its 95 % interval.
        share: Part of the mean absolute error that it explains, on the same responses.
        drawn: The gain in each draw of responses.
        ties: Keys of the causes that fit equally well.
    """

    cause: Cause
    x: float
    delta: Floats
    gain: float
    z: float
    slope: float
    low: float
    high: float
    share: float
    drawn: Floats
    ties: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the cause may be named."""
        return self.z >= LEAST_Z and self._near()

    @property
    def hints(self) -> bool:
        """Whether the cause may be mentioned as a hint."""
        return self.z >= HINT_Z and self._near()

    def _near(self) -> bool:
        return self.gain >= LEAST_GAIN and SLOPES[0] <= self.slope <= SLOPES[1] and self.share >= LEAST_SHARE

    @property
    def finite(self) -> Floats:
        """The predicted error `[N]`, 0 where it makes a sampled token impossible."""
        return np.where(np.isfinite(self.delta), self.delta, 0.0)


@dataclass
class Search:
    """Looks for the causes of an error.

    Args:
        sample: The tokens.
        oracle: Log-probabilities that the causes start from `[N]`.
        noise: The errors that rounding alone makes.
        rng: For the bootstrap over responses.
        drawn_at: Tells whether the tokens were drawn at a given temperature and not at the trainer's; returns None if unknown.
        progress: Called with the key of each cause before it is tried.
    """

    sample: Sample
    oracle: Floats
    noise: Noise
    rng: np.random.Generator
    drawn_at: Callable[[float], bool | None] = lambda temperature: None
    progress: Callable[[str], None] = lambda key: None
    _seen: dict[tuple[int, float], Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        judging = np.unique(self.sample.row[~self.sample.fits])
        self._draws = judging[self.rng.integers(0, len(judging), (DRAWS, len(judging)))]

    def select(self, causes: Sequence[Cause], error: Floats, most: int = 2) -> tuple[list[Fit], list[Fit], Floats]:
        """Return the causes that may be named, all fits to the whole error (best first), and the error that is left.

        Args:
            causes: The causes to try.
            error: Engine less oracle `[N]`.
            most: How many causes to name at most; each after the first is fitted to the error that is left.
        """
        named: list[Fit] = []
        first: list[Fit] = []
        for _ in range(most):
            fits = sorted((self.fit(cause, error) for cause in causes), key=lambda found: -found.gain)
            first = first or fits
            best = self._by_tokens(fits)
            # If even the best fit is not good enough, the true cause is not on the list, and naming the next best would be wrong.
            if best is None or not best.holds or any(best.cause.key == found.cause.key for found in named):
                break
            ties = tuple(
                # Causes of several checkpoints share one key.
                other.cause.key if other.cause.key != best.cause.key else other.cause.sentence(other.x)
                for other in fits
                if other is not best and self._as_good(other, best)
            )
            named.append(Fit(**{**vars(best), "ties": ties}))
            error = error - best.finite
            # In float32, the small error that a fitted parameter leaves would look like another cause.
            if float(np.abs(error).mean()) <= FLOAT32:
                break
        return named, first, error

    def _by_tokens(self, fits: Sequence[Fit]) -> Fit | None:
        """Return the best fit; if it ties with another of OTHER_HEAT and BEFORE_HEAT, the sampled tokens decide."""
        best = next(iter(fits), None)
        found = {fit.cause.key: fit for fit in fits if fit.holds and fit.cause.key in (OTHER_HEAT, BEFORE_HEAT)}
        if best is None or best.cause.key not in found or len(found) < 2:
            return best
        if not all(fit is best or self._as_good(fit, best) for fit in found.values()):
            return best
        drawn = self.drawn_at(found[OTHER_HEAT].x)
        return best if drawn is None else found[OTHER_HEAT if drawn else BEFORE_HEAT]

    def _as_good(self, other: Fit, best: Fit) -> bool:
        """Whether a fit cannot be told from the best: about as likely, or with predictions equal to a part of rounding."""
        if not other.hints:
            return False
        apart = other.finite - best.finite
        return float(np.mean(best.drawn > other.drawn)) < SURE or self.noise.ratio(apart) < ALIKE

    def fit(self, cause: Cause, error: Floats) -> Fit:
        """Fit one cause on half of the responses, and judge it on the others."""
        self.progress(cause.key)
        x = self._parameter(cause, error)
        # If no parameter helps on the fitted responses, do not compute a prediction for the judging ones.
        delta = self._delta(cause, cause.predict, x) if x is not None else np.zeros_like(error)
        x = cause.grid[0] if x is None else x
        judges = ~self.sample.fits
        rest = error - np.where(np.isfinite(delta), delta, 0.0)
        gains = self.noise.likelihood(np.where(np.isfinite(delta), rest, np.inf)) - self.noise.likelihood(error)
        count = int(self.sample.row.max()) + 1

        def summed(values: Floats) -> Floats:
            return np.bincount(self.sample.row[judges], values[judges], count).astype(np.float64)

        moved = np.where(np.isfinite(delta), delta, 0.0)
        gain = summed(gains)
        trust = self.noise.trust(rest)
        above, below = summed(trust * error * moved), summed(trust * moved**2)
        drawn = gain[self._draws].sum(1)
        slopes = above[self._draws].sum(1) / np.maximum(below[self._draws].sum(1), 1e-300)
        low, high = np.quantile(slopes, [0.025, 0.975])
        return Fit(
            cause=cause, x=x, delta=delta, gain=float(gain.sum()), z=float(gain.sum() / max(float(drawn.std()), 1e-9)),
            slope=float(above.sum() / max(float(below.sum()), 1e-300)), low=float(low), high=float(high),
            share=float(1 - np.abs(rest[judges]).sum() / max(float(np.abs(error[judges]).sum()), 1e-300)), drawn=drawn,
        )  # fmt: skip

    def _delta(self, cause: Cause, predict: Callable[[float], Floats], x: float) -> Floats:
        key = (id(predict), x)
        if key not in self._seen:
            self._seen[key] = predict(x) - self.oracle
        return self._seen[key]

    def _parameter(self, cause: Cause, error: Floats) -> float | None:
        """Return the likeliest parameter on the fitted responses: the best of the grid, then refined between its neighbours.

        Returns None if no parameter is better than no cause at all.
        """
        predict, losses = cause.screen or cause.predict, dict[float, float]()
        half = self.sample.fits & ~np.isnan(self._delta(cause, predict, cause.grid[0]))

        def loss(x: float) -> float:
            if x not in losses:
                delta = self._delta(cause, predict, x)
                rest = error - np.where(np.isfinite(delta), delta, 0.0)
                losses[x] = -float(self.noise.likelihood(np.where(np.isfinite(delta), rest, np.inf))[half].mean())
            return losses[x]

        best = min(cause.grid, key=loss)
        null = -float(self.noise.likelihood(error)[half].mean())
        if not cause.steps or losses[best] >= null + NEARLY:
            return best if losses[best] < null else None
        grid = sorted({*cause.grid, *([] if cause.neutral is None else [cause.neutral])})
        at = grid.index(best)
        low, high = math.log(grid[max(0, at - 1)]), math.log(grid[min(len(grid) - 1, at + 1)])
        tokens = int(half.sum())
        for step in range(cause.steps + MORE_STEPS):
            a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
            if step >= cause.steps and abs(loss(math.exp(a)) - loss(math.exp(b))) * tokens < TOLD:
                break
            if loss(math.exp(a)) < loss(math.exp(b)):
                high = b
            else:
                low = a
        best = min(losses, key=losses.__getitem__)
        return best if losses[best] < null else None
