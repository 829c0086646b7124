"""The run directory: what is written can be read back, whatever happened to the process or the file."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_ext.errors import RecordError, RunDirectoryError
from mismatch_ext.stream import RunData, RunStream, find_runs, read_run

HEADER = {
    "run": {"name": "a"},
    "trainer": {"dtype": "float32"},
    "engine": {},
    "versions": {"torch": "2.13.0"},
}
PROFILE = {
    "edges": [0, 1, 2],
    "count": [3, 0],
    "abs_diff_mean": [0.5, None],
    "abs_diff_max": [1.5, None],
    "k3_mean": [0.25, None],
}


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def small_run(run_dir: Path) -> bytes:
    """Write one line of every kind and return the file."""
    with RunStream.open(run_dir, header=HEADER) as stream:
        stream.step(1, {"reward": 0.5, "mismatch/k3_kl": 1e-6})
        stream.step(1, {"reward": 0.25}, "eval/long")
        stream.profile(1, {"position": PROFILE})
        stream.scatter(1, [-0.5, -1.0], [-0.25, -1.0])
        stream.event(1, "info", "weight_sync", "in sync", {"max": 0.0})
        stream.step(2, {"reward": 0.75})
    return (run_dir / "metrics.jsonl").read_bytes()


def test_everything_written_is_read_back(tmp_path: Path) -> None:
    small_run(tmp_path)
    data = read_run(tmp_path)
    assert data.problems == ()
    assert data.headers[0]["schema"] == 1 and data.headers[0]["segment"] == 0
    assert data.header["versions"] == {"torch": "2.13.0"}
    assert [(s.step, s.split, s.metrics) for s in data.steps] == [
        (1, "eval/long", {"reward": 0.25}),
        (1, "train", {"reward": 0.5, "mismatch/k3_kl": 1e-6}),
        (2, "train", {"reward": 0.75}),
    ]
    assert data.splits == ["train", "eval/long"]
    assert data.series("reward") == ([1, 2], [0.5, 0.75])
    assert data.profiles[0].profiles == {"position": PROFILE}
    assert data.scatters[0].rollout_logprobs == (-0.5, -1.0)
    assert data.scatters[0].old_logprobs == (-0.25, -1.0)
    assert (data.events[0].level, data.events[0].name, data.events[0].data) == (
        "info",
        "weight_sync",
        {"max": 0.0},
    )
    assert [(end.step, end.status) for end in data.ends] == [(2, "completed")]


def test_each_line_is_one_write_and_on_disk_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads: list[bytes] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (payloads.append(data), write(fd, data))[1])
    stream = RunStream.open(tmp_path, header=HEADER)
    for step in range(3):
        stream.step(step, {"reward": 1.0})
        assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(payloads)
        assert read_run(tmp_path).steps[-1].step == step
    stream.close()
    assert len(payloads) == 4
    assert all(payload.endswith(b"\n") and payload.count(b"\n") == 1 for payload in payloads)


def test_non_finite_numbers_become_null_and_are_named(tmp_path: Path) -> None:
    with RunStream.open(tmp_path, header={"trainer": {"scale": math.inf}}) as stream:
        stream.step(0, {"a": math.nan, "b": -math.inf, "c": np.float32("nan"), "d": 1.0, "e": None})
    header, step, _ = lines(tmp_path)
    assert header["trainer"] == {"scale": None} and header["nonfinite"] == ["header.trainer.scale"]
    assert step["metrics"] == {"a": None, "b": None, "c": None, "d": 1.0, "e": None}
    assert step["nonfinite"] == ["a", "b", "c"]
    assert b"NaN" not in (tmp_path / "metrics.jsonl").read_bytes()


def test_numpy_numbers_and_booleans_are_recorded_as_numbers(tmp_path: Path) -> None:
    with RunStream.open(tmp_path, header={}) as stream:
        stream.step(np.int64(3), {"a": np.float64(0.5), "b": np.int32(7), "c": True, "d": np.bool_(False)})
    assert read_run(tmp_path).steps[0].metrics == {"a": 0.5, "b": 7.0, "c": 1.0, "d": 0.0}


@pytest.mark.parametrize("value", ["0.5", [1.0], {"x": 1}, torch.tensor(1.0), 1j, np.zeros(2)])
def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with RunStream.open(tmp_path, header={}) as stream:
        with pytest.raises(RecordError, match="'mismatch/odd'"):
            stream.step(1, {"reward": 1.0, "mismatch/odd": value})
    assert [line["kind"] for line in lines(tmp_path)] == ["header", "end"]


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ({"trainer": {"dtype": torch.float16}}, r"header\.trainer\.dtype: dtype"),
        ({"config": {"paths": [Path("x")]}}, r"header\.config\.paths\[0\]: PosixPath"),
        ({"versions": {3: "x"}}, r"header\.versions: key 3"),
        ({"segment": 4}, "'segment'"),
    ],
)
def test_a_header_that_is_not_json_is_refused_before_anything_is_created(
    tmp_path: Path, header: dict[str, Any], named: str
) -> None:
    with pytest.raises(RecordError, match=named):
        RunStream.open(tmp_path / "run", header=header)
    assert not (tmp_path / "run").exists()


def test_malformed_arguments_are_refused(tmp_path: Path) -> None:
    with RunStream.open(tmp_path, header={}) as stream:
        for step in (-1, 1.5, True, 2**53 + 1):
            with pytest.raises(RecordError, match="step"):
                stream.step(step, {})  # type: ignore[arg-type]
        with pytest.raises(RecordError, match="split 'test'"):
            stream.step(1, {}, "test")
        with pytest.raises(RecordError, match="level 'fatal'.*info, warning, error"):
            stream.event(1, "fatal", "x", "y")
        with pytest.raises(RecordError, match="status 'done'.*completed, failed"):
            stream.end(1, "done")
        with pytest.raises(RecordError, match="2 rollout_logprobs but 1 old_logprobs"):
            stream.scatter(1, [-1.0, -2.0], [-1.0])
        with pytest.raises(RecordError, match=r"scatter\.old_logprobs\[0\] is not finite"):
            stream.scatter(1, [-1.0], [math.nan])
        with pytest.raises(RecordError, match="profile 'position': int"):
            stream.profile(1, {"position": 3})
    assert [line["kind"] for line in lines(tmp_path)] == ["header", "end"]


def test_a_profile_object_is_written_through_to_dict(tmp_path: Path) -> None:
    class Profile:
        def to_dict(self) -> dict[str, Any]:
            return {key: tuple(value) for key, value in PROFILE.items()}

    with RunStream.open(tmp_path, header={}) as stream:
        stream.profile(1, {"position": Profile()})
    assert read_run(tmp_path).profiles[0].profiles == {"position": PROFILE}


def test_an_existing_run_is_not_touched_without_resume(tmp_path: Path) -> None:
    before = small_run(tmp_path)
    with pytest.raises(RunDirectoryError, match="already holds a run.*resume"):
        RunStream.open(tmp_path, header=HEADER)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_an_empty_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    RunStream.open(tmp_path, header=HEADER).close()
    assert lines(tmp_path)[0]["segment"] == 0


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    for place, why in (
        (tmp_path / "file", "a file is in its place"),
        (tmp_path / "file" / "below", "a file is in its place"),
        (tmp_path / "folder", "Is a directory"),
        (Path("/proc/nowhere/run"), "cannot be written"),
        (Path("nul\0byte"), "cannot be written"),
    ):
        with pytest.raises(RunDirectoryError, match=why) as caught:
            RunStream.open(place, header=HEADER)
        assert str(place) in str(caught.value) and "mismatch.monitor.run_dir" in str(caught.value)


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = RunStream.open(tmp_path, header=HEADER)
    stream.step(1, {"reward": 1.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        with pytest.raises(RunDirectoryError, match="only 7 of .* bytes"):
            stream.step(2, {"reward": 1.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    stream.step(2, {"reward": 2.0})
    stream.close()
    assert [s.step for s in read_run(tmp_path).steps] == [1, 2]


def test_leaving_the_block_writes_how_the_run_ended(tmp_path: Path) -> None:
    with pytest.raises(KeyError), RunStream.open(tmp_path / "failed", header=HEADER) as stream:
        stream.step(4, {"reward": 1.0})
        raise KeyError("engine")
    end = read_run(tmp_path / "failed").ends[-1]
    assert (end.step, end.status, end.message) == (4, "failed", "KeyError: 'engine'")
    with RunStream.open(tmp_path / "said", header=HEADER) as stream:
        stream.end(0, "failed", "by hand")
    assert [e.message for e in read_run(tmp_path / "said").ends] == ["by hand"]
    with pytest.raises(RunDirectoryError, match="is closed"):
        stream.step(1, {})


def test_resume_cuts_a_torn_line_says_so_and_rewrites_nothing(tmp_path: Path) -> None:
    before = small_run(tmp_path)
    whole = before[: before.rindex(b"\n", 0, -1) + 1]
    (tmp_path / "metrics.jsonl").write_bytes(whole + b'{"kind":"step","se')
    with RunStream.open(tmp_path, header=HEADER, resume_step=2) as stream:
        assert stream.segment == 1
        stream.step(3, {"reward": 1.0})
    after = (tmp_path / "metrics.jsonl").read_bytes()
    assert after.startswith(whole)
    data = read_run(tmp_path)
    assert data.problems == ()
    assert [e.name for e in data.events if e.segment == 1] == ["recovered", "resumed"]
    recovered = next(e for e in data.events if e.name == "recovered")
    assert "18 bytes" in recovered.message and recovered.data == {"text": '{"kind":"step","se'}
    assert [s.step for s in data.steps if s.split == "train"] == [1, 2, 3]
    assert data.header["segment"] == 1 and data.header["resume_step"] == 2


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    before = small_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(before[:-1])
    with RunStream.open(tmp_path, header=HEADER, resume_step=2):
        pass
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)
    assert [e.name for e in read_run(tmp_path).events if e.segment == 1] == ["resumed"]


def test_a_later_segment_replaces_steps_and_abandoned_ones_are_left_out(tmp_path: Path) -> None:
    with RunStream.open(tmp_path, header=HEADER) as stream:
        for step in range(1, 8):
            stream.step(step, {"reward": float(step), "only_first": 0.0})
        stream.profile(7, {"position": PROFILE})
    # The checkpoint was of step 4; the second segment runs 5 and 6 again and never reaches 7.
    with RunStream.open(tmp_path, header=HEADER, resume_step=4) as stream:
        stream.step(5, {"reward": 50.0})
        stream.step(6, {"reward": 60.0})
        with (tmp_path / "metrics.jsonl").open("a") as late:  # of the first process, which was not dead yet
            for kind in (
                {"kind": "step", "metrics": {"reward": 5.5}},
                {"kind": "profile", "profiles": {"position": PROFILE}},
            ):
                late.write(json.dumps({"segment": 0, "step": 6, "split": "train", **kind}) + "\n")
        stream.profile(6, {"position": PROFILE})
    data = read_run(tmp_path)
    assert data.series("reward") == ([1, 2, 3, 4, 5, 6], [1.0, 2.0, 3.0, 4.0, 50.0, 60.0])
    assert data.steps[4].metrics == {"reward": 50.0}
    assert [(p.step, p.segment) for p in data.profiles] == [(6, 1)]
    assert len(data.problems) == 1 and "resumed from step 4" in data.problems[0] and "7 to 7" in data.problems[0]


def test_lines_of_one_step_in_one_segment_are_merged(tmp_path: Path) -> None:
    with RunStream.open(tmp_path, header=HEADER) as stream:
        stream.step(1, {"reward": 1.0, "loss": 3.0})
        stream.step(1, {"mismatch/k3_kl": 2.0, "loss": 4.0})
    assert read_run(tmp_path).steps[0].metrics == {"reward": 1.0, "loss": 4.0, "mismatch/k3_kl": 2.0}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"garbage", "line 2 was left out: not JSON"),
        (b"", "line 2 was left out: not JSON"),
        (b"\xff\xfe\xfa", "not UTF-8"),
        (b"[1]", "a JSON list, not an object"),
        (b"[" * 100_000, "nested too deeply"),
        (
            b'{"kind":"step","segment":0,"step":1,"split":"train","metrics":{"a":NaN}}',
            r"not strict JSON \(NaN\)",
        ),
        (b'{"kind":"new","segment":0,"step":1}', "unknown kind 'new'"),
        (b'{"kind":"step","segment":0,"step":-1,"split":"train","metrics":{}}', "step is -1"),
        (b'{"kind":"step","segment":0,"step":1,"split":"dev","metrics":{}}', "split is 'dev'"),
        (b'{"kind":"step","segment":0,"step":1,"split":"train","metrics":[]}', "metrics is"),
        (
            b'{"kind":"step","segment":0,"step":1,"split":"train","metrics":{"a":"x"}}',
            "line 2: metric 'a'.*no number",
        ),
        (b'{"kind":"event","segment":0,"step":1,"level":"bad","name":"n","message":"m"}', "level is 'bad'"),
        (b'{"kind":"end","segment":0,"step":1,"status":"completed"}', "message is None"),
        (b'{"kind":"header","schema":2,"segment":1}', "line 2: schema 2 is not 1"),
        (
            b'{"kind":"scatter","segment":0,"step":1,"split":"train","rollout_logprobs":[-1],"old_logprobs":[]}',
            "1 rollout and 0 trainer",
        ),
        (
            b'{"kind":"scatter","segment":0,"step":1,"split":"train","rollout_logprobs":[5],"old_logprobs":[-1]}',
            "holds 5, which is no log-probability",
        ),
        (
            b'{"kind":"profile","segment":0,"step":1,"split":"train","profiles":{"p":{"edges":[0,1],"count":[1,2,3]}}}',
            "edges has 2 entries for 3 bins",
        ),
    ],
)
def test_a_bad_line_becomes_a_sentence_with_its_number(tmp_path: Path, line: bytes, problem: str) -> None:
    good = b'{"kind":"step","segment":0,"step":9,"split":"train","metrics":{"reward":1}}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind":"header","schema":1,"segment":0}\n' + line + b"\n" + good)
    data = read_run(tmp_path)
    assert len(data.problems) == 1
    assert re.search(problem, data.problems[0]), data.problems
    assert data.steps[-1].step == 9


def test_an_empty_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    data = read_run(tmp_path)
    assert "is empty" in data.problems[0] and "no header" in data.problems[1]


def test_truncation_at_every_byte_is_read_and_can_be_resumed(tmp_path: Path) -> None:
    content = small_run(tmp_path / "whole")
    for size in range(len(content) + 1):
        run_dir = tmp_path / str(size)
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_bytes(content[:size])
        whole_lines = content[:size].count(b"\n") + (content[size : size + 1] == b"\n")
        data = read_run(run_dir)
        assert count(data) == whole_lines, size
        # A cut right before or right after a newline loses nothing.
        clean = size == 0 or b"\n" in content[size - 1 : size + 1]
        assert any("torn" in problem for problem in data.problems) != clean, size
        with RunStream.open(run_dir, header=HEADER, resume_step=2):
            pass
        resumed = read_run(run_dir)
        assert not resumed.problems, (size, resumed.problems)
        kept = content[:size] if content[size : size + 1] == b"\n" else content[: content.rfind(b"\n", 0, size) + 1]
        assert (run_dir / "metrics.jsonl").read_bytes().startswith(kept)


def count(data: RunData) -> int:
    parts = (data.headers, data.steps, data.profiles, data.scatters, data.events, data.ends)
    return sum(map(len, parts))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
kinds = st.sampled_from(["header", "step", "profile", "scatter", "event", "end"])
almost_lines = st.fixed_dictionaries(
    {"kind": kinds, "segment": st.integers(0, 3) | json_values, "step": st.integers(0, 5) | json_values},
    optional={
        "split": st.just("train") | json_values,
        "metrics": st.dictionaries(st.text(max_size=4), json_values, max_size=3) | json_values,
        "profiles": st.dictionaries(st.text(max_size=4), json_values, max_size=2) | json_values,
        "resume_step": st.integers(0, 5) | json_values,
        "level": st.just("info") | json_values,
        "name": json_values,
        "message": json_values,
        "rollout_logprobs": st.lists(json_values, max_size=3) | json_values,
        "old_logprobs": st.lists(json_values, max_size=3) | json_values,
        "schema": st.just(1) | json_values,
    },
).map(lambda line: json.dumps(line).encode())


@settings(max_examples=80, deadline=None)
@given(garbage=st.lists(st.binary(max_size=40) | almost_lines, max_size=6))
def test_garbage_never_stops_the_reader(tmp_path_factory: pytest.TempPathFactory, garbage: list[bytes]) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    good = b'{"kind":"end","segment":7,"step":9,"status":"completed","message":"kept"}'
    (run_dir / "metrics.jsonl").write_bytes(b"\n".join([*garbage, good]))
    data = read_run(run_dir)
    assert data.ends[-1].message == "kept"
    with RunStream.open(run_dir, header=HEADER, resume_step=0) as stream:
        assert stream.segment >= 8


WRITER = """
import sys
from mismatch_ext.stream import RunStream
stream = RunStream.open(sys.argv[1], header={"run": {"name": "killed"}})
step = 0
while True:
    step += 1
    stream.step(step, {f"metric_{i}": step / 7 for i in range(200)})
