"""`make demo` as the README shows it: the gap in bf16, FP16 and float32."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from examples.bootstrap import bootstrap_quotient
from examples.sequences import read_sequences
from mismatch_ext.log_reading import read_run
from tests.commands import ROOT, shell
from tests.evidence import judges
from tests.evidence.figures import gaps

SPLITS = ("eval/familiar", "eval/unfamiliar")
pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(3600)]


def test_the_demo_shows_the_claim(evidence: Callable[..., None]) -> None:
    """FP16 makes the gap of bf16 about 8 times smaller and its k3 about 64 times, and float32's is a thousand times smaller."""
    printed = shell("make demo FULL=1 MODEL=dense RUN_DIR=runs/demo")
    summary = json.loads((ROOT / "runs/demo/summary.json").read_text())
    rows, intervals = judges.runs_of(summary), summary["intervals"]
    assert set(rows) == {(run, split) for run in ("bf16", "fp16", "fp32") for split in (*SPLITS, "train")}
    for split in SPLITS:
        for run in ("bf16", "fp16", "fp32"):
            judges.enough_tokens(summary["tokens"][run][split])
        judges.fp16_is_finer(*(intervals["bf16 over fp16"][split][key] for key in ("abs", "k3")))
        judges.float32_is_the_oracle(*(intervals["bf16 over fp32"][split][key] for key in ("abs", "k3")))
    for run in ("bf16", "fp32"):
        judges.reward_climbs(
            [value for value in read_run(ROOT / "runs/demo" / run).series("reward")[1] if value is not None]
        )
    bf16 = read_sequences(ROOT / "runs/demo/bf16")
    familiar, unfamiliar = ((bf16[split]["abs"], bf16[split]["tokens"]) for split in SPLITS)
    assert bootstrap_quotient(unfamiliar, familiar).low > 1, "unfamiliar prompts should show the larger gap"
    assert "bf16 over fp16" in printed and "report: runs/demo/report.html" in printed
    assert "examples/arithmetic/models/dense" in printed
    rewards = {run: [rows[run, "train"][key] for key in ("reward_first", "reward_last")] for run in ("bf16", "fp32")}
    steps = {run: rows[run, "train"]["logs"] for run in ("bf16", "fp16", "fp32")}
    figures = {"tokens": summary["tokens"]["bf16"], **gaps(summary, SPLITS), "reward": rewards, "steps": steps}
    evidence("demo_dense", "make demo FULL=1", figures)
