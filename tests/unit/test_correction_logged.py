"""What is logged of a correction: the figures of several ranks are those of their union, and hosts agree on the names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext.config import CorrectionConfig
from mismatch_ext.correction import Correction, correct, correction_metrics
from mismatch_ext.names import CORRECTION_MEASURES
from mismatch_ext.presets import resolve
from mismatch_ext.sums import over_ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "token": {"preset": "decoupled_geo_rs_token_tis"},
    "sequence": {"preset": "decoupled_seq_is_rs"},
    "normalized": {"level": "sequence", "upper": 100.0, "normalize": True},
    "masked": {"preset": "icepop", "veto": 0.5},
    "rejected": {"reject": {"token_k1": (0.8, 1.2)}},
}


class Adding:
    """Three ranks that speak one after the other; the last of them hears all."""

    size = 3

    def __init__(self) -> None:
        self.rank = -1
        self.total: Tensor | None = None

    def gather(self, value: Any) -> list[Any]:
        raise NotImplementedError

    def sum(self, values: Tensor) -> Tensor:
        self.total = values if self.total is None else self.total + values
        return self.total


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return rollout and old log-probabilities, and a mask, of ranks of unequal weight: 9 rows of up to 20 tokens, 3 of 2."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(12, 20, generator=generator) * 3
    old = rollout + 0.2 * torch.randn(12, 20, generator=generator)
    mask = torch.arange(20) < torch.tensor([20, 19, 18, 17, 16, 15, 14, 13, 12, 2, 2, 2])[:, None]
    return rollout, old, mask


def corrected(rollout: Tensor, old: Tensor, mask: Tensor, settings: Any) -> Correction:
    return correct(old_logprobs=old, rollout_logprobs=rollout, response_mask=mask, config=settings)


@pytest.mark.parametrize("name", SETTINGS)
def test_metrics_of_ranks_are_those_of_their_union(name: str) -> None:
    settings = resolve(CorrectionConfig(**SETTINGS[name]))
    rollout, old, mask = batch()
    whole = corrected(rollout, old, mask, settings).metrics
    assert len(whole) >= (2 if name == "rejected" else 7)
    assert whole.keys() <= CORRECTION_MEASURES.keys()
    ranks, merged = Adding(), {}
    # The second of the three ranks has no token at all.
    mask = torch.cat([mask[:9], torch.zeros_like(mask[:2]), mask[9:]])
    old, rollout = (torch.cat([x[:9], torch.zeros_like(x[:2]), x[9:]]) for x in (old, rollout))
    for part in (slice(0, 9), slice(9, 11), slice(11, 14)):
        found = corrected(rollout[part], old[part], mask[part], settings)
        assert bool(found.metrics) == (part.start != 9)
        ranks.rank += 1
        merged = correction_metrics(over_ranks(found.sums, ranks))
    assert merged == pytest.approx(whole, rel=1e-6, abs=1e-9)
