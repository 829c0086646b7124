"""Your own loop on several ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_ext import Run
from mismatch_ext.checks import FailedCheck
from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import OtherRankError, RecordError
from mismatch_ext.log_reading import read_run
from mismatch_ext.ranks import agree
from mismatch_ext.routing.replay import MeasuredPasses
from tests.unit.loops import (
    KL,
    PROMPTS,
    Two,
    learn,
    sides,
)


def test_all_ranks_lead_the_rate_by_the_gap_of_all(tmp_path: Path) -> None:
    trainer, rollout = sides()
    ranks = Two()
    with Run({"lr": {"trigger": "mismatch_kl"}}, trainer, rollout, tmp_path, ranks=ranks).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        ranks.asked.clear()
        ranks.sums = 8.0
        with torch.no_grad():
            run.measure(batch, old=run.score(batch))
        (mine,) = (values for values in ranks.asked if isinstance(values, Tensor) and values.numel() > 1)
        assert mine[2] == batch.response_mask.sum()
        (entry,) = run._rate._collected  # type: ignore[union-attr]
        f_tau, kl, tokens = (mine + 8.0).tolist()  # by name
        assert entry == (tokens, {"mismatch_kl": kl / tokens, "f_tau": f_tau / tokens})


def test_ranks_that_agree_send_numbers_and_hardly_an_object(tmp_path: Path) -> None:
    """Objects are pickled and travel twice, for their sizes and themselves; the words of an error only travel if there is one."""
    trainer, rollout = sides()
    ranks = Two()
    block = {**KL, "correction": {"preset": "tis"}, "lr": {}}
    with Run(block, trainer, rollout, tmp_path, ranks=ranks).start() as run:
        learn(run, 1)
        ranks.asked.clear()
        learn(run, 1)
    of_step = [asked for asked in ranks.asked if not isinstance(asked, Tensor)]
    assert len(of_step) <= 2, of_step


def test_loss_and_gap_of_the_weights_are_means_over_ranks(tmp_path: Path) -> None:
    trainer, rollout = sides()
    ranks = Two(said={"loss": [(9.0, 1.0)], "mismatch/weight_sync_gap": [(3.0, 1.0)]})
    with Run({}, trainer, rollout, tmp_path, ranks=ranks).start() as run:
        (log,) = learn(run, 1)
    noted = next(asked for asked in ranks.asked if isinstance(asked, dict) and "loss" in asked)
    for name, other in (("loss", 9), ("mismatch/weight_sync_gap", 3)):
        ((own, _),) = noted[name]
        assert log[name] == (own + other) / 2


def test_findings_of_other_ranks_are_written(tmp_path: Path) -> None:
    trainer, rollout = sides()
    ranks = Two()
    with Run({}, trainer, rollout, tmp_path, ranks=ranks).start() as run:
        ranks.said, ranks.sums = [FailedCheck(check="measure", step=0, message="of another rank")], 1.0
        run._checks.gather(ranks)
        ranks.said, ranks.sums = None, 0.0
    failed = [event.message for event in read_run(tmp_path / "mismatch").events if event.name == "check_failed"]
    assert "of another rank" in failed[0]


def test_saving_moves_the_kl_controller_on_a_rank_that_writes_nothing(tmp_path: Path) -> None:
    trainer, rollout = sides()
    block = {"kl": {"coef": 0.1, "target_kl": 1e-3}}
    with Run(block, trainer, rollout, tmp_path, ranks=Two(1)).start() as run:
        batch = run.batch(rollout.generate(PROMPTS))
        with torch.no_grad():
            run.measure(batch, old=run.score(batch), reference=run.reference(batch))
        assert run._kl is not None and run._kl.state.steps == 0
        path = run.save(tmp_path)
        assert run._kl.state.steps == 1
    assert not path.exists()


# Verb: words of the error of the rank that fails in it.
FAILURES = {
    "init": "cannot be written",
    "start": "engine is gone",
    "batch": "weight version 7",
    "measure": "give run.measure(batch, old=..., reference=...) the reference's",
    "correct": "all must have one shape",
    "step": "no gradient went through",
    "send": "no space on device",
    "verify": "WeightSyncError",
    "log": "float()",
    "write": "disk is full",
    "save": "nothing",
    "observe measure": "nothing",
    "observe correct": "nothing",
}


def printed_by_ranks(folder: Path, *names: str) -> list[list[str]]:
    """Return the lines that each of two ranks prints."""
    command = [sys.executable, "-m", "tests.unit.rank_errors"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder), *names], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("verb", ["score", "evaluate"])
def test_an_error_between_two_checks_ends_every_rank_and_is_told(verb: str, tmp_path: Path) -> None:
    """Ranks may have different numbers of micro-batches, so that no rank waits for another there."""
    words = "has no provenance" if verb == "evaluate" else f"out of memory in {verb}"
    told = printed_by_ranks(tmp_path, verb)
    main, failing = (next(line for line in lines if line.startswith(f"{verb}: ")) for lines in told)
    assert words in failing and "Note" not in failing
    assert "This rank failed after rank 1: " in main and main.count(words) == 2  # in the note and in the metrics file


def test_the_first_error_of_a_training_is_told_after_trainings_that_failed_on_one_rank(tmp_path: Path) -> None:
    _, failing = printed_by_ranks(tmp_path, "fail again")
    assert [line for line in failing if line.startswith("fail again")] == ["fail again: rank 0: OSError: disk is full"]


def test_an_error_on_one_rank_ends_every_rank(tmp_path: Path) -> None:
    told = printed_by_ranks(tmp_path, *FAILURES)
    for lines in told:
        found = dict(line.split(": ", 1) for line in lines if line.split(": ")[0] in FAILURES)
        assert {name: words for name, words in FAILURES.items() if words not in found.get(name, "")} == {}


def test_evaluation_batches_meet_no_collective(tmp_path: Path) -> None:
    """Ranks may have different numbers of them."""
    trainer, rollout = sides()
    ranks = Two()
    block = {"correction": {"preset": "tis"}}
    with Run(block, trainer, rollout, tmp_path, ranks=ranks).start() as run:
        records = rollout.generate(PROMPTS)
        ranks.asked.clear()
        batch = run.batch(records, "eval/mine")
        with torch.no_grad():
            old = run.score(batch)
        run.measure(batch, old=old)
        run.correct(batch, old)
        assert ranks.asked == []


def test_evaluations_do_not_part_the_draws_of_training() -> None:
    section = RoutingConfig(mode="R3", measured=0.5)
    one, other = MeasuredPasses(section, seed=3), MeasuredPasses(section, seed=3)
    draws = []
    for step in range(40):
        for _ in range(step % 3):
            other.agreement("eval/mine")
        draws.append((one.agreement(), other.agreement()))
    assert all(mine == theirs for mine, theirs in draws) and len(set(draws)) == 2


@pytest.mark.parametrize("own", [None, RecordError("of this rank")])
def test_a_mistake_on_one_rank_ends_all_of_them_whatever_else_went_wrong(own: RecordError | None) -> None:
    """Otherwise a run that is only measured would count its own error, go on, and wait for the rank that has ended."""

    class Three(Two):
        size = 3

        def gather(self, value: Any) -> list[Any]:
            return [value, ("RecordError", "of another rank"), ("OtherRankError", "TypeError: a mistake")]

    with pytest.raises(OtherRankError, match="rank 2: TypeError: a mistake"):
        agree(own, Three(sums=2.0))
