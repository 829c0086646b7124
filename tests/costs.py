"""What tests cost: they start with the most expensive, and a run ends with what cost most.

Under `--dist loadgroup`, tests that share a fixture of their module or folder run one after the other in one process, so that it
is made once; so do a file's cheap tests; every other test goes where there is room. `costs.json` holds the seconds of each test
function as last measured, with its fixtures; `pytest --write-costs` measures them anew.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("costs.json")
UNKNOWN = 20.0  # seconds of a test that nobody has measured
CHEAP = 5.0  # below these a test stays with the others of its file
SHOWN = 10


def function_of(nodeid: str) -> str:
    """Return a test's file and function without its parameters and the group that xdist appends."""
    return nodeid.partition("[")[0].partition("@")[0]


def without_group(nodeid: str) -> str:
    """Return a test's file, function and parameters."""
    return nodeid[:at] if (at := nodeid.rfind("@")) > nodeid.rfind("]") else nodeid


def file_of(nodeid: str) -> str:
    """Return a test's file."""
    return nodeid.partition("::")[0]


class Costs:
    """Groups and orders tests by cost, sums up what they took, and prints or writes it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.known: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        self.spent: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)  # its first half before xdist reads the groups, its second after
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Put tests into groups and the most expensive group first, in each of xdist's processes."""
        if not self.config.getoption("loadgroup", False):
            return (yield)
        groups: dict[str, list[pytest.Item]] = defaultdict(list)
        for item, group in zip(items, grouped(items, self.cost), strict=True):
            if group != item.nodeid:
                item.add_marker(pytest.mark.xdist_group(group))
            groups[group].append(item)
        dearest = sorted(groups.values(), key=lambda group: -sum(map(self.cost, group)))
        items[:] = [item for group in dearest for item in group]
        yield
        name_groups(items)

    def cost(self, item: pytest.Item) -> float:
        """Return the seconds that a test is known, or assumed, to take."""
        return self.known.get(function_of(item.nodeid), UNKNOWN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add what setting up, running or tearing down a test took."""
        self.spent[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the slowest tests and every file's sum, or write the costs."""
        if len(self.spent) > SHOWN:
            terminalreporter.section(f"{SHOWN} slowest tests, with their fixtures")
            for nodeid in sorted(self.spent, key=self.spent.__getitem__, reverse=True)[:SHOWN]:
                terminalreporter.write_line(f"{self.spent[nodeid]:7.1f} s  {without_group(nodeid)}")
            files: dict[str, float] = defaultdict(float)
            for nodeid, seconds in self.spent.items():
                files[file_of(nodeid)] += seconds
            terminalreporter.section(f"seconds by file, {sum(files.values()):.0f} in all")
            for file in sorted(files, key=files.__getitem__, reverse=True):
                terminalreporter.write_line(f"{files[file]:7.1f} s  {file}")
        if self.config.getoption("write_costs"):
            self.write()

    def write(self) -> None:
        """Write the mean seconds of each function's tests; what this run left out keeps its number while its file is there."""
        cases = defaultdict(list)
        for nodeid, seconds in self.spent.items():
            cases[function_of(nodeid)].append(seconds)
        root = self.config.rootpath
        kept = {name: seconds for name, seconds in self.known.items() if (root / file_of(name)).exists()}
        measured = {name: round(sum(seconds) / len(seconds), 2) for name, seconds in cases.items()}
        FILE.write_text(json.dumps({**kept, **measured}, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def name_groups(items: list[pytest.Item]) -> None:
    """Append each group to its tests' node ids, where xdist's scheduler looks for it, if xdist itself has not.

    xdist 3.8 writes it to `_nodeid`, which pytest has not read since 9.2 (pytest-xdist, issue 1386): without an error, every test
    went where there was room, and what tests share was made again and again.
    """
    for item in items:
        if (mark := item.get_closest_marker("xdist_group")) and not item.nodeid.endswith(f"@{mark.args[0]}"):
            identity: Any = item
            identity._id = type(identity._id).parse(f"{item.nodeid}@{mark.args[0]}")


def grouped(items: list[pytest.Item], cost: Any) -> list[str]:
    """Return the name of each test's group."""
    groups: dict[str, str] = {}  # a fixture of a module, to the group of all tests that it is made for

    def root(name: str) -> str:
        while (above := groups.setdefault(name, name)) != name:
            name = above
        return name

    shared = [module_fixtures(item) for item in items]
    for fixtures in shared:
        for one in fixtures[1:]:
            groups[root(one)] = root(fixtures[0])
    return [
        root(fixtures[0]) if fixtures else file_of(item.nodeid) if cost(item) < CHEAP else item.nodeid
        for item, fixtures in zip(items, shared, strict=True)
    ]


def module_fixtures(item: pytest.Item) -> list[str]:
    """Name the fixtures of its module and package that a test uses, a module's with the parameters that each is made for."""
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009  (pytest has no public name for it)
    indices = item.callspec.indices if hasattr(item, "callspec") else {}

    def parameters(name: str) -> set[str]:
        own = {f"{name}={indices[name]}"} if name in indices else set()
        return own.union(*(parameters(other) for other in definitions[name][-1].argnames if other in definitions))

    folder = file_of(item.nodeid).rpartition("/")[0]
    return [
        f"{folder}:{name}"
        if definitions[name][-1].scope == "package"
        else "-".join([f"{file_of(item.nodeid)}:{name}", *sorted(parameters(name))])
        for name in sorted(definitions)
        if definitions[name][-1].scope in ("package", "module", "class")
    ]
