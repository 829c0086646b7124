"""Say why an engine and a trainer differ on one sample: split the gap, fit causes to it, and judge the error that they leave.

The gap is engine less trainer, token by token. The oracle, the trainer's model in float32, stands between them: causes are fitted
to engine less oracle, and trainer less oracle is the trainer's own arithmetic.

Suffixes of shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mismatch_ext.doctor.causes import HOSTS, Cause, Remedy, remedy
from mismatch_ext.doctor.fits import (
    BEFORE_HEAT,
    FLOAT32_UNITS,
    LAST_PLACE,
    OTHER_HEAT,
    ROUNDING,
    SLOPES,
    Explained,
    Fit,
    Noise,
    Search,
)
from mismatch_ext.doctor.logits import Logits, LogitTable, of_logits, score_tokens, truncations
from mismatch_ext.doctor.sample import Floats, Integers, Sample
from mismatch_ext.doctor.tokens import SURE, TokensTest, judge_ends, judge_start, judge_tokens
from mismatch_ext.errors import NonFiniteLogprobError
from mismatch_ext.gap import k3
from mismatch_ext.precision.dtypes import is_finer
from mismatch_ext.weights import OUTPUT_HEAD

SCHEMA = 1
# With fewer tokens, intervals of shares are wider than half of the gap; k3, which few tokens carry, needs more tokens.
LEAST_TOKENS, LEAST_TOKENS_K3 = 2_000, 30_000
DRAWS = 400
# In units of the trainer's arithmetic in the engine's dtype: an engine whose error is below `FINER` computes finer than its
# dtype, and a trainer whose error is above `COARSER` computes coarser than the engine.
FINER, COARSER = 0.6, 2.0
# A float32 head explains an error down to this factor below what such a head leaves; a smaller error has another reason.
HEADS = 1.5
# A fitted temperature counts as the one that was asked for if their ratio differs from 1 by less than this.
NEAR = 0.01
# A named cause that leaves something is confirmed if it predicted at least this part of what the remedy mends. A remedy resets
# all settings of a kind together, so that it also mends what another of them did. Sampling is fitted by exact formulas; a model
# of an engine's rounding, such as of fp8, is not exact.
MOST, MOST_SAMPLED = 0.75, 0.9
# Causes are named only if they explain at least this part of what is not rounding, of all tokens and of those that they move
# most: the next best would be wrong.
LEAST_PART = 0.5
# The trainer's error is rounding up to this size. On 14 clean runs (a dense model and one with experts; bfloat16, float16,
# float32; three seeds; temperatures 1 and 0.7) the trainer's was at most 1.22 and the engine's at most 1.14.
TRAINER_ROUNDING = 1.5
# Experts that differ are rounding up to so many times what rounding of this model flips, and up to this share in float32.
# On five clean runs (bfloat16, float16, float32) an engine flipped 0.8 to 1.2 times as many as rounding did.
FLIPS, FEW_FLIPS = 2.0, 0.002
# An error begins at a place only if at least so many tokens before it are rounding.
LEAST_BEFORE = 64
# A block stands out if the engine's error is this many times the error of the trainer's block in the engine's dtype. Sound blocks
# reach 2.0: a kernel may round more often than the trainer's, as vLLM's bfloat16 attention does on a CPU without AVX-512.
STANDS_OUT = 3.0
# Families of causes that do not act when the engine scores the same tokens as a prompt: that score alone is their remedy.
SAMPLED = ("sampling", "reporting", "prompt")
# Near-ties of a router may move this share of the tokens even in float32.
FEW = 0.05
# What differs by this many times rounding is something else: decode from prefill, or the largest hundredth of the tokens.
APART = 3.0
# Nats. The distance is 0.08 for the shipped models with weights rounded to 3 bits, 0.02 for 4 bits, and 0.56 or 0.72 when one
# shipped model is taken for the other, although both were trained on the same task.
ANOTHER = 0.25
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
REVERSED, ALONE = "prompts in reverse order", "one prompt at a time"
AFRESH = "decode against prefill, past the prefix cache"


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
    afresh: Floats | None = None
    """As `decode`, of tokens that were sampled past the prefix cache; None if that was not tried."""
    cached_prompts: int = 0
    """Number of prompts that the engine took from its prefix cache, in part or whole."""

    @property
    def by_batches(self) -> float:
        """How far its scores move with the other requests of a batch, in nats per token."""
        return max((rung.mean for rung in self.rungs if rung.name in (REVERSED, ALONE)), default=0.0)

    def decodes_apart(self, noise: Noise | None = None) -> bool:
        """Whether its decode differs from its prefill by more than other batches and, if known, rounding explain."""
        return float(np.abs(self.decode).mean()) > self._explained(noise)

    def has_stale_cache(self, noise: Noise) -> bool:
        """Whether its decode is its prefill's as soon as it passes the prefix cache by, for one that decodes apart."""
        return self.afresh is not None and float(np.abs(self.afresh).mean()) <= self._explained(noise)

    def _explained(self, noise: Noise | None) -> float:
        """Return what other batches and rounding explain, in nats per token."""
        if noise is None:
            return APART * self.by_batches
        return max(APART * max(noise.mean, self.by_batches), noise.exact)


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


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the gap: mean size in nats per token, shares of mean |Δlogp| and k3, and the 90 % interval of the former."""

    name: str
    mean: float
    share: float | None
    low: float | None
    high: float | None
    share_k3: float | None


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


@dataclass(frozen=True, kw_only=True)
class Mended:
    """What remedies did on the same tokens: the part of the error that should have disappeared, and the part that did."""

    causes: tuple[str, ...]
    predicted: float
    measured: float
    slope: float
    left: float


@dataclass(frozen=True, kw_only=True)
class NamedCause:
    """A cause that a report names; `key`, `family` and `said` are those of the `Cause`, with the parameter in the sentence."""

    key: str
    family: str
    said: str
    parameter: float
    # "partly" if something is left; "confirmed" if its remedy made the gap fall as predicted; "measured" if a side differs from
    # itself.
    status: Literal["fits", "partly", "confirmed", "measured"]
    share: float | None = None  # of the mean |Δlogp|; None for too few tokens
    z: float | None = None  # this, slope, low and high are None for a cause that was not fitted
    slope: float | None = None
    low: float | None = None
    high: float | None = None
    ties: tuple[str, ...] = ()  # keys of causes that fit equally well
    remedy: Remedy = Remedy()


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the doctor found."""

    tokens: int  # that were judged
    responses: int
    gap: dict[str, float]  # `logp_abs_diff_mean`, `k3_kl` and `logp_abs_diff_max` between engine and trainer
    parts: tuple[Part, ...]  # in the order of the path from engine to trainer
    # The engine's error in units of the trainer's own arithmetic: the larger of the ratios of medians and of means, and the
    # ratio of the largest hundredth.
    ratio: float
    tail_ratio: float
    trainer_ratio: float  # the trainer's error in the units of `ratio`
    measurable: bool  # whether rounding is larger than float32's own, so that the ratios mean something
    causes: tuple[NamedCause, ...]
    hints: tuple[str, ...]  # fits that are not sure enough to name a cause
    left: float  # `ratio` and `tail_ratio` of the error that the named causes leave
    left_tail: float
    unexplained: float  # mean size of the error that is neither named nor rounding, nats per token
    notes: tuple[str, ...]
    tokens_test: TokensTest
    verdict: str  # "clean", "explained", "partly", "unexplained" or "other_trainer"
    tried: tuple[str, ...]  # keys of all causes that were tried
    flips: tuple[float, float] | None = None  # `Scores.flips`
    most_flips: tuple[int, float] | None = None  # `Scores.most_flips`
    seen: int = 0  # tokens of the longest response that was judged
    longest: int = 0  # and of the longest that the run allows; 0 if unknown
    begins: int | None = None  # first token of a response from which on the error that is left lies; None if everywhere
    engine_dtype: str = ""
    trainer_dtype: str = ""
    mended: tuple[Mended, ...] = ()
    rungs: tuple[Rung, ...] = ()  # of each side
    largest: Largest | None = None
    blocks: tuple[Block, ...] = ()  # empty if that was not asked for, or not possible
    # Why parts that cancel have no shares: "reference" if they are beyond rounding, "rounding" if not, "" if none cancel.
    cancels: Literal["", "reference", "rounding"] = ""
    hosts: tuple[str, ...] = HOSTS  # whose lines to change are said
    seconds: Mapping[str, float] = field(default_factory=dict)  # duration of each of the doctor's rungs, by name
    # Predictions of the named causes, and the rounding by which they are judged; neither is in `data`.
    explained: Explained | None = field(default=None, repr=False, compare=False)
    noise: Noise | None = field(default=None, repr=False, compare=False)

    def exit_status(self, threshold: float) -> int:
        """Return 0 for a clean pair, 1 if at most `threshold` nats per token are unexplained, otherwise 3; 2 is an error."""
        if self.verdict == "clean":
            return 0
        if self.verdict == "other_trainer":
            return 3
        hidden = self.verdict == "unexplained" and self.unexplained == 0
        return 3 if self.verdict != "explained" and (hidden or self.unexplained > threshold) else 1

    def data(self) -> dict[str, Any]:
        """Return the diagnosis as JSON-able data."""
        data = {"schema": SCHEMA, **asdict(replace(self, explained=None, noise=None))}
        del data["explained"], data["noise"]
        data["tokens_test"]["finding"] = self.tokens_test.finding
        return data

    def for_hosts(self, hosts: tuple[str, ...]) -> Diagnosis:
        """Return the diagnosis with the lines to change of some hosts alone."""
        others = dict.fromkeys(set(HOSTS) - set(hosts), "")
        causes = tuple(replace(cause, remedy=replace(cause.remedy, **others)) for cause in self.causes)
        return replace(self, causes=causes, hosts=hosts)

    @property
    def mendable(self) -> tuple[NamedCause, ...]:
        """The causes that a remedy can confirm: those that predict the error of each token."""
        fitted = () if self.explained is None else [fit.cause.key for fit in self.explained.named]
        return tuple(cause for cause in self.causes if cause.key in fitted)

    def confirmed(self, families: Collection[str], left: float, after: Floats) -> Diagnosis:
        """Return the diagnosis after remedies of some families: the engine's error in units of rounding, and of each token `[N]`.

        A cause is confirmed if the error fell to the size of rounding, and fell token by token as the cause predicts. A cause
        that left something must also have predicted most of the fall, because the remedy of its family mends more than it.
        """
        keys = [cause.key for cause in self.mendable if cause.family in families]
        if self.explained is None or self.noise is None or not keys:
            return self
        error = self.explained.error
        prediction = sum((fit.finite for fit in self.explained.named if fit.cause.key in keys), np.zeros_like(error))
        gap, before = float(np.abs(after).mean()), max(float(np.abs(error).mean()), 1e-300)
        predicted, fell = 1 - float(np.abs(error - prediction).mean()) / before, 1 - gap / before
        slope = self.noise.slope(error - after, prediction)
        mended = left <= ROUNDING or gap <= self.noise.exact
        sure = mended and SLOPES[0] <= slope <= SLOPES[1]
        whole = (
            self.verdict != "partly" or predicted >= (MOST_SAMPLED if set(families) <= set(SAMPLED) else MOST) * fell
        )
        note = (
            f"after the remedy of {', '.join(keys)}: the engine's error is {gap:.1e} nats per token, {left:.2f} of rounding's; "
            f"it fell by {fell:.0%}, {predicted:.0%} were predicted (slope {slope:.2f})"
        )
        causes, parts, verdict, unexplained = self.causes, self.parts, self.verdict, self.unexplained
        hints, largest = self.hints, self.largest
        if not sure:
            note += "; that does not confirm it"
            # A remedy that leaves an error, or that did not do what was predicted, refutes "explained".
            causes = tuple(replace(cause, status="partly") if cause.key in keys else cause for cause in causes)
            verdict = "partly"
            unexplained = max(unexplained, gap - self.noise.mean if not mended else abs(fell - predicted) * before)
            # If an error like that of a temperature remains without sampling, which alone has one, the logits are scaled.
            if keys == ["temperature"] and SLOPES[0] <= self.noise.slope(after, prediction) <= SLOPES[1]:
                note += ": the engine's score of a prompt shows it too, and has no temperature"
                causes = tuple(_scaled_logits(cause) if cause.key in keys else cause for cause in self.causes)
                verdict, unexplained = self.verdict, self.unexplained
                parts = tuple(replace(part, name="logit_scale") if part.name in keys else part for part in parts)
                if largest is not None:
                    scaled = {"logit_scale" if name in keys else name: size for name, size in largest.parts.items()}
                    largest = replace(largest, parts=scaled)
            elif fell < LEAST_PART * predicted:
                # What was predicted did not happen, so that nothing of it stays a name.
                refuted = f"refuted: its remedy took {fell:.0%} of {predicted:.0%}"
                hints = (*(f"{cause.said} ({refuted})" for cause in causes if cause.key in keys), *hints)
                causes = tuple(cause for cause in causes if cause.key not in keys)
                verdict = "partly" if causes else "unexplained"
                parts = tuple(
                    replace(part, name=f"like {part.name}, which is refuted") if part.name in keys else part
                    for part in parts
                )
        elif not whole:
            note += "; the remedy mends more than the named cause: another setting of its kind differs too, or instead"
            unexplained = max(unexplained, (fell - predicted) * before)
        else:
            causes = tuple(replace(cause, status="confirmed") if cause.key in keys else cause for cause in causes)
            # Reports from before the sampling settings do not cut off a tail.
            if self.tokens_test.truncated is not None and {cause.family for cause in causes} == {"reporting"}:
                causes += (_by_tokens(self.tokens_test, 1.0),)
            # The remedy also removed what the fit left, for example routes that changed because of the fault.
            verdict, unexplained = ("explained", 0.0) if verdict == "partly" else (verdict, unexplained)
        return replace(
            self, causes=causes, parts=parts, hints=hints, largest=largest, notes=(*self.notes, note), verdict=verdict,
            unexplained=unexplained,
            mended=(*self.mended, Mended(causes=tuple(keys), predicted=predicted, measured=fell, slope=slope, left=left)),
        )  # fmt: skip


