"""Sums per response: their means are the metrics, and ratios are of what they say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.sequences import SequenceSums, left_by_replay, read_sequences, times_larger
from mismatch_ext.gap import gap_metrics, gap_sums


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


def test_sums_over_tokens_are_the_metrics_means(tmp_path: Path) -> None:
    batches = [batch(0), batch(1), batch(2, split="train")]
    sums = listening(batches)
    sums.write(tmp_path)
    kept = read_sequences(tmp_path)
    assert set(kept) == {"eval/familiar"}
    found = kept["eval/familiar"]
    joined = {key: torch.cat([b[key] for b in batches[:2]]) for key in ("old", "native", "rollout", "mask")}
    for prefix, ours in (("", "old"), ("native/", "native")):
        metrics = gap_metrics(gap_sums(old=joined[ours], rollout=joined["rollout"], mask=joined["mask"]))
        assert sum(found["tokens"]) == metrics["tokens"] and len(found["tokens"]) == 12
        assert sum(found[f"{prefix}abs"]) / metrics["tokens"] == pytest.approx(metrics["logp_abs_diff_mean"])
        assert sum(found[f"{prefix}k3"]) / metrics["tokens"] == pytest.approx(metrics["k3_kl"])
        assert sum(found[f"{prefix}f2"]) / metrics["tokens"] == pytest.approx(metrics["f_2"])


def test_ratios_are_of_what_they_say() -> None:
    kept = listening([batch(seed) for seed in range(8)]).sums
    assert left_by_replay(kept, "eval/familiar", "abs").value == pytest.approx(1 / 2, rel=1e-3)
    assert left_by_replay(kept, "eval/familiar", "k3").value == pytest.approx(1 / 4, rel=1e-2)
    doubled = {split: {**by, "abs": by["native/abs"]} for split, by in kept.items()}
    assert times_larger(doubled, kept, "eval/familiar", "abs").value == pytest.approx(2, rel=1e-3)
