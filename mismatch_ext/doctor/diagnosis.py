"""The doctor's verdict on one sample: the gap's parts, the causes that are named, what is left, and what the tokens say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_ext.doctor.blocks import Block
from mismatch_ext.doctor.causes import SLOPES, Cause, Fit, Search
from mismatch_ext.doctor.foretold import Foretold, Mended
from mismatch_ext.doctor.logits import of_logits
from mismatch_ext.doctor.noise import Noise
from mismatch_ext.doctor.remedies import Remedy, remedy
from mismatch_ext.doctor.rungs import FLOAT32, Engine, Largest, Rung
from mismatch_ext.doctor.sample import Floats, Sample
from mismatch_ext.doctor.split import Part, split
from mismatch_ext.doctor.table import Logits, LogitTable
from mismatch_ext.doctor.tokens import SURE, TokensTest, judge_ends, judge_tokens
from mismatch_ext.errors import NonFiniteLogprobError
from mismatch_ext.metrics.numerics import k3

# What rounding alone leaves of an error, in units of the trainer's own arithmetic: medians, then the largest hundredth.
ROUNDING, ROUNDING_TAIL = 1.3, 3.0
# An engine that errs less than this computes finer than its dtype; a trainer that errs more, coarser than the engine.
FINER, COARSER = 0.6, 2.0
# How far below what a head in float32 leaves an error may be: one that is finer still has another reason.
HEADS = 1.5
# A name that leaves something is confirmed where it foretold this part of what the remedy mends: a remedy takes back settings of
# a kind together, and so mends what another of them did, too.
MOST = 0.75
# How near a temperature that fits is to the one that was asked for.
NEAR = 0.01
# The part of the gap that the trainer's padding makes.
LAYOUT = "layout"
# Families of causes that the engine's score of the same tokens as a prompt does not have: its settings then are mended already.
SAMPLED = ("sampling", "reporting", "prompt")
SCHEMA = 1
DOCTOR_FILE = "doctor.json"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What the trainer's side says of a sample's tokens, at the run's temperature.

    Args:
        trainer: Log-probabilities as the run computes them `[N]`.
        own: The trainer's arithmetic in the engine's dtype, under the engine's routes `[N]`.
        logits: Of the oracle: the trainer's model in float32, its weights rounded to the engine's dtype, under the
            engine's routes where they are known `[N, V]`, float32, before the temperature.
        headed: The same with a head in float32; None where that is no other `[N]`.
        native: Log-probabilities of the oracle under the trainer's own routes `[N]`; None for a model without experts.
        straight: The trainer's with right padding, under which every position is its own `[N]`; None where the run pads so.
        layout: How the run lays its batches, in words; "" where it pads on the right.
        rungs: What the trainer differs from itself by.
        temperature: What the trainer divides logits by.
        end_tokens: Ids that end a response.
        engine_dtype, trainer_dtype: What the sides compute in, for remedies; "" where nobody says.
        trainer_head: What the trainer's head computes in, if in something else.
    """

    trainer: Floats
    own: Floats
    logits: Tensor | Logits
    headed: Floats | None = None
    native: Floats | None = None
    straight: Floats | None = None
    layout: str = ""
    rungs: tuple[Rung, ...] = ()
    temperature: float = 1.0
    end_tokens: tuple[int, ...] = ()
    engine_dtype: str = ""
    trainer_dtype: str = ""
    trainer_head: str = ""


