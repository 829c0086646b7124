"""`examples.replay_gap`: what replay leaves of the gap on the same tokens, after training."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.evidence import judges
from tests.readme import ROOT, in_readme, shell

SPLITS = ("eval/familiar", "eval/unfamiliar")
COLUMNS = {"mean |Δlogp|": "logp_abs_diff_mean", "largest |Δlogp|": "logp_abs_diff_max", "k3": "k3_kl", "F(2)": "f_2"}
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def test_replay_lowers_k3_after_training(evidence: Callable[..., None]) -> None:
    """After GRPO with replay, replay lowers k3 on the same tokens in bf16, and in float32 no routing decision differs."""
    command = in_readme("python -m examples.replay_gap")
    printed = shell(command)
    summary = json.loads((ROOT / "runs/replay_gap/summary.json").read_text())
    runs, left = summary["runs"], summary["left"]
    figures: dict[str, object] = {"steps": summary["steps"]}
    for split in SPLITS:
        found = runs["bf16"][split]
        judges.enough_tokens(found["tokens"])
        assert found["native/tokens"] == found["tokens"]
        judges.replay_lowers_k3(left[split]["k3"])
        figures[split] = {
            "tokens": found["tokens"],
            "the trainer's own": {label: found[f"native/{key}"] for label, key in COLUMNS.items()},
            "replayed": {label: found[key] for label, key in COLUMNS.items()},
            "left by replay": left[split],
            "routing decisions that differ": found["routing/set_mismatch_frac"],
        }
    for split, found in runs["float32"].items():
        assert found["routing/set_mismatch_frac"] == 0 and found["routing/compared_tokens"] > 10_000, split
    assert "trained distribution: replay leaves" in printed
    evidence("replay_gap", figures, command=command)
