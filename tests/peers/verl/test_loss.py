"""The actor's loss in the real verl: KL terms against exact values, denominators, bypass repaired, presets by name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from mismatch_ext.versions import installed
from tests.peers.kl_terms import assert_documented
from tests.peers.scenarios import Run, named

own = named("tests.peers.verl.in_process.scenarios_kl_terms")
on_driver = named("tests.peers.verl.in_process.scenarios_driver")
in_engine = named("tests.peers.verl.in_process.scenarios_losses")


pytestmark = pytest.mark.engine

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.in_process
def test_every_documented_configuration_is_exact_through_verls_loss(run: Run) -> None:
    found = run(on_driver.exact).expect()
    assert len(found) == 96
    for name, one in found.items():
        assert one["documented"] < 1e-12 and one["mode"] == "sum", name
        # The truth is that of KL(pi||ref); the others are off it by at least 7 %, so that the comparison can fail.
        assert one["true"] < 1e-12 if one["unbiased"] else one["true"] > 0.05, name
    assert sum(one["unbiased"] for one in found.values()) == 18


@pytest.mark.in_process
def test_verls_own_terms_are_those_of_the_page(run: Run) -> None:
    found = run(own.terms).expect()
    assert_documented(found, "verl", str(installed("verl")))
    by = {(row["setting"].rpartition("=")[2], row["sampling"]): row for row in found}
    assert {kind for kind, _ in by if by[kind, "on-policy"]["default"]} == {"low_var_kl"}
    assert by["low_var_kl", "on-policy"]["regularizes"] == "KL(ref||pi) of tokens, prefixes of pi"
    assert by["low_var_kl+", "on-policy"]["regularizes"] == "KL(pi||ref) of tokens, prefixes of pi"
    assert by["kl", "on-policy"]["regularizes"] == "0"
    assert by["rloo", "on-policy"]["regularizes"] == "KL(pi||ref) of responses"
    assert not any(by[kind, "off-policy"]["regularizes"] for kind in ("low_var_kl", "low_var_kl+", "kl"))


@pytest.mark.in_process
def test_verls_own_presets_are_certified_by_enumeration(run: Run) -> None:
    found = run(own.corrections).expect()
    unbounded, disabled = found.pop("unbounded"), found["disabled"]["theirs"]
    assert unbounded["bias"] < 1e-9 and len(found) == 16
    for name, judged in found.items():
        assert judged["theirs"] == pytest.approx(judged["ours"], rel=1e-5, abs=1e-8), name
        # Each of them is biased, and does something.
        assert judged["theirs"]["bias"] > 0.05 and (judged["theirs"] != disabled) == (name != "disabled"), name


@pytest.mark.numeric
def test_denominators_and_metrics_are_verls_for_every_aggregation(run: Run, tmp_path: Path) -> None:
    run(in_engine.on_two_ranks, out=tmp_path).expect()


def test_rejection_leaves_the_kl_of_every_sampled_token_and_a_carried_coefficient_is_taken(
    run: Run, tmp_path: Path
) -> None:
    run(in_engine.terms, out=tmp_path).expect()


def test_an_update_without_the_weights_of_a_correction_is_refused(run: Run, tmp_path: Path) -> None:
    weighted, plain = run(in_engine.weighed, out=tmp_path).expect()
    assert weighted == "nothing was refused"
    assert plain.startswith("RecordError: mismatch.correction: this update's samples have no 'rollout_is_weights'")


@pytest.mark.in_process
def test_a_policy_loss_that_ignores_the_weights_of_a_correction_is_refused_at_the_start(run: Run) -> None:
    found = run(on_driver.policy_losses).expect()
    runs = {name for name, said in found.items() if said == "nothing was refused"}
    assert runs == {
        "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo",
        "multiplies", "draws and multiplies",
    }  # fmt: skip
    same, shaky = "has tokens with the same slope for two weights", "is not finite or not repeatable"
    for name, said in {
        **dict.fromkeys(("ignores", "bypass_mode", "draws", "corrects some"), same), "draws by numpy": shaky
    }.items():  # fmt: skip
        assert found[name].startswith(f"ConfigError: {ACTOR}.policy_loss.loss_mode={name!r} with mismatch.correction")
        assert said in found[name]
    # The run's own rows may suit a loss that these do not.
    assert "cannot be tried on 3 rows of lengths 4, 2, 3: ZeroDivisionError" in found["fails"]
    assert "cannot be tried on" in found["unset"] and "dro_beta" in found["unset"]
    assert found["random numbers"] == "as before"


def test_kl_in_rewards_and_its_coefficient(run: Run) -> None:
    run(on_driver.rewards).expect()
    run(on_driver.coefficient).expect()


def test_micro_batches_of_padding_and_missing_fields(run: Run) -> None:
    run(on_driver.padding).expect()


def test_what_a_section_sets_in_verls_configuration(run: Run) -> None:
    table = Path(__file__).with_name("set_by_sections.toml").read_text(encoding="utf-8")
    run(on_driver.settings, cases=tomllib.loads(table)["case"]).expect()
