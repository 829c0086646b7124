"""The `kl` section in the real TRL: gradients, denominators, rewards, adaptive coefficient."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mismatch_ext.versions import installed
from tests.peers.kl_terms import assert_documented
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_kl as scenarios
    from tests.peers.trl import scenarios_kl_terms
else:
    scenarios = named("tests.peers.trl.scenarios_kl")
    scenarios_kl_terms = named("tests.peers.trl.scenarios_kl_terms")


pytestmark = pytest.mark.engine


def test_trls_own_terms_are_those_of_the_page(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios_kl_terms.terms, model=str(dense), out=str(tmp_path)).expect()
    assert_documented(found, "TRL", str(installed("trl")))
    by = {(row["setting"], row["sampling"]): row for row in found}
    default = "use_bias_correction_kl=True"
    assert {setting for setting, _ in by if by[setting, "on-policy"]["default"]} == {default}
    # The default is the per-token reverse KL, on-policy and off; without the ratio it is the forward one.
    assert by[default, "on-policy"]["regularizes"] == "KL(pi||ref) of tokens, prefixes of pi"
    assert by[default, "off-policy"]["regularizes"] == "KL(pi||ref) of tokens, prefixes of mu"
    plain = by["use_bias_correction_kl=False", "on-policy"]
    assert plain["regularizes"] == "KL(ref||pi) of tokens, prefixes of pi"
    assert 0.2 < by[default, "on-policy"]["responses"] < plain["responses"]


def test_every_estimator_and_placement_trains(run: Run, dense: Path, tmp_path: Path) -> None:
    runs = run(scenarios.every_configuration, model=dense, out=tmp_path, timeout=600).expect()
    assert len(runs) == 12
    for name, found in runs.items():
        assert found["steps"] == 3 and found["changed"], name
        assert all(math.isfinite(x) for key in ("loss", "grad_norm", "kl") for x in found[key]), name
        # The policy was moved off the reference before the first step; k3 is a mean of what is never negative.
        assert min(found["kl"]) > 1e-3, name


def test_denominators_are_trls_for_every_loss_type(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.denominators, model=dense, out=tmp_path).expect()
    assert set(found) == {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"}
    for loss_type, errors in found.items():
        assert errors["error"] < 1e-5, loss_type
        # Without the KL term the gradient is another one, so the comparison can fail.
        assert errors["share_of_kl"] > 0.1, loss_type
        assert errors["ragged"] == (loss_type in ("grpo", "sapo"))  # these average over each response's own tokens


@pytest.mark.parametrize(
    "kl",
    [
        {"estimator": "k1", "placement": "reward"},
        {"estimator": "k3", "placement": "both"},
        {"estimator": "k2", "placement": "loss", "target": "token"},
        {"estimator": "k1", "placement": "reward", "target": "token"},
        {"estimator": "abs", "placement": "both"},
        {"estimator": "k3", "placement": "both", "baseline": "leave_one_out"},
    ],
    ids=lambda kl: "-".join(kl.values()),
)
def test_first_step_is_the_hand_computed_one(run: Run, dense: Path, tmp_path: Path, kl: dict[str, Any]) -> None:
    found = run(scenarios.first_step, model=dense, out=tmp_path, kl=kl).expect()
    assert found["error"] < 1e-5
    # Several prompts, and several responses to each: a baseline over all of them would be another.
    assert 1 < found["prompts"] < found["rows"]


def test_the_baseline_is_over_all_samples_of_a_batch_and_no_copies(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.baselines, model=dense, out=tmp_path).expect()
    assert found["error"] < 1e-5 and found["lone"] == 0 and found["copies"] == 0


def test_kl_in_rewards_enters_before_group_normalization(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.rewards_path, model=dense, out=tmp_path).expect()
    assert found["names"] == ["graded", "kl"]
    assert found["spread"] > 0.1  # the penalties differ between completions, so that advantages depend on them
    assert found["kl_error"] < 1e-5 and found["advantage_error"] < 1e-5


def test_lora_iterations_accumulation_half_precision_and_evaluation(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.other_settings, model=dense, out=tmp_path).expect()
    assert len(found["kl"]) == 4 and len(found["eval_kl"]) == len(found["eval_loss"]) == 2
    # The adapters start at random, so that policy and reference differ from the first step on.
    assert min(found["kl"] + found["eval_kl"]) > 1e-4
    assert all(math.isfinite(x) for values in found.values() for x in values)


def test_a_coefficient_that_is_scheduled_as_in_trl_is_the_one_of_each_step(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    found = run(scenarios.scheduled, model=dense, out=tmp_path).expect()
    assert max(found["errors"]) < 1e-6 and found["effect"] > 1e-2 and found["coef"] == [0.5, 0.05]
    assert "target_kl" in found["refused"] and "0.1" in found["refused"]


def test_a_controller_moves_once_a_step_however_often_a_step_generates(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.refilled, model=dense, out=tmp_path).expect()
    coefficients, updates = zip(*found["steps"], strict=True)
    assert coefficients[0] == 0.1 and len(set(coefficients)) == 3
    assert updates == (0, 1, 2) and found["saved"] == 3


def test_adaptive_coefficient_resumes_where_it_was(run: Run, dense: Path, tmp_path: Path) -> None:
    whole = run(scenarios.adaptive, model=dense, out=tmp_path / "whole").expect()
    assert len(set(whole["coef"])) == 4
    checkpoint = tmp_path / "whole/checkpoint-2"
    resumed = run(scenarios.adaptive, model=dense, out=tmp_path / "resumed", resume=checkpoint).expect()
    assert resumed["state"] == whole["state"]
    assert resumed["coef"][-2:] == whole["coef"][-2:] and resumed["parameters"] == whole["parameters"]


@pytest.mark.parametrize(
    ("kl", "overrides", "words"),
    [
        ({}, {}, ["mismatch.kl without a coefficient", "beta > 0"]),
        ({"coef": 0.1}, {"beta": 0.2}, ["beta=0.2", "mismatch.kl.coef=0.1"]),
        (
            {"coef": 0.1, "reward_path": "rewards", "estimator": "full"},
            {},
            ["'rewards'", "'full'", "leave out reward_path"],
        ),
        (
            {"coef": 0.1, "reward_path": "rewards", "ratio": "token"},
            {},
            ["'rewards'", "ratio='token'", "leave out reward_path"],
        ),
        (
            {"coef": 0.1, "reward_path": "rewards"},
            {"mask_truncated_completions": True},
            ["'rewards'", "mask_truncated_completions", "surrogate"],
        ),
        (
            {"coef": 0.1, "reward_path": "rewards", "estimator": "k2"},
            {},
            ["'rewards'", "placement='loss'"],
        ),
        (
            {"coef": 0.1, "reward_path": "rewards"},
            {"multi_objective_aggregation": "normalize_then_sum"},
            ["'rewards'", "'normalize_then_sum'", "surrogate"],
        ),
    ],
)
def test_contradictions_are_refused(kl: dict[str, Any], overrides: dict[str, Any], words: list[str]) -> None:
    from mismatch_ext.adapters.trl import MismatchGRPOConfig

    from mismatch_ext.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        MismatchGRPOConfig(output_dir="x", use_cpu=True, bf16=False, mismatch={"kl": kl}, **overrides)
    assert all(word in str(error.value) for word in words), error.value
