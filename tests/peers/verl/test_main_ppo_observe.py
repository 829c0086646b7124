"""verl's own trainer under `mismatch.level: observe`: stock's numbers to the last digit, with faults that would end the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext.log_reading import read_run
from mismatch_ext.report import build
from tests.models import tiny_model
from tests.peers.death import plain
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
    """Return a stock run, one that observes, and their folder, in bfloat16; a log-probability of the third step is no number."""
    work = tmp_path_factory.mktemp("observe")
    model = tiny_model("moe", work / "model")
    env = {FAULT: "nonfinite_logprob@3"}
    given = [*dtypes("bfloat16"), "actor_rollout_ref.rollout.enable_rollout_routing_replay=True", "trainer.save_freq=3"]

    def ran(name: str, *sections: str) -> VerlRun:
        overrides = [*given, *sections, f"trainer.rollout_data_dir={work / name / 'samples'}"]
        return run_verl(work / name, overrides, model=model, plugin=bool(sections), env=env)

    return ran("stock"), ran("observe", *SECTIONS), work


def numbers(steps: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return what verl itself logged, without times; what is no number is a word."""
    kept = [{k: v for k, v in step.items() if not k.startswith((*TIMES, "mismatch/"))} for step in steps]
    return [{k: v if v == v else "nan" for k, v in step.items()} for step in kept]


def samples(folder: Path) -> list[list[str]]:
    """Return what each step was trained on, without the order in which it arrived and verl's random id of each prompt."""
    steps = [path.read_text(encoding="utf-8").splitlines() for path in sorted((folder / "samples").iterdir())]
    return [sorted(json.dumps({**json.loads(line), "uid": None}, sort_keys=True) for line in lines) for lines in steps]


def parameters(folder: Path) -> Any:
    return plain(
        torch.load(folder / "checkpoints/global_step_3/actor/model_world_size_1_rank_0.pt", weights_only=False)
    )


def test_logs_samples_and_parameters_are_stocks_bit_for_bit(runs: tuple[VerlRun, VerlRun, Path]) -> None:
    stock, observed, work = runs
    assert numbers(observed.expect()) == numbers(stock.expect())
    assert samples(work / "observe") == samples(work / "stock") and len(samples(work / "stock")) == 3
    assert parameters(work / "observe") == parameters(work / "stock")


def test_every_failed_check_warns_and_no_section_acts(runs: tuple[VerlRun, VerlRun, Path]) -> None:
    _, observed, work = runs
    (folder,) = {path.parent for path in work.rglob("mismatch/metrics.jsonl")}
    run = read_run(folder)
    findings = {event.data["check"] for event in run.events if event.name == "observed"}  # type: ignore[index]
    assert findings == {"gap", "alarm"}
    assert all(f"mismatch.level='observe': {check} failed at step " in observed.log for check in findings)
    last = observed.steps[-1]
    assert last["mismatch/observed/alarm"] == 1 and last["mismatch/observed/gap"] == 1
    measured = {"mismatch/k3_kl", "mismatch/weight_sync_gap"}
    assert measured <= observed.steps[0].keys()
    assert not [
        name for step in observed.steps for name in step if name.startswith(("mismatch/enforce/", "mismatch/routing/"))
    ]
    assert [end.status for end in run.ends] == ["completed"]
    page = build(folder).path.read_text(encoding="utf-8")
    assert all(check in page for check in findings)
