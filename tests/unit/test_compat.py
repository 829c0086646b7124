"""Seams: what is read of a package without importing it, which features a change refuses, and the table that says so."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mismatch_ext.adapters import compat

from mismatch_ext import versions
from mismatch_ext.compat import (
    Both,
    Default,
    Either,
    Gone,
    Has,
    Known,
    Says,
    Seam,
    Sources,
    Takes,
    examine,
    refuse_changed,
)
from mismatch_ext.compat.survey import FEATURES, Host, survey
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import PeerVersionError, SeamError, UntestedVersionWarning
from mismatch_ext.versions import PEERS, Peer

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = {
    "__init__.py": "raise RuntimeError('imported')\nfrom .engine import Engine as Engine\n",
    "base.py": """
class Base:
    limit: int = 3

    def __init__(self):
        self.runner = None

    def inherited(self, a, *, b=2):
        return a
""",
    "engine.py": """
try:
    import nothing_of_that_name
except ImportError:
    FLAG = "fallback"

from typing import overload

from upst.base import Base

@overload
def steps(x: int) -> int: ...
def steps(fn, y=1):
    # a comment
    yield fn

def plain(fn): return fn

class Engine(Base):
    dtype: str = "auto"

    @staticmethod
    def loss(self, model, inputs):
        return model
""",
    "sub/__init__.py": "from ..engine import Engine\n",
}


@pytest.fixture
def upst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a peer `upst` 1.4.0 that cannot be imported, installed in front on the path."""
    for name, text in PACKAGE.items():
        (tmp_path / "upst" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "upst" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    peer = Peer(name="upst", distributions=("upst",), ran=("1.2.0", "1.4.0"), open=True, extra="up")
    monkeypatch.setitem(PEERS, "upst", peer)
    monkeypatch.setattr(versions, "_TOLD", set())
    monkeypatch.setattr(versions, "_version_of", lambda name: {"upst": "1.4.0"}.get(name))
    return tmp_path / "upst"


def edit(folder: Path, name: str, old: str, new: str) -> None:
    """Plant a change in a file."""
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))


LOSS = "upst.engine:Engine.loss"
HOLDING = [
    Has("upst.engine:Engine"),
    Has("upst.engine:FLAG"),
    Has("upst.engine:Engine.limit"),
    Has("upst.engine:Engine.runner"),
    Has("upst.sub:Engine.dtype"),
    Takes("upst.engine:steps", "fn", "y", first=True),
    Takes("upst.engine:Engine.inherited", "b"),
    Takes(LOSS, "inputs", "model"),
    Default("upst.engine:Engine.dtype", "'auto'"),
    Default("upst.engine:Engine.inherited", "2", parameter="b"),
    Default("upst.engine:steps", "1", parameter="y"),
    Says("upst.engine:steps", "a comment"),
    Says("upst.engine", r"(?<!def )\bplain|overload"),
    Either(Has("upst.engine:Gone"), Has("upst.engine:Engine")),
    Both(Has("upst.engine:Engine"), Has("upst.base:Base")),
]


@pytest.mark.parametrize("claim", HOLDING, ids=str)
def test_a_claim_that_holds(upst: Path, claim: Any) -> None:
    seam = Seam(name="upst/x", peer="upst", features=("kl",), what="tests", claims=(claim,), upstream="https://upst")
    assert seam.probe(Sources()) is None
    assert "upst" not in sys.modules


@pytest.mark.parametrize(
    ("claim", "found"),
    [
        (Has("upst.engine:Other"), "upst.engine:Other is not there."),
        (Has("upst.engine:Engine.other"), "upst.engine:Engine.other is not there."),
        (Has("upst.gone:Other"), "there is no module upst.gone."),
        (Has("not_there_at_all.gone:Other"), "there is no module not_there_at_all.gone."),
        (Takes("upst.engine:steps", "y", "fn", first=True), "upst.engine:steps takes (fn, y), not y, fn."),
        (Takes("upst.engine:steps", "z"), "upst.engine:steps takes (fn, y), not z."),
        (Takes("upst.engine:FLAG", "z"), "upst.engine:FLAG is no function any more."),
        (
            Default("upst.engine:Engine.dtype", "'half'"),
            "the default of upst.engine:Engine.dtype is 'auto', not 'half'.",
        ),
        (Default("upst.engine:steps", "2", parameter="y"), "the default of y is 1, not 2."),
        (Default("upst.engine:steps", "2", parameter="z"), "upst.engine:steps has no parameter z."),
        (Known(LOSS, {"0123456789abcdef": "1.2.0"}), "; known are those of 1.2.0."),
        (Says("upst.engine:steps", "no comment"), "the source of upst.engine:steps no longer has 'no comment'."),
        (Either(Has("upst.engine:A"), Has("upst.engine:B")), "upst.engine:A is not there. upst.engine:B is not there."),
        (Both(Has("upst.engine:Engine"), Has("upst.engine:B")), "upst.engine:B is not there."),
    ],
    ids=str,
)
def test_what_was_found_in_the_place_of_a_claim_is_said(upst: Path, claim: Any, found: str) -> None:
    seam = Seam(name="upst/x", peer="upst", features=("kl",), what="tests", claims=(claim,), upstream="https://upst")
    assert (seam.probe(Sources()) or "").endswith(found)


