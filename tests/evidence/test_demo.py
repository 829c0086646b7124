"""`make demo` as the README shows it, a model after the other: the gap in bf16, FP16 and float32, and what replay does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from examples.bootstrap import bootstrap_quotient
from examples.sequences import read_sequences
from mismatch_ext.log_reading import read_run
from tests.commands import ROOT, shell
from tests.evidence import judges
from tests.evidence.figures import gaps

SPLITS = ("eval/familiar", "eval/unfamiliar")
WITH_EXPERTS = ("bf16", "bf16-r3", "fp16-r3", "fp32-r3")
pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(3600)]


def demonstrate(kind: str, run_dir: str) -> tuple[str, dict[str, Any]]:
    """Run one model's part of `make demo`, and return what it printed and its summary."""
    printed = shell(f"make demo FULL=1 MODEL={kind} RUN_DIR={run_dir} {'STEPS=0' if kind == 'moe' else ''}")
    return printed, json.loads((ROOT / run_dir / "summary.json").read_text())


def hold_report(summary: dict[str, Any]) -> None:
    """Hold that the report is one file that loads nothing, with the table's figures."""
    html = (ROOT / "runs/demo/report.html").read_text(encoding="utf-8")
    markup = re.sub(r"(<script\b[^>]*>).*?(</script>)", r"\1\2", html, flags=re.S)
    assert not re.search(r"""<[^>]+\b(src|href)\s*=""", markup)
    mean = judges.runs_of(summary)["bf16", "eval/familiar"]["values"]["logp_abs_diff_mean"]
    assert f"{mean:.2e}".replace("e-0", "e-") in markup or f"{mean:.3g}" in markup


def test_the_demo_shows_the_claim(evidence: Callable[..., None]) -> None:
    """FP16 makes the gap of bf16 about 8 times smaller and its k3 about 64 times, and float32's is a thousand times smaller."""
    printed, summary = demonstrate("dense", "runs/demo")
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
    hold_report(summary)
    figures = {"tokens": summary["tokens"]["bf16"], **gaps(summary, SPLITS), "reward": rewards, "steps": steps}
    evidence("demo_dense", "make demo FULL=1", figures)


def test_the_demo_measures_experts_too() -> None:
    """With experts, replay lowers k3 on the same tokens, FP16 with replay lowers it further, and float32 hardly flips."""
    printed, summary = demonstrate("moe", "runs/demo/moe")
    rows, intervals = judges.runs_of(summary), summary["intervals"]
    assert set(rows) == {(run, split) for run in WITH_EXPERTS for split in SPLITS}
    judges.replay_lowers_k3({split: intervals["bf16-r3 left by replay"][split]["k3"] for split in SPLITS})
    replay = {(row["run"], row["split"]): row for row in summary["replay"]}
    for split in SPLITS:
        for run in WITH_EXPERTS:
            judges.enough_tokens(summary["tokens"][run][split])
        # Of both with replay, too: what is left then is rounding alone, 8 bits' beside 11.
        for coarse in ("bf16", "bf16-r3"):
            judges.fp16_is_finer(*(intervals[f"{coarse} over fp16-r3"][split][key] for key in ("abs", "k3")))
        judges.float32_is_the_oracle(*(intervals["bf16-r3 over fp32-r3"][split][key] for key in ("abs", "k3")))
        # Each token that was evaluated is among those compared, and tokens of prompts are besides.
        compared = summary["tokens"]["fp32-r3"][split]
        judges.float32_routes_alike(replay["fp32-r3", split]["flips"], replay["bf16-r3", split]["flips"], compared)
        assert replay["fp32-r3", split]["flips"] < replay["fp16-r3", split]["flips"] < replay["bf16-r3", split]["flips"]
    assert "The same tokens, routed by the trainer itself -> replayed" in printed
    assert "report: runs/demo/moe/report.html" in printed
