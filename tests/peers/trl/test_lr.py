"""The `lr` section in the real TRL: what is applied is the schedule times the rule, and nothing else changes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mismatch_ext.log_reading import read_run
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_lr as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_lr")

# Responses grow from 4 tokens to 16 at step 3: with a baseline of 3 that is the surge, and the period
# round(1.8 * 3) = 5 steps.
SURGE = {"baseline_window": 3}
AFTER_SURGE = [1, 1, 1, 1, 1, 0.5, 0.5, 0.5]


def multipliers(result: dict[str, Any]) -> list[float]:
    """Return the multiplier that was logged at each step."""
    return [entry["mismatch/lr_multiplier"] for entry in result["metrics"]]


def test_a_surge_of_lengths_finds_the_period_and_survives_kill_9(run: Run, untied: Path, tmp_path: Path) -> None:
    given = {"model": untied, "lr": SURGE, "grow_at": 3, "max_steps": 8}
    given |= {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    whole = run(scenarios.train, out=tmp_path / "whole", **given).expect()
    assert max(whole["lengths"][:3]) <= 4 < 8 < min(whole["lengths"][3:])
    assert multipliers(whole) == AFTER_SURGE
    assert [rates[0] for rates in whole["applied"]] == [1e-3 * factor for factor in AFTER_SURGE]
    assert whole["metrics"][-1]["mismatch/lr_surge_step"] == 3 and whole["metrics"][-1]["mismatch/lr_period"] == 5
    for killed_after, left in ((2, 1), (5, 4)):  # while the baseline is measured, and in the middle of the period
        out = tmp_path / f"killed{killed_after}"
        died = run(scenarios.train, out=out, kill_after=killed_after, **given)
        assert died.code == -9
        resumed = run(scenarios.train, out=out, resume=out / f"checkpoint-{left}", **given).expect()
        assert multipliers(resumed) == AFTER_SURGE
        assert resumed["applied"] == whole["applied"][left:]
        assert resumed["parameters"] == whole["parameters"]
        assert read_run(out / "mismatch").series("mismatch/lr_multiplier") == (list(range(1, 9)), AFTER_SURGE)


def test_a_run_without_saved_state_is_joined_with_a_warning(run: Run, dense: Path, tmp_path: Path) -> None:
    given = {"model": dense, "save_strategy": "steps", "save_steps": 1}
    given |= {"lr_scheduler_type": "constant"}
    run(scenarios.train, out=tmp_path, lr=None, max_steps=2, **given).expect()
    ran = run(scenarios.train, out=tmp_path, lr={"period": 2}, max_steps=5, resume=tmp_path / "checkpoint-2", **given)
    assert multipliers({"metrics": [m for m in ran.expect()["metrics"] if m]}) == [0.5, 0.5, 0.25]
    assert "checkpoint of step 2 holds no state of mismatch.lr" in ran.stderr


def test_a_skipped_float16_step_does_not_advance_the_rule(run: Run, dense: Path, tmp_path: Path) -> None:
    # A scale of 2^17 overflows float16 on every machine, until backing off has brought it down.
    scale = {"init_scale": 2.0**17, "growth_interval": 1000}
    result = run(
        scenarios.train,
        model=dense,
        out=tmp_path,
        lr={"period": 1},
        rest={"precision": {"dtype": "float16", **scale}},
        use_vllm=True,
        bf16=None,
        max_steps=14,
        max_completion_length=16,
    ).expect()
    skipped = sum(now < before for before, now in pairwise([scale["init_scale"], *result["scale"]]))
    assert 1 <= skipped <= 12
    assert len(result["applied"]) == 14 - skipped
    base = [1e-3 * (1 - step / 14) for step in range(14)]
    rule = [max(0.5**step, 0.1) for step in range(14)]
    # Neither the linear schedule nor the rule moves while steps are skipped.
    assert [rates[0] for rates in result["applied"]] == pytest.approx(
        [base[step] * rule[step] for step in range(14 - skipped)], rel=1e-12
    )


@pytest.mark.parametrize("kind", ["trainer", "callback"])
def test_a_training_that_begins_anew_begins_with_the_whole_rate(
    run: Run, dense: Path, tmp_path: Path, kind: str
) -> None:
    # Interrupted at step 5, where the multiplier is 0.25, with two updates per generation.
    rates = run(scenarios.again, model=dense, out=tmp_path, kind=kind).expect()
    assert rates == [1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4, 2.5e-4]


def test_the_whole_batch_of_a_step_leads_it(run: Run, dense: Path, tmp_path: Path) -> None:
    result = run(scenarios.whole_batch, model=dense, out=tmp_path).expect()
    assert result["taken"] == pytest.approx(result["logged"], rel=1e-12)
    assert len(result["taken"]) == 3
