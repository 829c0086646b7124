"""Tells, only from an engine's log-probabilities, whether it holds the trainer's model at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatch_ext.doctor.diagnosis import Diagnosis, NamedCause, Scores
from mismatch_ext.doctor.remedies import remedy
from mismatch_ext.doctor.sample import Sample
from mismatch_ext.doctor.table import LogitTable

KEY = "other_model"
# Nats. The distance is 0.08 for the shipped models with weights rounded to 3 bits, 0.02 for 4 bits, and 0.56 or 0.72 when one
# shipped model is taken for the other, although both were trained on the same task.
ANOTHER = 0.25
# If a token is almost certain (spread below this), its log-probability says nothing about the logits.
TELLING = 1e-3


def distance(sample: Sample, scores: Scores) -> float:
    r"""Return the median over tokens of how far an engine's logits are off, in nats.

    When logits move by dz, log p moves by (onehot - p) . dz: an error over ||onehot - p|| is the size of dz along it.

    Args:
        sample: The tokens, with the engine's score of them as part of a prompt.
        scores: The trainer's scores, at temperature 1, because engines score prompts at that temperature.
    """
    table = LogitTable.of(sample, scores.logits, scores.temperature)
    telling = table.spread > TELLING
    error = np.abs(sample.engine - table.logprob)
    return float(np.median(error[telling] / table.spread[telling])) if telling.any() else 0.0


def judged(found: Diagnosis, far: float) -> Diagnosis:
    """Return the diagnosis; if the engine holds another model, with that as its cause.

    When an engine scores the trainer's own tokens as a prompt, its sampling, reports and prompts play no part. Rounding, even of
    weights to 4 bits, moves logits by a small part of a nat. So logits that are off by a quarter of a nat at half of the tokens
    come from other weights or another architecture. A listed cause that explains everything takes precedence. A cause that fits
    only in part does not, because some cause may fit in part when two models resemble each other.

    Args:
        found: The diagnosis without this cause.
        far: The `distance` of the engine's score of the same tokens as a prompt.
    """
    if far < ANOTHER or found.verdict not in ("partly", "unexplained"):
        return found
    cause = NamedCause(
        key=KEY, family="weights", parameter=far, status="fits", share=None, z=None, slope=None, low=None, high=None, ties=(),
        said=f"the engine does not hold this model: half of its logits are off by {far:.2g} nats or more", remedy=remedy(KEY),
    )  # fmt: skip
    dropped = [other.key for other in found.causes]
    parts = tuple(
        replace(part, name=f"{part.name}, which fits in part") if part.name in dropped else part for part in found.parts
    )
    return replace(found, causes=(cause,), parts=parts, verdict="explained", unexplained=0.0, foretold=None)