def diagnose(
    sample: Sample,
    scores: Scores,
    causes: Sequence[Cause] = (),
    *,
    engine: Engine | None = None,
    asked: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda key: None,
) -> Diagnosis:
    """Say why engine and trainer differ on a sample; raises NonFiniteLogprobError for the trainer's own log-probabilities.

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
        return drawn if drawn is not None or asked is None else abs(asked / temperature - 1) < NEAR

    few = table.screened()

    def truncated(temperature: float, whole: bool) -> Sequence[Cause]:
        source = table if whole else few
        return truncations(LogitTable.of(sample, source.logits, temperature, source.places, tail_alone=True))

    search = Search(sample, table.logprob, noise, rng, drawn_at, progress)
    explained = search.explain(listed, sample.engine - table.logprob, truncated=truncated)
    # If the causes leave more than rounding, and the engine's decode differs from its prefill, then the part that only the decode
    # makes is measured, and the causes have to explain only the prefill.
    apart = engine if engine and not noise.is_rounding(explained.rest) and engine.decodes_apart(noise) else None
    prefill = None if apart is None else apart.prefill
    if prefill is not None:
        explained = search.explain(listed, prefill - table.logprob)
    hints = [
        f"{fit.cause.sentence(fit.x)} (z {fit.z:.1f})" for fit in explained.fits if fit.hints and not explained.named
    ]
    if explained.named and not noise.is_rounding(explained.rest):
        part = least_part(explained.error, explained.rest, scores.own - table.logprob)
        if part < LEAST_PART and not _engines_noise(explained, sample, scores, noise).is_rounding(explained.rest):
            hints = [f"{fit.cause.sentence(fit.x)} (explains {fit.share:.0%})" for fit in explained.named]
            explained = replace(explained, named=(), rest=explained.error)

    straight = _straight(scores)
    attended = straight if scores.attended is None else scores.attended
    native = table.logprob if scores.native is None else scores.native
    terms = {} if prefill is None else {DECODED: sample.engine - prefill}
    terms |= {fit.cause.key: fit.finite for fit in explained.named} | {ENGINES: explained.rest}
    terms |= {} if scores.native is None else {ROUTES: table.logprob - native}
    terms |= {TRAINERS: native - attended} | ({} if scores.attended is None else {ATTENTION: attended - straight})
    terms |= {} if scores.straight is None else {LAYOUT: straight - scores.trainer}
    cancels, split_parts = without_cancelling(split(terms, sample.row, rng), terms, noise)
    parts = {part.name: part for part in split_parts}

    engines_noise = _engines_noise(explained, sample, scores, noise)
    complete = engines_noise.is_rounding(explained.rest)
    left, trainer_ratio = engines_noise.size(explained.rest), noise.size(terms[TRAINERS])
    named = [_by_fit(fit, parts[fit.cause.key], complete, scores.temperature) for fit in explained.named]
    # Only if the log-probabilities agree: otherwise the tokens come from another distribution in any case, whatever the cause.
    if not named and complete and apart is None and tokens.finding is not None:
        named = [_by_tokens(tokens, scores.temperature)]
    # Reports from before the sampling settings do not cut off a tail.
    elif named and complete and tokens.truncated is not None and {cause.family for cause in named} == {"reporting"}:
        named.append(_by_tokens(tokens, scores.temperature))
    # `noise.measured` does not count here: it is false for a float32 engine, where a half-precision trainer makes the whole gap.
    if trainer_ratio > COARSER and parts[TRAINERS].mean > noise.exact:
        named.append(_by_trainer(trainer_ratio, parts[TRAINERS], scores))
    if complete and not named and scores.headed is not None and noise.measured:
        engines, trainers, headed = (
            noise.ratio(errors) for errors in (explained.rest, terms[TRAINERS], scores.headed - table.logprob)
        )
        named += _by_head(sample, scores, engines, trainers, headed, parts)
    attention_drops = scores.attended is not None and noise.size(terms[ATTENTION]) > COARSER
    if attention_drops and parts[ATTENTION].mean > noise.exact:
        named.append(_by_attention(sample, scores, noise.size(terms[ATTENTION]), parts[ATTENTION]))
    if scores.straight is not None:
        named += _by_layout(scores, noise, terms[LAYOUT], parts[LAYOUT])
    # Behind an error of arithmetic, or of a named cause, a router sees other hidden states and chooses otherwise for that reason.
    plain = complete and all(fit.cause.family in ("sampling", "reporting") for fit in explained.named)
    if plain and scores.flips is not None and scores.flips[0] > max(FLIPS * scores.flips[1], FEW_FLIPS):
        named.append(_by_router(scores.flips, scores.most_flips, parts.get(ROUTES)))
    if apart is not None:
        by_engine = _by_cache if apart.has_stale_cache(noise) else _by_decode
        named.insert(0, by_engine(apart, parts.get(DECODED)))
    if late := judge_start(sample):
        sentence = f"the mask starts {late} token{'s'[: late > 1]} late in every response: it leaves out what the engine sampled"
        named.append(_measured("mask", "reporting", sentence, late, None))

    # If the tokens come from another distribution than both sides report, the pair is not clean, with or without a named cause.
    # Nor is it if the trainer errs more than rounding and that has no name.
    exact = (
        trainer_ratio <= TRAINER_ROUNDING
        or parts[TRAINERS].mean <= noise.exact
        or any(cause.family == "trainer" for cause in named)
    )
    # What hits one token in a hundred moves neither median nor mean; of few tokens a hundredth is a single one.
    rare = (
        not named
        and len(sample.row) >= LEAST_TOKENS
        and float(np.abs(explained.rest).mean()) > noise.exact
        and engines_noise.tail_ratio(explained.rest) > APART
    )
    sound = complete and exact and not rare and (bool(named) or abs(tokens.z) < SURE)
    missing = 0.0 if complete else max(0.0, float(np.abs(explained.rest).mean()) - engines_noise.mean)
    missing = missing if exact else max(missing, parts[TRAINERS].mean - noise.mean)
    # No note beside a named cause, because a change of the logits also changes the size of rounding errors.
    finer = not named and noise.measured and left < FINER and float(np.abs(explained.error).mean()) > noise.exact
    gap = sample.engine - scores.trainer
    mean_gap = float(np.abs(gap).mean())
    return Diagnosis(
        tokens=len(gap),
        responses=len(np.unique(sample.row)),
        gap={
            "logp_abs_diff_mean": mean_gap,
            "k3_kl": float(k3(torch.from_numpy(-gap)).mean()),
            "logp_abs_diff_max": float(np.abs(gap).max()),
        },
        parts=tuple(parts.values()),
        ratio=noise.size(explained.error),
        tail_ratio=noise.tail_ratio(explained.error),
        trainer_ratio=trainer_ratio,
        measurable=noise.measured,
        causes=tuple(named),
        hints=tuple(hints[:2]),
        left=left,
        left_tail=engines_noise.tail_ratio(explained.rest),
        unexplained=missing,
        notes=(
            *(
                (f"the engine errs {left:.2f} times as much as its dtype lets expect: it is finer than that",)
                if finer
                else ()
            ),
            *(
                (
                    f"the sides compute in different dtypes, the engine in {scores.engine_dtype} and the trainer in "
                    f"{scores.trainer_dtype}: the coarser one's rounding is in the gap",
                )
                if "" not in (scores.engine_dtype, scores.trainer_dtype) and scores.engine_dtype != scores.trainer_dtype
                else ()
            ),
            *judge_ends(sample, scores.end_tokens),
            *(() if engine is None else engine.notes),
        ),
        tokens_test=tokens,
        verdict=("explained" if named else "clean") if sound else ("partly" if named else "unexplained"),
        tried=tuple(cause.key for cause in listed),
        flips=scores.flips,
        most_flips=scores.most_flips,
        seen=int(sample.place.max()) + 1,
        begins=None if complete else begins(sample.place, explained.rest, noise.mean, noise.exact),
        engine_dtype=scores.engine_dtype,
        trainer_dtype=scores.trainer_dtype,
        rungs=tuple(
            replace(rung, of_gap=rung.mean / mean_gap if mean_gap else None)
            for rung in (*scores.rungs, *(() if engine is None else engine.rungs))
        ),
        largest=_largest(sample, terms),
        cancels=cancels,
        explained=explained if explained.named else None,
        noise=noise,
    )


def rescored(sample: Sample, scores: Scores) -> tuple[float, Floats]:
    """Return an engine's error on tokens that it scored again at temperature 1: in units of rounding, and per token `[N]`."""
    oracle, spread = score_tokens(sample, scores.logits, scores.temperature)
    error = sample.engine - oracle
    return Noise.of(scores.own - oracle, spread, scores.float32_error).size(error), error


