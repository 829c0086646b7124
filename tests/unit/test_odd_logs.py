"""Each reader of logs, with a wrong value in each place: what is odd is a sentence, never an exception, never another number."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_ext.closing import closing_lines
from mismatch_ext.doctor import read_rollouts
from mismatch_ext.errors import MismatchError, RunDirectoryError
from mismatch_ext.log_reading import RunData
from mismatch_ext.report import judge_all, load_runs, summarize, tables, verdict
from mismatch_ext.report.doctor import read_why

LOGS = Path(__file__).parents[1] / "data/odd_logs"
"""What each writer of logs writes, in which every value is exchanged for a wrong one."""
ABSENT = object()
WRONG: tuple[Any, ...] = (
    ABSENT, None, True, -1, 1.5, 10**400, 1e308, "x", "", "eval_x", [], [1, 2], {}, {"a": 1}, [None], {"metric": [3]},
)  # fmt: skip
"""Values that replace each value of a log, one after another."""

Place = tuple[Any, ...]


def read_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (LOGS / name).read_text(encoding="utf-8").splitlines()]


def places(node: Any, path: Place = ()) -> Iterator[Place]:
    """Yield the path of each value in plain data, the outermost first."""
    if path:
        yield path
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inside:
        yield from places(value, (*path, key))


def at(node: Any, path: Place) -> Any:
    for key in path:
        node = node[key]
    return node


def changed(data: Any, path: Place, value: Any) -> Any:
    """Return a copy of plain data with another value at a path."""
    data = copy.deepcopy(data)
    parent = at(data, path[:-1])
    if value is ABSENT:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return data


def each_wrong(data: Any) -> Iterator[tuple[Place, Any, Any]]:
    """Yield a path in plain data, a value for it, and the data with that value there."""
    for path in places(data):
        for value in WRONG:
            yield path, value, changed(data, path, value)


def kind(value: Any) -> str:
    if value is ABSENT or value is None:
        return "nothing"
    return "number" if type(value) in (int, float) else type(value).__name__


def fits(data: Any, path: Place, value: Any) -> bool:
    """Tell whether a value is one that a writer may write there, so that what follows from it need not be called odd."""
    return kind(value) in ("nothing", kind(at(data, path)))


def outcome(runs: Mapping[str, RunData], folder: Path) -> tuple[Any, set[str]]:
    """Return everything that is concluded from runs, and the sentences about what could not be used."""
    summary = summarize(runs)
    why, unread = read_why(folder)
    judged = judge_all(runs, summary, why)
    said = verdict(judged, runs, why)
    ours = [run for run in runs.values() if not run.is_host_log]
    closing = [line for run in ours for line in closing_lines(run) if not line.startswith("  problems")]
    tables.event_rows(runs)
    tables.side_rows(runs)
    tables.setting_tables(runs)
    tables.patch_rows(runs)
    tables.config_texts(runs)
    missing = tables.missing(runs, summary)
    problems = [
        *(problem for run in runs.values() for problem in run.problems),
        *(text for _, text in (*missing, *unread)),
    ]
    return (said, judged, closing), set(problems)


def our_lines() -> list[dict[str, Any]]:
    """Return a log with every kind of line."""
    return read_lines("run.jsonl")


@pytest.mark.parametrize("number", range(len(our_lines())))
def test_an_odd_value_in_our_own_log(number: int, tmp_path: Path) -> None:
    lines = our_lines()

    def read(line: Any) -> tuple[Any, set[str]]:
        texts = map(json.dumps, [*lines[:number], line, *lines[number + 1 :]])
        (tmp_path / "metrics-000.jsonl").write_text("\n".join(texts) + "\n")
        return outcome(load_runs(tmp_path), tmp_path)

    usual, known = read(lines[number])
    for path, value, odd in each_wrong(lines[number]):
        found, problems = read(odd)
        if found != usual and not fits(lines[number], path, value):
            assert problems - known, (path, value)
    for line in ([], 3, "x", None):
        assert read(line)[1] - known, line


TRL_STATE = json.loads((LOGS / "trainer_state.json").read_text(encoding="utf-8"))
VERL_LINES = read_lines("verl.jsonl")


def read_or_refused(path: Path) -> tuple[Any, set[str]]:
    try:
        return outcome(load_runs(path), path.parent)
    except RunDirectoryError as error:  # the whole file is none of theirs
        return "refused", {str(error)}


def test_an_odd_value_in_trls_log(tmp_path: Path) -> None:
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps(TRL_STATE))
    usual, known = read_or_refused(file)
    for path, value, odd in each_wrong(TRL_STATE):
        file.write_text(json.dumps(odd))
        found, problems = read_or_refused(file)
        assert found != "refused" or len(path) == 1, (path, value)
        if found != usual and not (fits(TRL_STATE, path, value) and path[-1] != "step"):
            assert problems - known, (path, value)


def test_an_odd_value_in_verls_log(tmp_path: Path) -> None:
    file, (first, second, third) = tmp_path / "run.jsonl", VERL_LINES

    def read(line: Any) -> tuple[Any, set[str]]:
        file.write_text("\n".join(map(json.dumps, [first, line, third])) + "\n")
        return read_or_refused(file)

    usual, known = read(second)
    for path, value, line in each_wrong(second):
        found, problems = read(line)
        assert found != "refused", (path, value)
        empty = path == ("data",) and isinstance(value, dict)  # a step without a known metric
        odd = not fits(second, path, value) or path[-1] in ("step", "data")
        if found != usual and odd and not empty:
            assert problems - known, (path, value)
    for line in ([], 3, "x", None):
        found, problems = read(line)
        assert found != "refused" and problems - known, line


def test_an_odd_line_in_the_middle_of_verls_log(tmp_path: Path) -> None:
    lines = [json.dumps(line) for line in VERL_LINES]
    for odd in ("{", "[" * 100_000, '{"step": 2, "data": {"rollout_corr/k3_kl": NaN}}', '{"step": 2'):
        file = tmp_path / "run.jsonl"
        file.write_text("\n".join([lines[0], odd, *lines[1:]]) + "\n")
        (run,) = load_runs(file).values()
        assert [record.step for record in run.steps] == [1, 2, 3]
        assert "NaN" in odd or any("line 2 was left out" in problem for problem in run.problems)
    file.write_text(f"{lines[0]}\n{odd}")  # and no more
    (run,) = load_runs(file).values()
    assert run.last_step == 1 and "line 2 is torn" in run.problems[1]


def test_an_odd_step_in_an_event_file(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step in (-1, 1, 2):
            writer.add_scalar("train/sampling/sampling_logp_difference/mean", 0.001, step)
    (run,) = load_runs(tmp_path).values()
    assert [record.step for record in run.steps] == [1, 2]
    assert any("step -1" in problem for problem in run.problems)


DOCTOR = json.loads((LOGS / "doctor.json").read_text(encoding="utf-8"))


def test_an_odd_value_in_the_doctors_file(tmp_path: Path) -> None:
    (tmp_path / "metrics-000.jsonl").write_text("\n".join(map(json.dumps, our_lines())) + "\n")

    def read(text: str) -> tuple[Any, set[str]]:
        (tmp_path / "doctor.json").write_text(text)
        return outcome(load_runs(tmp_path), tmp_path)

    usual, known = read(json.dumps(DOCTOR))
    assert len(read_why(tmp_path)[0]) == 1
    for path, value, odd in each_wrong(DOCTOR):
        found, problems = read(json.dumps(odd))
        if found != usual and not fits(DOCTOR, path, value):
            assert problems - known, (path, value)
    for text in ("[" * 100_000, "[]", "", "{"):
        assert read(text)[1] - known, text[:9]


ROLLOUTS: dict[str, dict[str, Any]] = json.loads((LOGS / "rollouts.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", list(ROLLOUTS))
def test_an_odd_value_in_logged_rollouts(name: str, tmp_path: Path) -> None:
    file = tmp_path / "rollouts"

    def read(row: Any) -> str:
        if name == "slime":
            torch.save(row, file)
        else:
            file.write_text(json.dumps(row))
        try:
            return repr(read_rollouts(file))
        except MismatchError as error:
            return f"refused: {error}"

    assert "prompt_ids=(1, 2), response_ids=(3,)" in read(ROLLOUTS[name])
    for path, value, odd in each_wrong(ROLLOUTS[name]):
        found = read(odd)
        assert not found.startswith("refused") or str(file) in found, (path, value)
    for row in ([], 3, "x", None):
        assert read(row).startswith("refused"), row


def test_text_that_is_no_json_in_logged_rollouts(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    for odd in ("{", "[" * 100_000, '{"prompt_ids": ' + "1" * 5000):
        file.write_text(odd)
        with pytest.raises(MismatchError, match="line 1 is no JSON"):
            read_rollouts(file)
