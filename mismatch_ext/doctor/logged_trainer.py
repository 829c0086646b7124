"""Whether the trainer that was scored is the one whose log-probabilities a log holds; about another one nothing is said.

Suffixes of shapes: N tokens.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from mismatch_ext.doctor.causes import Remedy
from mismatch_ext.doctor.diagnose import APART, LEAST_TOKENS, NEAR, TRAINER_ROUNDING, Diagnosis, Scores
from mismatch_ext.doctor.fits import FLOAT32, TAIL, Noise, narrowed
from mismatch_ext.doctor.logits import TEMPERATURES, LogitTable
from mismatch_ext.doctor.sample import Floats, Sample
from mismatch_ext.gap import k3

# Steps of refinement between two temperatures of the list.
STEPS = 14


def against_logged(
    diagnosis: Diagnosis, sample: Sample, scores: Scores, logged: Floats, stated: float | None = None
) -> Diagnosis:
    """Return the diagnosis with how far the scored trainer is from the log's own, and without a verdict if that is too far.

    Two trainers that each err no more than rounding are no farther apart than the sum of both errors, in the mean. `logged` are
    the log's `trainer_logprobs` `[N]`, NaN where it has none, and `stated` the temperature that the log was sampled at.
    """
    known = np.isfinite(logged)
    gap = torch.from_numpy((logged - sample.engine)[known])
    from_engine = (
        f"mean |Δlogp| is {float(gap.abs().mean()):.1e} nats, k3 {float(k3(gap).mean()):.1e}, on {len(gap):,} tokens"
    )
    apart, table = logged - scores.trainer, LogitTable.of(sample, scores.logits, scores.temperature)
    plain = scores.trainer if scores.straight is None else scores.straight
    errors = ((scores.own - table.logprob)[known], (plain - table.logprob)[known])
    mean, tail = _over(apart[known], *errors)
    far = float(np.abs(apart[known]).mean())
    note = (
        f"by the log's own trainer_logprobs {from_engine}; --model scores them {far:.1e} nats apart "
        f"from the log's trainer, {mean:.1f} times its rounding, {tail:.1f} times for the largest hundredth"
    )
    if _agrees(apart[known], errors, 1 + TRAINER_ROUNDING):
        return replace(diagnosis, notes=(*diagnosis.notes, note))
    note += ": it is not the trainer of the log"
    heat = _temperature(table, logged, known, stated)
    at_heat = LogitTable.of(sample, scores.logits, heat)
    heated = Noise.of(scores.trainer - table.logprob, table.spread).heated(heat / scores.temperature, at_heat.spread)
    if _agrees((logged - at_heat.logprob)[known], (heated.errors[known],), TRAINER_ROUNDING):
        note += f", and with --temperature {heat:.3g} it is"
    return replace(
        diagnosis, notes=(*diagnosis.notes, note), verdict="other_trainer", unexplained=far,
        # What fits a gap to another trainer changes nothing in the run.
        causes=tuple(replace(cause, remedy=Remedy()) for cause in diagnosis.causes),
    )  # fmt: skip


def _over(apart: Floats, *errors: Floats) -> tuple[float, float]:
    """Return how many times the largest of errors differences are, in nats: in the mean, and for the largest hundredth."""
    sizes = [np.abs(part) for part in (apart, *errors)]
    means, tails = ([float(measure(size)) for size in sizes] for measure in (np.mean, partial(np.quantile, q=TAIL)))
    return means[0] / max(*means[1:], 1e-300), tails[0] / max(*tails[1:], 1e-300)


def _agrees(apart: Floats, errors: tuple[Floats, ...], most: float) -> bool:
    mean, tail = _over(apart, *errors)
    # Of few tokens the largest hundredth is a single one.
    within = mean <= most and (tail <= APART or len(apart) < LEAST_TOKENS)
    return within or float(np.abs(apart).mean()) <= FLOAT32


def _temperature(table: LogitTable, logged: Floats, known: np.ndarray, stated: float | None) -> float:
    """Return the temperature at which the oracle is nearest to the log's trainer; the `stated` one if that is as near."""

    losses: dict[float, float] = {}

    def loss(x: float) -> float:
        if x not in losses:
            losses[x] = float(np.abs((table.under(lambda z, _: z / x) - logged)[known]).mean())
        return losses[x]

    grid = sorted(x * table.temperature for x in (*TEMPERATURES, 1.0))
    at = grid.index(min(grid, key=loss))
    narrowed(loss, grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)], STEPS)
    best = min(losses, key=losses.__getitem__)
    return stated if stated is not None and abs(stated / best - 1) < NEAR else best
