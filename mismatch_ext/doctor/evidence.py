"""What is known of an engine and a trainer on one sample: the gap in parts, causes that fit, and what later steps have tried.

The gap is engine less trainer, token by token. The oracle, the trainer's model in float32, stands between them: causes are fitted
to engine less oracle, and trainer less oracle is the trainer's own arithmetic.

Suffixes of shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from mismatch_ext.doctor.causes import Cause
from mismatch_ext.doctor.fits import (
    BEFORE_HEAT,
    FLOAT32_UNITS,
    LAST_PLACE,
    OTHER_HEAT,
    ROUNDING,
    Explained,
    Noise,
    Search,
)
from mismatch_ext.doctor.logits import Logits, LogitTable, of_logits, score_tokens, truncations
from mismatch_ext.doctor.sample import Floats, Integers, Sample
from mismatch_ext.doctor.tokens import TokensTest, judge_tokens
from mismatch_ext.errors import NonFiniteLogprobError
from mismatch_ext.weights import OUTPUT_HEAD

# With fewer tokens, intervals of shares are wider than half of the gap.
LEAST_TOKENS = 2_000
DRAWS = 400
# A fitted temperature counts as the one that was asked for if their ratio differs from 1 by less than this.
NEAR = 0.01
# Causes are named only if they explain at least this part of what is not rounding, of all tokens and of those that they move
# most: the next best would be wrong.
LEAST_PART = 0.5
# A side errs coarser than its dtype above this many units of the trainer's arithmetic in the engine's dtype.
COARSER = 2.0
# An error begins at a place only if at least so many tokens before it are rounding.
LEAST_BEFORE = 64
# Near-ties of a router may move this share of the tokens even in float32.
FEW = 0.05
# What differs by this many times rounding is something else: decode from prefill, or the largest hundredth of the tokens.
APART = 3.0
# Two parts cancel if one has this share of the gap or more, and others together have the rest with the other sign. Shares then
# say nothing: the gap is a small difference of large parts.
CANCELS = 1.5
# If a token is almost certain (spread below this), its log-probability says nothing about the logits.
TELLING = 1e-3

# Causes by which log-probabilities are reported at another temperature than the trainer's.
HEATS = (OTHER_HEAT, BEFORE_HEAT)

# Parts of the gap, besides the named causes.
ENGINES, ROUTES, TRAINERS, ATTENTION, LAYOUT, DECODED = (
    "engine's arithmetic", "routes", "trainer's arithmetic", "attention", "layout", "decode_path",
)  # fmt: skip
# An engine's differences from itself.
DECODE, SAMPLED_AGAIN = "decode against prefill", "as sampled against its score as a prompt"
ALONE = "one prompt at a time"
Cancels = Literal["", "reference", "rounding"]


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One side's log-probabilities of the same tokens, computed in two ways, in nats per token: this needs no list of causes."""

    side: str
    name: str
    mean: float
    largest: float
    tokens: int
    # Not a share of the gap, because rounding errors add in squares.
    of_gap: float | None = None
    # The mean when the same is done in float32, which has no visible rounding.
    float32: float | None = None
    changes_the_policy: bool = False

    @classmethod
    def of(
        cls, side: str, name: str, apart: Floats, float32: Floats | None = None, *, float32_error: float = 0.0
    ) -> Rung:
        """Measure differences of log-probabilities `[N]`, and the same differences in float32.

        `float32_error` is `Scores.float32_error`: differences in float32 beyond its multiple are no rounding.
        """
        exact = None if float32 is None else np.abs(float32)
        most = FLOAT32_UNITS * float32_error
        return cls(
            side=side, name=name, mean=float(np.abs(apart).mean()), largest=float(np.abs(apart).max()), tokens=len(apart),
            float32=None if exact is None else float(exact.mean()),
            changes_the_policy=exact is not None and bool(exact.mean() > most and (exact > most).mean() > FEW),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine:
    """How an engine differs from itself.

    `decode` is what it reported while sampling, less its score of the same tokens as a prompt, both without sampling settings. If
    the run's requests have such settings, it is of other tokens than the sample's, and `prefill`, the score of these, is None.
    """

    rungs: tuple[Rung, ...]
    decode: Floats
    prefill: Floats | None
    notes: tuple[str, ...] = ()

    @property
    def by_batches(self) -> float:
        """How far its scores move with the other requests of a batch, in nats per token."""
        return max((rung.mean for rung in self.rungs if rung.name == ALONE), default=0.0)

    def decodes_apart(self, noise: Noise | None = None) -> bool:
        """Whether its decode differs from its prefill by more than other batches and, if known, rounding explain."""
        most = APART * self.by_batches
        if noise is not None:
            most = max(most, APART * noise.mean, noise.exact)
        return float(np.abs(self.decode).mean()) > most


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The trainer side's scores of a sample's tokens, at the run's temperature; log-probabilities are `[N]`, in nats."""

    trainer: Floats  # as the run computes them
    own: Floats  # the trainer's arithmetic in the engine's dtype, under the engine's routes
    # The oracle's `[N, V]`, float32, before the temperature: the trainer's model in float32, with weights rounded to the
    # engine's dtype, under the engine's routes if they are known.
    logits: Tensor | Logits
    # What float32 itself errs on this model, in nats: the mean of |float32 - float64| over log-probabilities of the sample, and
    # at least a last place (`own_rounding`).
    float32_error: float
    headed: Floats | None = None  # `own` with a head in float32; None if that is the same
    native: Floats | None = None  # the oracle's under the trainer's own routes; None for a model without experts
    # Shares of (token, layer) at which the oracle's own router chooses other experts than the engine did, and than the same
    # model in the engine's dtype does; None if the engine's are not known.
    flips: tuple[float, float] | None = None
    # The layer in which the engine chose other experts for most tokens, and their share there.
    most_flips: tuple[int, float] | None = None
    straight: Floats | None = None  # `trainer` with right padding, which shifts no position; None if that is the same
    layout: str = ""  # how the run lays out its batches, in words; "" if it pads on the right
    # The trainer's pass with an attention that computes all of the model, and the same without its soft cap; None if the
    # trainer has that attention.
    attended: Floats | None = None
    capless: Floats | None = None
    attention: str = ""  # the trainer's attention implementation, where `attended` has another
    rungs: tuple[Rung, ...] = ()
    temperature: float = 1.0  # that the trainer divides logits by
    end_tokens: tuple[int, ...] = ()
    engine_dtype: str = ""  # that the side computes in, for remedies; "" if unknown
    trainer_dtype: str = ""
    trainer_head: str = ""  # dtype that the trainer's head computes in; "" if it is `trainer_dtype`
    exact: tuple[Floats, Floats] | None = None  # what `score` returns, if it is known

    def score(self, sample: Sample) -> tuple[Floats, Floats]:
        """Return the oracle's log-probabilities of a sample's tokens `[N]`, and `LogitTable.spread` `[N]`."""
        return score_tokens(sample, self.logits, self.temperature) if self.exact is None else self.exact


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the gap: mean size in nats per token, share of mean |Δlogp|, and that one's 90 % interval."""

    name: str
    mean: float
    share: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The token with the largest gap: where it is, engine less trainer in nats, and the parts of that gap, which add up to it."""

    response: int
    token: int
    gap: float
    parts: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block on the engine's input: |engine - trainer| over |trainer|, and `own` of its mere rounding, both a median or both a
    95th percentile over tokens, whichever stands out more."""

    layer: int
    kind: str
    error: float
    own: float

    @property
    def ratio(self) -> float:
        """The engine's error in units of rounding, at least float32's: about 1 if the block computes what the trainer's does."""
        return self.error / max(self.own, FLOAT32_UNITS * LAST_PLACE)

    @property
    def place(self) -> str:
        """Where the block is, in words."""
        return OUTPUT_HEAD if self.kind == OUTPUT_HEAD else f"layer {self.layer}, {self.kind}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Tried:
    """What the engine's error on the same tokens was once remedies were tried: in units of rounding, and per token `[N]`."""

    families: Collection[str]  # of the causes whose remedies were tried
    left: float
    after: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Later:
    """Errors of a few responses of the run's whole length, scored as prompts: both sides' sizes and the places, all `[N]`."""

    place: Integers
    engine: Floats
    rounding: Floats
    exact: float  # mean error up to which float32 explains it

    @classmethod
    def of(cls, sample: Sample, scores: Scores) -> Later:
        """Compare an engine's scores with the oracle's, and rounding with the same."""
        oracle, _ = scores.score(sample)
        engine, rounding = (np.abs(side - oracle) for side in (sample.engine, scores.own))
        return cls(place=sample.place, engine=engine, rounding=rounding, exact=FLOAT32_UNITS * scores.float32_error)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunPass:
    """What was tried on a run's own pass: its log-probabilities and a plain pass's `[N]`, and what else a pass may do."""

    computed: Floats
    plain: Floats
    tries: Mapping[str, tuple[str, Floats]] = field(
        default_factory=dict
    )  # remedy and log-probabilities, by what it is in words
    dropout: str = ""  # in words, if dropout moves a plain pass by as much as the run's own is off


@dataclass(frozen=True, kw_only=True)
class LoggedTrainer:
    """How far the scored trainer is from the one whose log-probabilities a log holds."""

    said: str
    far: float  # nats per token
    other: bool  # whether it is another trainer


@dataclass(kw_only=True, eq=False)
class Evidence:
    """What is known of both sides. `gather` fills the first part; later steps add to the second, and take nothing away."""

    sample: Sample
    scores: Scores
    engine: Engine | None
    oracle: Floats  # the oracle's log-probabilities [N]
    noise: Noise  # the rounding of the trainer's arithmetic in the engine's dtype
    reported: Noise  # the same at the temperature at which, by the causes that fit, the engine reports
    explained: Explained
    hints: tuple[str, ...]  # fits that are not sure enough to name a cause
    apart: Engine | None  # the engine, if its decode differs from its prefill where the causes leave more than rounding
    terms: Mapping[
        str, Floats
    ]  # parts of the gap [N], which add up to it, in the order of the path from engine to trainer
    parts: Mapping[str, Part]
    cancels: Cancels  # why parts that cancel have no shares
    tokens: TokensTest
    tried: tuple[str, ...]  # keys of all causes

    notes: list[str] = field(default_factory=list)
    engine_head: str | None = None  # dtype of the engine's head, read back
    distance: float | None = None  # `distance` of the engine's prefill
    remedies: list[Tried] = field(default_factory=list)
    prompt: tuple[float, Floats] | None = None  # `rescored` of the engine's score of the tokens as a prompt
    blocks: Sequence[Block] = ()
    later: Later | None = None
    longest: int = 0  # tokens of the longest response that the run allows; 0 if unknown
    run_pass: RunPass | None = None
    logged: LoggedTrainer | None = None
    # Engine's and trainer's value of each field of a model's configuration that differs, by path; None if they are not known.
    configs: Mapping[str, tuple[Any, Any]] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)  # duration of each of the doctor's rungs, by name

    @property
    def complete(self) -> bool:
        """Whether the causes that fit leave only rounding of the engine's error."""
        return self.reported.is_rounding(self.explained.rest)

    @property
    def left(self) -> float:
        """The engine's error that the causes leave, in units of rounding."""
        return self.reported.size(self.explained.rest)

    @property
    def trainer_ratio(self) -> float:
        """The trainer's error in units of rounding."""
        return self.noise.size(self.terms[TRAINERS])


