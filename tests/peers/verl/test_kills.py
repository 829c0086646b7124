"""Kills at random moments over verl: every run is resumed without help, and ends as if nothing had stopped it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from tests.models import tiny_model
from tests.peers.scenarios import Forks, Ran, Scenario
from tests.peers.verl.kills import kill_in_process, killed_run, whole_run
from tests.rendezvous import rendezvous

KILLS, STEPS = 20, 8
# A leg of main_ppo is mostly its start: as many of the kills are made there as begin within these seconds, and the others, with
# two seconds to each, in verl's worker and engine alone.
SECONDS, LEAST = 240.0, 3
pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(3600)]


def test_kills_over_verl_leave_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed 20 times at random moments and resumed without help, verl trains bit for bit as if nothing had stopped it."""
    model = tiny_model("moe", tmp_path / "moe")
    draw, began = random.Random(0), time.monotonic()
    runs = 0
    with capsys.disabled(), tqdm(total=KILLS, desc="kills", smoothing=0) as bar:

        def told() -> None:
            bar.update()

        def more() -> bool:
            return bar.n < LEAST or (bar.n < KILLS and time.monotonic() - began < SECONDS)

        whole = whole_run(tmp_path / "whole", model, STEPS)
        while more():
            work = tmp_path / f"run-{runs}"
            killed_run(work, model, whole, draw, more=more, told=told, clock=time.monotonic)
            runs += 1
        forks = Forks()

        def start(scenario: Scenario, /, **payload: object) -> Ran:
            return forks.run(scenario, payload, {"HF_HUB_OFFLINE": "1", **rendezvous()}, 300)

        try:
            kill_in_process(start, model, tmp_path / "alone", draw, kills=KILLS - int(bar.n), steps=8, told=told)
        finally:
            forks.close()
