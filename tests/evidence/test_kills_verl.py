"""Kills at random moments over verl: every run is resumed without help, and ends as if nothing had stopped it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tqdm import tqdm

from tests.models import tiny_model
from tests.peers.scenarios import Forks, Ran, Scenario
from tests.peers.verl.kills import kill_in_process, killed_run, whole_run
from tests.rendezvous import rendezvous

KILLS, STEPS = 10, 10
IN_PROCESS = 10
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def test_kills_over_verl_leave_no_trace(
    evidence: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed 20 times at random moments and resumed without help, verl trains bit for bit as if nothing had stopped it."""
    model = tiny_model("moe", tmp_path / "moe")
    draw, runs = random.Random(0), 0
    lost: list[int] = []
    forks = Forks()

    def start(scenario: Scenario, /, **payload: object) -> Ran:
        return forks.run(scenario, payload, {"HF_HUB_OFFLINE": "1", **rendezvous()}, 300)

    try:
        with capsys.disabled(), tqdm(total=KILLS + IN_PROCESS, desc="kills", smoothing=0) as bar:
            alone = kill_in_process(
                start, model, tmp_path / "alone", draw, kills=IN_PROCESS, steps=8, told=lambda: bar.update() and None
            )
            forks.close()
            whole = whole_run(tmp_path / "whole", model, STEPS)
            died = 0
            while died < KILLS:
                work = tmp_path / f"run-{runs}"
                kills, costs = killed_run(
                    work, model, whole, draw, KILLS - died, time.monotonic, lambda: bar.update() and None
                )
                died, runs, lost = died + kills, runs + 1, lost + costs
    finally:
        forks.close()
    evidence(
        "kills_verl",
        {
            "kills of main_ppo with vLLM, all processes at once": died,
            f"its runs, of {STEPS} steps each": runs,
            "steps whose log such a kill has cost, which the run said": len(lost),
            "kills of verl's worker and engine in one process, by moment": alone,
        },
    )