def gather(
    sample: Sample,
    scores: Scores,
    causes: Sequence[Cause] = (),
    *,
    engine: Engine | None = None,
    asked: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda key: None,
) -> Evidence:
    """Fit causes to an engine's error and take the gap apart; raises NonFiniteLogprobError for the trainer's log-probabilities.

    `causes` each need a forward pass of a changed model; those that are functions of logits are always tried. `engine` is None
    if it cannot be asked. `asked` is the temperature that it was asked for, which decides if the tokens cannot. `seed` draws
    the bootstrap over responses. `progress` gets the key of each cause before it is tried.
    """
    _ensure_finite(sample, scores)
    rng = np.random.default_rng(seed)
    table = LogitTable.of(sample, scores.logits, scores.temperature)
    noise = Noise.of(scores.own - table.logprob, table.spread, scores.float32_error)
    listed = [*of_logits(table, scores.end_tokens), *causes]
    tokens = judge_tokens(table)

    def drawn_at(temperature: float) -> bool | None:
        drawn = tokens.drawn_at(temperature / scores.temperature)
        if drawn is None and asked is not None:
            return abs(asked / temperature - 1) < NEAR
        return drawn

    few = table.screened()

    def truncated(temperature: float, whole: bool) -> Sequence[Cause]:
        source = table if whole else few
        table_at = LogitTable.of(sample, source.logits, temperature, source.places, tail_alone=True)
        return truncations(table_at)

    search = Search(sample, table.logprob, noise, rng, drawn_at, progress)
    explained = search.explain(listed, sample.engine - table.logprob, truncated=truncated)
    apart = _apart(engine, explained, noise)
    prefill = None if apart is None else apart.prefill
    if prefill is not None:
        # The part that only the decode makes is measured, and the causes have to explain only the prefill.
        explained = search.explain(listed, prefill - table.logprob)
    explained, reported, hints = _strong(explained, sample, scores, noise)
    terms = _terms(sample, scores, table.logprob, explained, prefill)
    cancels, parts = without_cancelling(split(terms, sample.row, rng), terms, noise)
    return Evidence(
        sample=sample,
        scores=scores,
        engine=engine,
        oracle=table.logprob,
        noise=noise,
        reported=reported,
        explained=explained,
        hints=hints,
        apart=apart,
        terms=terms,
        parts={part.name: part for part in parts},
        cancels=cancels,
        tokens=tokens,
        tried=tuple(cause.key for cause in listed),
    )