def test_gone_is_told_of_what_is_asked_for_and_not_of_a_base_that_is_not_installed(upst: Path) -> None:
    edit(upst, "engine.py", "class Engine(Base):", "from upst.nowhere import More\n\nclass Engine(More, Base):")
    assert Sources().find("upst.engine:Engine.limit").value == "3"
    with pytest.raises(Gone, match="upst.engine:Engine.more is not there"):
        Sources().find("upst.engine:Engine.more")


def seams(upst: Path) -> tuple[Seam, ...]:
    """Return four seams of `upst`: of everything, of R3, of the objective, and of an engine on a CPU."""
    digests = {Sources().find(LOSS).digest: "1.2.0 and 1.4.0"}

    def seam(name: str, features: tuple[str, ...], claim: Any, where: tuple[str, ...] = ()) -> Seam:
        return Seam(
            name=f"upst/{name}", peer="upst", features=features, what=f"{name} of tests", claims=(claim,),
            upstream="https://upst/x.py", where=where,
        )  # fmt: skip

    return (
        seam("engine", ("monitor",), Has("upst.engine:Engine.runner")),
        seam("flag", ("routing.R3",), Has("upst.engine:Engine.dtype")),
        seam("loss", ("kl", "correction", "routing"), Known(LOSS, digests)),
        seam("packing", ("monitor",), Has("upst.engine:plain"), ("cpu",)),
    )


def asked(**sections: Any) -> tuple[str, ...]:
    """Return what a block asks for."""
    block = MismatchConfig.parse(sections)
    assert block is not None
    return block.features


@pytest.mark.parametrize(
    ("change", "sections", "named"),
    [
        (("dtype: str", "kind: str"), {"routing": {"mode": "R3"}}, "mismatch.routing.mode='R3'"),
        (("dtype: str", "kind: str"), {"routing": {"mode": "R2"}, "lr": {}}, None),
        (("return model", "return 2 * model"), {"kl": {}, "lr": {}}, "mismatch.kl: "),
        (
            ("return model", "return 2 * model"),
            {"correction": {"preset": "tis"}, "kl": {}},
            "mismatch.kl and mismatch.correction",
        ),
        (("return model", "return 2 * model"), {"precision": {"dtype": "float16"}, "lr": {}}, None),
        (("(Base)", ""), {"lr": {}}, "the mismatch block: "),
        (("def plain", "def other"), {"lr": {}}, None),
    ],
)
def test_a_change_refuses_the_features_that_need_it_and_no_other(
    upst: Path, change: tuple[str, str], sections: dict[str, Any], named: str | None
) -> None:
    declared = seams(upst)
    assert all(finding.change is None for finding in examine(declared, asked(**sections), {"cpu"}))
    edit(upst, "engine.py", *change)
    found = examine(declared, asked(**sections), set())
    if named is None:
        refuse_changed(found)
        return
    with pytest.raises(SeamError) as refusal:
        refuse_changed(found)
    message = str(refusal.value)
    assert message.startswith(named) and "upst 1.4.0 has changed upst/" in message, message
    assert "https://upst/x.py" in message
    assert "pip install upst==1.4.0" in message and message.endswith("Nothing was patched or started.")
    section = named.removeprefix("mismatch.").partition(".")[0].partition(":")[0].partition(" ")[0]
    assert f"Remove {section}" in message or "no section can do without" in message


def test_circumstances_decide_whether_a_seam_is_used(upst: Path) -> None:
    declared = seams(upst)
    edit(upst, "engine.py", "def plain", "def other")
    refuse_changed(examine(declared, asked(), {"vllm"}))
    with pytest.raises(SeamError, match="upst/packing"):
        refuse_changed(examine(declared, asked(), {"vllm", "cpu"}))


