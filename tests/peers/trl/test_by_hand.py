"""Steps of trainings are what they come to by hand, whatever a user's subclass does to rows and loss, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named

scenarios = named("tests.peers.trl.scenarios_by_hand")
engine = named("tests.peers.trl.scenarios_by_hand_engine")

pytestmark = [pytest.mark.engine, pytest.mark.numeric, pytest.mark.timeout(900)]


# "losses": each loss with a KL in it and two micro-batches a step. "baseline": runs in which groups that were counted by position
# had completions of other prompts in them.
@pytest.mark.parametrize("kind", ["plain", "losses", "baseline"])
def test_steps_are_the_hand_computed_ones_or_refused(run: Run, dense: Path, tmp_path: Path, kind: str) -> None:
    run(scenarios.compare_all, model=dense, out=tmp_path, kind=kind, timeout=800).expect()


# A bfloat16 engine's rollouts are corrected, masks leave out what it could not sample, and experts are those that it chose.
@pytest.mark.parametrize(
    ("kind", "model", "first", "last"),
    [
        ("corrected", "dense", 0, 8),
        pytest.param("corrected", "dense", 8, 16, marks=pytest.mark.nightly),
        ("masked", "dense", 0, 4),
        ("routed", "moe", 0, 8),
    ],
)
def test_steps_on_an_engines_rollouts(
    run: Run, request: pytest.FixtureRequest, tmp_path: Path, kind: str, model: str, first: int, last: int
) -> None:
    folder = request.getfixturevalue(model)
    run(engine.compare_some, model=folder, out=tmp_path, kind=kind, first=first, last=last, timeout=800).expect()
