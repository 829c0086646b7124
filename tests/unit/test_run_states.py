"""State of a run of your own loop: resumed, gone back to, ended, failed, and under observe."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mismatch_ext import Run
from mismatch_ext.errors import (
    RecordError,
)
from mismatch_ext.log_reading import read_run
from tests.unit.loops import (
    EVERYTHING,
    PROMPTS,
    learn,
    same,
    save,
    sides,
    weights,
)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run(EVERYTHING, trainer, rollout, tmp_path / "whole").start() as run:
        whole = learn(run, 4)
    expected = weights(trainer)

    trainer, rollout = sides()
    kept = tmp_path / "kept"
    with Run(EVERYTHING, trainer, rollout, tmp_path / "cut").start() as run:
        learn(run, 2, checkpoint=kept)
        sampler = rollout._random.get_state()

    trainer, rollout = sides()  # another process begins with the first weights, on both sides
    rollout._random.set_state(sampler)
    saved = torch.load(kept / "trainer.pt")
    for name in saved:
        getattr(trainer, name).load_state_dict(saved[name])
    with Run(EVERYTHING, trainer, rollout, tmp_path / "cut").start(resume=kept) as run:
        assert run.steps == 2
        rest = learn(run, 2)
    assert same(expected, weights(trainer))
    for log, other in zip(whole[2:], rest, strict=True):
        assert {k: v for k, v in log.items() if k != "mismatch/weight_sync_gap"} == {
            k: v for k, v in other.items() if k != "mismatch/weight_sync_gap"
        }
    # The multiplier, the coefficient and the baseline of the weight check had moved by then.
    assert whole[1]["mismatch/kl_coef"] != 0.05
    written = read_run(tmp_path / "cut/mismatch")
    assert [record.step for record in written.steps] == [1, 2, 3, 4] and "resumed" in {e.name for e in written.events}


def test_a_folder_without_a_state_is_refused(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with pytest.raises(RecordError, match=r"mismatch.json holds no state of a run"):
        Run(None, trainer, rollout, tmp_path).start(resume=tmp_path)


def test_a_running_loop_goes_back_to_a_state(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run(EVERYTHING, trainer, rollout, tmp_path).start() as run:
        learn(run, 1)
        state, kept = run.state_dict(), copy.deepcopy(trainer.model.state_dict())
        learn(run, 1)
        batch = run.batch(rollout.generate(PROMPTS))
        run.backward(run.score(batch).mean())
        trainer.model.load_state_dict(kept)
        run.load_state_dict(state)
        verdict = run.send()
        assert run.steps == 1 and verdict is not None and verdict.ok
        assert "loss" not in run.log().metrics  # nothing of the steps that are undone
        learn(run, 1)


def test_a_rate_that_is_controlled_from_a_resume_on_joins_at_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, rollout = sides()
    with Run({}, trainer, rollout, tmp_path).start() as run:
        learn(run, 5)
        save(run, tmp_path)
    with Run({"lr": {"period": 4}}, trainer, rollout, tmp_path).start(resume=tmp_path) as run:
        (log,) = learn(run, 1)
    assert log["mismatch/lr_multiplier"] == 0.5
    assert "checkpoint of step 5 holds no state of mismatch.lr" in caplog.text


def test_a_failed_loop_says_so_in_its_file(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with pytest.raises(ZeroDivisionError), Run(None, trainer, rollout, tmp_path).start() as run:
        learn(run, 1)
        1 / 0  # noqa: B018
    (end,) = read_run(tmp_path / "mismatch").ends
    assert end.status == "failed" and "ZeroDivisionError" in end.message
    # Nothing of the run is left on the optimizer.
    assert trainer.scheduler.get_last_lr() == [pytest.approx(0.05 * 0.92)]


def test_a_start_that_fails_leaves_nothing_on_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, rollout = sides()
    block = {"lr": {"period": 2}}

    def down(tokens: Tensor) -> Tensor:
        raise RuntimeError("the engine is down")

    run = Run(block, trainer, rollout, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="is down"):
        patch.setattr(rollout, "score", down)
        run.start()
    Run(block, trainer, rollout, tmp_path / "other").start().end()
    with run.start():
        learn(run, 1)
        assert run.state_dict()["lr"]["control"]["step"] == 1


def test_a_config_that_only_measures_stops_at_nothing(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with pytest.warns(UserWarning, match="the run goes on"), Run({}, trainer, rollout, tmp_path).start() as run:
        early = rollout.generate(PROMPTS)
        rollout.weight_version += 1
        batch = run.batch(early)
        old = run.score(batch).detach()
        run.measure(batch, old=old[:, :-1])
        run.step(run.score(batch).mean())
    assert {"records", "measure"} == set(run._checks.counts)