"""


def test_a_killed_writer_leaves_whole_lines_and_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    try:
        while not path.exists() or path.read_bytes().count(b"\n") < 50:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    killed = path.read_bytes()
    data = read_run(tmp_path)
    assert not data.ends
    assert [s.step for s in data.steps] == list(range(1, len(data.steps) + 1)) and len(data.steps) >= 49
    assert len(data.problems) <= 1
    last = data.steps[-1].step
    with RunStream.open(tmp_path, header=HEADER, resume_step=last) as stream:
        stream.step(last + 1, {"reward": 1.0})
    assert path.read_bytes().startswith(killed[: killed.rindex(b"\n") + 1])
    resumed = read_run(tmp_path)
    assert resumed.problems == () and resumed.steps[-1].step == last + 1
    assert resumed.ends[-1].status == "completed"


def test_find_runs(tmp_path: Path) -> None:
    for name in ("fp16", "bf16"):
        small_run(tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert find_runs(tmp_path) == {"bf16": tmp_path / "bf16", "fp16": tmp_path / "fp16"}
    assert find_runs(tmp_path / "bf16") == {"bf16": tmp_path / "bf16"}
    outputs = tmp_path / "outputs"
    for name in ("before", "after"):
        write_run_in = outputs / name / "mismatch"
        write_run_in.mkdir(parents=True)
        (write_run_in / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    assert find_runs(outputs) == {name: outputs / name / "mismatch" for name in ("after", "before")}
    assert find_runs(outputs / "after") == {"after": outputs / "after/mismatch"}


def test_places_without_a_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, why in (
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "file", "is a file, not a folder"),
        (tmp_path, "holds no metrics.jsonl"),
    ):
        with pytest.raises(RunDirectoryError, match=why) as caught:
            find_runs(place)
        assert str(place) in str(caught.value)
    with pytest.raises(RunDirectoryError, match="No such file"):
        read_run(tmp_path)
