"""`monitor.doctor` without a host: when a batch is examined, what is written, and that nothing of it ends a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_ext.config import MismatchConfig
from mismatch_ext.doctor import Diagnosis, Sample, Scores, diagnose
from mismatch_ext.doctor.in_run import RunDoctor, rows_within
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.log import RunLog
from mismatch_ext.log_reading import read_run
from mismatch_ext.loop import Run
from mismatch_ext.names import MITIGATION_MEASURES
from tests.unit.loops import sides

ROWS, LENGTH, VOCABULARY = 40, 20, 8


def diagnosis(*, scale: float = 1.0) -> Diagnosis:
    """Return what is found of tokens that an engine scored with logits of some scale, and the trainer in single precision."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(ROWS * LENGTH, VOCABULARY, generator=generator)
    tokens = torch.multinomial((scale * logits).softmax(-1), 1, generator=generator)
    engine = (scale * logits.double()).log_softmax(-1).gather(-1, tokens)[:, 0]
    engine += 1e-4 * torch.randn(len(engine), generator=generator, dtype=torch.float64)
    own = logits.double().log_softmax(-1).gather(-1, tokens)[:, 0].numpy()
    own = own + 1e-4 * np.random.default_rng(0).normal(size=len(own))
    rows = tokens[:, 0].reshape(ROWS, LENGTH)
    sample = Sample(
        prompts=((1, 2),) * ROWS, responses=tuple(map(tuple, rows.tolist())), masks=((True,) * LENGTH,) * ROWS,
        logprobs=tuple(map(tuple, engine.reshape(ROWS, LENGTH).tolist())),
    )  # fmt: skip
    return diagnose(sample, Scores(trainer=own, own=own, logits=logits))


def log_of(folder: Path, step: int = 7, **monitor: Any) -> RunLog:
    """Return the log of a run, with alarms of three metrics at their first value above 1."""
    alarms = {name: {"above": 1.0, "patience": 1} for name in ("one", "two", "three")}
    block = MismatchConfig.parse({"monitor": {"alarms": alarms, "default_alarms": False, **monitor}})
    assert block is not None
    log = RunLog(block, folder, info=dict, step=lambda: step)
    log.begin(None)
    return log


def doctor_of(log: RunLog) -> RunDoctor:
    assert log.doctor is not None
    return log.doctor


def test_the_first_batch_is_examined_once_and_written_where_the_report_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_of(tmp_path, doctor="first_batch")
    doctor = doctor_of(log)
    assert doctor.due
    found = diagnosis(scale=1 / 0.8)
    metrics = doctor.examine(7, lambda: found)
    assert not doctor.due
    log.watch(8, {"one": 2.0})
    assert not doctor.due  # alarms were not asked about
    written = json.loads((tmp_path / "doctor_step_7/doctor.json").read_text(encoding="utf-8"))
    assert [cause["key"] for cause in written["causes"]] == ["temperature"]
    assert written["run"] == {"step": 7, "because": "the first batch"}
    assert "temperature: 1" in capsys.readouterr().out
    assert metrics == {
        "doctor/unexplained": found.unexplained, "doctor/engine_ratio": found.ratio,
        "doctor/trainer_ratio": found.trainer_ratio,
    } and set(metrics) <= set(MITIGATION_MEASURES)  # fmt: skip
    (event,) = [event for event in read_run(tmp_path).events if event.name == "doctor"]
    assert (event.level, event.step) == ("warning", 7) and "explained" in event.message
    assert event.data == {"because": "the first batch", "verdict": "explained", "causes": ["temperature"]}


