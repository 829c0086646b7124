"""`mismatch-ext compat --verl`: verl's driver's checks of a configuration, without Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl")  # part of `make setup`

import ray
from mismatch_ext.adapters.cli import main
from mismatch_ext.adapters.verl import plugin

from examples.arithmetic.shipped import FOLDER
from tests.commands import ROOT
from tests.peers.verl.prepared import GRPO

plugin.unload()  # importing the adapter has loaded it
BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
)
DENSE = (*GRPO, *BATCHES, f"actor_rollout_ref.model.path={FOLDER / 'dense'}")
YAML = ("--config-path", str(ROOT / "examples/configs"), "--config-name=verl_grpo")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, list[str]]]:
    status = main(["compat", "--json", "--verl", *words])
    return status, json.loads(capsys.readouterr().out)


def test_every_refusal_is_named_and_not_the_first_alone(capsys: pytest.CaptureFixture[str]) -> None:
    block = ("+mismatch.routing.mode=R3", "+mismatch.monitor.doctor=on_alarm", "+mismatch.correction.veto=0.1")
    status, found = checked(capsys, *DENSE, *block, "trainer.use_v1=False")
    assert (status, found["verdict"], found["later"]) == (1, "refused", [])
    names = ("trainer.use_v1", "mismatch.monitor.doctor", "actor_rollout_ref.model.path", "mismatch.correction.veto")
    assert [line.partition("=")[0] for line in found["refused"]] == [*names]
    assert main(["compat", "--verl", *DENSE, *block]) == 1
    assert capsys.readouterr().out.startswith("refused: mismatch.monitor.doctor=")


def test_the_configuration_in_a_file_is_accepted_with_what_it_sets(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = checked(capsys, *YAML, f"actor_rollout_ref.model.path={FOLDER / 'dense'}")
    assert (status, found["verdict"], found["refused"]) == (0, "accepted", [])
    assert "mixed_precision.param_dtype=fp16" in found["settings"][0]
    assert any("the weights fit the dtype" in line for line in found["later"])
    status, found = checked(capsys, *YAML, "mismatch=null")
    assert (status, found["verdict"]) == (1, "no mismatch config")


def test_what_verl_itself_refuses_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = checked(capsys, *DENSE, "+mismatch={}", "data.train_batch_size=3", "trainer.n_gpus_per_node=8")
    assert status == 1 and found["refused"][0].startswith("verl: AssertionError: real_train_batch_size")


def test_an_observed_run_says_what_is_left_out_or_that_nothing_is_observed(capsys: pytest.CaptureFixture[str]) -> None:
    observe = (*DENSE, "+mismatch.level=observe", "+mismatch.routing.mode=R3")
    status, found = checked(capsys, *observe, "+mismatch.monitor.doctor=on_alarm")
    assert (status, found["verdict"], found["settings"]) == (0, "accepted", [])
    assert ["monitor.doctor" in line for line in found["warnings"]] == [True]
    status, found = checked(capsys, *observe, "trainer.use_v1=False")
    assert (status, found["verdict"]) == (1, "not observed") and "use_v1" in found["refused"][0]


def test_a_configuration_that_cannot_be_composed_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["compat", "--verl", "no.such.key=1"]) == 2
    assert "error: --verl: Could not override 'no.such.key'" in capsys.readouterr().err
    assert main(["compat", "--verl", "--config-path", str(tmp_path), "--config-name=mine"]) == 2
