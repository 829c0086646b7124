"""The `routing` section: replay of expert choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mismatch_ext.errors import ConfigError
from mismatch_ext.strict import require as _require


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """Replay of the experts that a mixture-of-experts model chose before (R3, arXiv 2510.11370; R2, arXiv 2512.01374)."""

    mode: Literal["R2", "R3"]
    """`R3` replays the choice of whoever sampled the tokens, `R2` the trainer's own of its old-logprob pass."""
    reference: bool = False
    """Replay in the reference model too."""
    agreement_rate: float = 0.05
    """Share of replayed forward passes in which the model's own choice is measured as well, at the cost of a top-k per layer."""
    native_gap_rate: float = 0.0
    """Share of rollout batches that are scored once more without replay: the gap there is what replay closes."""

    def __post_init__(self) -> None:
        for name in ("agreement_rate", "native_gap_rate"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"mismatch.routing.{name}", value, "0 <= x <= 1")
        if self.mode == "R2" and self.native_gap_rate:
            raise ConfigError(
                f"mismatch.routing.native_gap_rate={self.native_gap_rate} with mode='R2': the pass that is measured there is "
                "the one that R2 records, and is native already; leave it out."
            )
