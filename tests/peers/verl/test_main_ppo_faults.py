"""Faults whose verdict `tests/peers/verl/{test_reports,test_loss}.py` hold without a run, in whole runs of verl's own trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_model
from tests.peers.verl.cpu.faults import FAULT, MESSAGE
from tests.peers.verl.main_ppo import VerlRun, dtypes, run_verl

pytestmark = pytest.mark.nightly

ACTING = "+mismatch.monitor.weight_sync=error"
"""The smallest config that ends a run in which a check fails."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model("moe", tmp_path / "model")


def failed(work: Path, override: str, *, model: Path, fault: str | None = None) -> VerlRun:
    """Run with a block and a fault, and return what must have failed before its first step, and not hung."""
    env = {} if fault is None else {FAULT: fault}
    run = run_verl(work / "run", [*dtypes("float32"), override], model=model, plugin=True, timeout=300, env=env)
    run.expect_failure()
    return run


def test_the_package_fails_in_the_worker_only(model: Path, tmp_path: Path) -> None:
    run = failed(tmp_path, ACTING, model=model, fault="no_plugin_in_the_worker")
    assert f"{MESSAGE}: mismatch_ext.adapters.verl" in run.log


def test_the_package_fails_in_the_rollout_only(model: Path, tmp_path: Path) -> None:
    run = failed(tmp_path, ACTING, model=model, fault="no_plugin_in_the_rollout")
    assert f"{MESSAGE}: mismatch_ext.adapters.verl" in run.log


def test_a_vocabulary_larger_than_the_tokenizer(tmp_path: Path) -> None:
    model = tiny_model("dense", tmp_path / "model", extra_vocabulary=48)
    run = failed(tmp_path, ACTING, model=model)
    assert "ConfigError" in run.log and "Resize the model's embeddings to the tokenizer" in run.log
