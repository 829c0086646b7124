"""A hundred kills at random moments over TRL: every run is resumed without help, and ends as if nothing had stopped it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tqdm import tqdm

from tests.models import tiny_model
from tests.peers.scenarios import Forks, Ran, Scenario
from tests.peers.trl.kills import MOMENTS, Whole, kill_many, whole_run
from tests.rendezvous import rendezvous

KILLS = 100
SEEDS = (0, 1)
pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(3600)]


def test_a_hundred_kills_leave_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed 100 times at random moments and resumed without help, TRL ends bit for bit as if nothing had stopped it."""
    model = tiny_model("moe", tmp_path / "moe")
    bar, lock = tqdm(total=KILLS, desc="kills", smoothing=0), threading.Lock()

    def told(count: int) -> None:
        with lock:
            bar.update(count)

    def share(seed: int) -> tuple[Whole, int, dict[str, int]]:
        """Make half of the kills in forks of a process of its own."""
        forks = Forks()

        def start(scenario: Scenario, /, **payload: object) -> Ran:
            return forks.run(scenario, payload, {"HF_HUB_OFFLINE": "1", **rendezvous()}, 300)

        try:
            whole = whole_run(start, model, tmp_path / f"whole-{seed}", "R2")
            kills = {"kills": KILLS // len(SEEDS), "seed": seed}
            return whole, *kill_many(start, model, tmp_path / f"killed-{seed}", whole, told=told, **kills)
        finally:
            forks.close()

    with capsys.disabled(), ThreadPoolExecutor(len(SEEDS)) as pool:
        shares = list(pool.map(share, SEEDS))
    bar.close()
    found = {where: sum(counted[where] for _, _, counted in shares) for where in MOMENTS}
    assert sum(found.values()) == KILLS and all(found.values()), found
    assert shares[0][0].result == shares[1][0].result
