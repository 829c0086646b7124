"""What the trainer differs from itself by on the same tokens, and the token of the largest gap; no list of causes is needed.

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


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One side's log-probabilities of the same tokens, computed in two ways.

    Args:
        side: "trainer".
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
