"""`monitor.doctor` in verl's real worker, with FSDP1 and FSDP2: causes are named, and nothing of the worker is touched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.verl.in_process import scenarios_examining as scenarios
else:
    scenarios = named("tests.peers.verl.in_process.scenarios_examining")


@pytest.fixture(scope="module", params=["fsdp2", "fsdp"])
def found(request: pytest.FixtureRequest, run: Run, dense: Path) -> dict[str, Any]:
    return run(scenarios.examine, model=dense, env={"VERL_TEST_STRATEGY": request.param}).expect()


def test_nothing_is_named_on_clean_rollouts_and_the_gap_is_the_runs_own(found: dict[str, Any]) -> None:
    assert found["clean"]["causes"] == [] and found["clean"]["tokens"] > 500
    for name in ("clean", "own"):
        assert found[name]["mean"] == pytest.approx(found[name]["measured"], rel=1e-6)


def test_what_the_runs_own_pass_differs_by_from_a_plain_one_is_named(found: dict[str, Any]) -> None:
    own = found["own"]
    assert [key for key, _ in own["causes"]] == ["layout"], own
    # Beside what a tiny model's pass differs by in any case.
    assert own["parts"]["layout"] == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize(("fault", "value"), [("top_p", 0.9), ("temperature", 0.9)])
def test_a_planted_setting_is_named_with_its_value(found: dict[str, Any], fault: str, value: float) -> None:
    ((key, parameter),) = found[fault]["causes"]
    assert key == fault and parameter == pytest.approx(value, abs=0.02)
    assert found[fault]["verdict"] == "explained"


def test_weights_gradients_and_random_numbers_stay_as_they_are(found: dict[str, Any]) -> None:
    assert all(case["untouched"] for name, case in found.items() if name != "broken")


def test_the_copy_is_of_the_weights_that_the_worker_has_now(found: dict[str, Any]) -> None:
    """After three updates the same rollouts are of other weights, which no cause on the short list is."""
    clean, stale = found["clean"], found["stale"]
    assert stale["ratio"] > 3 * clean["ratio"] and stale["verdict"] in ("partly", "unexplained")


def test_a_log_probability_that_is_none_is_named(found: dict[str, Any]) -> None:
    assert "response 0, token 3: the engine's log-probability is nan" in found["broken"]
