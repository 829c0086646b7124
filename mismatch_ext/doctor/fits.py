"""How well each cause predicts an error, token by token: fitted on half of the responses, judged on the other half.

Suffixes of shapes: N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from mismatch_ext.doctor.causes import Cause
from mismatch_ext.doctor.sample import Floats, Sample

# Two float32 programs differ by up to so many times what one of them errs on this model: each of them errs (2), and kernels that
# add in another order err by some times more (4). `Scores.float32_error` is what one errs.
FLOAT32_UNITS = 8.0
# One unit in the last place of float32, as a share of the number.
LAST_PLACE = float(np.finfo(np.float32).eps)
# A token's spread below this is rounding of float64.
CERTAIN = 1e-8
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
# An error up to this size is rounding, in units of the trainer's own arithmetic, by its median and by its mean.
ROUNDING = 1.3

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
# Causes that act together with a temperature, whose parameters are fitted jointly with it.
TOGETHER = (OTHER_HEAT, "top_p", "top_k", "min_p")
GOLDEN = (math.sqrt(5) - 1) / 2


def own_rounding(measured: float, *values: Floats) -> float:
    """Return what a model errs in float32, in nats per token: what was measured, but at least one last place.

    Some models round nothing: a shallow one, or one whose sums come out exact. A log-probability that is written down and read
    again still loses a last place, at the size of the largest finite one of `values`, which are logits or log-probabilities.
    """
    largest = max(float(np.abs(part[np.isfinite(part)]).max(initial=0.0)) for part in values)
    return max(measured, LAST_PLACE * largest)


@dataclass(frozen=True, kw_only=True)
class Noise:
    r"""Rounding errors of the trainer's own arithmetic in the engine's dtype, whitened by how each token depends on its logits.

    When logits move by dz, log p moves by (onehot - p) . dz, so an error is about :math:`\sigma ||onehot - p||`.
    """

    weight: Floats  # divisor of each token's error [N]
    scale: float  # robust standard deviation of the whitened errors
    tail: float  # 99th percentile of their sizes, in units of `scale`
    mean: float  # mean size of the errors themselves, in nats
    float32_error: float  # mean size of the model's own rounding in float32, in nats
    measured: bool  # whether they lie above float32's own rounding
    errors: Floats  # they themselves, in nats [N]
    spread: Floats  # the oracle's `LogitTable.spread` [N]

    @classmethod
    def of(cls, errors: Floats, spread: Floats, float32_error: float) -> Noise:
        """Measure the trainer's own arithmetic.

        `errors` `[N]` are its errors in the engine's dtype, `spread` is the oracle's `LogitTable.spread`, and `float32_error` is
        `Scores.float32_error`: the oracle knows no log-probability better than that.
        """
        telling = spread > 1e-3
        sigma = float(np.median(np.abs(errors[telling]) / spread[telling])) / NORMAL if telling.any() else 0.0
        weight = np.sqrt(spread**2 + (float32_error / max(sigma, float32_error)) ** 2)
        sizes = np.abs(errors / weight)
        median = float(np.median(sizes)) / NORMAL
        scale = max(median, float32_error)
        return cls(
            weight=weight,
            scale=scale,
            tail=max(float(np.quantile(sizes, TAIL)) / scale, 1.0),
            mean=float(np.abs(errors).mean()),
            float32_error=float32_error,
            measured=min(median, sigma) > float32_error,
            errors=errors,
            spread=spread,
        )

    def heated(self, ratio: float, spread: Floats) -> Noise:
        """Return what these errors of logits are at `ratio` times the temperature, where the oracle's spread is this `[N]`."""
        errors = self.errors * spread / np.maximum(self.spread, CERTAIN) / ratio
        return Noise.of(errors, spread, self.float32_error / ratio)

    @property
    def exact(self) -> float:
        """The mean error up to which a side counts as rounding in float32, in nats per token."""
        return FLOAT32_UNITS * self.float32_error

    def ratio(self, errors: Floats) -> float:
        """Return the whitened median error over that of the trainer's own arithmetic: about 1 if it is only rounding."""
        return float(np.median(np.abs(errors / self.weight))) / NORMAL / self.scale

    def size(self, errors: Floats) -> float:
        """Return the larger of the ratios of medians and of means; a median does not see what hits under half of the tokens."""
        return max(self.ratio(errors), float(np.abs(errors).mean()) / max(self.mean, self.float32_error))

    def tail_ratio(self, errors: Floats) -> float:
        """Return the same ratio at the 99th percentile, which shows faults that hit few tokens."""
        return float(np.quantile(np.abs(errors / self.weight), TAIL)) / self.scale / self.tail

    def is_rounding(self, errors: Floats) -> bool:
        """Whether errors are only rounding, by their median and their mean."""
        return self.size(errors) <= ROUNDING or float(np.abs(errors).mean()) <= self.exact

    def likelihood(self, errors: Floats) -> Floats:
        """Return the log-likelihood of each error as rounding, up to a constant `[N]`."""
        finite = np.isfinite(errors)
        x = np.where(finite, errors, 0.0) / self.weight / (ROOM * self.scale)
        return np.where(finite, -(FREEDOM + 1) / 2 * np.log1p(x * x / FREEDOM), IMPOSSIBLE)

    def trust(self, errors: Floats) -> Floats:
        """Return each token's weight in a slope `[N]`: smaller if its error is larger than rounding."""
        x = errors / self.weight / (ROOM * self.scale)
        return np.asarray(1 / (1 + x * x / FREEDOM) / self.weight**2)

    def slope(self, errors: Floats, predicted: Floats) -> float:
        """Return errors over predicted errors `[N]`, fitted token by token."""
        trust = self.trust(errors - predicted)
        return float((trust * errors * predicted).sum() / max(float((trust * predicted**2).sum()), 1e-300))


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """How well one cause predicts the error; all but `x` and `delta` are of the responses that it was not fitted on."""

    cause: Cause
    x: float
    delta: Floats  # the error that it predicts [N]; -inf where it makes a sampled token impossible
    gain: float  # in log-likelihood, nats
    z: float  # the gain over its standard deviation in bootstrap draws of responses
    slope: float  # error over predicted error, with its 95 % interval
    low: float
    high: float
    share: float  # the part of the mean absolute error that it explains
    drawn: Floats  # the gain in each draw of responses
    ties: tuple[str, ...] = ()  # keys of the causes that fit equally well

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
        return _finite(self.delta)


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """An error, engine less oracle `[N]`; the fits of causes that may be named; and the error that these leave `[N]`."""

    error: Floats
    named: tuple[Fit, ...]  # each after the first is fitted to what the ones before it leave
    fits: tuple[Fit, ...]  # of all causes to the whole error, best first
    rest: Floats


