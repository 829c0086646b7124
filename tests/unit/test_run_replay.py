"""Routes, and what a mixture of experts needs, in your own loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mismatch_ext import Run
from mismatch_ext.errors import (
    LoopError,
    RoutingError,
)
from mismatch_ext.log_reading import read_run
from tests.models import tiny_model
from tests.unit.loops import (
    PROMPTS,
    learn,
    moe_sides,
    rewards_of,
)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny mixture-of-experts checkpoint in float32."""
    return tiny_model("moe", tmp_path_factory.mktemp("models") / "moe")


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_routes_are_replayed(mode: str, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GPUs that the run does not use keep their random numbers.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    trainer, rollout = moe_sides(moe, dtype="bfloat16")
    block = {"routing": {"mode": mode, "measured": 1.0, "reference": True}, "kl": {"coef": 0.1}}
    with Run(block, trainer, rollout, tmp_path).start() as run:
        logs = learn(run, 2)
        assert run._replay is not None and run._replay.forwards == (6 if mode == "R3" else 4)
        batch = run.batch(rollout.generate(PROMPTS))
        with torch.no_grad():
            old, native = run.score(batch), trainer.logprobs(batch)
        replayed = run.score(batch)
    assert torch.equal(old, replayed.detach())
    # Under R2 they are the model's own, under R3 those of an engine in another dtype, of which some differ.
    assert torch.equal(old, native) == (mode == "R2")
    assert all("mismatch/routing/set_mismatch_frac" in log for log in logs)


def test_a_pass_that_is_not_replayed_is_named_before_the_first_step(moe: Path, tmp_path: Path) -> None:
    trainer, rollout = moe_sides(moe)
    with pytest.raises(LoopError, match=r"step 1: mismatch.routing.mode='R3', and no forward pass of this step"):
        with Run({"routing": {"mode": "R3"}}, trainer, rollout, tmp_path).start() as run:
            batch = run.batch(rollout.generate(PROMPTS))
            with torch.no_grad():
                run.measure(batch, old=run.score(batch))
            run.step(-(trainer.logprobs(batch) * rewards_of(batch)).mean())


def test_a_pass_of_ones_own_is_replayed(moe: Path, tmp_path: Path) -> None:
    trainer, rollout = moe_sides(moe)
    with Run({"routing": {"mode": "R3"}}, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        with torch.no_grad():
            run.measure(batch, old=run.score(batch))
        with run.replaying(batch):
            logits = trainer.model(input_ids=batch.tokens, attention_mask=batch.attention_mask.long()).logits
        run.step(logits.square().mean())
        with pytest.raises(RoutingError, match="nothing was replayed"), run.replaying(batch):
            trainer.model(input_ids=batch.tokens[:, :3])


def test_rollouts_without_routes_are_refused(moe: Path, tmp_path: Path) -> None:
    trainer, rollout = moe_sides(moe)
    early = rollout.generate(PROMPTS)
    with Run({"routing": {"mode": "R3"}}, trainer, rollout, tmp_path).start() as run:
        with pytest.raises(RoutingError, match="these rollouts have no routes"):
            run.batch(early)


def test_float16_is_set_on_the_trainer_and_scaled(moe: Path, tmp_path: Path) -> None:
    trainer, rollout = moe_sides(moe, dtype="float16")
    block = {"precision": {"dtype": "float16", "init_scale": 2.0**30}}
    with Run(block, trainer, rollout, tmp_path).start() as run:
        schedule = torch.optim.lr_scheduler.LinearLR(trainer.optimizer, 1.0, 0.1, 10)
        trainer.scheduler = schedule
        logs = learn(run, 3)
        taken = 3 - int(logs[-1]["mismatch/overflow_steps"])
        # A scale far too large: the first steps overflow, are not taken, and do not move the schedule.
        assert taken < 3 and schedule.last_epoch == taken
        assert logs[-1]["mismatch/loss_scale"] == 2.0**30 * 0.5 ** (3 - taken)
    reading = read_run(tmp_path / "mismatch").header["trainer"]
    assert reading["autocast_dtype"] == "float16" and reading["scaler"]["enabled"]
