"""The `correction` section: importance weights and rejection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mismatch_ext.presets import resolve
from mismatch_ext.strict import settle


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Importance weights and rejection for the gap between rollout and trainer policy."""

    preset: str | None = None
    """A named preset of `mismatch_ext.correction.PRESETS` (verl's and TRL's names); the other keys override it."""
    mode: Literal["decoupled", "bypass"] | None = None
    """`decoupled` weighs by pi_old/mu beside the host's own ratio; `bypass` takes mu as the old policy."""
    loss: Literal["ppo_clip", "reinforce"] | None = None
    """Policy loss of `bypass`: the host's clipped ratio pi/mu without weights, or A log pi with weights pi/mu."""
    level: Literal["none", "token", "sequence", "geometric"] | None = None
    """Level of the importance weight: per token, product over the sequence, or its geometric mean."""
    bound: Literal["truncate", "mask", "clip", "icepop"] | None = None
    """What happens beyond the bounds: `truncate` min(w, upper), `clip` to [lower, upper], `mask`/`icepop` weight 0."""
    upper: float | None = None
    """Upper bound of the weight."""
    lower: float | None = None
    """Lower bound of the weight."""
    normalize: bool | None = None
    """Divide the weights by their mean over the batch."""
    reject: str | None = None
    """Rejection rules, comma-separated, all must hold: `{token,seq_sum,seq_mean}_{k1,k2,k3}`, `seq_max_{k2,k3}`."""
    reject_threshold: str | float | None = None
    """One threshold per rule, comma-separated: `lo_hi` or a number for k1 (ratio bounds), an upper bound for k2 and k3.
    Quote it: YAML reads a bare 0.5_2 as 0.52."""
    veto: float | None = None
    """Drop a sequence that has any token with ratio below this."""
    off_policy_threshold: float | None = None
    """DeepSeek-V3.2: drop a sequence of negative advantage whose mean log(mu/pi) exceeds this."""

    def __post_init__(self) -> None:
        settle(self, "mismatch.correction")
        resolve(self)
