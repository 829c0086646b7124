"""`benchmarks.lr_gap`, quick: the runs that docs/lr.md is about, too few of them to rank anything."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from tests.readme import ROOT, shell

COMMAND = (
    "python -m benchmarks.lr_gap --seeds 1 --steps 16 --engines bf16 trainer --rates off on --out runs/lr_gap_quick"
)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def test_the_control_has_no_gap_and_the_rate_is_led(evidence: Callable[..., None]) -> None:
    """The runs of docs/lr.md work on this machine: an engine in bf16 shows a gap, the trainer's own sampling shows none."""
    printed = shell(f"rm -rf runs/lr_gap_quick && {COMMAND}")
    assert "control: trainer samples" in printed
    found = {}
    for run in ("bf16-off", "bf16-on", "trainer-off", "trainer-on"):
        folder = ROOT / f"runs/lr_gap_quick/{run}-seed0"
        lines = [json.loads(line) for line in (folder / "mismatch/metrics.jsonl").read_text().splitlines()]
        k3 = [line["metrics"]["mismatch/k3_kl"] for line in lines if "mismatch/k3_kl" in line.get("metrics", {})]
        assert k3 and all(math.isfinite(value) for value in k3), run
        found[run] = {"k3": sum(k3) / len(k3)}
    for rate in ("off", "on"):
        # Both compute in float32 and bf16 rounds 2^16 times coarser: k3 differs by its square, of which a millionth is asked for.
        assert found[f"bf16-{rate}"]["k3"] > 1e3 * found[f"trainer-{rate}"]["k3"]
    evidence("lr_gap_quick", found, command=COMMAND)