def _apart(engine: Engine | None, explained: Explained, noise: Noise) -> Engine | None:
    """Return the engine if the causes leave more than rounding, and its decode differs from its prefill."""
    if engine is None or noise.is_rounding(explained.rest):
        return None
    return engine if engine.decodes_apart(noise) else None


def _strong(
    explained: Explained, sample: Sample, scores: Scores, noise: Noise
) -> tuple[Explained, Noise, tuple[str, ...]]:
    """Return the causes that explain enough to be named, the rounding of what the engine then reports, and hints at others."""
    if not explained.named:
        hints = [f"{fit.cause.sentence(fit.x)} (z {fit.z:.1f})" for fit in explained.fits if fit.hints]
        return explained, noise, tuple(hints)
    reported = _reported_noise(explained, sample, scores, noise)
    if noise.is_rounding(explained.rest) or reported.is_rounding(explained.rest):
        return explained, reported, ()
    if least_part(explained.error, explained.rest, noise.errors) >= LEAST_PART:
        return explained, reported, ()
    weak = [f"{fit.cause.sentence(fit.x)} (explains {fit.share:.0%})" for fit in explained.named]
    return replace(explained, named=(), rest=explained.error), noise, tuple(weak)


def _reported_noise(explained: Explained, sample: Sample, scores: Scores, noise: Noise) -> Noise:
    """Return the rounding of what the engine reports, at the temperature that the named causes say it is reported at."""
    heats = [fit.x for fit in explained.named if fit.cause.key in HEATS]
    if not heats:
        return noise
    return noise.heated(heats[0] / scores.temperature, score_tokens(sample, scores.logits, heats[0])[1])


