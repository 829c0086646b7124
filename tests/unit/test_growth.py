"""The alarm on the gap's growth: its slope and interval, growth under a heavy tail, a constant gap that raises nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_ext.config import MonitorConfig
from mismatch_ext.growth import GROWTH_FLOOR, GROWTH_LEAST, GROWTH_WINDOW, Growth, grown, slope
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


def test_the_slope_is_the_median_over_pairs_and_ignores_an_outlier() -> None:
    steps, values = [1, 2, 4, 7, 11], [2.0, 4.0, 8.0, 14.0, 22.0]
    assert slope(steps, values)[0] == 2.0
    # Of ten pairs four have the outlier, so that the median is of the others.
    assert slope(steps, [2.0, 4.0, 800.0, 14.0, 22.0])[0] == 2.0


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


def test_an_interval_covers_the_slope_of_batches_that_are_alike() -> None:
    """Drifting noise has no slope: the interval of 99 % holds 0 in 95 % of the runs, the plain one in 84 %."""
    covered = 0
    for seed in range(200):
        made = np.random.default_rng(seed).standard_normal(GROWTH_WINDOW)
        for t in range(1, GROWTH_WINDOW):
            made[t] += 0.6 * made[t - 1]
        _, low, high = slope(range(GROWTH_WINDOW), list(made))
        covered += low <= 0 <= high
    assert covered >= 190


@pytest.mark.parametrize("kind", ["log-normal", "Pareto", "t of two degrees"])
def test_a_gap_that_grows_as_verl_saw_raises_the_alarm_and_a_constant_one_does_not(kind: str) -> None:
    """0.0100 to 0.0313 in 32 steps, and on at that rate; runs of 96 steps that grow, of 400 that do not."""
    factor = (0.0313 / 0.0100) ** (1 / 32)
    for seed in range(5):
        noise = noises(seed, 400)[kind]
        assert alarms(0.01 * noise) == []
        grown = alarms(0.01 * noise[:96] * factor ** np.arange(96))
        assert grown and grown[0][1] == "raised" and grown[0][0] >= GROWTH_LEAST


def test_a_gap_too_small_to_matter_may_grow() -> None:
    assert alarms(1e-9 * 1.1**t for t in range(100)) == []  # up to 1.3e-5
    assert alarms(GROWTH_FLOOR * 1.1**t for t in range(100))[0] == (GROWTH_LEAST + 2, "raised")


def test_an_alarm_is_over_once_the_gap_stays() -> None:
    found = alarms([0.001 * 1.1 ** min(t, 40) for t in range(200)])
    assert [status for _, status in found] == ["raised", "cleared"] and found[1][0] > 40


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


def test_a_second_log_of_a_step_and_a_training_that_begins_again() -> None:
    growth = Growth()
    for step in range(20):
        growth, _ = grown(growth, step, 0.01)
        growth, _ = grown(growth, step, 99.0)
    assert grown(growth, 20, math.inf)[1]["k3_growth"] == 1.0  # neither is taken
    assert grown(growth, 1, 0.01)[1] == {}
