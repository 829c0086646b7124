"""The `routing` section: replay of expert choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mismatch_ext.strict import require as _require
from mismatch_ext.strict import settle


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """Replay of the experts that a mixture-of-experts model chose before (R3, arXiv 2510.11370; R2, arXiv 2512.01374)."""

    mode: Literal["R2", "R3"]
    """`R3` replays the choice of whoever sampled the tokens, `R2` the trainer's own of its old-logprob pass."""
    reference: bool = False
    """Replay in the reference model too."""
    measured: float = 0.05
    """Share of replayed forward passes, and under R3 of rollout batches, in which the model's own choice is measured too: in a
    pass for a top-k per layer, of a batch by scoring it once more without replay. The gap there is what replay closes."""

    def __post_init__(self) -> None:
        settle(self, "mismatch.routing")
        _require(0 <= self.measured <= 1, "mismatch.routing.measured", self.measured, "0 <= x <= 1")
