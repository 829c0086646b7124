"""What a report says of how runs ended: trainings and evaluations, complete, failed or broken off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mismatch_ext.report import load_runs, summarise, tables
from mismatch_ext.stream import RunStream
from tests.unit.synthetic_runs import header, metrics, tokens, write_profiles
from tests.unit.test_report import rendered


def ended_run(run_dir: Path, *, splits: tuple[str, ...], of: str | None, then: str | None = None) -> Path:
    """Write a run that measured some splits once and ended, or did not, and after which something else was written."""
    rng = np.random.default_rng(0)
    rollout, old = tokens(rng, 1e-3, 4, 16)
    stream = RunStream.open(run_dir, header=header("bf16"))
    for split in splits:
        stream.step(0, metrics(rollout, old) | {"reward": 0.5}, split)
        write_profiles(stream, 0, rollout, old, split)
    if of is not None:
        stream.end(0, "completed", of=of)
    if then == "training":
        stream.event(0, "info", "training", "a training begins after the evaluation above.")
    elif then is not None:
        stream.step(0, metrics(rollout, old) | {"reward": 0.5}, then)
    stream.close()
    return run_dir


def test_an_evaluation_without_training_is_complete(tmp_path: Path) -> None:
    run = ended_run(tmp_path / "run", splits=("eval/familiar", "eval/unfamiliar"), of="evaluation")
    page = rendered(run)
    assert "not complete" not in page.text and "evaluation completed" in page.text
    assert "Nothing: every run recorded all" in page.text


@pytest.mark.parametrize(
    ("splits", "of", "then", "missing"),
    [
        # Killed while it trained; before its first step, after an evaluation; and while it evaluated.
        (("eval/familiar", "train"), None, None, "no end line"),
        (("eval/familiar",), "evaluation", "training", "no end line"),
        (("eval/familiar",), "evaluation", "train", "no end line"),
        (("eval/familiar",), None, None, "no end line"),
        # A training that ended is complete, whatever was evaluated before or after it.
        (("eval/familiar", "train"), "training", None, None),
        (("train",), "training", "eval/familiar", None),
    ],
)
def test_a_training_that_broke_off_is_not_complete(
    tmp_path: Path, splits: tuple[str, ...], of: str | None, then: str | None, missing: str | None
) -> None:
    runs = load_runs(ended_run(tmp_path / "run", splits=splits, of=of, then=then))
    found = [text for _, text in tables.missing(runs, summarise(runs))]
    assert [text.split(":")[0] for text in found] == ([] if missing is None else [missing])


def test_an_evaluation_that_failed_says_so(tmp_path: Path) -> None:
    with RunStream.open(tmp_path, header=header("bf16")) as stream:
        stream.step(0, {"reward": 0.5}, "eval/default")
        stream.end(0, "failed", "EngineError: gone", of="evaluation")
    assert "the evaluation ended with an error, later steps are missing: EngineError: gone" in rendered(tmp_path).text