def distance(sample: Sample, scores: Scores) -> float:
    """Return the median over tokens of how far an engine's logits are off, in nats, where both score prompts at temperature 1.

    When logits move by dz, log p moves by (onehot - p) . dz: an error over ||onehot - p|| is the size of dz along it.
    """
    oracle, spread = score_tokens(sample, scores.logits, scores.temperature)
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


def farther(diagnosis: Diagnosis, sample: Sample, scores: Scores, longest: int) -> Diagnosis:
    """Return the diagnosis after a few responses of the run's whole length, scored as prompts at temperature 1."""
    late = sample.place >= diagnosis.seen
    if diagnosis.verdict != "clean" or not late.any():
        return replace(diagnosis, longest=longest)
    oracle, _ = score_tokens(sample, scores.logits, scores.temperature)
    engine_error, rounding_error = (np.abs(side - oracle) for side in (sample.engine, scores.own))
    exact = FLOAT32_UNITS * scores.float32_error
    allowed = max(APART * float(rounding_error.mean()), exact)
    late_error = float(engine_error[late].mean())
    if late_error <= allowed:
        return replace(diagnosis, seen=int(sample.place.max()) + 1, longest=longest)
    first = begins(sample.place, engine_error, float(rounding_error.mean()), exact)
    note = f"{int(late.sum())} tokens beyond token {diagnosis.seen}: the engine errs {late_error:.1e} nats per token"
    return replace(
        diagnosis, verdict="unexplained", unexplained=late_error, notes=(*diagnosis.notes, note), longest=longest,
        begins=diagnosis.seen if first is None else first, seen=int(sample.place.max()) + 1,
    )  # fmt: skip