def _terms(
    sample: Sample, scores: Scores, oracle: Floats, explained: Explained, prefill: Floats | None
) -> dict[str, Floats]:
    """Return the parts of the gap `[N]`, which add up to it."""
    straight = plain_pass(scores)
    attended = straight if scores.attended is None else scores.attended
    native = oracle if scores.native is None else scores.native
    terms: dict[str, Floats] = {}
    if prefill is not None:
        terms[DECODED] = sample.engine - prefill
    for fit in explained.named:
        terms[fit.cause.key] = fit.finite
    terms[ENGINES] = explained.rest
    if scores.native is not None:
        terms[ROUTES] = oracle - native
    terms[TRAINERS] = native - attended
    if scores.attended is not None:
        terms[ATTENTION] = attended - straight
    if scores.straight is not None:
        terms[LAYOUT] = straight - scores.trainer
    return terms


def plain_pass(scores: Scores) -> Floats:
    """Return the log-probabilities of the trainer's plain pass, which pads on the right."""
    return scores.trainer if scores.straight is None else scores.straight


def rescored(sample: Sample, scores: Scores) -> tuple[float, Floats]:
    """Return an engine's error on tokens that it scored again at temperature 1: in units of rounding, and per token `[N]`."""
    oracle, spread = scores.score(sample)
    error = sample.engine - oracle
    return Noise.of(scores.own - oracle, spread, scores.float32_error).size(error), error


def distance(sample: Sample, scores: Scores) -> float:
    """Return the median over tokens of how far an engine's logits are off, in nats, where both score prompts at temperature 1.

    When logits move by dz, log p moves by (onehot - p) . dz: an error over ||onehot - p|| is the size of dz along it.
    """
    oracle, spread = scores.score(sample)
    telling = spread > TELLING
    error = np.abs(sample.engine - oracle)
    return float(np.median(error[telling] / spread[telling])) if telling.any() else 0.0


