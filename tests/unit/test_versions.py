"""Versions outside the supported ranges are refused, and the ranges go no further than what was run."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from mismatch_ext.patches.__main__ import DECLARED
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mismatch_ext import versions
from mismatch_ext.errors import PeerVersionError, UntestedVersionWarning
from mismatch_ext.patching import Patch
from mismatch_ext.versions import PEERS, KnownWrong, Peer, accepted, installed, require

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {"sglang": ROOT / "requirements/constraints-sglang-cpu.txt"}


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in front on the path, with a peer `upst` that was run with 1.2.0 and 1.4.0, and is wrong in 1.3.1."""
    peer = Peer(name="upst", distributions=("upst", "upst-cpu"), ran=("1.2.0", "1.4.0"), extra="up")
    monkeypatch.setitem(PEERS, "upst", peer)
    monkeypatch.setattr(versions, "KNOWN_WRONG", (wrong(None), wrong("routing.R3", versions="==1.4.0")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(versions, "_TOLD", set())
    return tmp_path


def wrong(
    feature: str | None, *, versions: str = "==1.3.1", where: tuple[str, ...] = (), without: str = ""
) -> KnownWrong:
    """Return an entry for `upst`."""
    return KnownWrong(
        peer="upst", versions=versions, feature=feature, condition="on a Sunday", where=where, without=without,
        reason="it sleeps.", remedy="pip install upst==1.2.0",
    )  # fmt: skip


def install(folder: Path, version: str, name: str = "upst") -> None:
    """Put a distribution's metadata into a folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_below_the_oldest_that_ran_the_error_names_peer_version_and_range(upstream: Path) -> None:
    install(upstream, "1.1.9")
    with pytest.raises(PeerVersionError, match="upst 1.1.9 is outside the supported range >=1.2.0"):
        require("upst")


def test_a_vendors_build_before_the_release_counts_as_it(upstream: Path) -> None:
    install(upstream, "1.2.0.dev1")
    assert require("upst") == "1.2.0.dev1"


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0", "1.4.1", "2.0.0", "1.10.0"])
def test_a_version_that_was_not_run_is_returned_with_one_warning(upstream: Path, version: str) -> None:
    install(upstream, version)
    with pytest.warns(
        UntestedVersionWarning,
        match=re.escape(f"untested with upst {version}; it was run with 1.2.0"),
    ):
        assert require("upst") == version
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert require("upst") == version


@pytest.mark.parametrize("version", ["1.2.0", "1.4.0", "1.4.0+cpu", "1.4"])
def test_a_version_that_ran_is_returned_without_a_word(upstream: Path, version: str) -> None:
    install(upstream, version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert require("upst") == version


def test_what_is_known_to_be_wrong_is_refused_with_reason_and_remedy(upstream: Path) -> None:
    install(upstream, "1.3.1")
    with pytest.raises(PeerVersionError, match="it does not work on a Sunday: it sleeps.*Fix: pip install upst==1.2.0"):
        require("upst")


def test_what_is_wrong_elsewhere_or_for_another_feature_is_no_hole(
    upstream: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(upstream, "1.4.0")
    monkeypatch.setattr(versions, "KNOWN_WRONG", (wrong("routing.R3", versions="==1.4.0", where=("cpu",)),))
    assert accepted("upst", ["kl", "routing.R2"], {"cpu"}) == accepted("upst", ["routing.R3"], {"vllm"}) == "1.4.0"
    with pytest.raises(PeerVersionError, match="mismatch.routing.R3 does not work on a Sunday"):
        accepted("upst", ["routing.R3"], {"vllm", "cpu"})


@pytest.mark.parametrize("entry", versions.KNOWN_WRONG, ids=lambda entry: f"{entry.peer}{entry.versions}")
def test_every_entry_is_of_a_version_that_would_be_accepted(entry: KnownWrong) -> None:
    bounds = [Version(part.version.removesuffix(".*")) for part in SpecifierSet(entry.versions)]
    assert any(PEERS[entry.peer].accepts(str(bound)) for bound in bounds)


def test_any_of_a_peers_distributions_will_do(upstream: Path) -> None:
    install(upstream, "1.3.0", name="upst-cpu")
    with pytest.warns(UntestedVersionWarning):
        assert require("upst") == installed("upst") == "1.3.0"


def test_a_missing_peer_is_named_with_what_to_install(upstream: Path) -> None:
    with pytest.raises(PeerVersionError) as error:
        require("upst")
    assert "upst is not installed" in str(error.value) and 'pip install ".[up]"' in str(error.value)


def test_a_missing_peer_is_named_with_the_versions_that_work_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: None)
    with pytest.raises(PeerVersionError, match=r"supports sglang >=0\.5\.12\. "):
        accepted("sglang")
    with pytest.raises(PeerVersionError, match=r">=0\.5\.12 \(under verl: 0\.5\.12, 0\.5\.18\)"):
        accepted("sglang", using={"verl", "sglang"})


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_was_run_in_the_installed_version_and_versions_are_in_order(name: str) -> None:
    ran = [Version(version) for version in PEERS[name].ran]
    assert ran == sorted(set(ran)) and PEERS[name].accepts(PEERS[name].ran[0])
    version = installed(name)
    if version is None:  # a peer whose pins do not go with the others' has an environment of its own
        version = re.findall(rf"^{name}==(\S+)", ELSEWHERE[name].read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert PEERS[name].tested(version)


def test_the_table_of_tested_versions_has_what_ran_and_nothing_else() -> None:
    page = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    table = page.partition("\n## Tested versions\n")[2].partition("\n| limit |")[0]
    named: dict[str, set[str]] = {name: set() for name in PEERS}
    for row in table.splitlines():
        cells = row.split(" | ")
        for name, ran in re.findall(r"([A-Za-z-]+) ((?:\d[\d.]*\d(?:, (?=\d)| and )?)+)", cells[-1]):
            named.setdefault(name.lower(), set()).update(re.findall(r"\d[\d.]*\d", ran))
    assert {name: named[name] for name in PEERS} == {name: set(peer.ran) for name, peer in PEERS.items()}


@pytest.mark.parametrize("patch", [patch for patch, _ in DECLARED], ids=lambda patch: patch.name)
def test_a_patch_reaches_no_further_than_what_its_peer_was_run_with(patch: Patch) -> None:
    bounds = {part.operator: part.version for part in SpecifierSet(patch.supports)}
    if bounds:
        assert PEERS[patch.peer].accepts(bounds[">="]) and PEERS[patch.peer].tested(bounds["<="])
