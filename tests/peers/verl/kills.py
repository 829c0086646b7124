"""Kills verl's worker and engine at random moments in one process, resumes them without help, and judges how they end."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.peers.scenarios import Ran, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_kills as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_kills")

MOMENTS: dict[str, float] = {"mismatch.json": 2, "torch.save": 8, "time": 0.5}
"""Where it is killed, and after how many times at most; seconds for `time`."""


def kill_in_process(
    start: Callable[..., Ran], model: Path, work: Path, draw: random.Random, *, kills: int, steps: int
) -> None:
    """Kill one worker's training so many times, the moments in turn, and check that each run ends as one left alone."""
    whole = start(scenarios.leg, model=model, out=work / "whole", steps=steps).expect()
    measured = ["routing/compared_tokens" in log for log in whole["logs"]]
    assert any(measured) and not all(measured)  # else whether their choice is resumed would not show
    killed = runs = 0
    while killed < kills:
        moments = draw.sample(list(MOMENTS), len(MOMENTS))[: kills - killed]
        for where in (*moments, None):
            kill = None
            if where is not None:
                most = MOMENTS[where]
                count = draw.uniform(0, most) if where == "time" else draw.randint(1, int(most))
                kill = {"where": where, "count": count, "part": draw.random()}
            ran = start(scenarios.leg, model=model, out=work / f"run-{runs}", steps=steps, kill=kill)
            if ran.code == 0:
                break
            assert where is not None and ran.code == -signal.SIGKILL, f"{kill}: {ran.code}\n{ran.stderr[-4000:]}"
            killed += 1
        assert ran.expect() == whole
        runs += 1