def test_an_alarm_has_one_batch_examined_and_others_wait_their_steps(tmp_path: Path) -> None:
    log = log_of(tmp_path, doctor="on_alarm")
    doctor, found = doctor_of(log), diagnosis()
    assert not doctor.due
    log.watch(1, {"one": 0.5, "two": 0.5, "three": 0.5})
    assert not doctor.due
    log.watch(2, {"one": 2.0, "two": 2.0, "three": 0.5})
    assert doctor.due
    doctor.examine(2, lambda: found)
    assert not doctor.due
    log.watch(51, {"one": 0.0, "two": 0.0, "three": 2.0})
    assert not doctor.due  # 49 steps later, when `one` and `two` were over
    log.watch(52, {"one": 2.0, "two": 0.0, "three": 0.0})
    assert not doctor.due  # `one` has been examined
    log.watch(53, {"two": 2.0, "three": 2.0})
    assert doctor.due  # both were raised too soon after the last one, and may ask again
    doctor.examine(53, lambda: found)
    folders = sorted(path.name for path in tmp_path.glob("doctor_*"))
    assert folders == ["doctor_step_2", "doctor_step_53"]
    because = json.loads((tmp_path / "doctor_step_53/doctor.json").read_text(encoding="utf-8"))["run"]["because"]
    assert because == "two"


def test_whatever_fails_is_an_event_and_the_run_goes_on(tmp_path: Path) -> None:
    def fails() -> Diagnosis:
        raise MemoryError("no room for a copy")

    log = log_of(tmp_path, doctor="first_batch")
    doctor = doctor_of(log)
    assert doctor.examine(7, fails) == {}
    assert not doctor.due  # it would fail again
    (event,) = [event for event in read_run(tmp_path).events if event.name == "doctor"]
    assert event.level == "warning" and "step 7" in event.message and "MemoryError: no room for a copy" in event.message
    assert not list(tmp_path.glob("doctor_*"))


def test_a_later_alarm_asks_again_where_a_batch_could_not_be_examined(tmp_path: Path) -> None:
    def fails() -> Diagnosis:
        raise RecordError("every response of the batch has an image in its prompt")

    log = log_of(tmp_path, doctor="on_alarm")
    doctor = doctor_of(log)
    for step in (2, 60):
        log.watch(step - 1, {"one": 0.0})
        log.watch(step, {"one": 2.0})
        assert doctor.due
        doctor.examine(step, fails)
    log.watch(110, {"one": 0.0})
    log.watch(111, {"one": 2.0})
    doctor.examine(111, diagnosis)
    log.watch(170, {"one": 0.0})
    log.watch(171, {"one": 2.0})
    assert not doctor.due
    told = [event.message for event in read_run(tmp_path).events if event.name == "doctor"]
    assert len(told) == 3 and all("has an image" in message for message in told[:2])


def test_a_file_that_cannot_be_written_is_an_event_too(tmp_path: Path) -> None:
    log = log_of(tmp_path, doctor="first_batch")
    (tmp_path / "doctor_step_7").write_text("in the way")
    assert doctor_of(log).examine(7, diagnosis) == {}
    assert "could not be examined" in read_run(tmp_path).events[-1].message


def test_a_clean_batch_warns_of_nothing(tmp_path: Path) -> None:
    doctor_of(log_of(tmp_path, doctor="first_batch")).examine(
        7, lambda: replace(diagnosis(), verdict="clean", causes=())
    )
    assert read_run(tmp_path).events[-1].level == "info"


def test_rows_are_drawn_over_the_whole_batch_within_the_limit() -> None:
    tokens = [10] * 50 + [0] * 5 + [10] * 50
    rows = rows_within(tokens, 205)
    assert len(rows) == 20 and rows == sorted(set(rows)) == rows_within(tokens, 205)
    assert min(rows) < 40 and max(rows) > 65 and not set(rows) & set(range(50, 55))
    assert rows_within(tokens, 10**6) == [row for row, count in enumerate(tokens) if count]
    assert len(rows_within([900, 900, 900], 10)) == 2  # the doctor fits on one and judges on the other
    assert rows_within([0, 5, 0], 10) == [1]


@pytest.mark.parametrize(
    ("monitor", "named"),
    [
        ({"doctor": "on_alarm", "default_alarms": False}, "mismatch.monitor.doctor: 'on_alarm' without any alarm"),
        ({"doctor": "always"}, "first_batch"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(monitor: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MismatchConfig.parse({"monitor": monitor})


def test_a_loop_of_ones_own_is_refused_by_name(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with pytest.raises(ConfigError, match="mismatch.monitor.doctor='first_batch': your own loop"):
        Run({"monitor": {"doctor": "first_batch"}}, trainer, rollout, tmp_path)
