"""Whether the trainer that was scored is the one whose log-probabilities a log holds.

Suffixes of shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from mismatch_ext.doctor.diagnose import TRAINER_ROUNDING
from mismatch_ext.doctor.evidence import APART, LEAST_TOKENS, NEAR, LoggedTrainer, Scores, plain_pass
from mismatch_ext.doctor.fits import FLOAT32_UNITS, TAIL, Noise, narrowed
from mismatch_ext.doctor.logits import TEMPERATURES, LogitTable, score_tokens
from mismatch_ext.doctor.sample import Floats, Sample
from mismatch_ext.gap import k3

# Steps of refinement between two temperatures of the list.
STEPS = 14


def compare_logged(
    sample: Sample, scores: Scores, logged: Floats, stated: float | None = None, *, scored_late: bool = False
) -> LoggedTrainer:
    """Say how far the scored trainer is from the log's own.

    Two trainers that each err no more than rounding are no farther apart than the sum of both errors, in the mean. `logged` are
    the log's `trainer_logprobs` `[N]`, NaN where it has none, and `stated` the temperature that the log was sampled at. If they
    may be of later weights than those that sampled (`scored_late`), no distance makes another trainer.
    """
    known = np.isfinite(logged)
    gap = torch.from_numpy((logged - sample.engine)[known])
    from_engine = (
        f"mean |Δlogp| is {float(gap.abs().mean()):.1e} nats, k3 {float(k3(gap).mean()):.1e}, on {len(gap):,} tokens"
    )
    apart, table = logged - scores.trainer, LogitTable.of(sample, scores.logits, scores.temperature)
    plain = plain_pass(scores)
    own, trainers = (scores.own - table.logprob)[known], [(side - table.logprob)[known] for side in (plain, logged)]
    mean, tail = _over(apart[known], scores.float32_error, own, *trainers)
    far = float(np.abs(apart[known]).mean())
    said = (
        f"by the log's own trainer_logprobs {from_engine}; --model scores them {far:.1e} nats apart "
        f"from the log's trainer, {mean:.1f} times its rounding, {tail:.1f} times for the largest hundredth"
    )
    if _agrees(apart[known], 1 + TRAINER_ROUNDING, scores.float32_error, own, *trainers):
        return LoggedTrainer(said=said, far=far, other=False)
    if scored_late:
        said += "; the log's may be of later weights than those that sampled, so this does not show another trainer"
        return LoggedTrainer(said=said, far=far, other=False)
    said += ": it is not the trainer of the log"
    heat = _temperature(table, logged, known, stated)
    at_heat, heated_spread = score_tokens(sample, scores.logits, heat)
    own_noise = Noise.of(plain - table.logprob, table.spread, scores.float32_error)
    heated = own_noise.heated(heat / scores.temperature, heated_spread)
    if abs(heat / scores.temperature - 1) >= NEAR and _agrees(
        (logged - at_heat)[known], TRAINER_ROUNDING, heated.float32_error, heated.errors[known]
    ):
        said += f", and with --temperature {heat:.3g} it is"
    return LoggedTrainer(said=said, far=far, other=True)


def _over(apart: Floats, float32_error: float, rounding: Floats, *trainers: Floats) -> tuple[float, float]:
    """Return how many times rounding differences are, in nats: in the mean, and for the largest hundredth.

    If both `trainers` err more than `rounding`, the smaller of their errors takes its place: one alone is a fault, not a scale.
    Rounding is at least `float32_error`, that of `Scores`.
    """

    def over(measure: Callable[[Floats], Any]) -> float:
        size, own, *errors = (float(measure(np.abs(part))) for part in (apart, rounding, *trainers))
        return size / max(own, min(errors, default=0.0), float32_error)

    return over(np.mean), over(partial(np.quantile, q=TAIL))


def _agrees(apart: Floats, most: float, float32_error: float, rounding: Floats, *trainers: Floats) -> bool:
    mean, tail = _over(apart, float32_error, rounding, *trainers)
    # Of few tokens the largest hundredth is a single one.
    within = mean <= most and (tail <= APART or len(apart) < LEAST_TOKENS)
    return within or float(np.abs(apart).mean()) <= FLOAT32_UNITS * float32_error


def _temperature(table: LogitTable, logged: Floats, known: np.ndarray, stated: float | None) -> float:
    """Return the temperature at which the oracle is nearest to the log's trainer; the `stated` one if that is as near."""

    losses: dict[float, float] = {}
    few = table.screened(known)
    judging = np.zeros_like(known)
    judging[few.places] = known[few.places]

    def loss(x: float) -> float:
        if x not in losses:
            losses[x] = float(np.abs((few.under(lambda z: z / x) - logged)[judging]).mean())
        return losses[x]

    grid = sorted(x * table.temperature for x in (*TEMPERATURES, 1.0))
    at = grid.index(min(grid, key=loss))
    narrowed(loss, grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)], STEPS)
    best = min(losses, key=losses.__getitem__)
    return stated if stated is not None and abs(stated / best - 1) < NEAR else best
