"""The metrics file: what is written can be read back, whatever happened to the process or the file."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mismatch_ext.errors import RecordError, RunDirectoryError
from mismatch_ext.host_logs import read_runs
from mismatch_ext.log_reading import RunData, read_run
from mismatch_ext.metrics_file import SegmentFile
from tests.unit.synthetic_runs import run_stream

HEADER = {"run": {"name": "a"}, "trainer": {"dtype": "float32"}, "engine": {}, "versions": {"torch": "2.13.0"}}
PROFILE = {
    "edges": [0, 1, 2],
    "count": [3, 0],
    "abs_diff_mean": [0.5, None],
    "abs_diff_max": [1.5, None],
    "k3_mean": [0.25, None],
}


def small_run(run_dir: Path) -> bytes:
    """Write one line of every kind and return the file."""
    with run_stream(run_dir, header=HEADER) as stream:
        stream.step(1, {"reward": 0.5, "mismatch/k3_kl": 1e-6})
        stream.step(1, {"reward": 0.25}, "eval/long")
        stream.profile(1, {"position": PROFILE})
        stream.scatter(1, rollout=[-0.5, -1.0], old=[-0.25, -1.0])
        stream.event(1, "info", "weight_sync", "in sync", {"max": 0.0})
        stream.step(2, {"reward": 0.75})
    return (run_dir / "metrics-000.jsonl").read_bytes()


def test_everything_written_is_read_back(tmp_path: Path) -> None:
    small_run(tmp_path)
    data = read_run(tmp_path)
    assert data.problems == () and data.header["versions"] == {"torch": "2.13.0"}
    assert data.series("reward") == ([1, 2], [0.5, 0.75]) and data.series("reward", "eval/long") == ([1], [0.25])
    assert data.profiles[0].profiles == {"position": PROFILE}
    assert (data.scatters[0].rollout_logprobs, data.scatters[0].old_logprobs) == ([-0.5, -1.0], [-0.25, -1.0])
    assert (data.events[0].name, data.events[0].data) == ("weight_sync", {"max": 0.0})
    assert [(end.step, end.status) for end in data.ends] == [(2, "completed")]


def test_the_file_is_strict_json(tmp_path: Path) -> None:
    with run_stream(tmp_path, header={"trainer": {"scale": math.inf}}) as stream:
        stream.step(np.int64(0), {"a": math.nan, "b": np.float32("inf"), "c": np.float64(0.5)})
        stream.event(0, "info", "odd", "half a \ud83d pair")
        with pytest.raises(RecordError, match="event line cannot be written"):
            stream.event(0, "info", "x", "y", {"tensor": torch.zeros(2)})
    lines = (tmp_path / "metrics-000.jsonl").read_text().splitlines()
    header, step, *_ = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert header["nonfinite"] == ["trainer.scale"]
    assert step["metrics"] == {"a": None, "b": None, "c": 0.5} and step["nonfinite"] == ["a", "b"]
    data = read_run(tmp_path)
    assert data.problems == () and data.events[0].message == "half a ? pair"


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SegmentFile.create(tmp_path, header=HEADER)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        with pytest.raises(RunDirectoryError, match="only 7 of .* bytes"):
            stream.step(1, {"reward": 1.0})
    stream.step(2, {"reward": 2.0})
    stream.close()
    data = read_run(tmp_path)
    assert [s.step for s in data.steps] == [2] and data.problems == ()


def test_a_training_that_resumes_none_is_a_run_of_its_own(tmp_path: Path) -> None:
    small_run(tmp_path)
    with run_stream(tmp_path, header={"run": {"name": "evaluated"}}, of="evaluation") as stream:
        stream.step(0, {"reward": 0.25}, "eval/long")
    with run_stream(tmp_path, header=HEADER, first_segment=1) as stream:
        stream.step(1, {"reward": 3.0})
    with run_stream(tmp_path, header=HEADER, resume_step=1) as stream:
        stream.step(2, {"reward": 4.0})
    (tmp_path / "metrics-004.jsonl").write_bytes(b'{"kind": "hea')  # killed while it wrote its header
    data = read_run(tmp_path)
    assert [header["segment"] for header in data.headers] == [1, 2, 3]
    assert data.series("reward") == ([1, 2], [3.0, 4.0]) and data.series("reward", "eval/long") == ([0], [0.25])


def test_a_later_segment_replaces_steps_and_abandoned_ones_are_left_out(tmp_path: Path) -> None:
    with run_stream(tmp_path, header=HEADER) as stream:
        for step in range(1, 8):
            stream.step(step, {"reward": float(step), "only_first": 0.0})
        stream.profile(7, {"position": PROFILE})
    # The checkpoint was of step 4; the second segment runs 5 and 6 again and never reaches 7.
    with run_stream(tmp_path, header=HEADER, resume_step=4) as stream:
        stream.step(5, {"reward": 50.0})
        stream.step(5, {"loss": 4.0})
        stream.step(6, {"reward": 60.0})
        with (tmp_path / "metrics-000.jsonl").open("a") as late:  # of the first process, which was not dead yet
            line = {"kind": "step", "segment": 0, "step": 6, "split": "train", "metrics": {"reward": 5.5}}
            late.write(json.dumps(line) + "\n")
    data = read_run(tmp_path)
    assert data.series("reward") == ([1, 2, 3, 4, 5, 6], [1.0, 2.0, 3.0, 4.0, 50.0, 60.0])
    assert data.steps[4].metrics == {"reward": 50.0, "loss": 4.0} and data.profiles == ()
    assert len(data.problems) == 1 and "resumed from step 4" in data.problems[0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"garbage", "metrics-000.jsonl, line 2 was left out"),
        (b"\xff\xfe\xfa", "Invalid JSON"),
        (b"[" * 100_000, "recursion"),
        (b'{"kind":"step","segment":0,"step":1,"split":"train","metrics":{"a":"x"}}', r"step\.metrics\.a"),
        (b'{"kind":"news","segment":0,"step":1}', "news"),
        (
            b'{"kind":"event","segment":0,"step":1,"level":"error","name":"alarm","message":""}',
            "data of an event 'alarm'",
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_named_and_left_out(tmp_path: Path, line: bytes, problem: str) -> None:
    good = b'{"kind":"step","segment":0,"step":9,"split":"train","metrics":{"reward":1}}\n'
    (tmp_path / "metrics-000.jsonl").write_bytes(b'{"kind":"header","schema":1,"segment":0}\n' + line + b"\n" + good)
    data = read_run(tmp_path)
    assert len(data.problems) == 1 and re.search(problem, data.problems[0]), data.problems
    assert data.steps[-1].step == 9


def test_truncation_at_every_byte_is_read_and_can_be_resumed(tmp_path: Path) -> None:
    content = small_run(tmp_path / "whole")
    for size in range(len(content) + 1):
        run_dir = tmp_path / str(size)
        run_dir.mkdir()
        (run_dir / "metrics-000.jsonl").write_bytes(content[:size])
        whole_lines = content[:size].count(b"\n") + (content[size : size + 1] == b"\n")
        data = read_run(run_dir)
        assert count(data) == whole_lines, size
        # A cut right before or right after a newline loses nothing.
        clean = size == 0 or b"\n" in content[size - 1 : size + 1]
        assert any("torn" in problem for problem in data.problems) != clean, size
        SegmentFile.create(run_dir, header=HEADER, resume_step=1).close()
        resumed = read_run(run_dir)
        assert (resumed.header["segment"], resumed.header["resume_step"]) == (1, 1), size
        assert [record.step for record in resumed.steps if record.step > 1] == [], size
        assert (run_dir / "metrics-000.jsonl").read_bytes() == content[:size]


def count(data: RunData) -> int:
    return sum(map(len, (data.headers, data.steps, data.profiles, data.scatters, data.events, data.ends)))


@pytest.mark.parametrize("folder", ["", "mismatch"])
def test_runs_are_found(folder: str, tmp_path: Path) -> None:
    for name in ("fp16", "bf16"):
        small_run(tmp_path / "runs" / name / folder)
    (tmp_path / "runs/notes").mkdir()
    found = {name: run.path for name, run in read_runs(tmp_path / "runs").items()}
    assert found == {name: tmp_path / "runs" / name / folder for name in ("bf16", "fp16")}
    for place in (tmp_path / "runs/bf16", found["bf16"] / "metrics-000.jsonl"):
        ((name, run),) = read_runs(place).items()
        assert run.path == found["bf16"]


def test_a_place_without_a_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for place, why in ((tmp_path / "absent", "does not exist"), (tmp_path / "notes", r"holds no metrics-\*.jsonl")):
        with pytest.raises(RunDirectoryError, match=why):
            read_runs(place)
    (tmp_path / "metrics-000.jsonl").touch()
    assert "is empty" in read_run(tmp_path).problems[0] and "no header" in read_run(tmp_path).problems[1]
