"""docs/stability.md's first claim again: an arm and its control, in the miniature and on TRL with vLLM."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest

from benchmarks.stability import __main__ as miniature
from benchmarks.stability import real
from benchmarks.stability.record import RECORDED, RECORDED_REAL, Curves, Runs, recorded
from benchmarks.stability.table import first, halves, largest
from tests.readme import ROOT, shell

COMMAND = "python -m benchmarks.stability --out runs/stability_again --arms bypass matched --seeds 2 --jobs 2"
REAL_COMMAND = (
    "python -m benchmarks.stability.real --out runs/stability_real_again --arms 'TRL bypass' 'TRL tis' --seeds 1"
)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def figures_of(runs: Runs, again: Runs, arms: tuple[str, str]) -> dict[str, object]:
    """Return what an arm and its control took, then and now; after both have shown the claim."""
    for found in (runs, again):
        slow, quick = (halves(name, found[name]) for name in arms)
        # Recorded differences are above 25 steps; what a machine's rounding moves is a few.
        assert min(slow[seed] - quick[seed] for seed in slow if seed in quick) > 12, found is again
        assert first(found[arms[0]], "stopped") > 0.03
        assert not first(found[arms[1]], "stopped") > 0.005
    return {name: figures_of_one(name, runs[name], again[name]) for name in arms}


def figures_of_one(name: str, then: dict[int, Curves], now: dict[int, Curves]) -> dict[str, object]:
    """Return an arm's figures; what has no clip on the ratio to the engine logs nothing of it."""
    found: dict[str, object] = {
        "steps to half, recorded": list(halves(name, then).values()),
        "steps to half, again": list(halves(name, now).values()),
        "largest k3": largest(now, "k3"),
        "mean length at the end": statistics.fmean(curves["length"][-1] for curves in now.values()),
    }
    if math.isfinite(stopped := first(now, "stopped")):
        found["tokens stopped by the clip, first 20 steps"] = stopped
    return found


def test_a_clip_on_the_engines_ratio_stops_what_is_learnt(evidence: Callable[..., None]) -> None:
    """In a miniature on the engine's grid, a clip on the ratio to the engine delays learning, and a control does not."""
    shell(f"rm -rf runs/stability_again && {COMMAND}")
    again = miniature.read(ROOT / "runs/stability_again")
    evidence("stability", figures_of(recorded(RECORDED)[1], again, ("bypass", "matched")), command=COMMAND)


def test_and_so_it_does_in_trl_with_vllm(evidence: Callable[..., None]) -> None:
    """The same of TRL's GRPO with vLLM, where old log-probabilities of the trainer's own and token weights learn."""
    shell(f"rm -rf runs/stability_real_again && {REAL_COMMAND}")
    again = real.read(ROOT / "runs/stability_real_again")
    evidence(
        "stability_real", figures_of(recorded(RECORDED_REAL)[1], again, ("TRL bypass", "TRL tis")), command=REAL_COMMAND
    )