@pytest.fixture
def checked(upst: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Return a function that lets `upst` be of a version and checks a block against it."""
    found = seams(upst)
    monkeypatch.setattr(compat, "declared", lambda: found)

    def check(version: str, using: set[str] | None = None, **sections: Any) -> dict[str, str]:
        monkeypatch.setattr(versions, "_version_of", lambda name: version if name == "upst" else None)
        return compat.check(["upst"], asked(**sections), using or {"vllm"})

    return check


def test_a_version_that_was_not_run_is_one_warning_with_the_number_of_seams(
    checked: Callable[..., dict[str, str]],
) -> None:
    with pytest.warns(UntestedVersionWarning) as told:
        assert checked("1.5.0", kl={}) == {"upst": "1.5.0"}
        checked("1.5.0", kl={})
        versions.require("upst")
    assert [str(warning.message) for warning in told] == ["untested with upst 1.5.0; the 2 seams in use hold."]


def test_a_version_that_was_run_is_checked_without_a_word_and_refused_all_the_same(
    upst: Path, checked: Callable[..., dict[str, str]]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked("1.4.0", kl={})
        edit(upst, "engine.py", "return model", "return None")
        checked("1.4.0", lr={})
        with pytest.raises(SeamError, match="mismatch.kl: upst 1.4.0 has changed upst/loss"):
            checked("1.4.0", kl={})


def test_an_engine_that_was_not_run_is_refused_where_weights_are_not_proven(
    checked: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    off = {"monitor": {"weight_sync": "off"}}
    with pytest.warns(UntestedVersionWarning):
        checked("1.5.0", **off)  # holds no weights of its own
    monkeypatch.setattr(compat, "ENGINES", ("upst",))
    checked("1.4.0", **off)
    with pytest.raises(PeerVersionError, match=r"weight_sync='off' with upst 1.5.0, .*\(pip install upst==1.4.0\)"):
        checked("1.5.0", **off)


def test_the_oldest_is_a_floor(checked: Callable[..., dict[str, str]]) -> None:
    with pytest.raises(PeerVersionError, match="upst 1.1.0 is outside the supported range >=1.2.0"):
        checked("1.1.0")


# What is declared of the real peers.


def test_every_declared_seam_is_named_once_and_says_what_it_is_for() -> None:
    declared = compat.declared()
    names = [seam.name for seam in declared]
    assert len(names) == len(set(names)) > 30
    for seam in declared:
        assert seam.peer in PEERS and seam.name.startswith(f"{seam.peer}/"), seam.name
        assert seam.what and seam.claims and seam.upstream.startswith("https://"), seam.name
        assert seam.features and all(
            any(one == own or one.startswith(f"{own}.") for one in FEATURES) for own in seam.features
        ), seam.name


def test_every_open_peer_that_trains_has_a_seam_for_every_feature_it_carries() -> None:
    peers = {seam.peer for seam in compat.declared()}
    assert {name for name, peer in PEERS.items() if peer.open} <= peers


def test_all_seams_of_the_installed_peers_hold() -> None:
    found = compat.installed_environment()
    changed = {state.peer.name: state.data for state in found.peers if any(f.change for f in state.findings)}
    assert not changed, found.data()
    assert {state.peer.name for state in found.peers if state.findings} >= {
        "torch",
        "transformers",
        "trl",
        "vllm",
        "verl",
    }


def test_features_of_the_table_are_those_that_blocks_ask_for() -> None:
    sections = {"precision": {"dtype": "float16"}, "lr": {}, "correction": {"preset": "tis"}, "kl": {}}
    sections["monitor"] = {"doctor": "first_batch"}
    sections["sampling_mask"] = {}
    both = {feature for mode in ("R2", "R3") for feature in asked(**sections, routing={"mode": mode})}
    assert both == set(FEATURES)


# The table.


def test_the_table_says_what_works_and_why_the_rest_does_not(upst: Path) -> None:
    declared = seams(upst)
    edit(upst, "engine.py", "return model", "return None")
    hosts = (Host("one", ("upst",), frozenset({"vllm"})), Host("two", ("upst", "trl"), frozenset()))
    found = survey(declared, hosts)
    text = str(found)
    assert found.hosts["two"] == "trl" and "two: trl is not installed." in text
    one = found.hosts["one"]
    assert isinstance(one, dict) and {name for name, reason in one.items() if reason} == {
        "kl", "correction", "routing.R2", "routing.R3",
    }  # fmt: skip
    assert "3 of 4 hold" in text and "mismatch.kl: upst/loss: the source of upst.engine:Engine.loss has digest" in text
    data = json.loads(json.dumps(found.data()))
    assert data["peers"]["upst"]["changed"].keys() == {"upst/loss"} and data["hosts"]["one"]["lr"] is None
    assert data["hosts"]["two"] == {"not_installed": "trl"}


def test_a_host_with_a_peer_below_its_floor_can_nothing(upst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_version_of", lambda name: "1.0" if name == "upst" else None)
    found = survey(seams(upst), (Host("one", ("upst",), frozenset()),))
    one = found.hosts["one"]
    assert isinstance(one, dict) and all("outside the supported range" in (reason or "") for reason in one.values())
    assert "refused (accepted: >=1.2.0)" in str(found)


def test_the_command_imports_no_peer_and_no_torch() -> None:
    code = (
        "import sys; from mismatch_ext.adapters import cli; cli.main(['compat']); "
        "print('loaded:', *{'torch', 'trl', 'vllm', 'transformers', 'verl', 'accelerate'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rsplit("loaded:", 1)[1].split() == []


def test_the_command_is_a_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mismatch_ext", "compat", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["peers"]["trl"], done.stderr
