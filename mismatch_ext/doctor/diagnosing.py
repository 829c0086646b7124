"""Say why an engine and a trainer differ on one sample: split the gap, fit causes to it, and judge the error that they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from mismatch_ext.doctor.causes import Cause, Search
from mismatch_ext.doctor.diagnosis import ROUNDING, ROUNDING_TAIL, Diagnosis, Scores
from mismatch_ext.doctor.foretold import Foretold
from mismatch_ext.doctor.logits import of_logits
from mismatch_ext.doctor.naming import COARSER, FINER, by_decode, by_fit, by_head, by_layout, by_tokens, by_trainer
from mismatch_ext.doctor.noise import Noise
from mismatch_ext.doctor.rungs import FLOAT32, Engine, Largest
from mismatch_ext.doctor.sample import Floats, Sample
from mismatch_ext.doctor.split import split
from mismatch_ext.doctor.table import LogitTable
from mismatch_ext.doctor.tokens import SURE, judge_ends, judge_tokens
from mismatch_ext.errors import NonFiniteLogprobError
from mismatch_ext.metrics.numerics import k3

# A fitted temperature counts as the one that was asked for if their ratio differs from 1 by less than this.
NEAR = 0.01
# Name of the part of the gap that the trainer's padding makes.
LAYOUT = "layout"


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
        sample: The tokens that the engine sampled, with the log-probabilities that it reported.
        scores: The trainer side's scores of the same tokens.
        causes: Causes that each need a forward pass of a changed model; those that are functions of logits are always tried.
        engine: Measurements of the engine on itself; None if it cannot be asked.
        asked: Temperature that the engine was asked for, None if unknown; it decides if the tokens cannot.
        seed: Seed of the bootstrap over responses.
        progress: Called with the key of each cause before it is tried.

    Raises:
        NonFiniteLogprobError: A log-probability of the trainer's side is not finite; the message names response and token.
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
    # If the causes leave more than rounding, and the engine's decode differs from its prefill, then the part that only the decode
    # makes is measured, and the causes have to explain only the prefill.
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
    found = [by_fit(fit, shares[fit.cause.key], complete, scores.temperature) for fit in named]
    # Only if the log-probabilities agree: otherwise the tokens come from another distribution in any case, whatever the cause.
    if not found and complete and not decodes_apart and tokens.finding is not None:
        found = [by_tokens(tokens, scores.temperature)]
    # `noise.measured` does not count here: it is false for a float32 engine, where a half-precision trainer makes the whole gap.
    if trainer_ratio > COARSER and float(np.abs(parts["trainer's arithmetic"]).mean()) > FLOAT32:
        found.append(by_trainer(trainer_ratio, shares["trainer's arithmetic"], scores))
    if complete and not found and scores.headed is not None and noise.measured:
        found += by_head(sample, scores, left, trainer_ratio, noise.ratio(scores.headed - table.logprob), shares)
    if scores.straight is not None:
        found += by_layout(scores, noise.ratio(parts[LAYOUT]), shares[LAYOUT])
    if engine is not None and decodes_apart:
        found.insert(0, by_decode(engine, shares.get("decode_path")))
    # If the tokens come from another distribution than both sides report, the pair is not clean, with or without a named cause.
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
        # No note beside a named cause, because a change of the logits also changes the size of rounding errors.
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
    """Return an engine's error on tokens that it scored again: in units of the trainer's own arithmetic, and per token `[N]`.

    Args:
        sample: The tokens, with the engine's new log-probabilities.
        scores: The trainer side's scores, at temperature 1, because engines score prompts so.
    """
    table = LogitTable.of(sample, scores.logits, scores.temperature)
    error = sample.engine - table.logprob
    return Noise.of(scores.own - table.logprob, table.spread).ratio(error), error


def _is_rounding(rest: Floats, arithmetic: Floats, noise: Noise) -> bool:
    """Tell whether an error is only rounding. A heavy tail (the largest hundredth) counts only if the mean is larger too."""
    mean = float(np.abs(rest).mean())
    tail = noise.tail_ratio(rest) <= ROUNDING_TAIL or mean <= ROUNDING * float(np.abs(arithmetic).mean())
    return (noise.ratio(rest) <= ROUNDING and tail) or mean <= FLOAT32


def _notes(noise: Noise, left: float, error: Floats) -> tuple[str, ...]:
    if not noise.measured or left >= FINER or float(np.abs(error).mean()) <= FLOAT32:
        return ()
    return (f"the engine errs {left:.2f} times as much as its dtype lets expect: it is finer than that",)
