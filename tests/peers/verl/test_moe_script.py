"""examples/verl_moe.sh: what it asks for in each mode is verl's own configuration, and a block runs in it."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl")  # part of `make setup`

import verl.trainer.ppo.v1.trainer_separate_async  # noqa: F401 - a driver may have imported it, and what is beside it in verl
from hydra import compose, initialize_config_module
from mismatch_ext.adapters.verl import config as settings
from mismatch_ext.adapters.verl import plugin
from mismatch_ext.adapters.verl.refusals import MODES, trainer_of

from mismatch_ext import versions

SCRIPT = Path(__file__).resolve().parents[3] / "examples/verl_moe.sh"


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    plugin.load()
    with initialize_config_module(version_base=None, config_module="verl.trainer.config"):
        yield
    plugin.unload()  # other tests of this process look at what is patched


@pytest.fixture(autouse=True)
def as_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is known to be wrong with vLLM on a CPU alone."""
    known = tuple(wrong for wrong in versions.KNOWN_WRONG if wrong.condition != "on a CPU")
    monkeypatch.setattr(versions, "KNOWN_WRONG", known)


@pytest.mark.parametrize("mode", MODES)
def test_a_script_is_of_verls_configuration_and_its_block_is_run(mode: str, tmp_path: Path) -> None:
    printed = tmp_path / "python"
    printed.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    printed.chmod(printed.stat().st_mode | stat.S_IXUSR)
    assert os.access(SCRIPT, os.X_OK)
    given = ["trainer.total_training_steps=7"]
    env = {**os.environ, "PYTHON": str(printed), "MODEL": "some/model", "TRAIN": "a.parquet", "VAL": "b.parquet"}
    done = subprocess.run([SCRIPT, mode, *given], env=env, capture_output=True, text=True, check=True)
    module, name, *overrides = done.stdout.splitlines()
    assert (module, name) == ("-m", "verl.trainer.main_ppo") and overrides[-1:] == given
    # Composing refuses a key that verl has not.
    config = compose("ppo_trainer", overrides=overrides)
    assert config.actor_rollout_ref.model.path == "some/model"
    settings.prepare(config)
    assert config.trainer.v1.trainer_mode == trainer_of(mode)
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    if mode == "separate_async":
        # verl asks for whole local updates of a step.
        updates = config.trainer.v1.separate_async.parameter_sync_step
        assert config.data.train_batch_size == updates * config.actor_rollout_ref.actor.ppo_mini_batch_size