def with_blocks(diagnosis: Diagnosis, blocks: Sequence[Block]) -> Diagnosis:
    """Return the diagnosis with a comparison block by block; a block that stands out is no clean pair."""
    out = [block for block in blocks if block.ratio >= STANDS_OUT]
    verdict = "unexplained" if out and diagnosis.verdict == "clean" else diagnosis.verdict
    return replace(diagnosis, blocks=tuple(blocks), verdict=verdict)


def request_or_engine(diagnosis: Diagnosis, left: float, error: Floats) -> Diagnosis:
    """Return the diagnosis with which half of the engine's side differs, by its error on the same prompts `[N]`, nats."""
    exact = diagnosis.noise is not None and float(np.abs(error).mean()) <= diagnosis.noise.exact
    if left > ROUNDING and not exact:
        differs = "its weights, configuration or arithmetic differ, whatever is asked of it"
    elif exact or left**2 - 1 <= LEAST_PART * max(0.0, diagnosis.ratio**2 - 1):
        differs = "its weights, configuration and cache are sound, and prompts, sampling or what it reports differ"
    else:
        # Two errors of about the size of rounding do not say which half differs.
        return diagnosis
    note = f"where: scored as a prompt, the engine is at {left:.2f} of rounding's: {differs}"
    return replace(diagnosis, notes=(*diagnosis.notes, note))


