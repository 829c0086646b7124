"""A trainer that has no adapter, on the plain loop: torchtitan's model, optimizer, schedule and loss, with vLLM."""

from __future__ import annotations

import math

import pytest

from mismatch_ext.log_reading import RunData, read_run
from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.engines.scenarios_torchtitan")

STEPS = 3
pytestmark = [pytest.mark.engine, pytest.mark.nightly]


@pytest.fixture(scope="module")
def recorded(run: Run, tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """Return what a run with every section that a dense model has recorded."""
    out = tmp_path_factory.mktemp("vllm")
    run(scenarios.with_vllm, out=out, steps=STEPS).expect()
    return read_run(out / "run/mismatch")


def test_weights_of_a_correction_multiply_its_own_loss(run: Run) -> None:
    loss, norm, expected, expected_norm = run(scenarios.losses).expect()
    assert (loss, norm) == pytest.approx((expected, expected_norm), rel=1e-5)


def test_both_sides_compute_in_float16_and_the_loss_is_scaled(recorded: RunData) -> None:
    trainer, engine = recorded.header["trainer"], recorded.header["engine"]
    assert trainer["autocast_dtype"] == engine["model_dtype"] == "float16"
    assert trainer["scaler"]["enabled"] and recorded.header["audit"]["ok"]
    assert all(record.metrics["mismatch/loss_scale"] > 1 for record in recorded.steps)


def test_every_step_has_reward_length_rate_gap_and_what_each_section_did(recorded: RunData) -> None:
    assert recorded.problems == () and [end.status for end in recorded.ends] == ["completed"]
    assert [(record.step, record.split) for record in recorded.steps] == [(step + 1, "train") for step in range(STEPS)]
    for record in recorded.steps:
        for name in (
            "reward", "length", "learning_rate", "loss", "grad_norm", "entropy", "mismatch/k3_kl", "mismatch/tokens",
            "mismatch/logp_abs_diff_mean", "mismatch/rollout_is_mean", "mismatch/kl_ref_k1", "mismatch/kl_coef",
            "mismatch/lr_multiplier", "mismatch/weight_sync_gap",
        ):  # fmt: skip
            value = record.metrics[name]
            assert value is not None and math.isfinite(value), (record.step, name)
        assert 0 < record.metrics["mismatch/logp_abs_diff_mean"] < 0.02  # float16; tokens out of place are 0.1 and more
        assert record.metrics["learning_rate"] == pytest.approx(5e-5 * record.metrics["mismatch/lr_multiplier"])
    # From the second step on, the policy is no longer the one that it is kept near.
    divergences = [record.metrics["mismatch/kl_ref_k3"] for record in recorded.steps]
    assert divergences[0] == pytest.approx(0, abs=1e-6) and divergences[-1] > divergences[0]
    assert not [event for event in recorded.events if event.level == "error"]
