"""All sections in one run of the real TRL and vLLM; alarms that act; control and alarms by callback alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mismatch_ext.config import MismatchConfig
from mismatch_ext.log_reading import read_run
from mismatch_ext.patching import digest_of
from tests.peers.scenarios import Ran, Run, named

scenarios = named("tests.peers.trl.scenarios_everything")

# Every section: a loss scale that grows within the run, a coefficient that adapts, a rate that is halved every second step.
EVERYTHING: dict[str, Any] = {
    "precision": {"dtype": "float16", "init_scale": 1024.0, "growth_interval": 2},
    "correction": {"preset": "decoupled_geo_rs_token_tis"},
    "kl": {"coef": 0.05, "target_kl": 0.01},
    # The gap without replay is measured in some of these steps, which a resumed run must find.
    "routing": {"mode": "R3", "measured": 0.5},
    "lr": {"period": 2},
    "monitor": {
        # A reward of this random model is always above: raised at the third step, whenever the run was killed.
        "alarms": {"reward": {"above": 1.0e-9, "patience": 3}},
        "default_alarms": False,
    },
}
SAVING = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}

# TRL 1.13 gives the load-balancing loss a weight of its own, later releases the model's: with it, no float16 step overflows.
BALANCED = {"router_aux_loss_coef": 0.01}


@pytest.fixture(scope="module")
def whole(run: Run, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    """Return a run with every section that nothing interrupted, and its folder."""
    out = tmp_path_factory.mktemp("everything")
    return run(scenarios.everything, model=moe, out=out, block=EVERYTHING, **SAVING, **BALANCED), out


def test_every_section_is_active_in_one_run(whole: tuple[Ran, Path]) -> None:
    ran, out = whole
    history = ran.expect()["history"]
    last = history[-1]
    assert [entry["mismatch/lr_multiplier"] for entry in history] == [1.0, 1.0, 0.5, 0.5]
    assert [entry["learning_rate"] for entry in history] == [1e-3, 1e-3, 5e-4, 5e-4]
    assert last["mismatch/loss_scale"] == 4096
    assert 0 < last["mismatch/k3_kl"] < 1e-4
    assert last["mismatch/rollout_is_mean"] == pytest.approx(1.0, abs=0.01)
    assert "mismatch/rollout_rs_seq_masked_fraction" in last
    name = "mismatch/routing/set_mismatch_frac"  # of the half of the passes that is measured
    differing = [entry[name] for entry in history if name in entry]
    assert differing and 0 <= min(differing) <= max(differing) < 0.2
    assert len({entry["mismatch/kl_coef"] for entry in history}) > 1
    data = read_run(out / "mismatch")
    (alarm,) = [event for event in data.events if event.name == "alarm"]
    assert (alarm.step, alarm.data["metric"], alarm.data["status"]) == (3, "reward", "raised")
    block = MismatchConfig.parse(EVERYTHING)
    assert block is not None and data.header["config"] == block.to_dict()
    # Patches of single moments too are named in the header and in the provenance of the rollouts.
    patches = data.header["patches"]
    assert sorted(patch["name"] for patch in patches) == ran.expect()["patched"]
    assert ran.expect()["patch_digest"] == digest_of(patches)
    assert "mismatch-ext: training completed after 4 steps" in ran.stdout


@pytest.mark.parametrize("killed_after", [2, 3])
def test_killed_between_two_steps_and_resumed_equals_never_stopped(
    run: Run, moe: Path, tmp_path: Path, whole: tuple[Ran, Path], killed_after: int
) -> None:
    given = {"model": moe, "out": tmp_path, "block": EVERYTHING, **SAVING, **BALANCED}
    died = run(scenarios.everything, kill_after=killed_after, **given)
    assert died.code == -9
    last = tmp_path / f"checkpoint-{killed_after - 1}"
    assert not (tmp_path / f"checkpoint-{killed_after}").exists()
    resumed = run(scenarios.everything, resume=last, **given).expect()
    uninterrupted = whole[0].expect()
    native = ["mismatch/native/k3_kl" in entry for entry in uninterrupted["history"]]
    assert any(native) and not all(native)
    assert resumed["history"] == uninterrupted["history"]
    assert resumed["parameters"] == uninterrupted["parameters"]
    # The alarm's streak went over the kill too, and was told once.
    alarms = [event for event in read_run(tmp_path / "mismatch").events if event.name == "alarm"]
    assert [(alarm.step, alarm.data["first_step"]) for alarm in alarms] == [(3, 1)]
    steps = read_run(tmp_path / "mismatch").series("mismatch/lr_multiplier")
    assert steps == ([1, 2, 3, 4], [1.0, 1.0, 0.5, 0.5])


def test_a_callback_alone_controls_and_survives_kill_9(run: Run, dense: Path, tmp_path: Path) -> None:
    # Logged lengths are of the step before: grown at step 3, they surge at 4, and the period is round(1.8 * 4) = 7, unless a
    # measurement is lost on the way.
    block = {
        "lr": {"baseline_window": 3, "warmup_steps": 0},
        "monitor": {"alarms": {"completions/mean_length": {"above": 0.5, "patience": 4}}, "default_alarms": False},
    }
    given = {"model": dense, "block": block, **SAVING, "max_steps": 9}
    whole = run(scenarios.by_callback, out=tmp_path / "whole", **given).expect()
    rates = [entry["learning_rate"] for entry in whole["history"]]
    assert rates == [1e-3] * 7 + [5e-4] * 2
    assert whole["history"][-1]["mismatch/lr_surge_step"] == 4
    out = tmp_path / "killed"
    # With a baseline of three logs, the second of which waits in the checkpoint for the next step.
    died = run(scenarios.by_callback, out=out, kill_after=3, **given)
    assert died.code == -9
    resumed = run(scenarios.by_callback, out=out, resume=out / "checkpoint-2", **given).expect()
    assert resumed["parameters"] == whole["parameters"]
    assert resumed["history"] == whole["history"]
    data = read_run(out / "mismatch")
    assert [(event.step, event.data["first_step"]) for event in data.events if event.name == "alarm"] == [(4, 1)]
    assert data.series("mismatch/lr_multiplier")[1] == [1.0] * 7 + [0.5] * 2
