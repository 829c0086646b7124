"""The gap's metrics against a reference in loops: batches, rows without padding, and shards merged in any order."""

from __future__ import annotations

import math
import random

import pytest
import torch

from mismatch_ext.gap import gap_metrics, gap_profiles, gap_sums
from mismatch_ext.sums import merged
from tests.oracles.brute import gap as brute

pytestmark = pytest.mark.numeric

SEEDS = [*range(20), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 2600))]


@pytest.mark.parametrize("seed", SEEDS)
def test_metrics_of_batches_rows_and_shards(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    scale = rng.choice([1e-7, 1e-3, 0.1, 3.0])
    batches, unpadded, shards, rows = [], [], [], []
    for _ in range(rng.choice([1, 2, 4])):
        size, width = rng.choice([1, 2, 5]), rng.choice([1, 3, 9])
        dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16])
        rollout = (-4 * torch.rand(size, width, generator=generator, dtype=torch.float64)).to(dtype)
        old = rollout.double() + scale * torch.randn(size, width, generator=generator, dtype=torch.float64)
        old = old.to(rng.choice([dtype, dtype, torch.float64]))
        mask = torch.rand(size, width, generator=generator) < rng.choice([1.0, 0.6, 0.1])
        rows += [[(float(old[b, t]), float(rollout[b, t])) for t in range(width) if mask[b, t]] for b in range(size)]
        old, rollout = old.masked_fill(~mask, math.inf), rollout.masked_fill(~mask, math.nan)
        given = rng.choice([mask, mask.long(), mask.float()])
        batches.append(gap_sums(old=old, rollout=rollout, mask=given))
        lengths = torch.full((size,), width)
        unpadded.append(gap_sums(old=old.flatten(), rollout=rollout.flatten(), mask=given.flatten(), lengths=lengths))
        for b in range(size):
            row = slice(b, b + 1)
            shards.append(gap_sums(old=old[row], rollout=rollout[row], mask=given[row]))
    rng.shuffle(shards)
    whole, parts = merged(*batches), merged(*shards)
    if not any(rows):
        assert gap_metrics(whole) == gap_metrics(parts) == gap_metrics(merged(*unpadded)) == {}
        return
    want = brute.metrics(rows)
    for sums in (whole, parts, merged(*unpadded)):
        metrics = gap_metrics(sums)
        for name, value in want.items():
            tolerance = 1e-5 if name == "rollout_probs_pearson" else 1e-9
            assert abs(metrics[name] - value) <= tolerance * (1 + abs(value)), name
        assert metrics["k3_kl"] == pytest.approx(want["k3_kl"], rel=1e-6, abs=1e-300)
    profiles, of_parts = gap_profiles(whole), gap_profiles(parts)
    for name, profile in profiles.items():
        assert profile["count"] == of_parts[name]["count"]
        for column in ("abs_diff_mean", "abs_diff_max", "k3_mean"):
            for value, of_part in zip(profile[column], of_parts[name][column], strict=True):
                assert value == of_part or value == pytest.approx(of_part, rel=1e-9, abs=1e-9)
