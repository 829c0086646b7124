"""Rows of a batch that an alarm, a failed weight check or a refused row leaves in the run folder."""

from __future__ import annotations

import gzip
import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import mismatch_ext.evidence as module
from mismatch_ext import MismatchConfig, Run
from mismatch_ext.bad_rows import BadRows
from mismatch_ext.closing import closing_lines
from mismatch_ext.doctor import read_rollouts
from mismatch_ext.doctor.log_rows import line_of_routes
from mismatch_ext.errors import RecordError, RunDirectoryError, WeightSyncError
from mismatch_ext.evidence import ColumnBatch, Evidence, EvidenceRow, lines_of, pick_rows
from mismatch_ext.log import RunLog
from mismatch_ext.log_reading import read_run
from mismatch_ext.metrics_file import MetricsFile
from mismatch_ext.routing import RoutingTrace
from tests.unit.loops import PROMPTS, learn, sides

ALARM = {"k3_kl": {"above": 0.0, "patience": 1}}
ENDS = {"monitor": {"weight_sync": "error"}}  # a config that acts, and changes no number


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.jsonl.gz"))


def batch_of(gaps: list[float], length: int = 4, step: int = 6) -> ColumnBatch:
    """Return a batch with a gap per row, without padding."""
    rollout = torch.full((len(gaps), length), -1.0)
    return ColumnBatch(
        prompts=[[1, 2]] * len(gaps), responses=[[3] * length] * len(gaps), rollout=rollout,
        trainer=rollout + torch.tensor(gaps)[:, None], step=step,
    )  # fmt: skip


# Which rows.


def test_the_worst_rows_are_kept_and_others_from_all_over_the_batch() -> None:
    gaps = torch.tensor([0.01 * (row % 7) for row in range(100)])
    gaps[[3, 50, 97]] = torch.tensor([9.0, math.nan, math.inf])
    worst, others = pick_rows(gaps, torch.full((100,), 1000))
    assert worst[:3] == [50, 97, 3] and len(worst) == len(others) == 8
    assert gaps[worst[3:]].min() >= gaps[others].max()
    assert not set(worst) & set(others) and others == sorted(others) and others[0] < 10 and others[-1] > 90


def test_a_row_that_a_message_names_is_among_the_worst() -> None:
    batch = batch_of([float(row) for row in range(40)], length=600)
    kept = lines_of(batch, "RecordError: row 2 of mixed provenance, unlike row 21.")
    assert [line["kept"]["row"] for line in kept[:3]] == [2, 21, 39]
    assert [line["kept"]["chosen"] for line in kept] == ["worst"] * 8 + ["other"] * 8


def test_a_small_batch_is_kept_whole() -> None:
    assert pick_rows(torch.tensor([1.0, 3.0, 2.0]), torch.ones(3)) == ([1, 2, 0], [])
    assert [len(part) for part in pick_rows(torch.zeros(11), torch.ones(11))] == [8, 3]


@pytest.mark.parametrize(("tokens", "rows"), [(256, 16), (64, 72), (1, 256)])
def test_of_short_responses_more_are_kept(tokens: int, rows: int) -> None:
    """As many as the doctor needs to tell causes apart, and no more than a limit."""
    worst, others = pick_rows(torch.zeros(2000), torch.full((2000,), tokens))
    assert len(worst) == 8 and len(others) == rows - 8


def test_padding_is_cut_off_and_counted() -> None:
    batch = ColumnBatch(
        prompts=torch.tensor([[0, 0, 5], [4, 5, 6]]), prompt_mask=torch.tensor([[0, 0, 1], [1, 1, 1]]),
        responses=torch.tensor([[7, 8, 0], [7, 8, 9]]), response_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]),
        rollout=torch.full((2, 3), -0.5), trainer=torch.full((2, 3), -1.5),
        mask=torch.tensor([[True, False, False], [True, True, True]]),
    )  # fmt: skip
    assert batch.row(0) == EvidenceRow(
        prompt_ids=[5], response_ids=[7, 8], rollout=[-0.5, -0.5], trainer=[-1.5, -1.5], mask=[True, False], left=2, right=1
    )  # fmt: skip
    assert [sizes.tolist() for sizes in batch.sizes()] == [[1.0, 1.0], [1, 3]]


def test_values_that_are_not_finite_count_as_the_worst_where_the_policy_sampled() -> None:
    batch = batch_of([0.0, 5.0, 0.0, 0.0])
    batch.rollout[2][1] = math.nan
    batch.rollout[3][1] = math.nan
    batch.mask = torch.tensor([[True] * 4] * 3 + [[True, False, True, True]])
    first, *_, last = lines_of(batch, "an alarm")
    assert first["kept"]["row"] == 2 and first["rollout_logprobs"] == [-1.0, None, -1.0, -1.0]
    assert last["kept"]["row"] == 3 and [math.isnan(gap) for gap in batch.sizes()[0]] == [False, False, True, False]


# The file.


