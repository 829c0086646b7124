"""What a report says of how runs ended: trainings and evaluations, complete, failed or broken off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mismatch_ext.closing import closing_lines
from mismatch_ext.log_reading import Segment
from mismatch_ext.metrics_file import SegmentFile
from mismatch_ext.report import load_runs, summarize, tables
from tests.unit.synthetic_runs import header, metrics, tokens, write_profiles
from tests.unit.test_report import rendered


def ended_run(run_dir: Path, splits: tuple[str, ...], of: Segment, ended: bool, then: Segment | None = None) -> Path:
    """Write a segment that measured some splits once and ended, or did not, and after which another one began."""
    rng = np.random.default_rng(0)
    rollout, old = tokens(rng, 1e-3, 4, 16)
    stream = SegmentFile.create(run_dir, header=header("bf16"), of=of)
    for split in splits:
        stream.step(0, metrics(rollout, old) | {"reward": 0.5}, split)
        write_profiles(stream, 0, rollout, old, split)
    if ended:
        stream.end(0, "completed")
    if then is not None:
        stream = SegmentFile.create(run_dir, header=header("bf16"), of=then, first_segment=0)
        if then == "evaluation":
            stream.end(0, "completed")
    return run_dir


@pytest.mark.parametrize(
    ("splits", "of", "ended", "then", "missing"),
    [
        # Killed while it trained; before its first step, after an evaluation; and while it evaluated.
        (("eval/familiar", "train"), "training", False, None, "no end line"),
        (("eval/familiar",), "evaluation", True, "training", "no end line"),
        (("eval/familiar",), "evaluation", False, None, "no end line"),
        # A training that ended is complete, whatever is evaluated after it.
        (("eval/familiar", "train"), "training", True, None, None),
        (("train",), "training", True, "evaluation", None),
    ],
)
def test_a_training_that_broke_off_is_not_complete(
    tmp_path: Path, splits: tuple[str, ...], of: Segment, ended: bool, then: Segment | None, missing: str | None
) -> None:
    runs = load_runs(ended_run(tmp_path / "run", splits, of, ended, then))
    found = [text for _, text in tables.missing(runs, summarize(runs))]
    assert [text.split(":")[0] for text in found] == ([] if missing is None else [missing])


@pytest.mark.parametrize("rank", ["", "rank 1: "])
def test_a_training_that_ctrl_c_ended_was_interrupted(rank: str, tmp_path: Path) -> None:
    stream = SegmentFile.create(tmp_path, header=header("bf16"))
    stream.step(1, {"mismatch/logp_abs_diff_mean": 0.001})
    stream.end(1, "failed", f"{rank}KeyboardInterrupt: ")
    assert "bf16 was interrupted. What to do: " in rendered(tmp_path).text
    assert closing_lines(load_runs(tmp_path)["bf16"])[0] == "mismatch-ext: training was interrupted after 1 step"
