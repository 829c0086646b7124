"""Sums per response: their means are the metrics, and ratios are of what they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.sequences import SequenceSums, left_by_replay, times_larger


def listening(batches: list[dict[str, Any]]) -> SequenceSums:
    """Return the sums of a trainer that evaluates these batches, with replay and without."""
    seen: list[tuple[Any, ...]] = []
    recorder = SimpleNamespace(add_gap=lambda split, **given: seen.append((split, given)))
    sums = SequenceSums(SimpleNamespace(mm=SimpleNamespace(log=SimpleNamespace(sums=recorder))))
    for batch in batches:
        recorder.add_gap(batch["split"], old=batch["old"], rollout=batch["rollout"], mask=batch["mask"])
        recorder.add_gap(batch["split"], old=batch["native"], rollout=batch["rollout"], mask=batch["mask"], native=True)
    assert len(seen) == 2 * len(batches)  # what listens takes nothing away
    return sums


def batch(seed: int, split: str = "eval/familiar") -> dict[str, Any]:
    """Return a batch of 6 responses of up to 9 tokens; the trainer's own routes double the gap."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(6, 9, generator=generator)
    gap = 1e-3 * torch.randn(6, 9, generator=generator)
    mask = torch.arange(9) < torch.randint(1, 10, (6, 1), generator=generator)
    rollout[~mask] = torch.nan  # nothing is read there
    return {"split": split, "old": rollout + gap, "native": rollout + 2 * gap, "rollout": rollout, "mask": mask}


def test_ratios_are_of_what_they_say() -> None:
    kept = listening([batch(seed) for seed in range(8)]).sums
    assert left_by_replay(kept, "eval/familiar", "abs").value == pytest.approx(1 / 2, rel=1e-3)
    assert left_by_replay(kept, "eval/familiar", "k3").value == pytest.approx(1 / 4, rel=1e-2)
    doubled = {split: {**by, "abs": by["native/abs"]} for split, by in kept.items()}
    assert times_larger(doubled, kept, "eval/familiar", "abs").value == pytest.approx(2, rel=1e-3)