@dataclass(frozen=True, kw_only=True)
class NamedCause:
    """A cause that a report names.

    Args:
        key, family, said: As of the `Cause`; the sentence holds the parameter.
        parameter: Its value.
        status: "fits", "partly" where something is left, "confirmed" where its remedy was applied and the gap fell as
            predicted, or "measured" where a side differs from itself.
        share: Of the mean |Δlogp|; None for too few tokens.
        z, slope, low, high: How sure the fit is; None where the tokens alone say it.
        ties: Keys of causes that fit as well.
        remedy: What to change.
    """

    key: str
    family: str
    said: str
    parameter: float
    status: str
    share: float | None
    z: float | None
    slope: float | None
    low: float | None
    high: float | None
    ties: tuple[str, ...]
    remedy: Remedy


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the doctor found.

    Args:
        tokens, responses: How many were judged.
        gap: `logp_abs_diff_mean`, `k3_kl` and `logp_abs_diff_max` between engine and trainer.
        parts: Terms of the gap, in the order of the path from engine to trainer.
        ratio, tail_ratio: The engine's error in units of the trainer's own arithmetic: of medians, and of the largest hundredth.
        trainer_ratio: The trainer's error in the same units.
        measurable: Whether rounding lies above float32's own, so that the ratios mean something.
        causes: Those that are named.
        hints: Sentences of fits that are not sure enough for a name.
        left, left_tail: The ratios of what the named causes do not say.
        unexplained: Mean size of what is neither named nor rounding, in nats per token.
        notes: Sentences on what else was seen.
        tokens_test: What the tokens themselves say.
        verdict: "clean", "explained", "partly" or "unexplained".
        tried: Keys of the causes on the list.
        engine_dtype, trainer_dtype: What the sides compute in; "" where nobody says.
        mended: What remedies did that were tried.
        rungs: What each side differs from itself by.
        largest: The token of the largest gap; None for a diagnosis without a gap.
        blocks: The network's blocks, each given the engine's own input; empty where that was not asked for, or not possible.
        seconds: What the doctor's rungs took, by their names.
        foretold: What the named causes predict token by token; not in `data`.
    """

    tokens: int
    responses: int
    gap: dict[str, float]
    parts: tuple[Part, ...]
    ratio: float
    tail_ratio: float
    trainer_ratio: float
    measurable: bool
    causes: tuple[NamedCause, ...]
    hints: tuple[str, ...]
    left: float
    left_tail: float
    unexplained: float
    notes: tuple[str, ...]
    tokens_test: TokensTest
    verdict: str
    tried: tuple[str, ...]
    engine_dtype: str = ""
    trainer_dtype: str = ""
    mended: tuple[Mended, ...] = ()
    rungs: tuple[Rung, ...] = ()
    largest: Largest | None = None
    blocks: tuple[Block, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    foretold: Foretold | None = field(default=None, repr=False, compare=False)

    def exit_status(self, threshold: float) -> int:
        """Return 0 for a clean pair, 1 for one that is explained, 2 where more than a threshold is not.

        Args:
            threshold: Mean size of what is not explained, in nats per token.
        """
        if self.verdict == "clean":
            return 0
        hidden = self.verdict == "unexplained" and self.unexplained == 0
        return 2 if self.verdict != "explained" and (hidden or self.unexplained > threshold) else 1

    def data(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        found = {"schema": SCHEMA, **asdict(replace(self, foretold=None))}
        del found["foretold"]
        found["tokens_test"]["finding"] = self.tokens_test.finding
        return found

    @property
    def mendable(self) -> tuple[NamedCause, ...]:
        """The causes that a remedy can confirm: those that predict the error of each token."""
        return tuple(cause for cause in self.causes if self.foretold is not None and cause.key in self.foretold.by)

    def confirmed(self, families: Collection[str], left: float, after: Floats) -> Diagnosis:
        """Return it after remedies were applied to the engine and the same tokens were scored again.

        A cause is confirmed where the error fell to rounding's and fell token by token as the cause predicts. One that leaves
        something has to have predicted most of the fall, too: the remedy of its family mends more than the cause alone.

        Args:
            families: Of the causes whose remedies were applied.
            left: The engine's error then, in units of the trainer's own arithmetic.
            after: That error `[N]`.
        """
        keys = [cause.key for cause in self.mendable if cause.family in families]
        if self.foretold is None or not keys:
            return self
        gap = float(np.abs(after).mean())
        slope, (predicted, fell) = self.foretold.slope(keys, after), self.foretold.falls(keys, after)
        tried = Mended(causes=tuple(keys), predicted=predicted, measured=fell, slope=slope, left=left)
        self = replace(self, mended=(*self.mended, tried))
        sure = (left <= ROUNDING or gap <= FLOAT32) and SLOPES[0] <= slope <= SLOPES[1]
        whole = self.verdict != "partly" or predicted >= MOST * fell
        said = (
            f"after the remedy of {', '.join(keys)}: the engine's error is {gap:.1e} nats per token, {left:.2f} of rounding's; "
            f"it fell by {fell:.0%}, {predicted:.0%} were predicted (slope {slope:.2f})"
        )
        if sure and not whole:
            said += "; the remedy mends more than the named cause: another setting of its kind differs too, or instead"
        elif not sure:
            said += "; that does not confirm it"
            if keys == ["temperature"] and self._scaled(after):
                return self._of_the_logits(said)
        if not (sure and whole):
            return replace(self, notes=(*self.notes, said))
        causes = tuple(replace(cause, status="confirmed") if cause.key in keys else cause for cause in self.causes)
        # What a fit leaves, such as routes that follow the fault, went with the remedy.
        verdict, unexplained = ("explained", 0.0) if self.verdict == "partly" else (self.verdict, self.unexplained)
        return replace(self, causes=causes, notes=(*self.notes, said), verdict=verdict, unexplained=unexplained)

    def _scaled(self, after: Floats) -> bool:
        """Tell whether an error like that of a temperature is there where no token is sampled."""
        assert self.foretold is not None
        return SLOPES[0] <= self.foretold.stays(["temperature"], after) <= SLOPES[1]

    def _of_the_logits(self, said: str) -> Diagnosis:
        """Return it with logits that are scaled in the place of a temperature, which only sampling has."""
        causes = tuple(
            replace(
                cause, key="logit_scale", family="config", remedy=remedy("logit_scale"), parameter=1 / cause.parameter,
                said=f"the engine's logits are {1 / cause.parameter:.3g} times what the trainer's temperature makes of them",
            )
            if cause.key == "temperature" else cause for cause in self.causes
        )  # fmt: skip
        parts = tuple(replace(part, name="logit_scale") if part.name == "temperature" else part for part in self.parts)
        note = f"{said}: the engine's score of a prompt shows it too, and has no temperature"
        return replace(self, causes=causes, parts=parts, notes=(*self.notes, note))


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
    """Say why engine and trainer differ on a sample.

    Args:
        sample: What the engine sampled, and reported of it.
        scores: What the trainer's side says of the same tokens.
        causes: Those that need a forward pass of a changed model each; those that are functions of logits are always tried.
        engine: What the engine says of itself; None where it cannot be asked.
        asked: Temperature that the engine was asked for, as far as known: decides where the tokens cannot.
        seed: Of the bootstrap over responses.
        progress: Called with the key of each cause before it is tried.

    Raises:
        NonFiniteLogprobError: The trainer's side is not finite; names response and token.
    """
    straight = scores.trainer if scores.straight is None else scores.straight
    for side, values in (
        ("trainer's", scores.trainer),
        ("trainer's, padded on the right,", straight),
        ("trainer's, in the engine's dtype,", scores.own),
        ("trainer's, with a head in float32,", scores.own if scores.headed is None else scores.headed),
    ):
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            raise NonFiniteLogprobError(
                f"response {sample.row[wrong[0]]}, token {sample.place[wrong[0]]}: the log-probability that is the {side} is "
                f"{values[wrong[0]]}, {len(wrong)} of {len(values)} are not finite: that dtype overflows; `mismatch-ext "
                "readiness` says where."
            )
    rng = np.random.default_rng(seed)
    table = LogitTable.of(sample, scores.logits, scores.temperature)
    arithmetic = scores.own - table.logprob
    error = sample.engine - table.logprob
    noise = Noise.of(arithmetic, table.spread)
    listed = [*of_logits(table, scores.end_tokens), *causes]
    tokens = judge_tokens(table)

    def drawn_at(temperature: float) -> bool | None:
        said = tokens.drawn_at(temperature / scores.temperature)
        return said if said is not None or asked is None else abs(asked / temperature - 1) < NEAR

    search = Search(sample, table.logprob, noise, rng, drawn_at, progress)
    named, fits, rest = search.select(listed, error)
    # Where no cause is the whole truth, and the decode is not the prefill: what only the decode does is measured, and causes
    # have to explain the prefill alone.
    unclear = engine is not None and not _is_rounding(rest, arithmetic, noise)
    decodes_apart = unclear and engine is not None and engine.decodes_apart(float(np.abs(arithmetic).mean()))
    prefill = engine.prefill if engine is not None and decodes_apart else None
    if prefill is not None:
        error = prefill - table.logprob
        named, fits, rest = search.select(listed, error)
    parts = {fit.cause.key: fit.finite for fit in named}
    parts["engine's arithmetic"] = rest
    if scores.native is not None:
        parts["routes"] = table.logprob - scores.native
    parts["trainer's arithmetic"] = (table.logprob if scores.native is None else scores.native) - straight
    if scores.straight is not None:
        parts[LAYOUT] = straight - scores.trainer
    if prefill is not None:
        parts = {"decode_path": sample.engine - prefill} | parts
    shares = {part.name: part for part in split(parts, sample.row, rng)}
    trainer_ratio = noise.ratio(parts["trainer's arithmetic"])
    left, left_tail = noise.ratio(rest), noise.tail_ratio(rest)
    complete = _is_rounding(rest, arithmetic, noise)
    found = [_named(fit, shares[fit.cause.key], complete, scores.temperature) for fit in named]
    # Where the log-probabilities are off too, tokens are drawn from another distribution whatever the cause.
    if not found and complete and not decodes_apart and tokens.finding is not None:
        found = [_by_tokens(tokens, scores.temperature)]
    # Not `noise.measured`: beside a float32 engine, whose rounding is below it, a half-precision trainer is all of the gap.
    if trainer_ratio > COARSER and float(np.abs(parts["trainer's arithmetic"]).mean()) > FLOAT32:
        found.append(_coarser(trainer_ratio, shares["trainer's arithmetic"], scores))
    if complete and not found and scores.headed is not None and noise.measured:
        found += _by_head(sample, scores, left, trainer_ratio, noise.ratio(scores.headed - table.logprob), shares)
    if scores.straight is not None:
        found += _by_layout(scores, noise.ratio(parts[LAYOUT]), shares[LAYOUT])
    if engine is not None and decodes_apart:
        found.insert(0, _by_decode(engine, shares.get("decode_path")))
    # Tokens of another distribution than both sides report are not clean, whether or not it has a name.
    sound = complete and (bool(found) or abs(tokens.z) < SURE)
    verdict = ("explained" if found else "clean") if sound else ("partly" if found else "unexplained")
    gap = sample.engine - scores.trainer
    return Diagnosis(
        tokens=len(gap),
        responses=len(np.unique(sample.row)),
        gap={
            "logp_abs_diff_mean": float(np.abs(gap).mean()),
            "k3_kl": float(k3(torch.from_numpy(-gap)).mean()),
            "logp_abs_diff_max": float(np.abs(gap).max()),
        },
        parts=tuple(shares.values()),
        ratio=noise.ratio(error),
        tail_ratio=noise.tail_ratio(error),
        trainer_ratio=trainer_ratio,
        measurable=noise.measured,
        causes=tuple(found),
        hints=tuple(f"{fit.cause.sentence(fit.x)} (z {fit.z:.1f})" for fit in fits if fit.hints and not named)[:2],
        left=left,
        left_tail=left_tail,
        unexplained=0.0 if complete else max(0.0, float(np.abs(rest).mean() - np.abs(arithmetic).mean())),
        # A change of the logits changes how errors of rounding show, too.
        notes=(
            *(() if found else _notes(noise, left, error)),
            *judge_ends(sample, scores.end_tokens),
            *(() if engine is None else engine.notes),
        ),
        tokens_test=tokens,
        verdict=verdict,
        tried=tuple(cause.key for cause in listed),
        engine_dtype=scores.engine_dtype,
        trainer_dtype=scores.trainer_dtype,
        rungs=tuple(
            replace(rung, of_gap=rung.mean / float(np.abs(gap).mean()) if gap.any() else None)
            for rung in (*scores.rungs, *(() if engine is None else engine.rungs))
        ),
        largest=Largest.of(sample, parts),
        foretold=Foretold(error=error, by={fit.cause.key: fit.finite for fit in named}, noise=noise) if named else None,
    )


def rescored(sample: Sample, scores: Scores) -> tuple[float, Floats]:
    """Return an engine's error on tokens that it scored again: in units of the trainer's own arithmetic, and of each token `[N]`.

    Args:
        sample: The tokens, with what the engine says of them now.
        scores: What the trainer's side says, at temperature 1 as engines score prompts.
    """
    table = LogitTable.of(sample, scores.logits, scores.temperature)
    error = sample.engine - table.logprob
    return Noise.of(scores.own - table.logprob, table.spread).ratio(error), error


def _is_rounding(rest: Floats, arithmetic: Floats, noise: Noise) -> bool:
    """Tell whether an error is rounding's. Its largest hundredth, a heavy tail, counts where it makes the mean larger too."""
    mean = float(np.abs(rest).mean())
    tail = noise.tail_ratio(rest) <= ROUNDING_TAIL or mean <= ROUNDING * float(np.abs(arithmetic).mean())
    return (noise.ratio(rest) <= ROUNDING and tail) or mean <= FLOAT32