def begins(place: Integers, error: Floats, rounding: float, exact: float = 0.0) -> int | None:
    """Return the place `[N]` in a response behind which an error `[N]` begins; None if at once.

    `rounding` is rounding's mean, and `exact` the mean error that is rounding in float32, both in nats per token.
    """
    order = np.argsort(place, kind="stable")
    sizes = np.abs(error)[order]
    before = np.cumsum(sizes) / np.arange(1, len(sizes) + 1)
    small = np.flatnonzero(before <= max(ROUNDING * rounding, exact))
    if not len(small) or small[-1] + 1 >= len(sizes) or small[-1] + 1 < LEAST_BEFORE:
        return None
    first = int(place[order][small[-1]]) + 1
    behind = float(np.abs(error[place >= first]).mean()) if (place >= first).any() else 0.0
    return first if behind > APART * max(rounding, exact) else None


def least_part(error: Floats, rest: Floats, own: Floats) -> float:
    """Return the part of an error that causes explain: of all tokens, or of those that they move most if that is less.

    `rest` is what they leave and `own` mere rounding, which does not count; all are `[N]`.
    """

    def part(at: Any) -> float:
        before, after, rounding = (float(np.abs(x[at]).mean()) ** 2 for x in (error, rest, own))
        # Independent errors add in squares.
        return 1 - max(0.0, after - rounding) / max(before - rounding, 1e-300)

    moved = np.abs(error - rest)
    order = np.argsort(-moved)
    half = order[: int(np.searchsorted(moved[order].cumsum(), moved.sum() / 2)) + 1]
    return min(part(slice(None)), part(half))


def split(terms: Mapping[str, Floats], row: Integers, rng: np.random.Generator) -> list[Part]:
    """Return what each term `[N]` contributes to the gap d = engine - trainer, their sum, with a bootstrap over responses.

    The term p of d gets sign(d) p of |d|. The shares add up to 1. They are attributions along one path, and one can be negative.
    """
    gap = np.sum(list(terms.values()), axis=0)
    count = int(row.max()) + 1
    draws = rng.integers(0, count, (DRAWS, count))
    totals = np.bincount(row, np.abs(gap), count)
    # Show shares only if there are enough tokens to tell the parts apart.
    shown = len(gap) >= LEAST_TOKENS and totals.sum() > 0
    parts = []
    for name, term in terms.items():
        sums = np.bincount(row, np.sign(gap) * term, count)
        low, high = np.quantile(sums[draws].sum(1) / np.maximum(totals[draws].sum(1), 1e-300), [0.05, 0.95])
        parts.append(
            Part(
                name=name,
                mean=float(np.abs(term).mean()),
                share=float(sums.sum() / totals.sum()) if shown else None,
                low=float(low) if shown else None,
                high=float(high) if shown else None,
            )
        )
    return parts


def without_cancelling(
    parts: list[Part], terms: Mapping[str, Floats], noise: Noise
) -> tuple[Literal["", "reference", "rounding"], list[Part]]:
    """Return the parts without shares if some cancel, and why they do: `Diagnosis.cancels`."""
    shares = {part.name: part.share for part in parts if part.share is not None}
    if max(shares.values(), default=0.0) <= CANCELS or min(shares.values()) >= 1 - CANCELS:
        return "", parts
    two = [max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)]
    beyond = all(noise.size(terms[name]) > COARSER and float(np.abs(terms[name]).mean()) > noise.exact for name in two)
    bare = [replace(part, share=None, low=None, high=None) for part in parts]
    return "reference" if beyond else "rounding", bare


def _ensure_finite(sample: Sample, scores: Scores) -> None:
    for side, values in (
        ("trainer's", scores.trainer),
        ("trainer's, padded on the right,", scores.straight),
        ("trainer's, in the engine's dtype,", scores.own),
        ("trainer's, with a head in float32,", scores.headed),
    ):
        if values is not None and not np.isfinite(values).all():
            wrong = np.flatnonzero(~np.isfinite(values))
            raise NonFiniteLogprobError(
                f"response {sample.row[wrong[0]]}, token {sample.place[wrong[0]]}: the log-probability that is the {side} is "
                f"{values[wrong[0]]}, {len(wrong)} of {len(values)} are not finite: that dtype overflows; `mismatch-ext "
                "readiness` says where."
            )
