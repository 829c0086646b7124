"""The causes that a diagnosis names: from a fit, from the sampled tokens, or from a measurement of one side."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mismatch_ext.doctor.causes import Fit
from mismatch_ext.doctor.diagnosis import NamedCause, Scores
from mismatch_ext.doctor.remedies import remedy
from mismatch_ext.doctor.rungs import FLOAT32, Engine
from mismatch_ext.doctor.sample import Sample
from mismatch_ext.doctor.split import Part
from mismatch_ext.doctor.tokens import TokensTest

# In units of the trainer's arithmetic in the engine's dtype: an engine whose error is below `FINER` computes finer than its
# dtype, and a trainer whose error is above `COARSER` computes coarser than the engine.
FINER, COARSER = 0.6, 2.0
# A float32 head explains an error down to this factor below what such a head leaves; a smaller error has another reason.
HEADS = 1.5


def by_fit(fit: Fit, part: Part, complete: bool, temperature: float) -> NamedCause:
    """Return the cause of a fit, with its part of the gap; the status is "fits" if the causes are complete, else "partly"."""
    return NamedCause(
        key=fit.cause.key, family=fit.cause.family, said=fit.cause.sentence(fit.x), parameter=fit.x,
        status="fits" if complete else "partly", share=part.share, z=fit.z, slope=fit.slope, low=fit.low, high=fit.high,
        ties=fit.ties, remedy=remedy(fit.cause.key, temperature),
    )  # fmt: skip


def by_tokens(test: TokensTest, temperature: float) -> NamedCause:
    """Return the cause that only the tokens show: the engine reports log-probabilities from before its sampling settings."""
    assert test.finding is not None
    key, value, said = test.finding
    return NamedCause(
        key=key, family="sampling", said=f"{said}, and the log-probabilities are from before that",
        parameter=value * temperature if key == "temperature" else value, status="fits", share=None, z=abs(test.z), slope=None,
        low=None, high=None, ties=_alike(test, key), remedy=remedy(key, temperature),
    )  # fmt: skip


def _alike(test: TokensTest, key: str) -> tuple[str, ...]:
    """Return the keys of the settings that the tokens cannot tell from the named one."""
    return ("raw_logprobs", *test.alike) if key != "temperature" else ("raw_logprobs",)


def by_trainer(ratio: float, part: Part, scores: Scores) -> NamedCause:
    """Return the cause that the trainer's own error shows; it was measured, not fitted."""
    mending = remedy("trainer_dtype", engine_dtype=scores.engine_dtype, trainer_dtype=scores.trainer_dtype)
    said = f"the trainer errs {ratio:.1f} times as much as the engine's dtype would: coarser dtype, other padding or positions"
    return NamedCause(
        key="trainer_dtype", family="trainer", said=said, parameter=ratio, status="fits", share=part.share, z=None, slope=None,
        low=None, high=None, ties=(), remedy=mending,
    )  # fmt: skip


def by_layout(scores: Scores, ratio: float, part: Part) -> list[NamedCause]:
    """Return the cause that the trainer's batch layout shows, if the layout does more than change the rounding."""
    assert scores.straight is not None
    changed = [rung for rung in scores.rungs if rung.name == scores.layout and rung.changes_the_policy]
    if not changed and (ratio <= COARSER or float(np.abs(scores.straight - scores.trainer).mean()) <= FLOAT32):
        return []
    said = f"{scores.layout} moves the trainer's log-probabilities by {part.mean:.1e} nats per token, {ratio:.1f} of rounding's"
    if changed:
        said += f", and by {changed[0].float32:.1e} in float32: to the model other positions, or another context"
    return [_measured("layout", "trainer", said, ratio, part)]


def by_head(
    sample: Sample, scores: Scores, left: float, trainer_ratio: float, headed: float, shares: Mapping[str, Part]
) -> list[NamedCause]:
    """Return the cause that the sizes of both sides' errors show, if the head of only one side computes in float32.

    Args:
        sample: The tokens.
        scores: The trainer side's scores.
        left, trainer_ratio: The engine's and the trainer's error, in units of the trainer's arithmetic in the engine's dtype.
        headed: The error, in the same units, of a model with a float32 head and the rest in the engine's dtype. A side whose
            error is nearer to it than to 1 (as a ratio) has such a head.
        shares: The parts of the gap, by name.
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


def by_decode(engine: Engine, part: Part | None) -> NamedCause:
    """Return the cause that the engine shows by itself: it samples tokens by another computation than its prefill."""
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
