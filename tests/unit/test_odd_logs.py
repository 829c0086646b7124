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
from tests.unit.synthetic_runs import header

ABSENT = object()
WRONG: tuple[Any, ...] = (
    ABSENT, None, True, -1, 1.5, 10**400, 1e308, "x", "", "eval_x", [], [1, 2], {}, {"a": 1}, [None], {"metric": [3]},
)  # fmt: skip
"""Values that replace each value of a log, one after another."""

Place = tuple[Any, ...]


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


ALARM = {
    "metric": "mismatch/k3_kl", "step": 3, "value": 2e-3, "threshold": 1e-3, "side": "above", "action": "warn",
    "status": "raised", "first_step": 1, "message": "k3 is high",
}  # fmt: skip
FINDING = {"check": "weight_sync", "count": 2, "message": "stale", "step": 2}


def event(step: int, name: str, data: Any, level: str = "warning") -> dict[str, Any]:
    return {"kind": "event", "segment": 0, "step": step, "level": level, "name": name, "message": "so", "data": data}


def our_lines(acts: bool = True) -> list[dict[str, Any]]:
    config = {
        "kl": {"coef": 0.1, "target_kl": 0.01},
        "routing": {"mode": "R3"},
        "correction": {"preset": "tis"},
    }
    opening = {"kind": "header", "segment": 0, "schema": 1, "time": "now", "of": "training", "resume_step": None}
    bins = {"edges": [0, 1], "count": [3], "abs_diff_mean": [0.1], "abs_diff_max": [0.2], "k3_mean": [0.01]}
    metrics = {
        "mismatch/logp_abs_diff_mean": 0.01, "mismatch/k3_kl": 2e-3, "mismatch/tokens": 8.0, "mismatch/kl_ref_k1": 0.1,
        "mismatch/kl_coef": 0.1, "mismatch/weight_sync_gap": 0.001, "mismatch/overflow_steps": 1.0, "mismatch/loss_scale": 2.0,
        "mismatch/lr_multiplier": 0.5, "mismatch/lr_surge_step": 2.0, "reward": 0.5, "loss": 0.1,
    }  # fmt: skip
    at_step = {"segment": 0, "step": 2, "split": "train"}
    steps = [{"kind": "step", **at_step, "step": step, "metrics": metrics} for step in (1, 2, 3)]
    return [
        opening
        | header("bf16", config=config, acts=acts, audit={"dtype": "bfloat16"})
        | {"sampling": {"repetition_penalty": 1.1}},
        *steps,
        {"kind": "profile", **at_step, "profiles": {"position": bins}},
        {"kind": "scatter", **at_step, "rollout_logprobs": [-1.0], "old_logprobs": [-1.1]},
        event(3, "alarm", ALARM),
        event(3, "alarm", ALARM | {"status": "cleared"}, "info"),
        event(2, "check_failed", FINDING),
        event(2, "bad_rows", {"reason": "routes", "rows": 2}, "warning"),
        event(3, "bad_rows", {"reason": None, "rows": 4}, "error"),
        event(2, "weight_sync", {"status": "stale"}, "error"),
        {"kind": "end", "segment": 0, "step": 3, "status": "completed", "message": ""},
    ]


@pytest.mark.parametrize("acts", [True, False])
@pytest.mark.parametrize("number", range(len(our_lines())))
def test_an_odd_value_in_our_own_log(number: int, acts: bool, tmp_path: Path) -> None:
    lines = our_lines(acts)
    file = tmp_path / "metrics-000.jsonl"

    def read(line: Any) -> tuple[Any, set[str]]:
        texts = [json.dumps(line if at_line == number else each) for at_line, each in enumerate(lines)]
        file.write_text("\n".join(texts) + "\n")
        return outcome(load_runs(tmp_path), tmp_path)

    usual, known = read(lines[number])
    for path in places(lines[number]):
        for value in WRONG:
            found, problems = read(changed(lines[number], path, value))
            if found != usual and not fits(lines[number], path, value):
                assert problems - known, (path, value)
    for line in ([], 3, "x", None):
        found, problems = read(line)
        assert problems - known, line


TRL_STATE = {
    "global_step": 3,
    "log_history": [
        {
            "step": step, "loss": 0.1, "reward": 0.5, "grad_norm": 0.3, "learning_rate": 1e-6, "completions/mean_length": 80.0,
            "sampling/sampling_logp_difference/mean": 0.001, "sampling/sampling_logp_difference/max": 0.1,
            "sampling/importance_sampling_ratio/mean": 0.99,
        }
        for step in (1, 2, 3)
    ] + [{"step": 3, "eval_reward": 0.7}],
}  # fmt: skip
VERL_LINES = [
    {
        "step": step,
        "data": {"rollout_corr/k3_kl": 2e-3, "rollout_corr/kl": 1e-3, "critic/score/mean": 0.5, "actor/lr": 1e-6},
    }
    for step in (1, 2, 3)
]


def read_or_refused(path: Path) -> tuple[Any, set[str]]:
    try:
        return outcome(load_runs(path), path.parent)
    except RunDirectoryError as error:  # the whole file is none of theirs
        return "refused", {str(error)}


