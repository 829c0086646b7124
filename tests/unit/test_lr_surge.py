"""The surge detector on simulated lengths: what fires, what does not, and how often it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from mismatch_ext.lr import LrConfig, surge
from mismatch_ext.lr.surge import Level, Measurement, SurgeDetector
from tests.unit import lengths as sim

DEFAULT = LrConfig()


def hits(curve: sim.Curve, config: LrConfig = DEFAULT, *, seeds: int, steps: int, responses: int = 64) -> list[int]:
    """Return the steps of the surges that were found, one per run that fired."""
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        hit = sim.first_surge(config, sim.measurements(curve(rng, steps), rng, responses=responses))
        found += [hit[0]] if hit else []
    return found


def series(values: list[float], truncated: Sequence[float | None] | None = None) -> list[Measurement]:
    cut = truncated or [None] * len(values)  # type: ignore[list-item]
    return [Measurement(step=k, value=v, truncated=f) for k, (v, f) in enumerate(zip(values, cut, strict=True))]


@pytest.mark.parametrize(
    ("curve", "responses"), [(sim.flat, 64), (sim.flat, 8), (sim.wandering, 64), (sim.spiking, 64)]
)
def test_stationary_lengths_do_not_fire(curve: sim.Curve, responses: int) -> None:
    # 0 of 60 runs of 400 batches: below one false alarm in 8000 batches at 95 % confidence (rule of three).
    assert hits(curve, seeds=60, steps=400, responses=responses) == []


def test_the_rate_of_false_alarms_is_measured_where_it_is_not_zero() -> None:
    # Batches of 4 responses are too noisy for the defaults: the test above would see it if the detector were as bad there.
    few = hits(sim.flat, seeds=40, steps=1000, responses=4)
    assert 0 < len(few) <= 8


@pytest.mark.parametrize(
    ("curve", "first", "last", "responses"),
    [
        (sim.stepping, 100, 100, 64),
        (sim.surging, 105, 120, 64),
        (sim.surging, 100, 125, 8),
        (sim.saturating, 108, 128, 64),
    ],
)
def test_a_surge_fires_in_every_run_while_it_lasts(curve: sim.Curve, first: int, last: int, responses: int) -> None:
    found = hits(curve, seeds=30, steps=200, responses=responses)
    assert len(found) == 30 and first <= min(found) and max(found) <= last, found


def test_a_surge_into_the_limit_is_only_seen_in_the_truncated_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    # The mean cannot double: it is near 5000 of 8192 at the start.
    monkeypatch.setattr(surge, "TRUNCATED_RISE", 2.0)
    assert hits(sim.saturating, seeds=10, steps=300) == []


def test_slow_growth_fires_once_it_is_large() -> None:
    # 1000 to 3000 over 1000 batches. The baseline is the level of step 25, 1050: twice that is passed at step 550; truncation
    # and noise of a batch move it.
    found = hits(sim.growing, seeds=10, steps=1000)
    assert len(found) == 10 and 400 <= min(found) and max(found) <= 600


@pytest.mark.parametrize("spikes", [1, 2, 3])
def test_fewer_than_half_of_the_smoothed_batches_change_nothing(spikes: int) -> None:
    values = [100.0] * 60 + [1e6] * spikes + [100.0] * 60
    found = sim.first_surge(DEFAULT, series(values))
    assert found == (None if spikes < 3 else (60, 62))


def test_the_threshold_by_hand() -> None:
    # Median of 1..9 is 5, median deviation 2, so spread 2.9652; 2 * 5 = 10, 5 + 4 * 2.9652 = 16.86, least 1.
    level = Level.of([float(k) for k in range(1, 10)])
    assert (level.center, level.spread) == (5.0, pytest.approx(2.9652))
    detector = SurgeDetector(DEFAULT)
    assert detector.threshold(level) == pytest.approx(16.8608)
    assert SurgeDetector(LrConfig(surge_ratio=4.0)).threshold(level) == 20.0
    assert detector.threshold(Level(center=0.1, spread=0.1)) == 1.0


def test_a_baseline_of_zero_has_no_multiple() -> None:
    values = series([0.0] * 5 + [1.0])
    assert sim.first_surge(LrConfig(trigger="grad_norm", baseline_window=1), values) is None
    assert sim.first_surge(LrConfig(baseline_window=1), values) == (5, 5)


def test_a_surge_in_the_baseline_is_seen_from_its_second_half_on_only() -> None:
    assert sim.first_surge(DEFAULT, series([100.0] * 30 + [400.0] * 50)) is not None
    assert sim.first_surge(DEFAULT, series([100.0] * 20 + [400.0] * 80)) is None


def test_truncated_responses_need_to_rise_over_their_own_baseline() -> None:
    flat = [500.0] * 100
    assert sim.first_surge(DEFAULT, series(flat, [0.45] * 100)) is None
    assert sim.first_surge(DEFAULT, series(flat, [0.1] * 60 + [0.59] * 40)) is None
    assert sim.first_surge(DEFAULT, series(flat, [0.1] * 60 + [0.6] * 40)) == (60, 62)
    assert sim.first_surge(DEFAULT, series(flat, [0.1] * 60 + [0.9] * 2 + [0.1] * 38)) is None
    # Batches with a response that was aborted, of which nobody knows whether it was cut off.
    holes = [None if k in (3, 40) else 0.1 for k in range(60)]
    assert sim.first_surge(DEFAULT, series(flat, [*holes, *[0.6] * 40])) == (60, 62)


# Two detectors of others, as they are described; ours must not share what is wrong with them.


def fixed_baseline_raw(values: list[float]) -> int | None:
    """Baseline: mean of the first 50; the surge is the first single value above 3 times that."""
    baseline = sum(values[:50]) / 50
    return next((k for k, v in enumerate(values) if k >= 50 and v > 3.0 * baseline), None)


def ratio_to_moving_average(values: list[float], alpha: float = 0.5, ratio: float = 1.2) -> int | None:
    """The surge is the first value above `ratio` times the moving average of those before, which follows it."""
    average = values[0]
    for k, value in enumerate(values[1:], 1):
        if value / average >= ratio:
            return k
        average = alpha * value + (1 - alpha) * average
    return None


def test_one_long_batch_fires_the_others_but_not_ours() -> None:
    values = [1000.0] * 70 + [6000.0] + [1000.0] * 100
    assert (fixed_baseline_raw(values), ratio_to_moving_average(values)) == (70, 70)
    assert sim.first_surge(DEFAULT, series(values)) is None


def test_a_ramp_escapes_a_moving_average_but_not_ours() -> None:
    # 9 % a batch: the average is at most 9 % / alpha behind, 1.18 times. The lengths grow to 3.5 times in 15 batches.
    values = [1000.0 * 1.09 ** min(max(k - 99, 0), 15) for k in range(200)]
    assert values[-1] / values[0] > 3.5 and all(b / a < 1.1 for a, b in pairwise(values))
    assert ratio_to_moving_average(values) is None
    found = sim.first_surge(DEFAULT, series(values))
    assert found is not None and found[0] == 108  # the first above twice the baseline: 1.09^9 = 2.17, 1.09^8 = 1.99


def test_noise_fires_a_moving_average_but_not_ours() -> None:
    rng = np.random.default_rng(0)
    batches = sim.measurements(sim.flat(rng, 400), rng, responses=64)
    assert ratio_to_moving_average([m.value for m in batches]) is not None
    assert sim.first_surge(DEFAULT, batches) is None
