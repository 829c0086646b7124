"""The rule of the learning rate: multipliers known by hand, surges of simulated lengths, statistics, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_ext import lr
from mismatch_ext.config import LrConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.gap import gap_metrics, gap_sums
from mismatch_ext.lr import Baseline, LrState, Measurement, lr_metrics, lr_multiplier, lr_period, lr_step
from mismatch_ext.states import from_json, to_json
from mismatch_ext.sums import merged
from tests.unit import lengths as sim

DEFAULT = LrConfig()
SMALL = LrConfig(baseline_window=4)
NEW = LrState(trigger="response_length")


def run(config: LrConfig, lengths: Sequence[float]) -> tuple[LrState, list[float]]:
    """Return the last state, and the multiplier of each step."""
    current, multipliers = NEW, []
    for step, length in enumerate(lengths):
        current, multiplier = lr_step(current, {"response_length": length}, config, step=step)
        multipliers.append(multiplier)
    return current, multipliers


def test_the_papers_sequence_reaches_the_floor_at_the_fourth_decay() -> None:
    # 0.5^k against the floor 0.1: 1, .5, .25, .125, then .0625 < .1.
    _, multipliers = run(LrConfig(period=10), [1.0] * 60)
    assert multipliers == [m for m in (1.0, 0.5, 0.25, 0.125, 0.1, 0.1) for _ in range(10)]
    _, multipliers = run(LrConfig(period=10, warmup_steps=5), [1.0] * 20)
    assert multipliers == [1.0] * 15 + [0.5] * 5


def test_a_surge_at_step_110_gives_a_period_of_198() -> None:
    # The paper's Qwen3-4B: 1.8 * 110 = 198. The median of 5 sees the surge at step 112, and dates it back to 110.
    current, multipliers = run(DEFAULT, [1000.0] * 110 + [3500.0] * 790)
    assert multipliers == [max(0.5 ** (step // 198), 0.1) for step in range(900)]
    found = lr_metrics(current, DEFAULT)
    assert (found["lr_surge_step"], found["lr_period"], found["lr_surge_threshold"]) == (110.0, 198.0, 2000.0)


def test_the_period_is_rounded_and_at_least_1() -> None:
    # 1.8 n = 9 n / 5 is never halfway between integers, and cutting it off is one less for two n in five.
    periods = [lr_period(dataclasses.replace(NEW, surge_step=n), DEFAULT) for n in range(405)]
    assert periods == [1, *((9 * n + 2) // 5 for n in range(1, 405))]


def test_a_step_is_measured_once_and_an_empty_batch_not_at_all() -> None:
    first, _ = lr_step(NEW, {"response_length": 100.0}, SMALL, step=0)
    assert lr_step(first, {"response_length": 900.0}, SMALL, step=0)[0] == first
    empty, _ = lr_step(first, {"responses": 0, "response_length": math.nan}, SMALL, step=1)
    assert empty == lr_step(first, None, SMALL, step=1)[0] and empty.history == first.history
    # An empty batch first and a full one later at the same step: the full one counts.
    full, _ = lr_step(empty, {"responses": 8, "response_length": 100.0}, SMALL, step=1)
    assert len(full.history) == 2


def test_steps_may_be_left_out_but_never_go_back() -> None:
    current = NEW
    for step in range(0, 80, 4):  # four optimizer steps per batch
        length = 100.0 if step < 40 else 400.0
        current, multiplier = lr_step(current, {"response_length": length}, SMALL, step=step)
    assert (current.surge_step, lr_period(current, SMALL), multiplier) == (40, 72, 0.5)
    with pytest.raises(RecordError, match="step 75 comes after step 76; .* Load the state"):
        lr_step(current, None, SMALL, step=75)
    assert lr_step(NEW, None, SMALL, step=1)[1] == 1.0  # hosts that count from 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1])
def test_a_broken_statistic_is_named_even_if_it_is_not_the_trigger(value: float) -> None:
    with pytest.raises(RecordError, match="step 0: mismatch_kl="):
        lr_step(NEW, {"response_length": 1.0, "mismatch_kl": value}, DEFAULT, step=0)


def test_a_missing_statistic_a_fraction_above_1_and_another_triggers_state_are_refused() -> None:
    config, other = LrConfig(trigger="mismatch_kl"), LrState(trigger="mismatch_kl")
    with pytest.raises(RecordError, match="step 0: mismatch_kl is missing"):
        lr_step(other, {"response_length": 100.0}, config, step=0)
    with pytest.raises(RecordError, match="f_tau=1.5 .* 0 <= x <= 1"):
        lr_step(other, {"mismatch_kl": 0.1, "f_tau": 1.5}, config, step=0)
    with pytest.raises(RecordError, match="trigger 'response_length', the section of 'mismatch_kl'"):
        lr_step(NEW, None, config, step=0)


def test_a_damaged_state_is_refused_by_its_types_and_settings_may_change() -> None:
    with pytest.raises(RecordError, match=r"lr\.history"):
        from_json(LrState, to_json(NEW) | {"history": [{"step": 1}]}, "lr")
    surged = dataclasses.replace(NEW, step=199, surge_step=100)
    assert lr_multiplier(surged, LrConfig(decay=0.2)) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"decay": 1.0}, "mismatch.lr.decay: 1.0"),
        ({"period": 3, "trigger": "f_tau"}, "trigger: 'f_tau' has no effect with period=3"),
        ({"surge_ratio": 1.0}, "mismatch.lr.surge_ratio"),
    ],
)
def test_the_section_refuses(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LrConfig(**block)


# The detector.


def hits(curve: sim.Curve, *, seeds: int, steps: int, responses: int = 64) -> list[int]:
    """Return the steps of the surges that were found, one per run that fired."""
    surges = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        surge = sim.first_surge(DEFAULT, sim.measurements(curve(rng, steps), rng, responses=responses))
        surges += [surge[0]] if surge else []
    return surges


def series(values: Sequence[float], truncated: Sequence[float | None] | None = None) -> list[Measurement]:
    cut = truncated or [None] * len(values)
    return [Measurement(step=k, value=v, truncated=f) for k, (v, f) in enumerate(zip(values, cut, strict=True))]


@pytest.mark.parametrize(
    ("curve", "responses"), [(sim.flat, 64), (sim.flat, 8), (sim.wandering, 64), (sim.spiking, 64)]
)
def test_stationary_lengths_do_not_fire(curve: sim.Curve, responses: int) -> None:
    # 0 of 60 runs of 400 batches: below one false alarm in 8000 batches at 95 % confidence (rule of three).
    assert hits(curve, seeds=60, steps=400, responses=responses) == []


def test_the_rate_of_false_alarms_is_measured_where_it_is_not_zero() -> None:
    # Batches of 4 responses are too noisy for the defaults: the test above would see it if the detector were as bad there.
    assert 0 < len(hits(sim.flat, seeds=40, steps=1000, responses=4)) <= 8


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
    surges = hits(curve, seeds=30, steps=200, responses=responses)
    assert len(surges) == 30 and first <= min(surges) and max(surges) <= last, surges


def test_a_surge_into_the_limit_is_only_seen_in_the_truncated_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    # The mean cannot double: it is near 5000 of 8192 at the start.
    monkeypatch.setattr(lr, "TRUNCATED_RISE", 2.0)
    assert hits(sim.saturating, seeds=10, steps=300) == []


def test_slow_growth_fires_once_it_is_large() -> None:
    # 1000 to 3000 over 1000 batches. The baseline is the level of step 25, 1050: twice that is passed at step 550; truncation
    # and noise of a batch move it.
    surges = hits(sim.growing, seeds=10, steps=1000)
    assert len(surges) == 10 and 400 <= min(surges) and max(surges) <= 600


@pytest.mark.parametrize(("spikes", "surge"), [(1, None), (2, None), (3, (60, 62))])
def test_fewer_than_half_of_the_smoothed_batches_change_nothing(spikes: int, surge: tuple[int, int] | None) -> None:
    assert sim.first_surge(DEFAULT, series([100.0] * 60 + [1e6] * spikes + [100.0] * 60)) == surge


def test_the_threshold_by_hand() -> None:
    # Median of 1..9 is 5, median deviation 2, so spread 2.9652; 2 * 5 = 10, 5 + 4 * 2.9652 = 16.86, least 1.
    current, _ = run(LrConfig(baseline_window=9), [float(k) for k in range(1, 10)])
    assert current.baseline is not None
    assert (current.baseline.center, current.baseline.spread) == (5.0, pytest.approx(2.9652))
    assert lr.surge_threshold(current.baseline, DEFAULT) == pytest.approx(16.8608)
    assert lr.surge_threshold(current.baseline, LrConfig(surge_ratio=4.0)) == 20.0
    assert lr.surge_threshold(Baseline(center=0.1, spread=0.1), DEFAULT) == 1.0


@pytest.mark.parametrize(
    ("truncated", "surge"),
    [
        ([0.45] * 100, None),
        ([0.1] * 60 + [0.59] * 40, None),
        ([0.1] * 60 + [0.6] * 40, (60, 62)),
        # A batch with a response that was aborted, of which nobody knows whether it was cut off.
        ([0.1] * 40 + [None] + [0.1] * 19 + [0.6] * 40, (60, 62)),
    ],
)
def test_truncated_responses_need_to_rise_over_their_own_baseline(
    truncated: list[float | None], surge: tuple[int, int] | None
) -> None:
    assert sim.first_surge(DEFAULT, series([500.0] * 100, truncated)) == surge


def test_a_ramp_that_a_moving_average_would_follow_is_found() -> None:
    # 9 % a batch: an average over the last batches is at most 1.18 times behind. The lengths grow to 3.5 times in 15 batches.
    ramp = [1000.0 * 1.09 ** min(max(k - 99, 0), 15) for k in range(200)]
    surge = sim.first_surge(DEFAULT, series(ramp))
    assert surge is not None and surge[0] == 108  # the first above twice the baseline: 1.09^9 = 2.17, 1.09^8 = 1.99


# Statistics.


def test_the_mean_length_is_over_responses_not_over_ranks() -> None:
    # Ranks with 1, 3 and 0 responses: (10 + 2 + 2 + 2) / 4 = 4, where the mean of means is 6.
    ranks = [torch.tensor([10]), torch.tensor([2, 2, 2]), torch.tensor([], dtype=torch.long)]
    sums = merged(*(lr.length_sums(lengths, lengths >= 10) for lengths in ranks))
    assert lr.length_statistics(sums) == {"responses": 4, "response_length": 4.0, "truncated_fraction": 0.25}
    assert lr.length_statistics(lr.length_sums(ranks[2], ranks[2] > 0)) == {"responses": 0}
    # 2^24 + 1 is the first integer that float32 does not hold.
    assert lr.length_statistics(lr.length_sums(torch.tensor([2**24 + 1])))["response_length"] == 2**24 + 1


def test_statistics_of_a_gap_and_of_a_batch_that_was_measured_elsewhere() -> None:
    mask = torch.tensor([[True, True]])
    sums = gap_sums(old=torch.tensor([[-1.0, -2.0]]), rollout=torch.tensor([[-1.0, -3.0]]), mask=mask)
    # exp(1) - 1 - 1 on one of two tokens.
    expected = {"mismatch_kl": pytest.approx((math.e - 2) / 2), "f_tau": 0.5}
    lengths, truncated = torch.tensor([4, 6, 8]), torch.tensor([False, True, True])
    assert lr.gap_statistics(sums) == lr.leading_statistics("f_tau", lengths, truncated, gap_metrics(sums)) == expected
    of_lengths = {"responses": 3, "response_length": 6.0, "truncated_fraction": 2 / 3}
    assert lr.leading_statistics("response_length", lengths, truncated, {}) == of_lengths
