"""Synthetic streams whose numerics and drift are known: each fault is in its own figure, and what is unknown has none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mismatch_ext.config import LrConfig, MismatchConfig, MonitorConfig
from mismatch_ext.drift import (
    UNKNOWN,
    drift_metrics,
    drift_sums,
    of_one_version,
    token_versions,
)
from mismatch_ext.errors import RecordError
from mismatch_ext.gap import gap_metrics, gap_sums
from mismatch_ext.log import RunLog
from mismatch_ext.lr import LrControl, numerics_statistics
from mismatch_ext.sums import Sums, merged
from tests.watching import Watching

ROWS, LENGTH = 64, 24


@dataclass(frozen=True)
class Stream:
    """A batch of rollouts, and what nobody knows of a real one: train(v) of every token."""

    rollout: Tensor
    own: Tensor
    old: Tensor
    mask: Tensor
    versions: Tensor
    scoring: int

    def sums(self) -> Sums:
        return drift_sums(
            old=self.old, rollout=self.rollout, mask=self.mask, versions=self.versions, scoring=self.scoring
        )

    def metrics(self) -> dict[str, float]:
        return drift_metrics(self.sums())


def stream(*, numerics: float, drift: float, seed: int = 0, fresh: bool = True) -> Stream:
    """Return rollouts of versions 0 to 3 in segments, scored by version 3, with normal numerics and drift of given spreads."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(ROWS, LENGTH, generator=draw, dtype=torch.float64)  # noqa: E731
    own = -normal().abs() - 0.1
    cuts = torch.randint(1, LENGTH, (ROWS,), generator=draw)
    first = torch.randint(0, 3, (ROWS,), generator=draw)
    versions = torch.where(torch.arange(LENGTH) < cuts[:, None], first[:, None], first[:, None] + 1)
    if not fresh:
        versions = versions.clamp(max=2)
    rollout = own + numerics * normal()
    old = own + drift * (3 - versions) * normal()
    lengths = torch.randint(2, LENGTH + 1, (ROWS,), generator=draw)
    mask = torch.arange(LENGTH) < lengths[:, None]
    return Stream(rollout, own, old, mask, versions, 3)


def test_tokens_of_the_scoring_weights_give_the_truth() -> None:
    given = stream(numerics=2e-3, drift=5e-2)
    found = given.metrics()
    same = given.mask & (given.versions == 3)
    assert found["numerics/tokens"] == int(same.sum()) > 50
    assert found["numerics/logp_abs_diff_mean"] == pytest.approx(
        float((given.rollout - given.own)[same].abs().mean()), rel=1e-12
    )
    known = (3 - given.versions)[given.mask].double()
    assert found["staleness_mean"] == pytest.approx(float(known.mean())) and found["staleness_max"] == 3


def test_drift_raises_the_gap_of_stale_tokens_alone() -> None:
    good, bad = (stream(numerics=2e-3, drift=size).metrics() for size in (5e-3, 5e-2))
    assert bad["stale/logp_abs_diff_mean"] > 5 * good["stale/logp_abs_diff_mean"]
    for name in ("numerics/logp_abs_diff_mean", "numerics/k3_kl"):
        assert bad[name] == pytest.approx(good[name], rel=1e-6), name


def test_what_is_unknown_has_no_figure() -> None:
    sums = stream(numerics=2e-3, drift=5e-2, fresh=False).sums()
    found = drift_metrics(sums)
    assert {name for name in found if name.startswith("numerics/")} == {"numerics/tokens"}
    assert found["numerics/tokens"] == found["same_version_frac"] == 0
    assert found["stale/logp_abs_diff_mean"] > 0


def test_parts_merge_as_if_they_were_one() -> None:
    given = stream(numerics=2e-3, drift=5e-2)
    parts = []
    for rows in (slice(0, 20), slice(20, ROWS)):
        part = {k: getattr(given, k)[rows] for k in ("rollout", "own", "old", "mask", "versions")}
        parts.append(replace(given, **part).sums())
    one, two = given.metrics(), drift_metrics(merged(*parts))
    assert one.keys() == two.keys()
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-12)


