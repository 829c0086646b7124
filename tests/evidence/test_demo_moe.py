"""`make demo MODEL=moe`: training with experts, in every setting."""

from __future__ import annotations

import json

import pytest

from tests.commands import ROOT, shell
from tests.evidence import judges
from tests.evidence.test_demo import SPLITS, WITH_EXPERTS

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(3600)]


def test_the_demo_trains_with_experts() -> None:
    """Every setting trains with experts, and the gap falls from bf16 to FP16 with replay to float32 with replay."""
    shell("make demo FULL=1 MODEL=moe STEPS=2 RUN_DIR=runs/moe")
    summary = json.loads((ROOT / "runs/moe/summary.json").read_text())
    rows, intervals = judges.runs_of(summary), summary["intervals"]
    assert set(rows) == {(run, split) for run in WITH_EXPERTS for split in (*SPLITS, "train")}
    for split in SPLITS:
        for run in WITH_EXPERTS:
            judges.enough_tokens(summary["tokens"][run][split])
        for coarse in ("bf16", "bf16-r3"):
            judges.fp16_is_finer(*(intervals[f"{coarse} over fp16-r3"][split][key] for key in ("abs", "k3")))
        # Of samples of their own. float32's rounding is 2^13 times smaller than FP16's; by twice it is smaller at any rate.
        half, single = (rows[run, split]["values"] for run in ("fp16-r3", "fp32-r3"))
        assert all(half[key] > 2 * single[key] for key in ("logp_abs_diff_mean", "k3_kl")), (split, half, single)
        judges.float32_is_the_oracle(*(intervals["bf16-r3 over fp32-r3"][split][key] for key in ("abs", "k3")))
    steps = {run: rows[run, "train"]["logs"] for run in WITH_EXPERTS}
    assert set(steps.values()) == {2}