@dataclass
class Search:
    """Looks for the causes of an error."""

    sample: Sample
    oracle: Floats  # log-probabilities that the causes start from [N]
    noise: Noise
    rng: np.random.Generator
    # Whether the tokens were drawn at this temperature and not at the trainer's; None if they cannot tell.
    drawn_at: Callable[[float], bool | None]
    progress: Callable[[str], None]
    _deltas: dict[tuple[Cause, bool, float], Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        judging = np.unique(self.sample.row[~self.sample.fits])
        self._draws = judging[self.rng.integers(0, len(judging), (DRAWS, len(judging)))]

    def explain(
        self,
        causes: Sequence[Cause],
        error: Floats,
        most: int = 2,
        truncated: Callable[[float, bool], Sequence[Cause]] | None = None,
    ) -> Explained:
        """Fit causes to an error `[N]`; `truncated` gives causes that cut off a tail at a temperature, to fit both jointly.

        Its second argument says whether they predict all tokens, or only those that choose parameters.
        """
        named: list[Fit] = []
        first: list[Fit] = []
        rest = error
        for _ in range(most):
            fits = sorted((self.fit(cause, rest) for cause in causes), key=lambda fit: -fit.gain)
            first = first or fits
            best = self._by_tokens(fits)
            # If even the best fit is not good enough, the true cause is not on the list, and naming the next best would be wrong.
            if best is None or not best.holds or any(best.cause.key == fit.cause.key for fit in named):
                break
            ties = tuple(
                # Causes of several checkpoints share one key.
                other.cause.key if other.cause.key != best.cause.key else other.cause.sentence(other.x)
                for other in fits
                if other is not best and self._as_good(other, best)
            )
            named.append(replace(best, ties=ties))
            rest = rest - best.finite
            # A temperature beside a truncation resembles another truncation alone.
            if truncated is not None and best.cause.key in TOGETHER and not (named[1:] or self.noise.is_rounding(rest)):
                heat = next(cause for cause in causes if cause.key == OTHER_HEAT)
                if pair := self._together(heat, truncated, error, best):
                    return Explained(
                        error=error, named=pair, fits=tuple(first), rest=error - pair[0].finite - pair[1].finite
                    )
            # In float32, the small error that a fitted parameter leaves would look like another cause.
            if float(np.abs(rest).mean()) <= self.noise.exact:
                break
        return Explained(error=error, named=tuple(named), fits=tuple(first), rest=rest)

    def _by_tokens(self, fits: Sequence[Fit]) -> Fit | None:
        """Return the best fit; if it ties with another of OTHER_HEAT and BEFORE_HEAT, the sampled tokens decide."""
        best = next(iter(fits), None)
        heats = {fit.cause.key: fit for fit in fits if fit.holds and fit.cause.key in (OTHER_HEAT, BEFORE_HEAT)}
        if best is None or best.cause.key not in heats or len(heats) < 2:
            return best
        if not all(fit is best or self._as_good(fit, best) for fit in heats.values()):
            return best
        drawn = self.drawn_at(heats[OTHER_HEAT].x)
        return best if drawn is None else heats[OTHER_HEAT if drawn else BEFORE_HEAT]

    def _as_good(self, other: Fit, best: Fit) -> bool:
        """Whether a fit cannot be told from the best: about as likely, or with predictions equal to a part of rounding."""
        if not other.hints:
            return False
        apart = other.finite - best.finite
        return float(np.mean(best.drawn > other.drawn)) < SURE or self.noise.ratio(apart) < ALIKE

    def fit(self, cause: Cause, error: Floats) -> Fit:
        """Fit one cause on half of the responses, and judge it on the others."""
        self.progress(cause.key)
        x, helps = self._parameter(cause, error)
        # If no parameter helps on the fitted responses, do not compute a prediction for the judging ones.
        delta = self._delta(cause, x) if helps else np.zeros_like(error)
        return self._judged(cause, x if helps else cause.grid[0], delta, error)

    def _judged(self, cause: Cause, x: float, delta: Floats, error: Floats) -> Fit:
        """Judge what a cause predicts `[N]` on the responses that it was not fitted on."""
        judges = ~self.sample.fits
        moved = _finite(delta)
        rest = error - moved
        gains = self.noise.likelihood(np.where(np.isfinite(delta), rest, np.inf)) - self.noise.likelihood(error)
        count = int(self.sample.row.max()) + 1

        def summed(values: Floats) -> Floats:
            return np.bincount(self.sample.row[judges], values[judges], count).astype(np.float64)

        gain = summed(gains)
        trust = self.noise.trust(rest)
        above, below = summed(trust * error * moved), summed(trust * moved**2)
        drawn = gain[self._draws].sum(1)
        slopes = above[self._draws].sum(1) / np.maximum(below[self._draws].sum(1), 1e-300)
        low, high = np.quantile(slopes, [0.025, 0.975])
        return Fit(
            cause=cause, x=x, delta=delta, gain=float(gain.sum()),
            z=float(gain.sum() / max(float(drawn.std()), 1e-9)), slope=float(above.sum() / max(float(below.sum()), 1e-300)),
            low=float(low), high=float(high), drawn=drawn,
            share=float(1 - np.abs(rest[judges]).sum() / max(float(np.abs(error[judges]).sum()), 1e-300)),
        )  # fmt: skip

    def _together(
        self, heat: Cause, truncated: Callable[[float, bool], Sequence[Cause]], error: Floats, alone: Fit
    ) -> tuple[Fit, Fit] | None:
        """Return the fits of a temperature and of a truncation that act together, if they explain more than one cause alone."""
        pairs: dict[tuple[str, float], tuple[float, float]] = {}  # by truncation and temperature: loss, parameter

        def rounded(x: float) -> float:
            return float(f"{x:.4g}")

        def tried(x: float, chosen: str = "") -> float:
            """Return the loss of a temperature with the best parameter of a truncation; of every truncation if none is chosen."""
            x = rounded(x)
            for cause in truncated(x, False) if (chosen, x) not in pairs else ():
                if chosen in ("", cause.key):
                    coarse = cause if chosen else replace(cause, steps=0)
                    cut, _ = self._parameter(coarse, error, anyway=True)
                    pairs[cause.key, x] = (self._loss(self._delta(coarse, cut), error), cut)
                    self._forget(coarse)
            return pairs[chosen, x][0] if chosen else 0.0

        # At a trainer's temperature of 0.8 the grid's 1.4 times is not 1.12 to the last bit.
        grid = sorted(map(rounded, heat.grid))
        for x in grid:
            tried(x)
        key, x = min(pairs, key=lambda pair: pairs[pair][0])
        at = grid.index(x)
        # The grid's own losses are of unrefined parameters.
        pairs.clear()
        tried(x, key)
        narrowed(partial(tried, chosen=key), grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)], heat.steps)
        key, x = min((pair for pair in pairs if pair[0] == key), key=lambda pair: pairs[pair][0])
        _, cut = pairs[key, x]
        cause = next(cause for cause in truncated(x, True) if cause.key == key)
        whole, warmed = self._delta(cause, cut), self._delta(heat, x)
        both = self._judged(cause, cut, whole, error)
        more = both.drawn - alone.drawn
        better = both.gain - alone.gain >= LEAST_GAIN and float(more.mean()) >= LEAST_Z * float(more.std())
        # Two truncations would fit in part, too. A lower temperature enlarges the rounding that is left.
        whole_error = self.noise.is_rounding((error - both.finite) / max(1.0, (heat.neutral or x) / x))
        if not (both.holds and better and whole_error):
            return None
        return (
            self._judged(heat, x, warmed, error - _finite(whole - warmed)),
            self._judged(cause, cut, whole - warmed, error - warmed),
        )

    def _loss(self, delta: Floats, error: Floats) -> float:
        """Return how unlikely an error is with a prediction, a mean over the fitted tokens that it is known of."""
        half = self.sample.fits & ~np.isnan(delta)
        rest = np.where(np.isfinite(delta), error - _finite(delta), np.inf)
        return -float(self.noise.likelihood(rest)[half].mean())

    def _delta(self, cause: Cause, x: float, *, screened: bool = False) -> Floats:
        """Return the error that a cause predicts `[N]`, from its `screen` if that is asked for."""
        predict = cause.screen if screened and cause.screen is not None else cause.predict
        key = (cause, predict is cause.screen, x)
        if key not in self._deltas:
            self._deltas[key] = predict(x) - self.oracle
        return self._deltas[key]

    def _forget(self, cause: Cause) -> None:
        """Drop what a cause predicts, and with it the table of a temperature that was only tried."""
        for key in [key for key in self._deltas if key[0] is cause]:
            del self._deltas[key]

    def _parameter(self, cause: Cause, error: Floats, *, anyway: bool = False) -> tuple[float, bool]:
        """Return the likeliest parameter on the fitted responses, refined if it helps or `anyway`, and whether it helps."""
        losses: dict[float, float] = {}

        def loss(x: float) -> float:
            if x not in losses:
                losses[x] = self._loss(self._delta(cause, x, screened=True), error)
            return losses[x]

        best = min(cause.grid, key=loss)
        half = self.sample.fits & ~np.isnan(self._delta(cause, best, screened=True))
        null = -float(self.noise.likelihood(error)[half].mean())
        if cause.steps and (anyway or losses[best] < null + NEARLY):
            grid = sorted({*cause.grid, *([] if cause.neutral is None else [cause.neutral])})
            at = grid.index(best)
            narrowed(loss, grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)], cause.steps, TOLD / int(half.sum()))
            best = min(losses, key=losses.__getitem__)
        return best, losses[best] < null


def narrowed(loss: Callable[[float], float], low: float, high: float, steps: int, told: float = math.inf) -> None:
    """Evaluate a loss by golden sections between two parameters; past the steps only while it differs by more than `told`."""
    first, last = math.log(low), math.log(high)
    for step in range(steps + MORE_STEPS):
        a, b = last - GOLDEN * (last - first), first + GOLDEN * (last - first)
        if step >= steps and abs(loss(math.exp(a)) - loss(math.exp(b))) < told:
            break
        if loss(math.exp(a)) < loss(math.exp(b)):
            last = b
        else:
            first = a


def _finite(delta: Floats) -> Floats:
    return np.where(np.isfinite(delta), delta, 0.0)
