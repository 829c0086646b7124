"""The `kl` section in the real TRL: its own terms, schedules, adaptive coefficient."""

from __future__ import annotations

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
    assert resumed["eval_kl"] == whole["eval_kl"] > 0
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
