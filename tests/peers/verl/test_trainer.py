"""Our trainer in the order of verl's step: whom it asks, what it logs and keeps, and what a resumed run goes on with."""

from __future__ import annotations

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.verl.in_process.scenarios_trainer")


def test_steps_of_a_run_and_of_its_resume(run: Run) -> None:
    found = run(scenarios.steps).expect()
    first, resumed = found["first"], found["resumed"]
    for ran in (first, resumed):
        # Two round trips of ours for each step, beside weight updates.
        assert [name.split()[0] for name in ran["asked"]] == ["report", *["update_lr", "metrics"] * 2]
        for metrics in ran["logged"]:
            assert metrics["mismatch/k3_kl"] > 1e-6 and metrics["mismatch/skipped_steps"] == 1
            assert metrics["mismatch/off_policy_masked_fraction"] == 0.25
            # One of six responses was rejected by verl's correction.
            assert metrics["mismatch/masked_seq_frac"] == pytest.approx(1 / 6)
            assert metrics["mismatch/kl_coef"] > 0 and metrics["mismatch/lr_multiplier"] == 1
        assert ran["coef"] == [metrics["mismatch/kl_coef"] for metrics in ran["logged"]]
    # The mean over responses of the tokens that the policy sampled, without a tool's.
    assert first["asked"][1] == "update_lr 10.00"
    assert found["states"] == [f"global_step_{step}" for step in (1, 2, 3, 4)] and resumed["sent"] == 4
    # The coefficient follows its target from where the first run left it.
    assert first["coef"][0] == 0.1 and len({*first["coef"], *resumed["coef"]}) >= 3 and resumed["coef"][0] != 0.1
    # The alarm of the first step has kept its six rows, and is still raised in the resumed run.
    assert found["kept"] == ["evidence-1.jsonl.gz", 6]


def test_verl_takes_no_step_on_a_batch_whose_rows_are_all_bad(run: Run) -> None:
    """Without a gradient an optimizer would still move the weights by its momentum; a config that only measures lets it.

    A weight update after no step is not one of those by which the optimizer is found to move nothing.
    """
    found = run(scenarios.batches_without_good_rows).expect()
    taken = {"updates": 2, "stepped": [True, False]}
    not_taken = {"updates": 0, "stepped": [False, False]}
    assert found == {"one is good": taken, "none is good": not_taken, "only measured": taken}


def test_weights_that_did_not_arrive_end_a_run_with_a_checkpoint_of_the_actors(run: Run) -> None:
    error = "WeightSyncError: stale"
    assert run(scenarios.saved_before_an_error).expect() == [error, "sleep", "save", error]