def test_an_odd_value_in_trls_log(tmp_path: Path) -> None:
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps(TRL_STATE))
    usual, known = read_or_refused(file)
    for path in places(TRL_STATE):
        for value in WRONG:
            file.write_text(json.dumps(changed(TRL_STATE, path, value)))
            found, problems = read_or_refused(file)
            assert found != "refused" or len(path) == 1, (path, value)
            if found != usual and not (fits(TRL_STATE, path, value) and path[-1] != "step"):
                assert problems - known, (path, value)


@pytest.mark.parametrize("number", range(3))
def test_an_odd_value_in_verls_log(number: int, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"

    def read(line: Any) -> tuple[Any, set[str]]:
        lines = [json.dumps(line if at_line == number else each) for at_line, each in enumerate(VERL_LINES)]
        file.write_text("\n".join(lines) + "\n")
        return read_or_refused(file)

    usual, known = read(VERL_LINES[number])
    for path in places(VERL_LINES[number]):
        for value in WRONG:
            found, problems = read(changed(VERL_LINES[number], path, value))
            assert found != "refused", (path, value)
            empty = path == ("data",) and isinstance(value, dict)  # a step without a known metric
            odd = not fits(VERL_LINES[number], path, value) or path[-1] in ("step", "data")
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


def test_an_odd_step_in_an_event_file(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step in (-1, 1, 2):
            writer.add_scalar("train/sampling/sampling_logp_difference/mean", 0.001, step)
    (run,) = load_runs(tmp_path).values()
    assert [record.step for record in run.steps] == [1, 2]
    assert any("step -1" in problem for problem in run.problems)


DOCTOR = {
    "gap": {"logp_abs_diff_mean": 0.01, "k3_kl": 1e-3}, "tokens": 5000, "responses": 32, "verdict": "explained", "ratio": 12.0,
    "measurable": True, "unexplained": 0.001, "notes": ["a note"], "hints": [], "seen": 10, "longest": 20, "conclusion": "So.",
    "parts": [{"name": "dtype", "share": 0.9, "low": 0.8, "high": 1.0, "mean": 0.009}],
    "causes": [
        {"key": "dtype", "said": "the dtype", "share": 0.9, "status": "confirmed", "remedy": {"trl": "set it", "verl": "set it"}}
    ],
}  # fmt: skip


def test_an_odd_value_in_the_doctors_file(tmp_path: Path) -> None:
    lines = our_lines()
    (tmp_path / "metrics-000.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps(DOCTOR))
    usual, known = outcome(load_runs(tmp_path), tmp_path)
    assert len(read_why(tmp_path)[0]) == 1
    for path in places(DOCTOR):
        for value in WRONG:
            file.write_text(json.dumps(changed(DOCTOR, path, value)))
            found, problems = outcome(load_runs(tmp_path), tmp_path)
            if found != usual and not fits(DOCTOR, path, value):
                assert problems - known, (path, value)
    for text in ("[" * 100_000, "[]", "3", "", "{"):
        file.write_text(text)
        assert outcome(load_runs(tmp_path), tmp_path)[1] - known, text[:9]


ROLLOUTS: dict[str, dict[str, Any]] = {
    "own": {
        "prompt_ids": [1, 2], "response_ids": [3], "rollout_logprobs": [-1.0], "response_mask": [True], "weight_version": 1,
        "step": 2, "trainer_logprobs": [-1.1], "provenance": {"weight_version": 1, "sampling": {"temperature": 0.5}},
        "routes": {"start": 0, "layers": [0], "num_experts": 2, "shape": [2, 1, 1], "dtype": "uint8", "experts": "AAA="},
    },
    "slime": {
        "samples": [
            {
                "tokens": [1, 2, 3], "response_length": 1, "rollout_log_probs": [-1.0], "loss_mask": [1],
                "weight_versions": ["1"], "rollout_routed_experts": [[[0]], [[1]]],
            }
        ]
    },
    "nemo-rl": {
        "token_ids": [[1, 2, 3, 0]], "input_lengths": [3], "token_loss_mask": [[0, 0, 1, 0]],
        "generation_logprobs": [[0, 0, -1.0, 0]], "prev_logprobs": [[-0.5, -0.5, -1.1, 0]], "idx": 0,
    },
    "prime-rl": {
        "env": {}, "task": {}, "run": {"work": {"policy": {"start": 1, "end": 2}}},
        "traces": [
            {
                "agent": {"trainable": True},
                "calls": [{"node": 1, "sampling": {"temperature": 0.5}}],
                "nodes": [
                    {"token_ids": [1, 2], "mask": [False, False], "logprobs": []},
                    {"parent": 0, "token_ids": [3], "mask": [True], "logprobs": [-1.0]},
                ],
            }
        ],
    },
}  # fmt: skip


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

    usual = read(ROLLOUTS[name])
    assert "prompt_ids=(1, 2), response_ids=(3,)" in usual
    for path in places(ROLLOUTS[name]):
        for value in WRONG:
            found = read(changed(ROLLOUTS[name], path, value))
            assert not found.startswith("refused") or str(file) in found, (path, value)
    for row in ([], 3, "x", None):
        assert read(row).startswith("refused"), row


def test_text_that_is_no_json_in_logged_rollouts(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    for odd in ("{", "[" * 100_000, '{"prompt_ids": ' + "1" * 5000):
        file.write_text(odd)
        with pytest.raises(MismatchError, match="line 1 is no JSON"):
            read_rollouts(file)
