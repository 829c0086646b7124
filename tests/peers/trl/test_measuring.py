"""Configs that do not act, with the real TRL and vLLM: the run is stock's to the last bit, and every failed check is told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_measuring as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_measuring")

pytestmark = pytest.mark.engine

# The check, and words of the error that ends a run whose config acts.
FAULTS = [
    ("weight_sync", "garbled"),
    ("sampling", "the temperature is 0.7 in trainer.vllm_generation"),
]
# Why a row is bad, and words of its message.
BAD_ROWS = {
    "rollout_logprobs": "rollout 3, token 1",
    "tokens": "row 1: the tokens to be trained on are not those that the engine sampled",
}


def check_stock(stock: dict[str, Any], measured: dict[str, Any], steps: int) -> None:
    """Compare a measured run with stock TRL: every number of its log, weights and random numbers."""
    assert len(stock["log"]) == steps and any(entry["grad_norm"] > 0 for entry in stock["log"])
    for mine, theirs in zip(measured["log"], stock["log"], strict=True):
        assert str(mine) == str(theirs), {n: (mine[n], theirs[n]) for n in mine if str(mine[n]) != str(theirs[n])}
    assert measured["parameters"] == stock["parameters"] and measured["rng"] == stock["rng"]


@pytest.mark.numeric
@pytest.mark.parametrize("rloo", [False, True])
def test_an_empty_config_measures_as_attach_does_and_sections_under_observe_are_left_out(
    run: Run, moe: Path, tmp_path: Path, rloo: bool
) -> None:
    found = run(scenarios.measured, model=moe, out=tmp_path, rloo=rloo).expect()
    for name in ("measured", "attached", "observed"):
        measured = found[name]
        check_stock(found["stock"], measured, steps=3)
        assert measured["end"] == ["completed"] and measured["acts"] is False and measured["failed"] == []
        for entry in measured["ours"]:
            assert entry["mismatch/k3_kl"] > 0 and not {"mismatch/lr_multiplier", "mismatch/kl_coef"} & set(entry)
        assert measured["ours"][-1]["mismatch/weight_sync_gap"] >= 0
    assert found["measured"]["ours"] == found["attached"]["ours"] == found["observed"]["ours"]


@pytest.mark.numeric
def test_four_faults_are_told_and_change_nothing(run: Run, dense: Path, tmp_path: Path) -> None:
    ran = run(scenarios.four_faults, model=dense, out=tmp_path)
    found = ran.expect()
    measured = found["measured"]
    check_stock(found["stock"], measured, steps=5)
    assert measured["end"] == ["completed"]
    for check, words in FAULTS:
        told = [failed["message"] for failed in measured["failed"] if failed["check"] == check]
        assert any(words in message for message in told), (check, words, told)
        count = measured["last"][f"mismatch/checks_failed/{check}"]
        assert count == measured["ours"][-1][f"mismatch/checks_failed/{check}"] >= 1
        assert f"<td>{check}</td>" in measured["report"]
        assert f"{check}: failed " in ran.stdout
    assert {failed["check"] for failed in measured["failed"]} == {check for check, _ in FAULTS}
    # A config that does not act counts bad rows, and measures the others of their batches.
    for reason, words in BAD_ROWS.items():
        counts = [entry.get(f"mismatch/bad_rows/{reason}", 0) for entry in measured["ours"]]
        assert sum(counts) == 1, (reason, counts)
        (message,) = [message for message in measured["bad_rows"] if f"bad rows ({reason})" in message]
        assert words in message and "only measures" in message
    assert all(entry["mismatch/k3_kl"] >= 0 for entry in measured["ours"])


@pytest.mark.numeric
def test_a_resumed_run_goes_on_with_its_state_or_says_why_not(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.resumed, model=dense, out=tmp_path).expect()
    check_stock(found["stock"], found["measured"], steps=4)
    assert "weight_sync" in found["whole"]
    (failed,) = found["measured"]["failed"]
    assert failed["check"] == "checkpoint" and "is damaged" in failed["message"]
    # Updates of two steps on top of the four before, then on top of the checkpoint's two.
    assert found["versions"] == [6, 4]


def test_an_engine_that_fails_at_its_probes_is_told_and_a_mistake_of_ours_ends_the_run(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    found = run(scenarios.errors, model=dense, out=tmp_path).expect()
    assert found["steps"] == 2
    assert found["failed"] == [] and found["unanswered"]
    assert all("RuntimeError: the engine is out of memory" in message for message in found["unanswered"])
    assert any("nothing is known of this weight update" in told for told in found["told"])
    assert found["left"] == "a mistake of ours"


@pytest.mark.numeric
def test_without_an_engine_alarms_watch_what_trl_logs(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.alone, model=dense, out=tmp_path).expect()
    check_stock(found["stock"], found["measured"], steps=3)
    assert found["measured"]["last"]["mismatch/alarms_raised"] == 1 and found["measured"]["failed"] == []


@pytest.mark.numeric
def test_a_callback_that_does_not_act_leaves_rate_and_run_alone(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.callback, model=dense, out=tmp_path).expect()
    check_stock(found["stock"], found["measured"], steps=3)
    assert [alarm["metric"] for alarm in found["alarms"]] == ["reward"]
