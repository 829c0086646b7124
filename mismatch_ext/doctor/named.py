"""Causes in words, as a report names them: from fits, from tokens, and from what a side shows on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mismatch_ext.doctor.causes import Remedy, remedy
from mismatch_ext.doctor.evidence import (
    COARSER,
    DECODED,
    ENGINES,
    LEAST_PART,
    TRAINERS,
    Engine,
    Part,
    Scores,
    plain_pass,
)
from mismatch_ext.doctor.fits import Fit, Noise
from mismatch_ext.doctor.sample import Floats, Sample
from mismatch_ext.doctor.tokens import TokensTest
from mismatch_ext.precision.dtypes import is_finer

# In units of the trainer's arithmetic in the engine's dtype: an engine whose error is below this computes finer than its dtype.
FINER = 0.6
# A float32 head explains an error down to this factor below what such a head leaves; a smaller error has another reason.
HEADS = 1.5


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


def name_fit(fit: Fit, part: Part, complete: bool, temperature: float) -> NamedCause:
    """Return the cause of a fit; the status is "fits" if the causes are complete, else "partly"."""
    return NamedCause(
        key=fit.cause.key, family=fit.cause.family, said=fit.cause.sentence(fit.x), parameter=fit.x,
        status="fits" if complete else "partly", share=part.share, z=fit.z, slope=fit.slope, low=fit.low, high=fit.high,
        ties=fit.ties, remedy=remedy(fit.cause.remedy or fit.cause.key, temperature),
    )  # fmt: skip


def name_by_tokens(test: TokensTest, temperature: float) -> NamedCause:
    """Return the cause that only the tokens show: the engine reports log-probabilities from before its sampling settings."""
    assert test.finding is not None
    key, value, sentence = test.finding
    heat = key == "temperature"
    return NamedCause(
        key=key, family="sampling", said=f"{sentence}, and the log-probabilities are from before that",
        parameter=value * temperature if heat else value, status="fits", z=abs(test.z),
        ties=("raw_logprobs", *(() if heat else test.alike)), remedy=remedy(key, temperature),
    )  # fmt: skip


def name_trainer(ratio: float, part: Part, scores: Scores) -> NamedCause:
    """Return the cause that the trainer's own error shows; it was measured, not fitted."""
    if is_finer(scores.trainer_dtype, scores.engine_dtype):
        # In a plain pass its error is then what rounding its weights to the engine's dtype does.
        sentence = (
            f"the trainer computes with weights that are finer than the engine's grid: rounding them to {scores.engine_dtype} "
            f"moves log-probabilities by {part.mean:.1e} nats per token, {ratio:.1f} times what its arithmetic does. Updates "
            "below the grid do not reach the engine (mismatch/engine_moved_frac)"
        )
        return name_measured("engine_grid", "trainer", sentence, ratio, part)
    return NamedCause(
        key="trainer_dtype", family="trainer", parameter=ratio, status="fits", share=part.share,
        said=f"the trainer errs {ratio:.1f} times as much as the engine's dtype would: coarser dtype, other padding or positions",
        remedy=remedy("dtype", engine_dtype=scores.engine_dtype, trainer_dtype=scores.trainer_dtype),
    )  # fmt: skip


def name_layout(scores: Scores, noise: Noise, term: Floats, part: Part) -> list[NamedCause]:
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
    return [replace(name_measured("layout", "trainer", sentence, ratio, part), remedy=remedy(name))]


def judge_attention(sample: Sample, scores: Scores) -> tuple[str, bool]:
    """Say what the trainer's attention leaves out, and tell whether a pass with all of it is nearer to the engine."""
    assert scores.attended is not None
    straight = plain_pass(scores)
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


def name_attention(sample: Sample, scores: Scores, ratio: float, part: Part) -> NamedCause:
    """Return the cause that the trainer's attention shows, with a remedy if that brought the sides nearer."""
    sentence, helps = judge_attention(sample, scores)
    cause = name_measured("attention", "trainer", sentence, ratio, part)
    return replace(cause, remedy=remedy("attention" if helps else ""))


def name_head(
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
    return [name_measured("head_dtype", other, sentence, ratio, part)]


def name_router(flips: tuple[float, float], most_flips: tuple[int, float] | None, part: Part | None) -> NamedCause:
    """Return the cause that the engine's experts show, where rounding would not choose so many others."""
    sentence = (
        f"the engine chooses other experts than the trainer's router at {flips[0]:.1%} of tokens and "
        f"layers{in_layer(most_flips)}, rounding would at {flips[1]:.1%}: dtype or weights of its router (gate, correction bias)"
    )
    return name_measured("router", "routes", sentence, flips[0], part)


def in_layer(most_flips: Sequence[float] | None) -> str:
    """Return where most of the experts differ, as a sentence goes on; `most_flips` is `Scores.most_flips`."""
    if most_flips is None:
        return ""
    layer, share = most_flips
    return f" (most in layer {layer}, at {share:.1%} of its tokens)"


def name_decode(engine: Engine, part: Part | None) -> NamedCause:
    """Return the cause that the engine shows on its own: it samples tokens by another computation than its prefill."""
    mean = float(np.abs(engine.decode).mean())
    sentence = f"the engine's decode differs from its own prefill by {mean:.1e} nats per token"
    return name_measured(DECODED, "engine", sentence, mean, part)


def name_measured(key: str, family: str, sentence: str, parameter: float, part: Part | None) -> NamedCause:
    return NamedCause(
        key=key, family=family, said=sentence, parameter=parameter, status="measured",
        share=None if part is None else part.share, remedy=remedy(key),
    )  # fmt: skip


def name_scaled_logits(cause: NamedCause) -> NamedCause:
    """Return the cause "scaled logits" instead of a temperature, which only sampling has."""
    factor = 1 / cause.parameter
    return replace(
        cause, key="logit_scale", family="config", remedy=remedy("model"), parameter=factor,
        said=f"the engine's logits are {factor:.3g} times what the trainer's temperature makes of them",
    )  # fmt: skip
