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
from mismatch_ext.evidence import ColumnBatch, Evidence, lines_of, pick_rows
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
    assert not set(worst) & set(others) and others[0] < 10 and others[-1] > 90


@pytest.mark.parametrize(("tokens", "rows"), [(256, 16), (64, 72)])
def test_of_short_responses_more_are_kept(tokens: int, rows: int) -> None:
    """As many as the doctor needs to tell causes apart, and no more than a limit."""
    worst, others = pick_rows(torch.zeros(2000), torch.full((2000,), tokens))
    assert len(worst) == 8 and len(others) == rows - 8


def test_padding_is_cut_off_and_counted() -> None:
    batch = ColumnBatch(
        prompts=torch.tensor([[0, 0, 5]]), prompt_mask=torch.tensor([[0, 0, 1]]),
        responses=torch.tensor([[7, 8, 0]]), response_mask=torch.tensor([[1, 1, 0]]),
        rollout=torch.full((1, 3), -0.5), trainer=torch.full((1, 3), -1.5),
        mask=torch.tensor([[True, False, False]]),
    )  # fmt: skip
    row = batch.row(0)
    assert (row.prompt_ids, row.response_ids, row.mask) == ([5], [7, 8], [True, False])
    assert (row.left, row.right) == (2, 1)


def test_values_that_are_not_finite_count_as_the_worst_where_the_policy_sampled() -> None:
    batch = batch_of([0.0, 5.0, 0.0, 0.0])
    batch.rollout[2:, 1] = math.nan
    batch.mask = torch.ones(4, 4, dtype=torch.bool)
    batch.mask[3, 1] = False
    first, *_, last = lines_of(batch, "an alarm")
    assert first["kept"]["row"] == 2 and first["rollout_logprobs"] == [-1.0, None, -1.0, -1.0]
    assert last["kept"]["row"] == 3


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
    kept = logged.responses[0].kept
    assert kept is not None and kept.worst and "mismatch/k3_kl is" in kept.reason
    assert {response.step for response in logged.responses} == {"0"}  # the weights before the first step scored it
    assert all(response.trainer_logprobs is not None and not response.unused for response in logged.responses)
    # The warning names the command, and so do the event and the summary.
    (event,) = [event for event in read_run(path.parent).events if event.name == "evidence"]
    command = event.data["command"]
    assert shlex.split(command)[:4] == ["mismatch-ext", "doctor", "--rollouts", str(path)]
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
    file.opened().step(1, {"loss": 1.0}, "train")
    assert told == [1]


def test_the_key_turns_it_off(tmp_path: Path) -> None:
    trainer, rollout = sides()
    monitor = {"alarms": ALARM, "evidence": False}
    with Run({"monitor": monitor}, trainer, rollout, tmp_path).start() as run, pytest.warns(UserWarning) as said:
        learn(run, 1)
    assert files(tmp_path) == [] and not any("--rollouts" in str(warning.message) for warning in said)


def test_a_file_that_cannot_be_written_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RunDirectoryError("no space left on device.")

    monkeypatch.setattr(module, "write_whole", fails)
    told: list[str] = []
    evidence = Evidence(tmp_path, lambda *_, **__: pytest.fail("an event of a file that is not there"), told.append)
    evidence.hold(batch_of([1.0, 2.0]))
    assert evidence.keep(3, "an alarm") is None and evidence.keep(4, "an alarm") is None
    assert len(told) == 1 and "no space left" in told[0]


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
