"""`mismatch-ext doctor --rollouts` without `--model`: what the log's own log-probabilities tell."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mismatch_ext.adapters import cli
from mismatch_ext.adapters.doctor.options import configure

LENGTH = 40
Change = Callable[[dict[str, Any], int], None]


def told(
    folder: Path, capsys: pytest.CaptureFixture[str], change: Change, size: float = 1e-3, more: Sequence[str] = ()
) -> tuple[int, str]:
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
    status = cli.main(["doctor", "--rollouts", str(folder / "log.jsonl"), "--out", str(folder / "out"), *more])
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


def _placeholder(row: dict[str, Any], number: int) -> None:
    row["rollout_logprobs"][10 + number % 20] = -9999.0


def _cut(row: dict[str, Any], number: int) -> None:
    row["provenance"] = {"engine": "vllm", "sampling": {"temperature": 1.0, "top_p": 0.9}}


def _first(row: dict[str, Any], number: int) -> None:
    row["trainer_logprobs"][0] += 0.1 * (-1) ** number


def kept(row: dict[str, Any], number: int, **more: Any) -> None:
    row["step"], trainer = 6, {"host": "trl", "temperature": 0.7}
    row["provenance"] = {"sampling": {"temperature": 1.0}}
    row["kept"] = {"row": number, "chosen": "worst", "reason": "k3_kl is 0.1 at step 7", "trainer": trainer, **more}


def _kept(row: dict[str, Any], number: int) -> None:
    kept(row, number)


def _lag(row: dict[str, Any], number: int) -> None:
    kept(row, number, sampled_after=4 if number < 3 else 6)


def _nan(row: dict[str, Any], number: int) -> None:
    kept(row, number)
    row["rollout_logprobs"][5] = None if number == 4 else row["rollout_logprobs"][5]


SPECIAL = ("begins at token", "one-sided", "responses hold", "mask:", "weight version", "placeholder:", "grid:",
           "settings:", "where: the", "kept:", "lag:", "not finite:")  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_nothing, []),
        (_mask, ["mask: 20 sampled tokens were logged with exactly 0 next to a masked one", "placeholder:"]),
        (_late, ["begins at token 20 of a response"]),
        (_versions, ["weight version 7: 400 tokens", "weight version 8: 400 tokens, mean |Δlogp| 1.0e-01"]),
        (
            _placeholder,
            [
                "placeholder: the engine's log-probability is exactly -9999 on 20 sampled tokens, which hold 100%",
                "begins at token",
            ],
        ),
        (_cut, ["settings: top_p=0.9 is active"]),
        (_first, ["where: the first sampled token of each response holds"]),
        (
            _kept,
            [
                "kept: k3_kl is 0.1 at step 7",
                "settings: the engine samples at temperature 1, and the trainer divides its logits by 0.7",
            ],
        ),
        (
            _lag,
            ["kept:", "settings:", "lag: 3 of 20 responses were scored by later weights (step 6) than sampled them"],
        ),
        (_nan, ["kept:", "settings:", "not finite: 1 of the engine's log-probabilities of sampled tokens"]),
    ],
)
def test_the_log_alone_tells_where_the_gap_is_and_names_no_cause(
    change: Change, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = told(tmp_path, capsys, change)
    assert status == 3, text
    assert all(word in text for word in words), text
    assert not [word for word in SPECIAL if word in text and not any(word in expected for expected in words)], text
    assert "--model PATH" in text and "Clean" not in text
    assert json.loads((tmp_path / "out" / "doctor.json").read_text())["verdict"] == "unexplained"


def test_tokens_that_all_agree_end_with_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = told(tmp_path, capsys, _nothing, size=1e-6)
    assert status == 0 and "Within the threshold: all 800 tokens" in text and "Clean" not in text, text


def _skipped(row: dict[str, Any], number: int) -> None:
    row["response_mask"][:2] = [False] * 2


def _copied(row: dict[str, Any], number: int) -> None:
    row["trainer_logprobs"] = row["rollout_logprobs"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_skipped, "mask: starts 2 tokens late in every response"),
        (_copied, "copied: the trainer's log-probabilities are"),
    ],
)
def test_a_log_that_shows_a_defect_is_not_within_the_threshold(
    change: Change, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = told(tmp_path, capsys, change, size=1e-6)
    assert status == 3 and words in text and "Within the threshold" not in text, text


def test_the_command_for_the_cause_is_the_given_one_with_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    _, text = told(folder, capsys, _versions, more=("--weight-version", "7"))
    line = next(line for line in text.splitlines() if line.startswith("for the cause: "))
    parser = argparse.ArgumentParser(exit_on_error=False)
    configure(parser)
    read = parser.parse_args(shlex.split(line)[5:])
    assert read.rollouts == folder / "log.jsonl" and read.weight_version == "7" and read.model == Path("PATH")


def test_a_log_without_the_trainers_needs_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = told(tmp_path, capsys, lambda row, number: row.pop("trainer_logprobs"))
    assert status == 2 and "0 of 20 responses" in text and "--model is missing" in text, text


def test_nemo_rls_own_scores_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = Path(__file__).parents[1] / "data" / "rollouts" / "nemo_rl_train_data_step1.jsonl"
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    for row in rows:
        # Its zeros stand for tokens without a score.
        row["prev_logprobs"] = [[value - 0.5 if value else 0.0 for value in row["generation_logprobs"][0]]]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status = cli.main(["doctor", "--rollouts", str(tmp_path / "log.jsonl"), "--out", str(tmp_path / "out")])
    captured = capsys.readouterr()
    assert status == 3, captured
    assert "gap 5.00e-01 nats per token" in captured.out