def taken_apart(
    diagnosis: Diagnosis, computed: Floats, plain: Floats, tries: Mapping[str, tuple[str, Floats]]
) -> Diagnosis:
    """Return the diagnosis with what was tried on a run's own pass, where that pass differs beyond rounding.

    `computed` are its log-probabilities `[N]`, `plain` those of a plain pass; `tries` has the remedy and the log-probabilities of
    each thing that was done otherwise, by what it is in words.
    """
    at = next((number for number, cause in enumerate(diagnosis.causes) if cause.key == "layout"), None)
    if at is None:
        return diagnosis
    before = float(np.abs(computed - plain).mean())
    left = {what: float(np.abs(computed - tried).mean()) for what, (_, tried) in tries.items()}
    best = min(left, key=left.__getitem__, default=None)
    causes = list(diagnosis.causes)
    if best is not None and left[best] <= (1 - LEAST_PART) * before:
        by = f"{left[best]:.1e}, not by {before:.1e}"
        sentence = f"the run's own pass is one with {best}: against such a pass it differs by {by}"
        causes[at] = replace(causes[at], said=sentence, remedy=remedy(tries[best][0]))
        return replace(diagnosis, causes=tuple(causes))
    note = f"not shown in the run's own pass, by trying: {', '.join(left)}; masks, kernels and adapters were not tried"
    return replace(
        diagnosis, notes=(*diagnosis.notes, note), verdict="partly", unexplained=max(diagnosis.unexplained, before)
    )


