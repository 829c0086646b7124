"""The command that trains the real model in two dtypes: what it trains again, and what it records and draws."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import pytest

from examples import real_learning
from examples.real_learning import Run, differences, figures, window
from mismatch_ext import MismatchConfig
from mismatch_ext.metrics_file import SegmentFile

ROOT = Path(__file__).resolve().parents[2]


def trained(folder: Path, steps: int, *, reward: float = 0.5, gap: float = 1e-2, first: int = 1) -> None:
    """Write the metrics of a run as a training does, each step 1/100 better than the one before."""
    stream = SegmentFile.create(folder, header={}, resume_step=first - 1 if first > 1 else None)
    for step in range(first, steps + 1):
        metrics = {
            "reward": reward + step / 100,
            "rewards/reward/mean": 0.25,
            "completions/mean_length": 2.0,
            "step_time": 7.0,
            "mismatch/logp_abs_diff_mean": gap,
            "mismatch/k3_kl": gap**2,
            "mismatch/weight_sync_gap": 2 * gap,
        }
        stream.step(step, metrics)


def test_a_call_trains_what_is_missing_and_goes_on_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path / "bf16-0", 6)
    trained(tmp_path / "float32-0", 4)
    for step in (2, 4, 10):
        (tmp_path / f"float32-0/checkpoint-{step}").mkdir()
    for step in (2, 4):  # the last one was not written whole
        (tmp_path / f"float32-0/checkpoint-{step}/trainer_state.json").touch()
    commands: list[str] = []

    def train(run: Run, steps: int, model: Path) -> None:
        commands.append(" ".join(run.command(steps, model)))
        trained(run.folder, steps, gap=1e-6, first=5)

    monkeypatch.setattr(real_learning.smollm2, "unpack", lambda: Path("model"))
    monkeypatch.setattr(real_learning, "train", train)
    out, file = str(tmp_path), tmp_path / "record.json"
    arguments = ["real_learning", "--steps", "6", "--seeds", "0", "--out", out, "--record", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    real_learning.main()
    (command,) = commands
    assert '{"dtype": "float32"}' in command and "--max_steps 6" in command and "checkpoint-4" in command
    recorded = json.loads(file.read_text(encoding="utf-8"))
    assert (tmp_path / "report.html").is_file()
    assert [(row["arm"], row["steps"]) for row in recorded["figures"]] == [("bf16", 6), ("float32", 6)]
    assert recorded["differences"] == [{"runs": ["bf16-0", "float32-0"], "apart": 0.0}] and recorded["cpu"]


def test_a_row_has_both_ends_of_a_run(tmp_path: Path) -> None:
    trained(tmp_path, 9)
    row = figures(Run(arm="bf16", seed=0, folder=tmp_path))
    (first, half), (last, _) = row["reward"]
    assert row["window"] == 3 and (first, last) == pytest.approx((0.52, 0.58))
    assert half == pytest.approx(4.303 * 0.01 / math.sqrt(3), rel=1e-3)  # Student's quantile for two degrees of freedom
    assert row["gap"] == pytest.approx([1e-2, 1e-2]) and row["reached_engine"] is None and row["seconds"] == 7.0
    assert window(1000) == real_learning.LONGEST_WINDOW


def test_dtypes_and_seeds_are_compared_on_the_same_steps_and_where_both_ran(tmp_path: Path) -> None:
    rows = []
    for arm, seed, reward in (("bf16", 0, 0.5), ("float32", 0, 0.6), ("bf16", 1, 0.5), ("float32", 2, 0.8)):
        folder = tmp_path / f"{arm}-{seed}"
        trained(folder, 6, reward=reward)
        rows.append(figures(Run(arm=arm, seed=seed, folder=folder)))
    dtypes, seeds = differences(rows)
    assert dtypes["runs"] == ["bf16-0", "float32-0"] and dtypes["apart"] == pytest.approx(-0.1)
    assert seeds["runs"] == ["float32-2", "float32-0"] and seeds["apart"] == pytest.approx(0.2)


def test_every_commands_config_is_one(tmp_path: Path) -> None:
    for arm in real_learning.ARMS:
        command = Run(arm=arm, seed=0, folder=tmp_path).command(3, Path("model"))
        block = MismatchConfig.parse(json.loads(command[command.index("--mismatch") + 1]))
        assert block is not None and block.precision is not None and "--resume_from_checkpoint" not in command


def test_the_page_says_what_is_recorded_or_that_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    drawn = generate["TABLES"]["real_learning"].__globals__
    monkeypatch.setitem(drawn, "EVIDENCE", tmp_path)
    assert generate["real_learning"]() == [generate["NOT_RECORDED"]] and generate["picture_of_learning"]() is None
    rows = []
    for arm, gap in (("bf16", 1e-2), ("float32", 1e-6)):
        trained(tmp_path / arm, 6, gap=gap)
        rows.append(figures(Run(arm=arm, seed=0, folder=tmp_path / arm)))
    real_learning.record(rows, tmp_path / "real_learning.json")
    page = "\n".join(generate["real_learning"]())
    assert "| bf16 | 0 | 6 | 0.52 ± " in page and "| 25 % / 25 % | 1.0e-2 / 1.0e-2 | 2.0e-2 / 2.0e-2 | 7 |" in page
    assert "| bf16-0 less float32-0 | +0.000 |" in page
    picture = generate["picture_of_learning"]()
    assert picture.count("<polyline") == 4 and ">1e-6<" in picture