def _named(fit: Fit, part: Part, complete: bool, temperature: float) -> NamedCause:
    return NamedCause(
        key=fit.cause.key, family=fit.cause.family, said=fit.cause.sentence(fit.x), parameter=fit.x,
        status="fits" if complete else "partly", share=part.share, z=fit.z, slope=fit.slope, low=fit.low, high=fit.high,
        ties=fit.ties, remedy=remedy(fit.cause.key, temperature),
    )  # fmt: skip


def _by_tokens(test: TokensTest, temperature: float) -> NamedCause:
    """Return the cause that only the tokens show: the engine reports log-probabilities from before its sampling settings."""
    assert test.finding is not None
    key, value, said = test.finding
    return NamedCause(
        key=key, family="sampling", said=f"{said}, and the log-probabilities are from before that",
        parameter=value * temperature if key == "temperature" else value, status="fits", share=None, z=abs(test.z), slope=None,
        low=None, high=None, ties=_alike(test, key), remedy=remedy(key, temperature),
    )  # fmt: skip


def _alike(test: TokensTest, key: str) -> tuple[str, ...]:
    """Return the settings that the tokens cannot tell from the one that is named."""
    return ("raw_logprobs", *test.alike) if key != "temperature" else ("raw_logprobs",)


def _coarser(ratio: float, part: Part, scores: Scores) -> NamedCause:
    """Return the cause that the trainer's own error shows, which was measured and not fitted."""
    mending = remedy("trainer_dtype", engine_dtype=scores.engine_dtype, trainer_dtype=scores.trainer_dtype)
    said = f"the trainer errs {ratio:.1f} times as much as the engine's dtype would: coarser dtype, other padding or positions"
    return NamedCause(
        key="trainer_dtype", family="trainer", said=said, parameter=ratio, status="fits", share=part.share, z=None, slope=None,
        low=None, high=None, ties=(), remedy=mending,
    )  # fmt: skip


