"""What admits a model or an upgrade: figures of batches at learning rate 0, each beside its limit, as a table for a pull request.

Suffixes of shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from mismatch_ext.doctor.diagnose import FEW_FLIPS, FLIPS, STANDS_OUT, TRAINER_ROUNDING
from mismatch_ext.doctor.evidence import Block, Scores
from mismatch_ext.doctor.fits import ROUNDING, Noise
from mismatch_ext.doctor.named import judge_attention
from mismatch_ext.doctor.sample import Floats, Integers, Sample
from mismatch_ext.gap import k3

# prime-rl admits a model below this k3, NeMo-RL below this mean of exp(|difference|) (their pages on new models).
PRIME_RL, NEMO_RL = 0.015, 1.05
# Stretches of a response that are shown apart.
STRETCHES = 4
ENGINES_ERROR, TRAINERS_ERROR = "error of the engine", "error of the trainer"
# Most batches on the page.
SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What was measured; it passes up to its limit, and without a limit it always does."""

    name: str
    value: float
    limit: float | None = None
    by: str = "mismatch-ext"

    @property
    def passes(self) -> bool:
        """Whether the figure keeps its limit; a value that is no number does not."""
        return self.limit is None or bool(self.value <= self.limit)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Size of the gap in one batch, or in one stretch of all responses."""

    name: str
    tokens: int
    mean: float
    k3: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a gate measured: figures with their limits, the gap of each batch and stretch, and in words what was looked at."""

    sides: str
    figures: tuple[Figure, ...]
    batches: tuple[Stretch, ...]
    stretches: tuple[Stretch, ...]
    looked: tuple[str, ...]

    @property
    def passes(self) -> bool:
        """Whether every figure keeps its limit."""
        return all(figure.passes for figure in self.figures)

    def data(self) -> dict[str, Any]:
        """Return the gate as JSON-able data."""
        failed = [figure.name for figure in self.figures if not figure.passes]
        return {"schema": 1, "passes": self.passes, "failed": failed, **asdict(self)}

    def page(self) -> str:
        """Return the gate as a page of Markdown."""
        return "\n".join(_page(self))


def measured(
    sample: Sample,
    scores: Scores,
    batch: Integers,
    *,
    blocks: Sequence[Block] = (),
    no_blocks: str = "the engine shows no blocks",
    sides: str = "",
    looked: Sequence[str] = (),
) -> Gate:
    """Return the gate's figures of a sample, whose tokens `[N]` are of several batches.

    `no_blocks` says why no blocks are given, and `looked` what was looked at.
    """
    gap = sample.engine - scores.trainer
    figures = [*_sizes(gap), *_errors(sample, scores), *_routes(scores)]
    first = f"not compared: {no_blocks}"
    if blocks:
        out = [block for block in blocks if block.ratio >= STANDS_OUT]
        figures.append(Figure(name=f"blocks that differ, of {len(blocks)}", value=float(len(out)), limit=0.0))
        first = f"{out[0].place} ({out[0].ratio:.1f} of rounding's)" if out else f"none of {len(blocks)}"
    part = sample.place * STRETCHES // (int(sample.place.max()) + 1)
    stretches = [(part == number) for number in np.unique(part)]
    return Gate(
        sides=sides,
        figures=tuple(figures),
        batches=tuple(_stretch(f"batch {number}", gap, batch == number) for number in np.unique(batch)),
        stretches=tuple(
            _stretch(f"tokens {sample.place[at].min()} to {sample.place[at].max()}", gap, at) for at in stretches
        ),
        looked=(*looked, f"first block that differs: {first}", *_attention(sample, scores, figures)),
    )


def _attention(sample: Sample, scores: Scores, figures: Sequence[Figure]) -> list[str]:
    """Return a sentence about a trainer's attention that leaves out a part of the model, if the trainer failed."""
    failed = [figure for figure in figures if not figure.passes and figure.name.startswith(TRAINERS_ERROR)]
    if not failed or scores.attended is None:
        return []
    sentence, helps = judge_attention(sample, scores)
    return [f"{sentence}; set attn_implementation: eager" if helps else sentence]


def _sizes(gap: Floats) -> list[Figure]:
    curve, factor = float(k3(torch.from_numpy(-gap)).mean()), float(np.exp(np.abs(gap)).mean())
    return [
        Figure(name="mean abs difference (nats per token)", value=float(np.abs(gap).mean())),
        Figure(name="k3 (nats per token)", value=curve, limit=PRIME_RL, by="prime-rl"),
        Figure(name="mean exp(abs difference)", value=factor, limit=NEMO_RL, by="NeMo-RL"),
        Figure(name="largest difference (nats)", value=float(np.abs(gap).max())),
    ]


def _errors(sample: Sample, scores: Scores) -> list[Figure]:
    """Return both sides' errors against the oracle in units of rounding; in nats where float32 explains them."""
    oracle, spread = scores.score(sample)
    noise = Noise.of(scores.own - oracle, spread, scores.float32_error)
    native = oracle if scores.native is None else scores.native
    figures = []
    for side, error, limit in (
        (ENGINES_ERROR, sample.engine - oracle, ROUNDING),
        (TRAINERS_ERROR, native - scores.trainer, TRAINER_ROUNDING),
    ):
        mean = float(np.abs(error).mean())
        small = Figure(name=f"{side} (nats per token)", value=mean, limit=noise.exact)
        large = Figure(name=f"{side} in units of rounding", value=noise.size(error), limit=limit)
        figures.append(small if mean <= noise.exact else large)
    return figures


def _routes(scores: Scores) -> list[Figure]:
    if scores.flips is None:
        return []
    engine, rounding = scores.flips
    limit = max(FLIPS * rounding, FEW_FLIPS)
    return [Figure(name="experts that differ, share of tokens and layers", value=engine, limit=limit)]


def _stretch(name: str, gap: Floats, at: Any) -> Stretch:
    sizes, curve = np.abs(gap[at]), k3(torch.from_numpy(-gap[at]))
    return Stretch(
        name=name,
        tokens=int(at.sum()),
        mean=float(sizes.mean()),
        k3=float(curve.mean()),
        largest=float(sizes.max()),
    )


def _page(gate: Gate) -> Iterator[str]:
    yield f"### mismatch-ext gate: {'passed' if gate.passes else 'failed'}"
    yield from ("", gate.sides, "", "| figure | measured | limit | |", "|---|---|---|---|")
    for figure in gate.figures:
        limit, judged = "no limit", ""
        if figure.limit is not None:
            limit = f"<= {figure.limit:.3g} ({figure.by})"
            judged = "ok" if figure.passes else "**FAILED**"
        yield f"| {figure.name} | {figure.value:.4g} | {limit} | {judged} |"
    yield from ("", "| where | tokens | mean | k3 | largest |", "|---|---|---|---|---|")
    # The page stays short: the first batches and the last one stand for many.
    batches = gate.batches if len(gate.batches) <= SHOWN else (*gate.batches[: SHOWN - 1], gate.batches[-1])
    for row in (*batches, *gate.stretches):
        yield f"| {row.name} | {row.tokens:,} | {row.mean:.1e} | {row.k3:.1e} | {row.largest:.1e} |"
    yield from ("", *(f"- {sentence}" for sentence in gate.looked))
