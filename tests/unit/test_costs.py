"""Tests that share a fixture of their module stay together, and the most expensive come first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import costs

ROOT = Path(__file__).resolve().parents[2]


def item(nodeid: str, fixtures: dict[str, tuple[str, tuple[str, ...]]], **indices: int) -> Any:
    """Return what pytest collects for a test: its fixtures with scope and what each asks for, and its parameters."""
    definitions = {name: [SimpleNamespace(scope=scope, argnames=asked)] for name, (scope, asked) in fixtures.items()}
    made = SimpleNamespace(
        nodeid=nodeid, _fixtureinfo=SimpleNamespace(name2fixturedefs=definitions), marks=[], callspec=None
    )
    made.callspec = SimpleNamespace(indices=indices)
    made.add_marker = made.marks.append
    return made


FAMILY = {"engine": ("module", ("kind",)), "kind": ("module", ()), "tmp_path": ("function", ())}


def test_one_group_for_each_making_of_a_shared_fixture() -> None:
    items = [item(f"a.py::{name}[{kind}]", FAMILY, kind=kind) for name in ("one", "two") for kind in (0, 1)]
    first, second, third, fourth = costs.grouped(items, lambda _: 60.0)
    assert first == third != second == fourth


def test_a_test_that_uses_two_fixtures_joins_their_groups() -> None:
    plain: dict[str, tuple[str, tuple[str, ...]]] = {"one": ("module", ()), "two": ("module", ())}
    items = [item(f"a.py::{name}", {name: plain[name]}) for name in plain]
    assert len(set(costs.grouped(items, lambda _: 60.0))) == 2
    assert len(set(costs.grouped([*items, item("a.py::both", plain)], lambda _: 60.0))) == 1


def test_a_fixture_of_the_folder_joins_its_files() -> None:
    folder: dict[str, tuple[str, tuple[str, ...]]] = {"server": ("package", ())}
    both = {**folder, "answers": ("module", ("server",))}
    groups = costs.grouped(
        [item("x/a.py::one", both), item("x/b.py::two", folder), item("y/a.py::other", folder)], lambda _: 60.0
    )
    assert groups[0] == groups[1] != groups[2]


def test_cheap_tests_stay_with_their_file() -> None:
    items = [item(f"a.py::{name}", {}) for name in ("cheap", "cheaper", "dear")]
    seconds = {"a.py::cheap": 1.0, "a.py::cheaper": 0.1, "a.py::dear": 100.0}
    assert costs.grouped(items, lambda one: seconds[one.nodeid]) == ["a.py", "a.py", "a.py::dear"]


def test_the_most_expensive_group_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = costs.Costs(SimpleNamespace(getoption=lambda name, default=None: name == "loadgroup"))  # type: ignore[arg-type]
    plugin.known = {"a.py::whole": 4.0, "a.py::part": 40.0, "b.py::alone": 30.0, "b.py::case": 8.0, "b.py::quick": 0.1}
    shared: dict[str, tuple[str, tuple[str, ...]]] = {"shared": ("module", ())}
    items = [
        item("b.py::quick", {}), item("b.py::alone", {}), item("b.py::case[x]", {}), item("a.py::whole", shared),
        item("c.py::unknown", {}), item("a.py::part", shared),
    ]  # fmt: skip
    next(plugin.pytest_collection_modifyitems(items))
    assert [one.nodeid.split("::")[1] for one in items] == ["whole", "part", "alone", "unknown", "case[x]", "quick"]
    assert [len(one.marks) for one in items] == [1, 1, 0, 0, 0, 1]


SHARING = """
import pytest
from pathlib import Path

@pytest.fixture(scope="module")
def made():
    with Path(__file__).with_suffix(".made").open("a") as file:
        file.write("made\\n")

@pytest.mark.parametrize("case", range(6))
def test(made, case):
    pass
"""


def test_two_workers_make_what_a_file_shares_once(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_addoption, pytest_configure\n")
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(SHARING)
    command = [sys.executable, "-m", "pytest", "-v", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "xdist"]
    ran = subprocess.run(
        [*command, "-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder", str(tmp_path)],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "12 passed" in ran.stdout, ran.stdout + ran.stderr
    assert {"gw0", "gw1"} == set(re.findall(r"\[(gw.)\]", ran.stdout))
    assert [(tmp_path / f"test_{name}.made").read_text() for name in ("a", "b")] == ["made\n"] * 2


def test_group_and_parameters_are_no_part_of_a_functions_name() -> None:
    assert costs.function_of("a.py::test[x@y]@a.py:group") == costs.function_of("a.py::test@a.py") == "a.py::test"
    assert (
        costs.without_group("a.py::test[x@y]@a.py:group") == "a.py::test[x@y]" == costs.without_group("a.py::test[x@y]")
    )