def other_model(diagnosis: Diagnosis, far: float) -> Diagnosis:
    """Return the diagnosis; if `far`, the `distance` of the engine's prefill, says that it holds another model, with that cause.

    Rounding, even of weights to 4 bits, moves logits by a small part of a nat. A listed cause that explains everything takes
    precedence. One that fits in part does not, because some cause may fit in part when two models resemble each other.
    """
    if far < ANOTHER or diagnosis.verdict not in ("partly", "unexplained"):
        return diagnosis
    cause = NamedCause(
        key="other_model", family="weights", parameter=far, status="fits", remedy=remedy("other_model"),
        said=f"the engine does not hold this model: half of its logits are off by {far:.2g} nats or more",
    )  # fmt: skip
    dropped = [other.key for other in diagnosis.causes]
    parts = tuple(
        replace(part, name=f"{part.name}, which fits in part") if part.name in dropped else part
        for part in diagnosis.parts
    )
    return replace(diagnosis, causes=(cause,), parts=parts, verdict="explained", unexplained=0.0, explained=None)


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

    For a function f with f(0) = 0, the term p of d gets f(d) p / d of f(d); with f = |d| that is sign(d) p. The shares add up
    to 1. They are attributions along one path, and a share can be negative.
    """
    gap = np.sum(list(terms.values()), axis=0)
    curve = k3(torch.from_numpy(-gap)).numpy()
    per_unit = np.divide(curve, gap, out=np.zeros_like(gap), where=gap != 0)
    count = int(row.max()) + 1
    draws = rng.integers(0, count, (DRAWS, count))
    totals = np.bincount(row, np.abs(gap), count)
    # Show shares only if there are enough tokens to tell the parts apart.
    shown = len(gap) >= LEAST_TOKENS and totals.sum() > 0
    shown_k3 = len(gap) >= LEAST_TOKENS_K3 and curve.sum() > 0
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
                share_k3=float((per_unit * term).sum() / curve.sum()) if shown_k3 else None,
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
    bare = [replace(part, share=None, low=None, high=None, share_k3=None) for part in parts]
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


def _largest(sample: Sample, terms: Mapping[str, Floats]) -> Largest:
    gap = np.sum(list(terms.values()), axis=0)
    at = int(np.abs(gap).argmax())
    return Largest(
        response=int(sample.row[at]), token=int(sample.place[at]), gap=float(gap[at]),
        parts={name: float(term[at]) for name, term in terms.items()},
    )  # fmt: skip


def _engines_noise(explained: Explained, sample: Sample, scores: Scores, noise: Noise) -> Noise:
    """Return the rounding of what the engine reports, at the temperature that the named causes say it is reported at."""
    heats = [fit.x for fit in explained.named if fit.cause.key in HEATS]
    if not heats:
        return noise
    return noise.heated(heats[0] / scores.temperature, score_tokens(sample, scores.logits, heats[0])[1])


def _by_fit(fit: Fit, part: Part, complete: bool, temperature: float) -> NamedCause:
    """Return the cause of a fit; the status is "fits" if the causes are complete, else "partly"."""
    return NamedCause(
        key=fit.cause.key, family=fit.cause.family, said=fit.cause.sentence(fit.x), parameter=fit.x,
        status="fits" if complete else "partly", share=part.share, z=fit.z, slope=fit.slope, low=fit.low, high=fit.high,
        ties=fit.ties, remedy=remedy(fit.cause.remedy or fit.cause.key, temperature),
    )  # fmt: skip


def _by_tokens(test: TokensTest, temperature: float) -> NamedCause:
    """Return the cause that only the tokens show: the engine reports log-probabilities from before its sampling settings."""
    assert test.finding is not None
    key, value, sentence = test.finding
    heat = key == "temperature"
    return NamedCause(
        key=key, family="sampling", said=f"{sentence}, and the log-probabilities are from before that",
        parameter=value * temperature if heat else value, status="fits", z=abs(test.z),
        ties=("raw_logprobs", *(() if heat else test.alike)), remedy=remedy(key, temperature),
    )  # fmt: skip


def _by_trainer(ratio: float, part: Part, scores: Scores) -> NamedCause:
    """Return the cause that the trainer's own error shows; it was measured, not fitted."""
    if is_finer(scores.trainer_dtype, scores.engine_dtype):
        # In a plain pass its error is then what rounding its weights to the engine's dtype does.
        sentence = (
            f"the trainer computes with weights that are finer than the engine's grid: rounding them to {scores.engine_dtype} "
            f"moves log-probabilities by {part.mean:.1e} nats per token, {ratio:.1f} times what its arithmetic does. Updates "
            "below the grid do not reach the engine (mismatch/engine_moved_frac)"
        )
        return _measured("engine_grid", "trainer", sentence, ratio, part)
    return NamedCause(
        key="trainer_dtype", family="trainer", parameter=ratio, status="fits", share=part.share,
        said=f"the trainer errs {ratio:.1f} times as much as the engine's dtype would: coarser dtype, other padding or positions",
        remedy=remedy("dtype", engine_dtype=scores.engine_dtype, trainer_dtype=scores.trainer_dtype),
    )  # fmt: skip


