"""verl's own trainer under `mismatch.level: observe`: stock's numbers to the last digit, with faults that would end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mismatch_ext.report import render
from mismatch_ext.rundata import read_run
from tests.models import tiny_model
from tests.peers.verl.cpu.faults import FAULT
from tests.peers.verl.main_ppo import VerlRun, dtypes, run_verl

pytestmark = pytest.mark.nightly

TIMES = ("timing_", "perf/", "actor/perf/")
SECTIONS = (
    "+mismatch.level=observe",
    "+mismatch.precision.dtype=float16",
    "+mismatch.routing={mode:R3,measured:1.0}",
    "+mismatch.correction.preset=decoupled_token_is",
    "+mismatch.kl={coef:0.05,estimator:full}",
    "+mismatch.lr.period=2",
    "+mismatch.monitor.alarms={response_length/mean:{above:1e-9,patience:1,action:stop}}",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[VerlRun, VerlRun, Path]:
    """Return a stock run and one that observes, in bfloat16; one log-probability of the third step is not a number."""
    work = tmp_path_factory.mktemp("observe")
    model = tiny_model("moe", work / "model")
    env = {FAULT: "nonfinite_logprob@3"}
    given = [*dtypes("bfloat16"), "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"]
    stock = run_verl(work / "stock", given, model=model, plugin=False, env=env)
    observed = run_verl(work / "observe", [*given, *SECTIONS], model=model, plugin=True, env=env)
    return stock, observed, work / "observe"


def numbers(steps: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return what verl itself logged, without times; what is no number is a word."""
    kept = [{k: v for k, v in step.items() if not k.startswith((*TIMES, "mismatch/"))} for step in steps]
    return [{k: v if v == v else "nan" for k, v in step.items()} for step in kept]


def test_every_number_is_stocks(runs: tuple[VerlRun, VerlRun, Path]) -> None:
    stock, observed, _ = runs
    assert numbers(observed.expect()) == numbers(stock.expect())


def test_every_fault_is_named(runs: tuple[VerlRun, VerlRun, Path]) -> None:
    _, observed, work = runs
    (folder,) = {path.parent for path in work.rglob("mismatch/metrics.jsonl")}
    run = read_run(folder)
    findings = {(event.data["check"], event.data["kind"]) for event in run.events if event.name == "observed"}  # type: ignore[index]
    assert findings >= {
        ("precision", "apply"), ("gap", "stop"), ("alarm", "stop"), ("kl_settings", "stop"), ("precision_settings", "stop"),
    }  # fmt: skip
    last = observed.steps[-1]
    assert last["mismatch/observed/alarm"] == 1 and last["mismatch/observed/gap"] == 1
    assert last["mismatch/enforce/lr_multiplier"] == 0.5 and "mismatch/enforce/rollout_is_mean" in observed.steps[0]
    assert 0 < observed.steps[0]["mismatch/routing/compared_tokens"]
    assert [end.status for end in run.ends] == ["completed"]
    page = render(folder).read_text(encoding="utf-8")
    assert "Enforce would have stopped at step" in page and all(check in page for check, _ in findings)
