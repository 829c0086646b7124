"""The analysis of learning rate against gap: hand-made runs whose figures can be worked out on paper."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.lr_gap.analysis import (
    Estimate,
    Series,
    difference_in_differences,
    last_third,
    paired,
    per_rollout,
    series,
    spread,
    surge_step,
)
from benchmarks.lr_gap.tables import (
    Results,
    Run,
    attributable,
    by_multiplier,
    cost,
    differences,
    levels,
    report,
    triggers,
)
from mismatch_ext.lr import LrConfig, SurgeConfig
from mismatch_ext.rundata import RunData, StepRecord


def data(records: list[tuple[int, str, dict[str, float | None]]]) -> RunData:
    """Return a run with these steps: step, split, metrics."""
    steps = tuple(StepRecord(segment=0, step=step, split=split, metrics=metrics) for step, split, metrics in records)
    return RunData(path=Path("run"), steps=steps)


def lengths(values: list[float], k3: float = 1e-5) -> RunData:
    """Return a run with one rollout in every fourth step."""
    rows = []
    for i, value in enumerate(values):
        metrics: dict[str, float | None] = {
            "reward": 0.5,
            "completions/mean_length": value,
            "completions/clipped_ratio": 0.0,
            "mismatch/k3_kl": k3,
        }
        rows += [(4 * i + 1, "train", metrics)]
        rows += [(4 * i + j, "train", {"grad_norm": 0.3}) for j in (2, 3, 4)]
    return data(rows)


def test_paired_differences_are_per_seed_and_only_of_seeds_that_have_both() -> None:
    assert paired({0: 3.0, 1: 5.0, 2: 1.0}, {1: 4.0, 0: 1.0, 7: 9.0}) == {0: 2.0, 1: 1.0}


def test_what_control_does_without_mismatch_is_taken_off() -> None:
    found = difference_in_differences({0: 5.0, 1: 7.0}, {0: 1.0, 1: 2.0}, {0: 4.0, 1: 4.0}, {0: 1.0, 1: 5.0})
    assert found == {0: 1.0, 1: 6.0}


def test_the_same_change_in_the_control_leaves_nothing() -> None:
    assert difference_in_differences({0: 0.75}, {0: 0.25}, {0: 1.0}, {0: 0.5}) == {0: 0.0}


def test_the_interval_is_students() -> None:
    # Standard deviation 1, 2 degrees of freedom: 4.303 / sqrt(3).
    found = Estimate.of([1.0, 2.0, 3.0])
    assert (found.mean, found.positive, found.negative, found.seeds) == (2.0, 3, 0, 3)
    assert found.half == pytest.approx(2.4843, abs=1e-4)
    assert not found.clear


def test_five_seeds_have_four_degrees_of_freedom() -> None:
    found = Estimate.of([-1.0, -1.0, -1.0, -1.0, -2.0])
    # Standard deviation sqrt(0.2): 2.776 * sqrt(0.2 / 5) = 2.776 * 0.2.
    assert found.half == pytest.approx(0.5552, abs=1e-4)
    assert found.clear
    assert (found.positive, found.negative) == (0, 5)


def test_one_seed_has_no_interval_and_shows_nothing() -> None:
    found = Estimate.of([3.0])
    assert math.isnan(found.half)
    assert not found.clear


def test_a_difference_of_zero_counts_for_neither_side() -> None:
    found = Estimate.of([0.0, 0.0, 1.0])
    assert (found.positive, found.negative) == (1, 0)


def test_the_last_third_starts_after_two_thirds_of_the_steps() -> None:
    assert last_third(Series(steps=tuple(range(1, 10)), values=(0, 0, 0, 0, 0, 90, 1, 2, 6)), 9) == 3.0


def test_the_last_third_of_a_metric_that_is_measured_once_per_rollout() -> None:
    assert last_third(Series(steps=(1, 5, 9), values=(1.0, 2.0, 4.0)), 12) == 4.0


def test_a_run_without_a_measurement_in_its_last_third_counts_with_its_last_one() -> None:
    assert last_third(Series(steps=(1, 5), values=(1.0, 2.0)), 60) == 2.0


def test_a_metric_of_every_step_is_averaged_over_the_steps_of_a_rollout() -> None:
    one = Series(steps=(1, 2, 3, 4, 5, 6), values=(1.0, 3.0, 5.0, 7.0, 9.0, 1.0))
    assert per_rollout(one, (1, 3)) == Series(steps=(1, 3), values=(2.0, 5.5))


def test_spread_of_one_seed_is_zero() -> None:
    assert spread([2.0]) == (2.0, 0.0)
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))


def test_series_are_of_training_and_of_what_was_measured() -> None:
    run = data(
        [
            (1, "train", {"reward": 0.25, "grad_norm": 1.0}),
            (1, "eval/default", {"reward": 0.99}),
            (2, "train", {"grad_norm": None}),
            (3, "train", {"reward": 0.5, "grad_norm": 2.0}),
        ]
    )
    assert series(run) == {
        "reward": Series(steps=(1, 3), values=(0.25, 0.5)),
        "gradient norm": Series(steps=(1, 3), values=(1.0, 2.0)),
    }


RULE = LrConfig(surge=SurgeConfig(baseline_window=3, smoothing=2))


def test_a_surge_is_dated_by_the_steps_taken_before_it() -> None:
    # Rollouts at steps 0, 4, 8, ... taken before; the fifth is the first at three times the baseline.
    assert surge_step(lengths([30, 31, 29, 30, 90, 95, 90]), RULE) == 16


def test_flat_lengths_have_no_surge() -> None:
    assert surge_step(lengths([30, 31, 29, 30, 31, 33, 30]), RULE) is None


def test_a_rule_that_watches_the_gap_looks_at_k3_alone() -> None:
    rule = LrConfig(trigger="mismatch_kl", surge=SurgeConfig(baseline_window=3, smoothing=1))
    run = lengths([30, 90, 90, 90])
    assert surge_step(run, rule) is None
    raised = data(
        [(s.step, s.split, {**s.metrics, "mismatch/k3_kl": 0.5 if s.step == 13 else 1e-3}) for s in run.steps]
    )
    assert surge_step(raised, rule) == 12


def results(engines: tuple[str, ...] = ("bf16", "trainer"), rates: tuple[str, ...] = ("off", "on", "flat")) -> Results:
    """Return two seeds of six steps: control lowers k3 from 4 to 1, and raises the reward with and without mismatch."""
    runs = {}
    for engine in engines:
        for rate in rates:
            for seed in range(2):
                k3 = 0.0 if engine == "trainer" else {"off": 4.0, "on": 1.0, "flat": 2.0}[rate]
                level = {"off": 0.25, "on": 0.75, "flat": 0.5}[rate] + seed / 8
                rows: list[tuple[int, str, dict[str, float | None]]] = []
                for step in range(1, 7):
                    multiplier = {"mismatch/lr_multiplier": 1.0 if step < 4 else 0.5} if rate == "on" else {}
                    metrics: dict[str, float | None] = {
                        "reward": level,
                        "completions/mean_length": 30.0,
                        "mismatch/k3_kl": k3 if step > 3 else 4.0,
                        "mismatch/f_1.1": 0.0,
                        "grad_norm": 1.0,
                        "entropy": 0.1,
                        **multiplier,
                    }
                    rows.append((step, "train", metrics))
                run = data(rows)
                runs[engine, rate, seed] = Run(data=run, series=series(run), accuracy=level)
    return Results(engines=engines, rates=rates, seeds=2, steps=6, runs=runs)


def test_tables_hold_levels_differences_and_what_is_left_of_them() -> None:
    found = results()
    assert "| vLLM bf16 | on | 1 ± 0 | 0 ± 0 | 1 ± 0 | 0.812 ± 0.0884 | 0.812 ± 0.0884 | 30 ± 0 |" in levels(found)
    assert "| vLLM bf16 | **-3 ± 0** (0+ 2-) | 0 ± 0 (0+ 0-) | 0 ± 0 (0+ 0-) | **0.5 ± 0** (2+ 0-)" in differences(
        found
    )
    left = "| vLLM bf16 | **-3 ± 0** (0+ 2-) | 0 ± 0 (0+ 0-) | 0 ± 0 (0+ 0-) | 0 ± 0 (0+ 0-) | 0 ± 0 (0+ 0-) |"
    assert left in attributable(found)


def test_an_engine_is_compared_with_the_control_at_each_rate() -> None:
    found = cost(results())
    assert "| vLLM bf16 | off | **4 ± 0** (2+ 0-) | 0 ± 0 (0+ 0-) |" in found
    assert "| vLLM bf16 | on | **1 ± 0** (2+ 0-) |" in found
    assert "trainer samples" not in found


def test_control_is_also_compared_with_a_constant_rate_of_the_same_mean() -> None:
    assert "| vLLM bf16 | **-1 ± 0** (0+ 2-) | 0 ± 0 (0+ 0-) | 0 ± 0 (0+ 0-) | **0.25 ± 0**" in differences(
        results(), "flat"
    )
    assert "On minus flat" in report(results())
    assert "On minus flat" not in report(results(rates=("off", "on")))


def test_each_multiplier_is_compared_with_the_same_steps() -> None:
    found = by_multiplier(results())
    assert "| vLLM bf16 | 1 | 4 → 4 |" in found
    assert "| vLLM bf16 | 0.5 | 4 → 1 |" in found


def test_triggers_are_counted_by_engine() -> None:
    assert "| vLLM bf16 | 0 of 2 | 0 of 2 |" in triggers(results())


def test_nothing_is_attributed_without_the_control() -> None:
    assert "beyond the control's" in report(results())
    alone = report(results(("bf16",)))
    assert "beyond the control's" not in alone
    assert "Engine minus control" not in alone
