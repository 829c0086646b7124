"""How much each side differs from itself on the same tokens: this needs no list of causes and, for the engine, no trainer.

Suffixes of shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mismatch_ext.doctor.sample import Floats, Sample

# Nats per token; two float32 programs differ by less than this.
FLOAT32 = 1e-5
# Near-ties of a router may move this share of the tokens even in float32.
FEW = 0.05
# Decode counts as different if it differs from prefill by this many times what rounding and other batches make.
APART = 3.0


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One side's log-probabilities of the same tokens, computed in two ways.

    Args:
        side: "trainer" or "engine".
        name: What differs between the two ways.
        mean, largest: Mean and largest absolute difference, in nats per token.
        of_gap: `mean` over the mean gap between engine and trainer; None if that gap is unknown or zero. It is not a share of
            the gap, because rounding errors add in squares.
        tokens: Number of tokens compared.
        float32: The mean when the same is done in float32, which has no visible rounding; None if it was not done.
        changes_the_policy: Whether the difference remains in float32, at more tokens than near-ties of a router move.
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
            side, name: As in `Rung`.
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
    """How an engine differs from itself.

    Args:
        rungs: Its differences from itself, one for each comparison.
        decode: Log-probabilities reported while sampling, less those of the same tokens scored as a prompt; both at temperature
            1 and without sampling settings. If the run's requests have such settings, other tokens than the sample's are used.
        prefill: Its log-probabilities of the sample's tokens as a prompt `[N]`; None if `decode` is of other tokens.
        notes: Sentences on what could not be measured.
    """

    rungs: tuple[Rung, ...]
    decode: Floats
    prefill: Floats | None
    notes: tuple[str, ...] = ()

    def decodes_apart(self, rounding: float) -> bool:
        """Whether its decode differs from its prefill by more than rounding and other batches explain.

        Args:
            rounding: Mean absolute rounding error of the trainer in the engine's dtype, in nats per token.
        """
        batches = max((rung.mean for rung in self.rungs if rung.name in BATCHES), default=0.0)
        return float(np.abs(self.decode).mean()) > max(APART * max(rounding, batches), FLOAT32)


# Names of the engine's rungs.
DECODE, SAMPLED = "decode against prefill", "as sampled against its score as a prompt"
REVERSED, ALONE = "prompts in reverse order", "one prompt at a time"
BATCHES = (REVERSED, ALONE)


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The token with the largest gap, and the parts of that gap.

    Args:
        response, token: Where the token is.
        gap: Engine less trainer, in nats.
        parts: The parts of the gap at this token, by name; they add up to it.
    """

    response: int
    token: int
    gap: float
    parts: Mapping[str, float]

    @classmethod
    def of(cls, sample: Sample, parts: Mapping[str, Floats]) -> Largest:
        """Find the largest gap and split it into its parts.

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
