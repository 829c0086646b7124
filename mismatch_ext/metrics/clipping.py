"""Phantom clipping: tokens that a clip on pi_trainer / pi_engine stops although the policy has not changed since it sampled.

A PPO clip is meant to limit the change of the policy. If the old log-probabilities are the engine's (`bypass` modes, TRL's
AsyncGRPO), the ratio contains the mismatch too. At the weights that sampled, the policy has not changed yet, so the mismatch
causes every clipped token. Shapes: B responses, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def stopped_by_clip(log_ratio: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """Tell which tokens have no gradient under PPO's clip (arXiv 1707.06347).

    min(r A, clip(r, 1 - low, 1 + high) A) is constant in r where r > 1 + high and A > 0, and where r < 1 - low and A < 0.

    Args:
        log_ratio: log r of the sampled tokens, any shape, nats.
        advantages: A, in a shape that broadcasts.
        low, high: Distances of the clip from 1.

    Returns:
        Bool, of the shape of `log_ratio`.
    """
    rising, falling = log_ratio > math.log1p(high), log_ratio < math.log1p(-low) if low < 1 else False
    return (rising & (advantages > 0)) | (falling & (advantages < 0))


@dataclass(frozen=True)
class PhantomSums:
    """The sums over tokens from which phantom clipping is measured; they add up over ranks and micro-batches.

    Args:
        tokens: Number of tokens that count.
        stopped: Number of these that the clip stops.
        up, down: Numbers of tokens with an advantage above 0 and below 0.
        up_gap, down_gap: Sums of log pi_trainer - log pi_engine over the tokens of `up` and `down`, in nats.
    """

    tokens: float
    stopped: float
    up: float
    up_gap: float
    down: float
    down_gap: float

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        trainer: Tensor,
        engine: Tensor,
        advantages: Tensor,
        mask: Tensor,
        low: float = 0.2,
        high: float = 0.2,
        *,
        sequences: bool = False,
    ) -> PhantomSums:
        """Count a batch.

        Args:
            trainer, engine: Log-probabilities of the sampled tokens by the weights that sampled them `[B, T]`, nats.
            advantages: `[B]` or `[B, T]`.
            mask: True, or 1, for the tokens that count `[B, T]`. Other tokens are not read.
            low, high: Distances of the clip from 1.
            sequences: Whether the clip is on the mean log-ratio of a response (GSPO, arXiv 2507.18071), not on each token's.
        """
        chosen = mask.bool()
        wide = advantages if advantages.dim() == trainer.dim() else advantages[:, None]
        all_d = torch.where(chosen, trainer.double() - engine.double(), 0.0)
        clipped = all_d
        if sequences:
            clipped = (all_d.sum(-1, keepdim=True) / chosen.sum(-1, keepdim=True).clamp(min=1)).expand(all_d.shape)
        d, a = all_d[chosen], wide.expand(trainer.shape)[chosen]
        up, down = a > 0, a < 0
        return cls(
            tokens=float(d.numel()),
            stopped=float(stopped_by_clip(clipped[chosen], a, low, high).sum()),
            up=float(up.sum()),
            up_gap=float(d[up].sum()),
            down=float(down.sum()),
            down_gap=float(d[down].sum()),
        )

    def values(self) -> tuple[float, ...]:
        """Return the sums in the order of the fields, for an addition over ranks."""
        return self.tokens, self.stopped, self.up, self.up_gap, self.down, self.down_gap

    def metrics(self) -> dict[str, float]:
        """Return the share of tokens that the clip stops, and the gap of reinforced tokens minus that of discouraged ones."""
        up, down = (
            total / count if count else math.nan
            for total, count in ((self.up_gap, self.up), (self.down_gap, self.down))
        )
        return {
            "phantom_clip_frac": self.stopped / self.tokens if self.tokens else math.nan,
            "advantage_gap": up - down,
        }
