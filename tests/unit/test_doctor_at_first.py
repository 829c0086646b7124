"""`mismatch-ext doctor --rollouts` without `--model`: what the log's own log-probabilities tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mismatch_ext.adapters import cli

LENGTH = 40
Change = Callable[[dict[str, Any], int], None]


def told(folder: Path, capsys: pytest.CaptureFixture[str], change: Change, size: float = 1e-3) -> tuple[int, str]:
    """Log 20 responses with an error of both signs after a change, and have the doctor read them."""
    random, lines = np.random.default_rng(0), []
    for number in range(20):
        engine = -random.exponential(size=LENGTH) - 0.1
        trainer = engine + random.normal(size=LENGTH) * size
        row = {"prompt_ids": [1, 2], "response_ids": [3] * LENGTH, "response_mask": [True] * LENGTH,
               "rollout_logprobs": engine.tolist(), "trainer_logprobs": trainer.tolist()}  # fmt: skip
        change(row, number)
        lines.append(json.dumps(row))
    (folder / "log.jsonl").write_text("\n".join(lines))
    status = cli.main(["doctor", "--rollouts", str(folder / "log.jsonl"), "--out", str(folder / "out")])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def _nothing(row: dict[str, Any], number: int) -> None:
    pass


def _mask(row: dict[str, Any], number: int) -> None:
    row["rollout_logprobs"][10:14] = [0.0] * 4  # a tool's
    row["response_mask"][11:14] = [False] * 3


def _late(row: dict[str, Any], number: int) -> None:
    row["trainer_logprobs"][20:] = [value + 0.1 * (-1) ** at for at, value in enumerate(row["trainer_logprobs"][20:])]


def _versions(row: dict[str, Any], number: int) -> None:
    row["weight_version"], row["step"] = 7 + number % 2, 8
    if number % 2:
        row["trainer_logprobs"] = [value - 0.1 for value in row["rollout_logprobs"]]


def _few(row: dict[str, Any], number: int) -> None:
    if number == 3:
        row["trainer_logprobs"] = [value - 1.0 for value in row["trainer_logprobs"]]


def _sided(row: dict[str, Any], number: int) -> None:
    row["trainer_logprobs"] = [value - 0.1 for value in row["rollout_logprobs"]]


SPECIAL = ("begins at token", "one-sided", "responses hold", "mask:", "weight version")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_nothing, []),
        (_mask, ["mask: 20 sampled tokens beside a masked one were logged with exactly 0"]),
        (_late, ["begins at token 20 of a response"]),
        (_versions, ["weight version 7: 400 tokens", "weight version 8: 400 tokens, mean |Δlogp| 1.0e-01"]),
        (_few, ["1 of 20 responses hold"]),
        (_sided, ["above 0 on 100% of the tokens: one-sided"]),
    ],
)
def test_the_log_alone_tells_where_the_gap_is_and_names_no_cause(
    change: Change, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = told(tmp_path, capsys, change)
    assert status == 3, text
    assert all(word in text for word in words), text
    assert not [word for word in SPECIAL if word in text and not any(word in expected for expected in words)], text
    assert "--model PATH" in text and "Unexplained" in text and "Clean" not in text
    assert json.loads((tmp_path / "out" / "doctor.json").read_text())["verdict"] == "unexplained"


def test_tokens_that_all_agree_end_with_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = told(tmp_path, capsys, _nothing, size=1e-6)
    assert status == 0 and "Within the threshold: all 800 tokens" in text and "Clean" not in text, text


def test_a_log_without_the_trainers_needs_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = told(tmp_path, capsys, lambda row, number: row.pop("trainer_logprobs"))
    assert status == 2 and "0 of 20 responses" in text and "--model is missing" in text, text


@pytest.mark.parametrize("scored", [True, False])
def test_nemo_rls_own_scores_are_read_and_its_zeros_are_none(
    scored: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        (Path(__file__).parents[1] / "data" / "rollouts" / "nemo_rl_train_data_step1.jsonl").read_text().splitlines()
    )
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["prev_logprobs"] = [[(value - 0.5) * scored if value else 0.0 for value in row["generation_logprobs"][0]]]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status = cli.main(["doctor", "--rollouts", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")])
    captured = capsys.readouterr()
    assert status == (3 if scored else 2), captured
    assert "gap 5.00e-01 nats per token" in captured.out if scored else "--model is missing" in captured.err
