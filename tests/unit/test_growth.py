"""The alarm on the gap's growth: its slope and interval, growth under a heavy tail, a constant gap that raises nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_ext.config import MonitorConfig
from mismatch_ext.growth import GROWTH_LEAST, GROWTH_WINDOW, Growth, grown, slope
from mismatch_ext.states import from_json, to_json
from tests.watching import Watching

RECORDED = Path(__file__).resolve().parents[2] / "benchmarks" / "stability"
LOW = "mismatch/k3_growth_low"


def alarms(gaps: Iterable[float]) -> list[tuple[int, str]]:
    """Return step and status of the growth's alarms over a run's gaps, one log a step."""
    growth, monitor = Growth(), Watching(MonitorConfig())
    found = []
    for step, gap in enumerate(gaps, 1):
        growth, metrics = grown(growth, step, gap)
        log = {f"mismatch/{name}": value for name, value in metrics.items()}
        found += [(alarm.step, alarm.status) for alarm in monitor.observe(step, log) if alarm.metric == LOW]
    return found


def noises(seed: int, count: int) -> dict[str, Any]:
    """Return factors on a gap, by what they are drawn from: batches' means of a heavy tail."""
    made = np.random.default_rng(seed)
    return {
        "log-normal": np.exp(0.5 * made.standard_normal(count)),
        # Neither has a variance, the second has hardly a mean.
        "Pareto": 1 + made.pareto(1.5, count),
        "t of two degrees": np.exp(0.4 * made.standard_t(2, count)),
    }


def test_the_interval_is_sens() -> None:
    """Kendall's spread for 20 values without ties is sqrt(20 * 19 * 45 / 18) = 30.82; (190 - 2.576 * 30.82) / 2 = 55.3."""
    made = np.random.default_rng(3)
    values = made.standard_normal(20)
    i, j = np.triu_indices(20, 1)
    pairs = np.sort((values[j] - values[i]) / (j - i))
    residuals = values - np.median(pairs) * np.arange(20)
    ranks = residuals.argsort().argsort() - 9.5
    assert (ranks[1:] * ranks[:-1]).sum() < 0, "the interval is widened, and this test is of none that is"
    assert slope(range(20), list(values)) == (np.median(pairs), pairs[55], pairs[190 - 1 - 55])


@pytest.mark.parametrize("kind", ["log-normal", "Pareto", "t of two degrees"])
def test_a_gap_that_grows_as_verl_saw_raises_the_alarm_and_a_constant_one_does_not(kind: str) -> None:
    """0.0100 to 0.0313 in 32 steps, and on at that rate; runs of 96 steps that grow, of 400 that do not."""
    factor = (0.0313 / 0.0100) ** (1 / 32)
    for seed in range(5):
        noise = noises(seed, 400)[kind]
        assert alarms(0.01 * noise) == []
        grown = alarms(0.01 * noise[:96] * factor ** np.arange(96))
        assert grown and grown[0][1] == "raised" and grown[0][0] >= GROWTH_LEAST


def test_no_run_that_was_recorded_with_a_constant_error_raises_it() -> None:
    """TRL with vLLM, and the miniature: engines in float32, bf16 and int4, whose error is that of their grid at each step."""
    constant = {
        "recorded_real.json": ("TRL matched", "TRL off the grid", "TRL dithered"),
        "recorded.json": ("no mismatch", "bf16 engine", "off the grid", "dithered", "matched", "R3", "own routes"),
    }
    for name, arms in constant.items():
        runs = json.loads((RECORDED / name).read_text(encoding="utf-8"))["runs"]
        for arm in arms:
            for curves in runs[arm].values():
                assert alarms(value for value in curves["k3"] if value is not None) == [], (name, arm)


def test_a_resumed_run_goes_on_with_the_same_logs() -> None:
    gaps = [0.01 * 1.05**t for t in range(60)]
    one = Growth()
    for step, gap in enumerate(gaps[:30]):
        one, _ = grown(one, step, gap)
    other = from_json(Growth, json.loads(json.dumps(to_json(one))), "growth")
    for step, gap in enumerate(gaps[30:], 30):
        (one, found), (other, again) = grown(one, step, gap), grown(other, step, gap)
        assert found == again and found
    assert len(one.points) == GROWTH_WINDOW
    # A factor of 1.05 a step, over the 47 steps between the first log that is held and the last.
    assert found["k3_growth"] == pytest.approx(1.05**47) and found["k3_growth_low"] == pytest.approx(1.05**47)