def test_a_file_is_a_log_that_the_doctor_reads(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with (
        Run({"monitor": {"alarms": ALARM}}, trainer, rollout, tmp_path).start() as run,
        pytest.warns(UserWarning) as said,
    ):
        learn(run, 1)
        sampling = run.rollout.sampling
    (path,) = tmp_path.rglob("evidence-*")
    assert path == tmp_path / "mismatch/evidence-1.jsonl.gz"
    logged = read_rollouts(path)
    assert len(logged.responses) == len(PROMPTS) * 4 and logged.settings["temperature"] == sampling.temperature
    (kept, *_) = [response.kept for response in logged.responses]
    assert kept is not None and kept.worst and not logged.scored_late and "mismatch/k3_kl is" in kept.reason
    computing = {"dtype": "float32", "weights": "float32", "temperature": 1.0, "replays": False}
    assert kept.trainer == {"host": "loop", **computing}
    assert {response.step for response in logged.responses} == {"0"}  # the weights before the first step scored it
    assert all(response.trainer_logprobs is not None and not response.unused for response in logged.responses)
    # The warning names the command, and so do the event and the summary.
    (event,) = [event for event in read_run(path.parent).events if event.name == "evidence"]
    command = event.data["command"]
    assert shlex.split(command)[:4] == ["mismatch-ext", "doctor", "--rollouts", str(path)]
    assert event.step == 1 and event.data["rows"] == 16 and event.data["weights_step"] == 0
    assert [command in str(warning.message) for warning in said].count(True) == 1
    assert any(command in line for line in closing_lines(read_run(path.parent)))


def test_routes_are_kept() -> None:
    trace = RoutingTrace(
        parts=(torch.tensor([[[0, 1]], [[2, 3]], [[1, 2]]], dtype=torch.uint8),), layers=(4,), num_experts=4,
    )  # fmt: skip
    batch = batch_of([0.0, 1.0])
    batch.routes = [None, trace]
    first, second = lines_of(batch, "an alarm")
    assert first["routes"] == line_of_routes(trace) and "routes" not in second


def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "evidence-1.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt_ids": [1]}')[:-6])
    with pytest.raises(RecordError, match=r"evidence-1.jsonl.gz is a damaged gzip file"):
        read_rollouts(path)


# What fires.


def test_without_an_alarm_nothing_is_kept_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lines_of", lambda *_: pytest.fail("a step without an alarm read the batch"))
    trainer, rollout = sides(noise=0.0)
    with Run({}, trainer, rollout, tmp_path).start() as run:
        learn(run, 3)
    assert files(tmp_path) == []


def test_three_files_a_run_and_those_of_a_resumed_run_count(tmp_path: Path) -> None:
    told: list[str] = []
    for _ in range(2):
        evidence = Evidence(tmp_path, lambda *_, **__: None, told.append)
        evidence.hold(batch_of([1.0, 2.0]))
        for step in (3, 3, 5, 8, 9):
            evidence.keep(step, "an alarm")
    assert files(tmp_path) == ["evidence-3.jsonl.gz", "evidence-5.jsonl.gz", "evidence-8.jsonl.gz"] and not told


def test_an_earlier_run_in_the_same_folder_keeps_its_files_and_takes_none_of_the_next(tmp_path: Path) -> None:
    for _ in range(2):
        trainer, rollout = sides()
        with Run({"monitor": {"alarms": ALARM}}, trainer, rollout, tmp_path).start() as run, pytest.warns(UserWarning):
            learn(run, 1)
    assert files(tmp_path) == ["before-001-evidence-1.jsonl.gz", "evidence-1.jsonl.gz"]


def test_evidence_is_set_aside_too_if_the_file_can_be_created_only_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics-000.jsonl").write_text("{}")
    told: list[int] = []
    file = MetricsFile(
        tmp_path, header=dict, step=lambda: 0, tell=lambda _: None, writes=True, begins_another=told.append
    )
    with monkeypatch.context() as full:
        full.setattr("os.open", mock.Mock(side_effect=OSError("no space left")))
        file.begin("training")
    assert told == []
    file.step(1, {"loss": 1.0}, "train")
    assert told == [1]


def test_the_key_turns_it_off(tmp_path: Path) -> None:
    trainer, rollout = sides()
    monitor = {"alarms": ALARM, "evidence": False}
    with Run({"monitor": monitor}, trainer, rollout, tmp_path).start() as run, pytest.warns(UserWarning) as said:
        learn(run, 1)
    assert files(tmp_path) == [] and not any("--rollouts" in str(warning.message) for warning in said)


@pytest.mark.parametrize("error", [RunDirectoryError("no space left on device."), MemoryError("no room")])
def test_a_file_that_cannot_be_written_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(module, "write_whole", fails)
    told: list[str] = []
    evidence = Evidence(tmp_path, lambda *_, **__: pytest.fail("an event of a file that is not there"), told.append)
    evidence.hold(batch_of([1.0, 2.0]))
    assert evidence.keep(3, "an alarm") is None and evidence.keep(4, "an alarm") is None
    assert len(told) == 1 and str(error) in told[0] and "The run goes on" in told[0]


