"""What a log of rollouts tells without a model, where it holds the trainer's log-probabilities beside the engine's."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mismatch_ext.doctor.diagnose import SCHEMA
from mismatch_ext.doctor.evidence import LEAST_BEFORE, begins
from mismatch_ext.doctor.log_notes import finite_rows, notes_of_settings, notes_of_values
from mismatch_ext.doctor.logged import FILE, Logged
from mismatch_ext.doctor.sample import Floats, Sample
from mismatch_ext.doctor.tokens import judge_start
from mismatch_ext.errors import RecordError
from mismatch_ext.gap import k3

# One-sided from this share of the tokens on; a choice, as are the other two.
ONE_SIDED = 0.95
# A few responses have the gap if this share of them, or one, holds this share of it.
FEW, MOST = 0.05, 0.8
LISTED = 12


@dataclass(frozen=True, kw_only=True)
class FirstAnswer:
    """What the numbers of a log tell alone; it names no cause, and is never clean."""

    tokens: int
    responses: int
    gap: dict[str, float]
    begins: int | None
    notes: tuple[str, ...]
    agrees: bool  # every token is within the threshold, and the log shows nothing that takes this back
    conclusion: str

    def data(self) -> dict[str, Any]:
        """Return it as JSON-able data, under the keys of a diagnosis where it has the same."""
        verdict = "within the threshold" if self.agrees else "unexplained"
        unexplained = self.gap["logp_abs_diff_mean"]
        return {"schema": SCHEMA, **{k: v for k, v in vars(self).items() if k != "agrees"},
                "verdict": verdict, "unexplained": unexplained}  # fmt: skip

    def report(self, path: object, version: str | None = None) -> str:
        """Return the lines for a terminal, of a log at this path and of one weight version if that was asked for."""
        gap = self.gap
        given = [str(path), *(() if version is None else ("--weight-version", version))]
        return "\n".join((
            f"gap {gap['logp_abs_diff_mean']:.2e} nats per token (k3 {gap['k3_kl']:.2e}, largest "
            f"{gap['logp_abs_diff_max']:.2e}) on {self.tokens:,} tokens of {self.responses} responses, by the log alone",
            *self.notes,
            "without a model the doctor cannot measure rounding, so it names no cause and calls no log clean",
            f"for the cause: mismatch-ext doctor --model PATH --rollouts {shlex.join(given)} --out DIR",
            self.conclusion,
        ))  # fmt: skip


def first_answer(logged: Logged, threshold: float) -> FirstAnswer:
    """Return what the log tells; `RecordError` if it has no trainer's log-probabilities, or of some responses alone."""
    notes = list(notes_of_settings(logged))
    if logged.kept is not None:
        # A row may have been kept because of such a value.
        logged, not_finite = finite_rows(logged)
        notes += [] if not_finite is None else [not_finite]
    having = sum(response.trainer_logprobs is not None for response in logged.responses)
    if having < len(logged.responses) or not having:
        told = "".join(f" {note}." for note in notes)
        raise RecordError(
            f"{logged.path}: {having} of {len(logged.responses)} responses have the trainer's log-probabilities "
            f"(trainer_logprobs, in NeMo-RL prev_logprobs), and --model is missing; give --model, or log them for all.{told}"
        )
    logged = replace(logged, responses=tuple(replace(response, routes=None) for response in logged.responses))
    sample = logged.sample()
    trainer = sample.sampled([response.trainer_logprobs or () for response in logged.responses])
    if not np.isfinite(trainer).all():
        at = np.flatnonzero(~np.isfinite(trainer))[0]
        raise RecordError(
            f"{logged.responses[sample.row[at]].where}: trainer_logprobs of token {sample.place[at]} is {trainer[at]}; log those "
            "of all sampled tokens, or give --model."
        )
    gap = sample.engine - trainer
    size = np.abs(gap)
    border = _border(sample) & (size > threshold)
    rest = np.where(border, 0.0, gap)
    early = np.argsort(sample.place, kind="stable")[: max(LEAST_BEFORE, len(size) // 8)]
    first = begins(sample.place, rest, float(np.abs(rest[early]).mean()))
    apart, doubtful = bool(size.max() > threshold), not size.any() or judge_start(sample) > 0
    if apart:
        conclusion = f"Unexplained: tokens are more than {threshold:g} nats apart, and the log alone shows no cause."
    elif doubtful:
        conclusion = (
            f"Unexplained: all tokens agree to {threshold:g} nats, but a line above says why that is not enough."
        )
    else:
        conclusion = f"Within the threshold: all {len(gap):,} tokens agree to {threshold:g} nats."
    notes += _notes(logged, sample, gap, first, border)
    notes += notes_of_values(logged, sample, trainer)
    return FirstAnswer(
        tokens=len(gap), responses=len(np.unique(sample.row)),
        gap={"logp_abs_diff_mean": float(size.mean()), "k3_kl": _k3(gap), "logp_abs_diff_max": float(size.max())},
        begins=first, notes=tuple(notes), agrees=not (apart or doubtful),
        conclusion=conclusion,
    )  # fmt: skip


def _k3(gap: Floats) -> float:
    return float(k3(torch.from_numpy(-gap)).mean())


def _border(sample: Sample) -> NDArray[np.bool_]:
    """Tell which tokens are next to a masked one and were logged with exactly 0, as of a mask that is one token off `[N]`."""
    places = zip(sample.row, sample.place, strict=True)
    beside = [False in sample.masks[row][max(0, at - 1) : at + 2] for row, at in places]
    border: NDArray[np.bool_] = np.array(beside, dtype=np.bool_) & (sample.engine == 0)
    return border


def _notes(logged: Logged, sample: Sample, gap: Floats, first: int | None, border: NDArray[np.bool_]) -> Iterator[str]:
    size = np.abs(gap)
    total = float(size.sum()) or 1.0
    largest = np.sort(size)[-max(1, len(size) // 100) :]
    apart = gap[gap != 0]
    if len(apart):
        tokens = "token holds" if len(largest) == 1 else f"{len(largest):,} tokens hold"
        yield f"tail: the largest {tokens} {largest.sum() / total:.0%} of the gap"
        higher = float((apart > 0).mean())
        sided = ": one-sided, which rounding alone is not" if max(higher, 1 - higher) >= ONE_SIDED else ""
        yield f"sign: engine less trainer {gap.mean():+.1e} nats in the mean, above 0 on {higher:.0%} of the tokens{sided}"
    else:
        yield (
            "copied: the trainer's log-probabilities are the engine's on every token, to the last bit, as where a bypass mode "
            "reuses them; two programs rarely agree so well"
        )
    if first is not None:
        before, behind = size[sample.place < first].mean(), size[sample.place >= first].mean()
        yield f"where: begins at token {first} of a response; {before:.1e} nats before it, {behind:.1e} from there on"
    by_row = np.sort(np.bincount(sample.row, size))[::-1]
    count = int(np.searchsorted(by_row.cumsum(), MOST * total)) + 1
    if count <= max(1, FEW * len(by_row)):
        yield f"where: {count} of {len(by_row)} responses hold {by_row[:count].sum() / total:.0%} of the gap"
    if border.any():
        zeros = f"{border.sum()} sampled {'token was' if border.sum() == 1 else 'tokens were'} logged with exactly 0"
        yield (
            f"mask: {zeros} next to a masked one, {size[border].sum() / total:.0%} of the gap: a token that a tool inserted "
            "looks like this, and a mask that is one token off counts it as sampled"
        )
    if late := judge_start(sample):
        yield f"mask: starts {late} token{'s'[: late > 1]} late in every response: it leaves out what the engine sampled"
    versions = [response.version for response in logged.responses]
    steps = [response.step or FILE for response in logged.responses]
    yield from _each("weight version", versions, sample, gap)
    if steps != versions:
        yield from _each("step", steps, sample, gap)


def _each(kind: str, names: Sequence[str], sample: Sample, gap: Floats) -> Iterator[str]:
    """Yield a line for each of several versions or steps in the order of the log; of many, those with the largest gaps."""
    of_token = np.array(names)[sample.row]
    parts = {name: gap[of_token == name] for name in dict.fromkeys(of_token)}
    if len(parts) < 2:
        return
    most = sorted(parts, key=lambda name: -float(np.abs(parts[name]).mean()))[:LISTED]
    for name, part in parts.items():
        if name in most:
            yield f"{kind} {name}: {len(part):,} tokens, mean |Δlogp| {np.abs(part).mean():.1e} nats, k3 {_k3(part):.1e}"
    if len(parts) > LISTED:
        yield f"{len(parts) - LISTED} more of {kind}, with smaller gaps, are not listed"