def test_segments_become_versions_of_tokens() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    parts = [
        [(4, 0), (5, 4)],  # a tool answers between two turns
        [(3, 0)],
        [(None, 0)],  # nobody says
        [(1, 0), (2, 4), (3, 2)],  # a template took tokens back
    ]
    found = token_versions(parts, mask)
    u = UNKNOWN
    assert found.tolist() == [[4, 4, 4, u, 5, 5], [3, 3, 3, 3, u, u], [u, u, u, u, u, u], [1, 1, 3, 3, 3, 3]]
    with pytest.raises(RecordError, match="3 lists of segments do not fit a mask of shape"):
        token_versions(parts[:3], mask)


def test_the_log_keeps_the_total_and_adds_the_parts(tmp_path: Path) -> None:
    given = stream(numerics=2e-3, drift=5e-2)
    plain, followed = (RunLog(MismatchConfig(), tmp_path / name, info=dict, step=lambda: 0) for name in "ab")
    followed.sums.follows_versions = True
    for one in (plain, followed):
        one.sums.add_gap("train", old=given.old, rollout=given.rollout, mask=given.mask)
    followed.sums.add("train", "drift", given.sums())
    total, both = plain.flush("train", 1), followed.flush("train", 1)
    assert {name: both[name] for name in total} == total
    assert both["mismatch/numerics/k3_kl"] < both["mismatch/k3_kl"] / 100
    assert "mismatch/numerics/k3_kl" not in followed.flush("train", 2)  # each log has its own


def test_alarms_of_numerics_are_not_raised_by_drift() -> None:
    drifted = {"mismatch/k3_kl": 0.5, "mismatch/staleness_max": 2.0}
    monitor = Watching(MonitorConfig())
    logs = [{**drifted, "mismatch/numerics/k3_kl": 1e-6}, drifted, drifted, drifted, drifted]
    assert [alarm for step, log in enumerate(logs) for alarm in monitor.observe(step, log)] == []
    faulty = {**drifted, "mismatch/numerics/k3_kl": 0.01}
    raised = [alarm for step in range(3) for alarm in monitor.observe(step, faulty)]
    assert [alarm.metric for alarm in raised] == ["mismatch/numerics/k3_kl"]


def test_the_rate_follows_numerics_and_waits_where_they_are_unknown() -> None:
    known = stream(numerics=2e-3, drift=5e-2)
    found = numerics_statistics(known.sums())
    assert found["mismatch_kl"] == known.metrics()["numerics/k3_kl"] < 1e-4
    config = LrConfig(trigger="mismatch_kl")
    rate = LrControl(config, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), required="never")
    rate.collect(numerics_statistics(stream(numerics=0.0, drift=5e-2, fresh=False).sums()))
    with rate.applied():  # an unknown figure is no measurement, and no error
        assert rate.multiplier == 1


def test_tokens_behind_those_of_other_weights_are_no_numerics_where_routes_are_replayed() -> None:
    # A tool's tokens stand between the turns of the second row; the third has none of the policy's.
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]])
    parts = [[(6, 0), (7, 2), (6, 3)], [(7, 0), (7, 2)], []]
    versions = token_versions(parts, mask)
    whole = of_one_version(versions, mask)
    assert whole.tolist() == [[True, True, False, False], [True] * 4, [True] * 4]
    rollout = torch.full(mask.shape, -1.0)
    old = torch.where(whole, rollout, rollout - 3)
    found = drift_metrics(
        drift_sums(old=old, rollout=rollout, mask=mask, versions=versions, scoring=7, comparable=whole)
    )
    assert found["numerics/tokens"] == 3 and found["numerics/logp_abs_diff_mean"] == 0
    assert found["same_version_frac"] == pytest.approx(4 / 7) and found["mixed_routes_frac"] == pytest.approx(1 / 7)


def test_drift_and_gap_measure_the_same_rows_where_only_some_are_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    old, rollout = (torch.randn(4, 6, generator=generator) for _ in range(2))
    mask, means = torch.ones(4, 6, dtype=torch.bool), torch.tensor([True, False, False, True])
    given: dict[str, Any] = {"old": old, "rollout": rollout, "mask": mask, "means": means}
    whole = gap_metrics(gap_sums(**given))
    parts = drift_metrics(drift_sums(**given, versions=torch.full((4, 6), 3), scoring=3))
    assert parts["numerics/k3_kl"] == whole["k3_kl"]
    assert parts["numerics/tokens"] == 24
