"""What runs the scenarios of the tests with peers: forks and fresh interpreters end alike, and nothing outlives them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Forks, Ran, Scenario, check_names, named, run_fresh

if TYPE_CHECKING:
    from tests.unit import scenarios_plain as scenarios
else:
    scenarios = named("tests.unit.scenarios_plain")

Start = Callable[..., Ran]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(params=["fork", "fresh"])
def start(request: pytest.FixtureRequest, forks: Forks) -> Start:
    def run(scenario: Scenario, timeout: float = 60, **payload: Any) -> Ran:
        variables = {"PLAIN_SCENARIO": "here"}
        if request.param == "fork":
            return forks.run(scenario, payload, variables, timeout)
        return run_fresh(scenario, payload, {**os.environ, **variables}, timeout)

    return run


def test_a_scenario_gets_its_arguments_and_its_streams_are_kept(start: Start, tmp_path: Path) -> None:
    ran = start(scenarios.told, path=tmp_path, many=[1, None])
    found = ran.expect()
    assert (found["path"], found["many"], found["variable"]) == (str(tmp_path), [1, None], "here")
    assert (ran.stdout, ran.stderr) == ("written by C\n", "printed\n")
    assert "PLAIN_SCENARIO" not in os.environ


def test_an_exception_is_code_1_with_its_traceback(start: Start) -> None:
    ran = start(scenarios.fails)
    assert (ran.code, ran.result) == (1, None) and ran.stderr.endswith("ValueError: as it should\n")
    with pytest.raises(AssertionError, match="as it should"):
        ran.expect()


def test_a_killed_scenario_has_the_signals_number(start: Start) -> None:
    assert start(scenarios.dies) == Ran(-9, None, "", "")


def test_what_a_scenario_leaves_behind_is_ended(start: Start, tmp_path: Path) -> None:
    start(scenarios.leaves_a_child, file=tmp_path / "late").expect()
    with pytest.raises(TimeoutError, match=r"scenarios_plain\.hangs still runs after 1 s"):
        start(scenarios.hangs, timeout=1, file=tmp_path / "late")
    # The next one is served all the same.
    assert start(scenarios.told).code == 0
    time.sleep(2.2)
    assert not (tmp_path / "late").exists()


def test_forks_share_one_import(forks: Forks) -> None:
    one, two = (forks.run(scenarios.told, {}, {}, 60).expect() for _ in range(2))
    assert one["pid"] != two["pid"] and one["imported_by"] == two["imported_by"] != os.getpid()


@pytest.mark.parametrize("variable", ["ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "PYTHONPATH"])
def test_a_variable_that_comes_too_late_for_a_fork_is_refused(forks: Forks, variable: str) -> None:
    with pytest.raises(ValueError, match=rf"^{variable}='x' for tests\.unit\.scenarios_plain\.told: .*fresh=True"):
        forks.run(scenarios.told, {}, {variable: "x"}, 60)


def test_a_name_that_no_module_defines_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test() -> None:\n    run(scenarios.tolt)\n")
    with pytest.raises(AttributeError, match=r"tests\.unit\.scenarios_plain has no function 'tolt'; it has .*'told'"):
        check_names(SimpleNamespace(__file__=str(file), scenarios=scenarios))
