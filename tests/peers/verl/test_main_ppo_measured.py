"""verl's own trainer with `mismatch: {}` and four faults: stock's numbers to the last digit, and every fault is told."""

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
from tests.peers.verl.main_ppo import PROMPTS, VerlRun, dtypes, run_verl

pytestmark = pytest.mark.nightly

TIMES = ("timing_", "perf/", "actor/perf/")
# A fault by the name in cpu/faults.py: the check that finds it, at which step, and words of what it says.
FAULTS = {
    "garbled_weights@1": ("weight_sync", 1, "weight update 2: garbled"),
    "moved_temperature@3": ("sampling", 3, "was sampled with temperature=0.7"),
}
# A fault that makes rows bad: the reason, at which step, how many, and words of what it says.
BAD = {
    "nonfinite_logprob@2": ("rollout_logprobs", 2, 1, "the engine's log-probability is nan"),
    "encoded_otherwise@3": ("tokens", 3, PROMPTS, "are not those that the engine sampled"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[VerlRun, VerlRun, Path]:
    """Return a stock run, one that is measured, and their folder, both in bfloat16 and with all faults."""
    work = tmp_path_factory.mktemp("measured")
    model = tiny_model("dense", work / "model")
    env = {FAULT: ",".join([*FAULTS, *BAD])}

    def ran(name: str, *config: str) -> VerlRun:
        overrides = [*dtypes("bfloat16"), *config, "trainer.save_freq=3"]
        overrides.append(f"trainer.rollout_data_dir={work / name / 'samples'}")
        return run_verl(work / name, overrides, model=model, plugin=bool(config), env=env)

    return ran("stock"), ran("measured", "+mismatch={}"), work


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
    stock, measured, work = runs
    assert numbers(measured.expect()) == numbers(stock.expect())
    assert samples(work / "measured") == samples(work / "stock") and len(samples(work / "stock")) == 3
    assert parameters(work / "measured") == parameters(work / "stock")


def test_all_faults_are_told_and_end_nothing(runs: tuple[VerlRun, VerlRun, Path]) -> None:
    _, measured, work = runs
    (folder,) = {path.parent for path in work.rglob("mismatch/metrics-000.jsonl")}
    run = read_run(folder)
    failed = [(event.step, event.data) for event in run.events if event.name == "check_failed"]
    page = build(folder).path.read_text(encoding="utf-8")
    for check, at, words in FAULTS.values():
        told = [data["message"] for step, data in failed if (data["check"], step) == (check, at)]
        assert any(words in message for message in told), (check, told, failed)
        assert f"the check {check!r} failed at step {at}" in measured.log
        assert f"{check}: failed " in measured.log  # a closing line
        assert check in page
        assert measured.steps[-1][f"mismatch/checks_failed/{check}"] >= 1
    assert {data["check"] for _, data in failed} == {check for check, _, _ in FAULTS.values()}
    for reason, at, count, words in BAD.values():
        told = [event.message for event in run.events if (event.name, event.step) == ("bad_rows", at)]
        assert any(words in message and "The config only measures" in message for message in told), (reason, told)
        assert [step.get(f"mismatch/bad_rows/{reason}", 0) for step in measured.steps] == [
            count if number == at else 0 for number in (1, 2, 3)
        ]
    assert {"mismatch/k3_kl", "mismatch/weight_sync_gap"} <= measured.steps[0].keys()
    assert run.header["acts"] is False and [end.status for end in run.ends] == ["completed"]