def test_a_refused_batch_is_kept_and_the_error_stays_as_it_is(tmp_path: Path) -> None:
    trainer, rollout = sides(noise=0.0)
    with pytest.raises(RecordError, match="mixed provenance"), Run(ENDS, trainer, rollout, tmp_path).start() as run:
        learn(run, 1)
        records = rollout.generate(PROMPTS)
        records[9] = replace(records[9], provenance=replace(records[9].provenance, engine="another"))
        run.batch(records)
    (path,) = tmp_path.rglob("evidence-*")
    (first, *others) = lines(path)
    assert path.name == "evidence-2.jsonl.gz" and "mixed provenance" in first["kept"]["reason"]
    assert 9 in [line["kept"]["row"] for line in (first, *others)[:8]] and "trainer_logprobs" not in first


def test_bad_rows_are_kept(tmp_path: Path) -> None:
    trainer, rollout = sides(noise=0.0)
    with Run(ENDS, trainer, rollout, tmp_path).start() as run:
        learn(run, 1)
        records = rollout.generate(PROMPTS)
        records[9] = replace(records[9], provenance=replace(records[9].provenance, weight_version=7))
        run.batch(records)
    (path,) = tmp_path.rglob("evidence-*")
    first = lines(path)[0]
    assert path.name == "evidence-2.jsonl.gz"
    assert first["kept"]["row"] == 9
    assert "row 9: it was sampled with weight version 7" in first["kept"]["reason"]


def test_bad_rows_leave_room_for_an_alarm(tmp_path: Path) -> None:
    log = RunLog(MismatchConfig(), tmp_path, info=dict, step=lambda: 0)
    log.begin()
    prompts, responses, logprobs = [[1, 2]] * 4, [[3, 4]] * 4, [[-1.0, -2.0]] * 4
    for step in range(4):
        held = ColumnBatch(prompts=prompts, responses=responses, rollout=logprobs, step=step)
        bad = BadRows(4)
        bad.add(1, "routes", "row 1: no routes.")
        log.count_bad_rows("train", bad, held)
    assert [path.name for path in sorted(tmp_path.glob("evidence-*"))] == ["evidence-1.jsonl.gz", "evidence-2.jsonl.gz"]
    assert log.evidence is not None
    assert log.evidence.keep(5, "an alarm", held) is not None


def test_rows_that_overflow_in_the_trainer_are_kept(tmp_path: Path) -> None:
    trainer, rollout = sides(noise=0.0)
    with Run(ENDS, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        with torch.no_grad():
            old = run.score(batch)
        old[5, 0] = math.nan
        run.measure(batch, old=old)
    (path,) = tmp_path.rglob("evidence-*")
    assert lines(path)[0]["kept"]["row"] == 5 and lines(path)[0]["trainer_logprobs"][0] is None


@pytest.mark.parametrize("action", ["error", "warn"])
def test_a_failed_weight_check_keeps_the_next_batch_or_the_last_one(tmp_path: Path, action: str) -> None:
    trainer, rollout = sides(noise=0.0)
    run = Run({"monitor": {"weight_sync": action, "default_alarms": False}}, trainer, rollout, tmp_path)
    with pytest.warns(UserWarning) if action == "warn" else pytest.raises(WeightSyncError), run.start():
        learn(run, 1)
        rollout.drops_updates = True
        learn(run, 3)
    (path,) = tmp_path.rglob("evidence-*")
    first = lines(path)[0]
    # The update after step 2 is the first that is dropped, and the next one leaves no doubt.
    assert (path.name, first["step"]) == {"error": ("evidence-3.jsonl.gz", 2), "warn": ("evidence-4.jsonl.gz", 3)}[
        action
    ]
    assert "weight" in first["kept"]["reason"]


def test_batches_of_an_evaluation_are_not_kept(tmp_path: Path) -> None:
    trainer, rollout = sides()
    with Run({"monitor": {"alarms": ALARM}}, trainer, rollout, tmp_path).start() as run:
        batch = run.batch(rollout.generate(PROMPTS), split="eval/test")
        with torch.no_grad():
            run.measure(batch, old=run.score(batch))
        run.log(split="eval/test")
    assert files(tmp_path) == []


def test_a_row_of_unequal_columns_is_kept_with_what_there_is() -> None:
    batch = ColumnBatch(prompts=[[1], [2]], responses=[[3, 4, 5], [6, 7]], rollout=[[-0.5, -1.0], [-0.1, -0.2, -0.3]])
    first, second = lines_of(batch, "RecordError: row 0 has 2 log-probabilities for 3 tokens")
    assert first["rollout_logprobs"] == [-0.5, -1.0, None] and first["response_mask"] == [True] * 3
    assert second["rollout_logprobs"] == [-0.1, -0.2] and first["kept"]["row"] == 0