def _by_layout(scores: Scores, noise: Noise, term: Floats, part: Part) -> list[NamedCause]:
    """Return the cause that the trainer's batch layout shows, if the layout does more than change the rounding."""
    changed = [rung for rung in scores.rungs if rung.name == scores.layout and rung.changes_the_policy]
    ratio = noise.size(term)
    if not changed and (ratio <= COARSER or part.mean <= noise.exact):
        return []
    moves = f"moves the trainer's log-probabilities by {part.mean:.1e} nats per token"
    sentence = f"{scores.layout} {moves}, {ratio:.1f} of rounding's"
    if changed:
        sentence += f", and by {changed[0].float32:.1e} in float32: to the model other positions, or another context"
    # A remedy only for a layout that was tried; of a run's own pass it is not known what differs in it.
    name = next(
        (name for word, name in (("packed", "packed"), ("padded on the left", "layout")) if word in scores.layout), ""
    )
    return [replace(_measured("layout", "trainer", sentence, ratio, part), remedy=remedy(name))]


def _straight(scores: Scores) -> Floats:
    """Return the log-probabilities of the trainer's plain pass, which pads on the right."""
    return scores.trainer if scores.straight is None else scores.straight


def judge_attention(sample: Sample, scores: Scores) -> tuple[str, bool]:
    """Say what the trainer's attention leaves out, and tell whether a pass with all of it is nearer to the engine."""
    assert scores.attended is not None
    straight = _straight(scores)
    moved = float(np.abs(scores.attended - straight).mean())
    before = float(np.abs(sample.engine - straight).mean())
    after = float(np.abs(sample.engine - scores.attended).mean())
    what = "computes otherwise than eager"
    # It computes as eager does once the cap is taken out there, too.
    if scores.capless is not None and float(np.abs(scores.capless - straight).mean()) < moved / 2:
        what = "has no soft cap"
    sentence = (
        f"the trainer's attention ({scores.attention}) {what}: with eager the gap is {after:.1e} nats per token, "
        f"not {before:.1e}"
    )
    return sentence, after <= (1 - LEAST_PART) * before


def _by_attention(sample: Sample, scores: Scores, ratio: float, part: Part) -> NamedCause:
    """Return the cause that the trainer's attention shows, with a remedy if that brought the sides nearer."""
    sentence, helps = judge_attention(sample, scores)
    cause = _measured("attention", "trainer", sentence, ratio, part)
    return replace(cause, remedy=remedy("attention" if helps else ""))


