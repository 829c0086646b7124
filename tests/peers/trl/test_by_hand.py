"""Steps of drawn trainings are what they come to by hand, whatever a user's subclass does to rows and loss, or are refused.

`make nightly` compares some hundreds of draws, of which `make test` has the first ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.commands import ROOT
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_by_hand as scenarios
    from tests.peers.trl import scenarios_by_hand_engine as engine
else:
    scenarios = named("tests.peers.trl.scenarios_by_hand")
    engine = named("tests.peers.trl.scenarios_by_hand_engine")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]
NEAR, ROUNDING = 1e-3, 3e-6
"""Largest difference of an update, as a part of it and of all weights' rounding to float32."""
LOGPROBS, OTHERS = 5e-5, 5e-4
"""Largest difference of log-probabilities, and of advantages and weights, which divide by spreads and multiply over tokens."""


def draws(in_test: int, in_all: int, *kind: str, at_once: int = 40) -> Iterator[Any]:
    """Return the kind, and the first and the last seed of each test: the first of them in `make test`, the others nightly."""
    yield pytest.param(*kind, 0, in_test)
    for first in range(in_test, in_all, at_once):
        yield pytest.param(*kind, first, min(first + at_once, in_all), marks=pytest.mark.nightly)


def refused(case: dict[str, Any]) -> str | None:
    """Return words of the error that a case has to raise, None if it is to run.

    Terms outside of a loss in two halves need a pass over all rows.
    """
    user, kl = case["user"], case["block"].get("kl", {})
    in_loss = kl and not (kl.get("reward_path") == "rewards" and kl["placement"] == "reward")
    if in_loss and user["ours_first"] and user["call"] == "halves":
        return "got no log-probability"
    return None


def check(results: list[dict[str, Any]]) -> None:
    """Check that runs are what they come to by hand, or refused where they have to be."""
    wrong = [result for result in results if not right(result)]
    assert not wrong, json.dumps(wrong[:3])
    assert sum("errors" in result and not result["tied"] for result in results) > len(results) / 2


def right(result: dict[str, Any]) -> bool:
    """Tell whether a run is what it comes to by hand, or refused as it has to be."""
    words = refused(result["case"])
    if "refused" in result or words is not None:
        return words is not None and words in result.get("refused", "")
    near = result["tied"] or all(off < NEAR * size + ROUNDING for off, size in result["errors"])
    return (
        len(result["errors"]) == 3
        and near
        and all(off < (LOGPROBS if name in ("old", "ref") else OTHERS) for name, off in result["batch_errors"].items())
    )


# A KL in the rewards alone, and a loss in two halves.
REWARDS_ALONE = pytest.param(247, 248)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("first", "last"), [*draws(20, 500), REWARDS_ALONE])
def test_steps_are_the_hand_computed_ones_or_refused(
    run: Run, dense: Path, tmp_path: Path, first: int, last: int
) -> None:
    check(run(scenarios.drawn, model=dense, out=tmp_path, first=first, last=last, timeout=800).expect())


def test_each_loss_with_a_kl_and_two_micro_batches(run: Run, dense: Path, tmp_path: Path) -> None:
    found = run(scenarios.each_loss, model=dense, out=tmp_path, timeout=300).expect()
    assert len(found) == 8 and not any("refused" in result for result in found)
    check(found)


def test_a_baseline_is_of_other_samples_of_the_prompt_wherever_rows_stand(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    # Eleven runs in which groups that were counted by position had completions of other prompts in them.
    cases = json.loads((ROOT / "tests/data/trl/leave_one_out.json").read_text(encoding="utf-8"))
    assert len(cases) == 11
    check(run(scenarios.given, model=dense, out=tmp_path, cases=cases, timeout=300).expect())


# A bfloat16 engine's rollouts are corrected, masks leave out what it could not sample, and experts are those that it chose.
SAMPLED = (*draws(8, 168, "corrected", "dense"), *draws(4, 84, "masked", "dense"), *draws(8, 88, "routed", "moe"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "model", "first", "last"), SAMPLED)
def test_steps_on_an_engines_rollouts(
    run: Run, request: pytest.FixtureRequest, tmp_path: Path, kind: str, model: str, first: int, last: int
) -> None:
    scenario, folder = getattr(engine, kind), request.getfixturevalue(model)
    check(run(scenario, model=folder, out=tmp_path, first=first, last=last, timeout=800).expect())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("first", "last"), [*draws(5, 85)])
def test_a_block_that_does_not_act_changes_no_bit(run: Run, dense: Path, tmp_path: Path, first: int, last: int) -> None:
    for result in run(scenarios.measured, model=dense, out=tmp_path, first=first, last=last, timeout=800).expect():
        assert result["measured"] == result["stock"] and len(result["stock"]["logged"]) > 3, result["case"]
