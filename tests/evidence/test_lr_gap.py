"""`benchmarks.lr_gap`, quick: the runs that docs/lr.md is about, too short and too few to rank anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.lr_gap.tables import CONTROL, Results
from tests.readme import ROOT, shell

ENGINES, RATES, SEEDS, STEPS = ("bf16", CONTROL), ("off", "on"), 2, 12
OUT = "runs/lr_gap_quick"
COMMAND = (
    f"python -m benchmarks.lr_gap --seeds {SEEDS} --steps {STEPS} --engines {' '.join(ENGINES)} --rates {' '.join(RATES)} "
    f"--out {OUT}"
)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def test_an_engine_in_bf16_shows_a_gap_and_the_control_none(evidence: Callable[..., None]) -> None:
    """In the runs of docs/lr.md an engine in bf16 has a gap at any rate, and the control, which samples by itself, has none."""
    printed = shell(f"rm -rf {OUT} && {COMMAND}")
    assert "control: trainer samples" in printed
    results = Results.read(ROOT / OUT, ENGINES, RATES, SEEDS, STEPS)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for engine in ENGINES:
        figures[engine] = {}
        for rate in RATES:
            values = {name: results.by_seed(engine, rate, name) for name in ("k3", "reward", "length")}
            figures[engine][rate] = {name: sum(found.values()) / SEEDS for name, found in values.items()}
    for rate in RATES:
        # A control with a tenth of the engine's gap would be none; what it has is the rounding of the last bits.
        assert figures["bf16"][rate]["k3"] > 10 * figures[CONTROL][rate]["k3"] >= 0
    evidence("lr_gap_quick", figures, command=COMMAND)
