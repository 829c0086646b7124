"""The gap of responses to prompts from the engine's prefix cache, apart from that of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext import Run
from mismatch_ext.gap import k3
from mismatch_ext.prefix_cache import cache_metrics, cache_sums, no_cache_sums
from mismatch_ext.rollout import RolloutRecord, to_records
from mismatch_ext.sums import merged
from tests.torch_rollout import TorchRollout
from tests.unit.loops import PROMPTS, learn, sides

OLD = torch.tensor([[-1.0, -2.0, -3.0], [-1.5, -2.5, 0.0], [-0.5, -0.5, -0.5]])
ROLLOUT = torch.tensor([[-1.1, -2.3, -3.0], [-1.5, -2.4, 7.0], [-2.5, -1.5, -1.5]])
MASK = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])


def records(provenance: Any, *cached: int | None) -> list[RolloutRecord | None]:
    count = len(cached)
    made = to_records(
        [[1, 2]] * count, [[3, 4, 5]] * count, [[-1.0] * 3] * count, provenance=provenance, cached_tokens=cached
    )
    return [*made]


@pytest.fixture
def provenance() -> Any:
    _, rollout = sides()
    return rollout.generate(PROMPTS)[0].provenance


def test_cached_and_fresh_prompts_have_their_own_means_over_batches(provenance: Any) -> None:
    known = records(provenance, 16, 0, None)
    sums = merged(*[cache_sums(old=OLD, rollout=ROLLOUT, mask=MASK, records=known)] * 2, no_cache_sums())
    d = OLD.double() - ROLLOUT.double()
    found = cache_metrics(sums)
    for kind, of in (("cached", d[0]), ("fresh", d[1, :2])):
        assert found[f"{kind}/tokens"] == 2 * len(of)
        assert found[f"{kind}/logp_abs_diff_mean"] == pytest.approx(float(of.abs().mean()))
        assert found[f"{kind}/k3_kl"] == pytest.approx(float(k3(of).mean()))


class Caching(TorchRollout):
    """An engine that takes the first prompt from a cache of other weights."""

    def generate(self, prompts: Any) -> list[RolloutRecord]:
        found = super().generate(prompts)
        stale = [tuple(value - 1.0 for value in record.rollout_logprobs) for record in found]
        cached = [
            replace(record, rollout_logprobs=values, cached_tokens=16)
            for record, values in zip(found[: self._n], stale, strict=False)
        ]
        return [*cached, *(replace(record, cached_tokens=0) for record in found[self._n :])]


def test_a_run_logs_a_cache_that_is_older_than_the_weights(tmp_path: Path) -> None:
    trainer, plain = sides(noise=0.01)
    rollout = Caching(trainer.model, plain._logits, noise=0.01)
    with Run({"monitor": {"metrics": "all"}}, trainer, rollout, tmp_path).start() as run:
        (logged,) = learn(run, 1)
    assert logged["mismatch/cached/logp_abs_diff_mean"] == pytest.approx(1, abs=0.05)
    assert logged["mismatch/fresh/logp_abs_diff_mean"] < 0.05
    assert logged["mismatch/cached/tokens"] + logged["mismatch/fresh/tokens"] == logged["mismatch/tokens"]