def _by_head(
    sample: Sample, scores: Scores, left: float, trainer_ratio: float, headed: float, parts: Mapping[str, Part]
) -> list[NamedCause]:
    """Return the cause that the sizes of both sides' errors show, if the head of only one side computes in float32.

    `headed` is the error of a model with such a head and the rest in the engine's dtype. A side whose error is nearer to it
    than to 1 (as a ratio) has such a head.
    """
    assert scores.headed is not None
    fine = headed**0.5
    if headed >= FINER or min(left, trainer_ratio) < headed / HEADS:
        return []
    if left < fine <= trainer_ratio:
        exact, other, ratio, part = "engine", "trainer", left, parts[TRAINERS]
    elif scores.trainer_head and trainer_ratio < fine <= left:
        exact, other, ratio, part = "trainer", "engine", trainer_ratio, parts[ENGINES]
    else:
        return []
    sentence = (
        f"the {exact}'s head computes in float32 and the {other}'s does not: the {exact} errs {ratio:.2f} times as much as "
        f"{scores.engine_dtype} would, and with such a head it would {headed:.2f} times"
    )
    if other == "trainer":
        before, after = (float(np.abs(sample.engine - side).mean()) for side in (scores.trainer, scores.headed))
        sentence += f"; a trainer with one is {after:.1e} nats per token from this engine, in the place of {before:.1e}"
    return [_measured("head_dtype", other, sentence, ratio, part)]


def with_heads(diagnosis: Diagnosis, sample: Sample, scores: Scores, engine_head: str | None) -> Diagnosis:
    """Return a diagnosis with a note if one head alone computes in float32, and the gap that two heads alike leave.

    The cause "head_dtype" takes an error that is small enough; the note takes the dtypes that both sides say they have.

    Args:
        diagnosis: The diagnosis.
        sample: The tokens, as the engine sampled them.
        scores: The trainer's side.
        engine_head: Dtype of the engine's head, read back; None if it is not known.
    """
    named = any(cause.key == "head_dtype" for cause in diagnosis.causes)
    if named or engine_head is None or scores.headed is None or scores.trainer_dtype != scores.engine_dtype:
        return diagnosis
    engine_is_exact, trainer_is_exact = engine_head == "float32", scores.trainer_head == "float32"
    if engine_is_exact == trainer_is_exact:
        return diagnosis
    exact, other = ("engine", "trainer") if engine_is_exact else ("trainer", "engine")
    alike = scores.headed if engine_is_exact else scores.own
    now, then = (float(np.abs(sample.engine - side).mean()) for side in (scores.trainer, alike))
    note = (
        f"the {exact}'s head computes in float32 and the {other}'s does not: the gap is {now:.2e} nats per token, and {then:.2e} "
        "with a trainer whose head is like the engine's. mismatch.precision.head sets both"
    )
    return replace(diagnosis, notes=(*diagnosis.notes, note))


def _by_router(flips: tuple[float, float], most_flips: tuple[int, float] | None, part: Part | None) -> NamedCause:
    """Return the cause that the engine's experts show, where rounding would not choose so many others."""
    sentence = (
        f"the engine chooses other experts than the trainer's router at {flips[0]:.1%} of tokens and "
        f"layers{in_layer(most_flips)}, rounding would at {flips[1]:.1%}: dtype or weights of its router (gate, correction bias)"
    )
    return _measured("router", "routes", sentence, flips[0], part)


def in_layer(most_flips: Sequence[float] | None) -> str:
    """Return where most of the experts differ, as a sentence goes on; `most_flips` is `Scores.most_flips`."""
    if most_flips is None:
        return ""
    layer, share = most_flips
    return f" (most in layer {layer}, at {share:.1%} of its tokens)"


def _by_decode(engine: Engine, part: Part | None) -> NamedCause:
    """Return the cause that the engine shows on its own: it samples tokens by another computation than its prefill."""
    mean = float(np.abs(engine.decode).mean())
    sentence = f"the engine's decode differs from its own prefill by {mean:.1e} nats per token"
    return _measured(DECODED, "engine", sentence, mean, part)


def _by_cache(engine: Engine, part: Part | None) -> NamedCause:
    """Return the cause that only prompts from the prefix cache show: their keys and values are of other weights."""
    assert engine.afresh is not None
    mean, afresh = (float(np.abs(errors).mean()) for errors in (engine.decode, engine.afresh))
    sentence = (
        "the prefix cache is older than the weights: the engine's decode differs from its own prefill by "
        f"{mean:.1e} nats per token with {engine.cached_prompts} prompts from the cache, and by {afresh:.1e} past it"
    )
    return _measured("stale_cache", "engine", sentence, mean, part)


def _measured(key: str, family: str, sentence: str, parameter: float, part: Part | None) -> NamedCause:
    return NamedCause(
        key=key, family=family, said=sentence, parameter=parameter, status="measured",
        share=None if part is None else part.share, remedy=remedy(key),
    )  # fmt: skip


def _scaled_logits(cause: NamedCause) -> NamedCause:
    """Return the cause "scaled logits" instead of a temperature, which only sampling has."""
    factor = 1 / cause.parameter
    return replace(
        cause, key="logit_scale", family="config", remedy=remedy("model"), parameter=factor,
        said=f"the engine's logits are {factor:.3g} times what the trainer's temperature makes of them",
    )  # fmt: skip
