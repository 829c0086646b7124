"""What each side differs from itself by on the same tokens: no list of causes, and for the engine no trainer, is needed.

Suffixes of shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mismatch_ext.doctor.sample import Floats, Sample

# Nats per token, below which an error is that of two float32 programs.
FLOAT32 = 1e-5
# Part of the tokens that near-ties of a router may move in float32, too.
FEW = 0.05
# How many times an engine's decode has to differ from its prefill as much as rounding, and as its own batches, do.
APART = 3.0


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One side's log-probabilities of the same tokens, computed in two ways.

    Args:
        side: "trainer" or "engine".
        name: What is otherwise.
        mean, largest: Of the sizes of the differences, in nats per token.
        of_gap: The mean over that of the gap between engine and trainer; None where it is not known, or zero. It is no share
            of the gap: errors of rounding add in squares.
        tokens: How many were compared.
        float32: The mean when the same is done in float32, where rounding is gone; None where it was not done.
        changes_the_policy: Whether float32 shows it, at more tokens than near-ties of a router move.
    """

    side: str
    name: str
    mean: float
    largest: float
    tokens: int
    of_gap: float | None = None
    float32: float | None = None
    changes_the_policy: bool = False

    @classmethod
    def of(cls, side: str, name: str, apart: Floats, float32: Floats | None = None) -> Rung:
        """Measure differences of log-probabilities `[N]`.

        Args:
            side, name: As above.
            apart: The differences.
            float32: The differences in float32.
        """
        exact = None if float32 is None else np.abs(float32)
        return cls(
            side=side, name=name, mean=float(np.abs(apart).mean()), largest=float(np.abs(apart).max()), tokens=len(apart),
            float32=None if exact is None else float(exact.mean()),
            changes_the_policy=exact is not None and bool(exact.mean() > FLOAT32 and (exact > FLOAT32).mean() > FEW),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine:
    """What an engine says of itself.

    Args:
        rungs: Its differences from itself, by the name of what is otherwise.
        decode: Its log-probabilities while it sampled less those of the same tokens as a prompt, both at temperature 1 and
            without sampling settings; of the sample's tokens, or of others where the run's requests have settings.
        prefill: Its log-probabilities of the sample's tokens as a prompt `[N]`, where `decode` is of the same tokens.
        notes: Sentences on what could not be measured.
    """

    rungs: tuple[Rung, ...]
    decode: Floats
    prefill: Floats | None
    notes: tuple[str, ...] = ()

    def decodes_apart(self, rounding: float) -> bool:
        """Tell whether its decode differs from its prefill by more than rounding and other batches make.

        Args:
            rounding: Mean size of the trainer's own errors in the engine's dtype, in nats per token.
        """
        batches = max((rung.mean for rung in self.rungs if rung.name in BATCHES), default=0.0)
        return float(np.abs(self.decode).mean()) > max(APART * max(rounding, batches), FLOAT32)


# Names of the engine's rungs.
DECODE, SAMPLED = "decode against prefill", "as sampled against its score as a prompt"
REVERSED, ALONE = "prompts in reverse order", "one prompt at a time"
BATCHES = (REVERSED, ALONE)


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The token of the largest gap, and what it is made of.

    Args:
        response, token: Where it is.
        gap: Engine less trainer, in nats.
        parts: The gap's terms there, by the names of the parts; they add up to it.
    """

    response: int
    token: int
    gap: float
    parts: Mapping[str, float]

    @classmethod
    def of(cls, sample: Sample, parts: Mapping[str, Floats]) -> Largest:
        """Take the largest gap apart.

        Args:
            sample: The tokens.
            parts: Name and term of each token `[N]`; they add up to engine less trainer.
        """
        gap = np.sum(list(parts.values()), axis=0)
        at = int(np.abs(gap).argmax())
        return cls(
            response=int(sample.row[at]), token=int(sample.place[at]), gap=float(gap[at]),
            parts={name: float(term[at]) for name, term in parts.items()},
        )  # fmt: skip

    def said(self) -> str:
        """Return the line of a report."""
        parts = [f"{name} {term / self.gap:.0%}" for name, term in self.parts.items()] if self.gap else []
        return f"largest gap, {self.gap:+.2e} nats at response {self.response}, token {self.token}: {', '.join(parts) or 'none'}"
