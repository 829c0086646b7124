"""How a recorder ends evaluations: alone, one inside another, failed, within a training and before one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mismatch_ext.config import MonitorConfig
from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.recorder import RunRecorder, run_folder
from mismatch_ext.records import SamplingSettings
from mismatch_ext.report.verdict import run_status
from mismatch_ext.rundata import read_run
from tests.unit.synthetic_runs import header


def recorder(run_dir: Path) -> RunRecorder:
    return RunRecorder(
        run_dir,
        monitor=MonitorConfig(),
        sampling=SamplingSettings(),
        header=lambda: header("bf16"),
        rank=0,
        world_size=1,
    )


def ends(run_dir: Path) -> list[tuple[int, str, str]]:
    return [(end.step, end.status, end.of) for end in read_run(run_dir).ends]


def test_a_run_directory_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder(MonitorConfig(run_dir="~/x"), Path("out")) == tmp_path / "x"
    assert run_folder(MonitorConfig(run_dir="x/~"), Path("out")) == Path("x/~")
    assert run_folder(MonitorConfig(), Path("out")) == Path("out/mismatch")
    with pytest.raises(RunDirectoryError, match="run_dir='~nobody-of-that-name/x'.*Give the whole path"):
        run_folder(MonitorConfig(run_dir="~nobody-of-that-name/x"), Path("out"))


def test_an_evaluation_of_several_sets_ends_once(tmp_path: Path) -> None:
    run = recorder(tmp_path)
    with run.evaluation(7):
        for split in ("eval/familiar", "eval/unfamiliar"):
            with run.evaluation(7):
                run.step(split, 7, {"reward": 0.5})
            assert ends(tmp_path) == []
    assert ends(tmp_path) == [(7, "completed", "evaluation")]
    with run.evaluation(7):
        run.step("eval/long", 7, {"reward": 0.5})
    assert ends(tmp_path) == [(7, "completed", "evaluation")]
    assert read_run(tmp_path).splits == ["eval/familiar", "eval/long", "eval/unfamiliar"]


def test_an_evaluation_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone"), recorder(tmp_path).evaluation(0):
        raise ValueError("gone")
    (end,) = read_run(tmp_path).ends
    assert (end.status, end.of, end.message) == ("failed", "evaluation", "ValueError: gone")


def test_a_good_evaluation_does_not_make_up_for_one_that_failed(tmp_path: Path) -> None:
    run = recorder(tmp_path)
    with pytest.raises(ValueError, match="gone"), run.evaluation(0):
        raise ValueError("gone")
    for _ in range(2):
        with run.evaluation(0):
            run.step("eval/default", 0, {"reward": 0.5})
        assert ends(tmp_path) == [(0, "failed", "evaluation")]
        assert run_status(read_run(tmp_path)) == "failed"
    run.begin(None)
    assert ends(tmp_path) == []  # what counts from here on is the training
    run.end(2, "completed")
    assert ends(tmp_path) == [(2, "completed", "training")]


def test_a_training_takes_the_end_of_the_evaluation_before_it_away(tmp_path: Path) -> None:
    run = recorder(tmp_path)
    with run.evaluation(0):
        run.step("eval/default", 0, {"reward": 0.5})
    run.begin(None)
    assert ends(tmp_path) == []  # killed here, it is a training that broke off
    with run.evaluation(1):
        run.step("eval/default", 1, {"reward": 0.5})
    assert ends(tmp_path) == []
    run.end(2, "completed")
    with run.evaluation(2):
        run.step("eval/default", 2, {"reward": 0.5})
    assert ends(tmp_path) == [(2, "completed", "training")]
    assert [event.name for event in read_run(tmp_path).events] == ["training"]


def test_a_resumed_training_takes_in_the_evaluation_before_it(tmp_path: Path) -> None:
    first = recorder(tmp_path)
    first.begin(None)
    for step in (1, 2, 3):
        first.step("train", step, {"reward": 0.1})
    second = recorder(tmp_path)
    with second.evaluation(0):
        second.step("eval/default", 0, {"reward": 0.5})
    second.begin(2)
    second.step("train", 3, {"reward": 0.2})
    second.end(3, "completed")
    data = read_run(tmp_path)
    assert data.series("reward") == ([1, 2, 3], [0.1, 0.1, 0.2]) and data.series("reward", "eval/default")[0] == [2]
    assert ends(tmp_path) == [(3, "completed", "training")]
    assert [event.name for event in data.events] == ["resumed"]


def test_what_each_split_observes_is_its_own(tmp_path: Path) -> None:
    run = recorder(tmp_path)
    run.start()
    mask = torch.ones(2, 3, dtype=torch.bool)
    for split, gap, native in (
        ("train", 0.5, False),
        ("eval/default", 0.25, False),
        ("eval/default", 0.125, True),
        ("train", 0.5, False),
    ):
        run.observe(split, torch.full((2, 3), -1.0), torch.full((2, 3), -1.0 - gap), mask, native=native)
    name = "mismatch/logp_abs_diff_mean"
    trained, evaluated = run.flush("train", 1), run.flush("eval/default", 1)
    assert (trained[name], trained["mismatch/tokens"]) == (0.5, 12)
    assert (evaluated[name], evaluated["mismatch/tokens"]) == (0.25, 6)
    assert evaluated["mismatch/native/logp_abs_diff_mean"] == 0.125 and "mismatch/native/tokens" not in trained
    assert run.flush("train", 2) == {} == run.flush("eval/default", 2)
