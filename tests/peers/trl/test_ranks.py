"""Two processes over gloo, DDP and FSDP2: with TRL's generation, and with a vLLM engine each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.scenarios import Run, named
from tests.peers.trl.ranks import launch

bad_ranks = named("tests.peers.trl.scenarios_bad_ranks")
rank_errors = named("tests.peers.trl.rank_errors")
scenarios = named("tests.peers.trl.scenarios_ranks")

pytestmark = pytest.mark.engine
EACH_KIND = pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])


def test_no_rank_waits_for_one_that_logs_by_itself(run: Run, dense: Path, tmp_path: Path) -> None:
    launch(run, "forks", scenarios.alone, tmp_path, dense=dense).expect()


@pytest.mark.parametrize("kind", ["forks", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_sections_on_two_ranks_are_those_of_both(run: Run, kind: str, moe: Path, dense: Path, tmp_path: Path) -> None:
    launch(run, kind, scenarios.transformers, tmp_path, model=moe, dense=dense).expect()


@EACH_KIND
def test_an_engine_for_each_rank(run: Run, kind: str, moe: Path, tmp_path: Path) -> None:
    launch(run, kind, scenarios.engines, tmp_path, model=moe).expect()


def test_an_error_on_one_rank_ends_both(run: Run, moe: Path, tmp_path: Path) -> None:
    ran = launch(run, "forks", scenarios.one_fails, tmp_path, model=moe)
    assert ran.code != 0 and "the loss was computed without a replayed forward pass" in ran.stderr
    assert "Timeout" not in ran.stderr


# What the case ends with on both ranks; one of them fails in it.
ENDS = {
    "turns": "sent 2 times",
    "alone": "sent [0, 1]",  # TRL's own, when an engine wakes up
    "moved": "sent 1 times",
    "update": "load_weights failed",
    "stale": "the engine is stale",
    "rollouts": "1 response tokens, 2 log-probabilities",
    "measured score": "verifies True, 1 failed",
    "mistaken score": "verifies True, 1 failed",
    "served update": "the server is gone",
    "served routes": "got [",
    "sampling": "another temperature",
    "gap": "not finite",
    "baseline": "baseline [",
    "controller": "no KL",
}


def test_no_rank_waits_for_one_that_fails_before_a_collective(run: Run) -> None:
    found = run(rank_errors.on_two, names=list(ENDS)).expect()
    for ends in found:
        assert {name: words for name, words in ENDS.items() if words not in ends.get(name, "")} == {}
    assert [ends["served routes"] for ends in found] == ["got [0, 1]", "got [2, 3]"]
    # Of four samples of one prompt, two have a KL of 0.5 a token and two, on the other rank, of -0.5.
    assert [ends["baseline"] for ends in found] == [
        "baseline [-0.5, -0.333, -0.167] by 1 object",
        "baseline [0.5, 0.333, 0.167] by 1 object",
    ]


@pytest.mark.numeric
@EACH_KIND
def test_one_bad_row_of_32_on_one_rank_has_no_weight_on_both(run: Run, kind: str, dense: Path, tmp_path: Path) -> None:
    launch(run, kind, bad_ranks.one_bad_row, tmp_path, model=dense).expect()


@pytest.mark.numeric
def test_rows_that_are_not_finite_are_judged_over_all_ranks(run: Run, dense: Path, tmp_path: Path) -> None:
    launch(run, "ddp", bad_ranks.nowhere_finite, tmp_path, model=dense).expect()
