"""Intervals of the benchmarks, against tables and enumeration."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks import clean_runs
from benchmarks.bench_false_alarms import replayed, resampled, verdicts_replayed
from benchmarks.harness import interval, of_the_mean


# 97.5 % points of Student's t, of a printed table, by degrees of freedom.
@pytest.mark.parametrize(("degrees", "point"), [(1, 12.706), (4, 2.776), (9, 2.262), (29, 2.045), (60, 2.000)])
def test_the_interval_of_a_mean_is_students(degrees: int, point: float) -> None:
    draw = random.Random(degrees)
    values = [draw.gauss(3.0, 0.5) for _ in range(degrees + 1)]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / degrees
    found, half = of_the_mean(values)
    assert found == pytest.approx(mean)
    assert half == pytest.approx(point * math.sqrt(variance / len(values)), rel=3e-4)


def test_one_value_has_no_interval() -> None:
    mean, half = of_the_mean([2.0])
    assert mean == 2.0 and math.isnan(half)


@pytest.mark.parametrize("count", [6, 9, 10, 17, 40])
def test_the_interval_of_a_median_leaves_it_out_with_at_most_5_percent(count: int) -> None:
    draw = random.Random(count)
    low, high = interval(draw.sample(range(count), count))
    # The values are their own places: the median is below the interval if at most `low` of them are below the median.
    outside = 2 * sum(math.comb(count, below) for below in range(int(low) + 1)) / 2**count
    closer = 2 * sum(math.comb(count, below) for below in range(int(low) + 2)) / 2**count
    assert low + high == count - 1
    assert outside <= 0.05 < closer


def test_of_few_values_the_interval_is_all_of_them() -> None:
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_rules_that_warn_and_end_are_replayed_over_clean_and_over_broken_logs() -> None:
    clean = [{"mismatch/k3_kl": 1e-5}] * 60
    assert replayed(clean) == ({}, 0)
    broken = [*clean, *[{"mismatch/k3_kl": 0.1, "mismatch/bad_rows/routes": 9.0}] * 60]
    warned, ends = replayed(broken)
    assert warned["mismatch/k3_kl"] == 1
    assert ends > 0
    good, bad = (False, False), (True, False)
    assert verdicts_replayed([good, bad, good, bad, good]) == (2, 0)
    assert verdicts_replayed([bad, bad, good]) == (2, 1)


def test_what_trl_logs_of_a_clean_run_is_replayed_with_the_probes_and_the_updates() -> None:
    runs = dict(clean_runs.recorded())
    assert {"bf16", "FP16", "bf16, mixture"} <= runs.keys()
    for setting, seeds in runs.items():
        for logs in seeds:
            assert {"grad_norm", "loss", "mismatch/k3_kl", "mismatch/weight_sync_gap", "update"} <= logs[-1].keys(), (
                setting
            )
            assert replayed(logs)[1] == 0, setting
    # What is replayed can warn, and can end a run.
    logs = runs["bf16"][0]
    growing = [log | {"mismatch/weight_sync_gap": 1e-3 * 1.05**step} for step, log in enumerate(logs)]
    assert replayed(growing)[0]["mismatch/weight_sync_growth_low"] == 1
    assert replayed([*logs, *[logs[-1] | {"update": clean_runs.DOUBTFUL}] * 2])[1] == 1


def test_blocks_of_a_run_are_drawn_in_their_order() -> None:
    (drawn,) = resampled([list(range(60))], 240, seed=1)
    assert len(drawn) == 240
    assert all(drawn[at + 1] == drawn[at] + 1 for at in range(239) if (at + 1) % 24)
    assert drawn[:24] != drawn[24:48]
