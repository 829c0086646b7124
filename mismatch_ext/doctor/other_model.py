"""Whether an engine holds the trainer's model at all, from its log-probabilities alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatch_ext.doctor.diagnosis import Diagnosis, NamedCause, Scores
from mismatch_ext.doctor.remedies import remedy
from mismatch_ext.doctor.sample import Sample
from mismatch_ext.doctor.table import LogitTable

KEY = "other_model"
# Nats. The shipped models with weights rounded to 3 bits are at 0.08, to 4 bits at 0.02; one for the other is at 0.56 and 0.72,
# though both were trained on the same task.
ANOTHER = 0.25
# Where a token is as good as certain, its log-probability does not tell of the logits.
TELLING = 1e-3


def distance(sample: Sample, scores: Scores) -> float:
    r"""Return how far an engine's logits are off at half of the tokens, in nats.

    When logits move by dz, log p moves by (onehot - p) . dz: an error over ||onehot - p|| is the size of dz along it.

    Args:
        sample: The tokens, with the engine's score of them as part of a prompt.
        scores: What the trainer's side says, at temperature 1 as engines score prompts.
    """
    table = LogitTable.of(sample, scores.logits, scores.temperature)
    telling = table.spread > TELLING
    error = np.abs(sample.engine - table.logprob)
    return float(np.median(error[telling] / table.spread[telling])) if telling.any() else 0.0


def judged(found: Diagnosis, far: float) -> Diagnosis:
    """Return a diagnosis that says it where an engine does not hold the model.

    Sampling, reports and prompts have no part in an engine's score of the trainer's own tokens, and rounding, of the weights to
    4 bits too, leaves logits within a small part of a nat. Logits that are off by a quarter of a nat at half of the tokens are
    those of other weights or of another architecture. A cause on the list that is the whole truth comes before that; one that
    fits in part, as some cause may where two models resemble each other, does not.

    Args:
        found: Without this cause.
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