def _by_layout(scores: Scores, ratio: float, part: Part) -> list[NamedCause]:
    """Return the cause that the trainer's batches show, where they do more than round otherwise."""
    assert scores.straight is not None
    changed = [rung for rung in scores.rungs if rung.name == scores.layout and rung.changes_the_policy]
    if not changed and (ratio <= COARSER or float(np.abs(scores.straight - scores.trainer).mean()) <= FLOAT32):
        return []
    said = f"{scores.layout} moves the trainer's log-probabilities by {part.mean:.1e} nats per token, {ratio:.1f} of rounding's"
    if changed:
        said += f", and by {changed[0].float32:.1e} in float32: to the model other positions, or another context"
    return [_measured("layout", "trainer", said, ratio, part)]


def _by_head(
    sample: Sample, scores: Scores, left: float, trainer_ratio: float, headed: float, shares: Mapping[str, Part]
) -> list[NamedCause]:
    """Return the cause that the sizes of the sides' errors show, where the head of one alone computes in float32.

    Args:
        sample: The tokens.
        scores: What the trainer's side says.
        left, trainer_ratio: The engine's and the trainer's error in units of the trainer's own in the engine's dtype.
        headed: The same of a head in float32, and the rest in the engine's dtype: nearer to it than to 1 is such a head.
        shares: The parts.
    """
    assert scores.headed is not None
    fine = headed**0.5
    if headed >= FINER or min(left, trainer_ratio) < headed / HEADS:
        return []
    if left < fine <= trainer_ratio:
        exact, other, ratio, part = "engine", "trainer", left, shares["trainer's arithmetic"]
    elif scores.trainer_head and trainer_ratio < fine <= left:
        exact, other, ratio, part = "trainer", "engine", trainer_ratio, shares["engine's arithmetic"]
    else:
        return []
    said = (
        f"the {exact}'s head computes in float32 and the {other}'s does not: the {exact} errs {ratio:.2f} times as much as "
        f"{scores.engine_dtype} would, and with such a head it would {headed:.2f} times"
    )
    if other == "trainer":
        before, after = (float(np.abs(sample.engine - side).mean()) for side in (scores.trainer, scores.headed))
        said += f"; a trainer with one is {after:.1e} nats per token from this engine, in the place of {before:.1e}"
    return [_measured("head_dtype", other, said, ratio, part)]


def _by_decode(engine: Engine, part: Part | None) -> NamedCause:
    """Return the cause that the engine shows alone: its tokens are sampled by another computation than its prefill."""
    mean = float(np.abs(engine.decode).mean())
    return _measured(
        "decode_path",
        "engine",
        f"the engine's decode differs from its own prefill by {mean:.1e} nats per token",
        mean,
        part,
    )


def _measured(key: str, family: str, said: str, parameter: float, part: Part | None) -> NamedCause:
    return NamedCause(
        key=key, family=family, said=said, parameter=parameter, status="measured", share=None if part is None else part.share,
        z=None, slope=None, low=None, high=None, ties=(), remedy=remedy(key),
    )  # fmt: skip


def _notes(noise: Noise, left: float, error: Floats) -> tuple[str, ...]:
    if not noise.measured or left >= FINER or float(np.abs(error).mean()) <= FLOAT32:
        return ()
    return (f"the engine errs {left:.2f} times as much as its dtype lets expect: it is finer than that",)
