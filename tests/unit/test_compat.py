"""Seams: what is claimed of a package, which features a change refuses, and the table that says so."""

from __future__ import annotations

import importlib
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
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import PeerVersionError, SeamError, UntestedVersionWarning
from mismatch_ext.seams import Claim, Host, Refusal, Seam, examine, exists, survey, table
from mismatch_ext.versions import PEERS, Peer

ROOT = Path(__file__).resolve().parents[2]
ENGINE = """
from dataclasses import dataclass

FLAG = "fallback"

class Base:
    def inherited(self, a, *, b=2): ...

@dataclass
class Engine(Base):
    dtype: str
    def loss(self, model, inputs): ...
    @staticmethod
    def steps(fn, y=1): ...

def plain(fn): return fn
"""


@pytest.fixture
def upst(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the imported module of a peer `upst` 1.4.0, which has another module that cannot be imported."""
    (tmp_path / "upst/sub").mkdir(parents=True)
    for name, text in (
        ("__init__", ""),
        ("engine", ENGINE),
        ("broken", "raise OSError('no such\\ndevice')"),
        ("sub/__init__", ""),
    ):
        (tmp_path / f"upst/{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(PEERS, "upst", Peer(name="upst", ran=("1.2.0", "1.4.0")))
    monkeypatch.setattr(versions, "_TOLD", set())
    monkeypatch.setattr(versions, "_version_of", lambda name: {"upst": "1.4.0"}.get(name))
    yield importlib.import_module("upst.engine")
    for name in [name for name in sys.modules if name.partition(".")[0] == "upst"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "claim",
    [
        exists("upst.engine"),
        exists("upst.engine:Engine.dtype"),  # a field without a default is no attribute of its class
        exists("upst.engine:Engine.inherited", "a"),
        exists("upst.engine:Engine.loss", "model", "inputs"),
        exists("upst.broken:Anything"),  # not loaded, but there
    ],
    ids=lambda claim: claim.target,
)
def test_a_claim_that_holds(upst: Any, claim: Claim) -> None:
    assert claim.change() is None
    assert "upst.broken" not in sys.modules and "upst.sub" not in sys.modules


@pytest.mark.parametrize(
    ("claim", "found"),
    [
        (exists("upst.engine:Engine.other"), "upst.engine:Engine.other is not there."),
        (exists("upst.gone:Other"), "there is no module upst.gone."),
        (exists("upst.engine:Engine.loss", "inputs"), "upst.engine:Engine.loss takes (model, inputs), not inputs."),
    ],
    ids=lambda value: getattr(value, "target", None),
)
def test_what_was_found_in_the_place_of_a_claim_is_said(upst: Any, claim: Claim, found: str) -> None:
    assert claim.change() == found


def seam(name: str, features: tuple[str, ...], target: str, *params: str, where: tuple[str, ...] = ()) -> Seam:
    return Seam(
        name=f"upst/{name}", features=features, what=f"{name} of tests", claims=(exists(target, *params),),
        checked="tests", upstream="https://upst/x.py", where=where,
    )  # fmt: skip


SEAMS = (
    seam("engine", ("monitor",), "upst.engine:Base"),
    seam("flag", ("routing.R3",), "upst.engine:FLAG"),
    seam("loss", ("kl", "correction", "routing"), "upst.engine:Engine.loss", "model", "inputs"),
    seam("packing", ("monitor",), "upst.engine:plain", where=("cpu",)),
)


def asked(**sections: Any) -> tuple[str, ...]:
    """Return what a block asks for."""
    block = MismatchConfig.parse(sections)
    assert block is not None
    return block.features


@pytest.mark.parametrize(
    ("gone", "sections", "using", "named"),
    [
        ("FLAG", {"routing": {"mode": "R3"}}, set(), "mismatch.routing.mode='R3'"),
        ("FLAG", {"routing": {"mode": "R2"}, "lr": {}}, set(), None),
        ("Engine", {"correction": {"preset": "tis"}, "kl": {}}, set(), "mismatch.kl and mismatch.correction"),
        ("plain", {"lr": {}}, {"vllm"}, None),
        ("plain", {"lr": {}}, {"vllm", "cpu"}, "the mismatch block: "),
    ],
)
def test_a_change_refuses_the_features_that_need_it_and_no_other(
    upst: Any, gone: str, sections: dict[str, Any], using: set[str], named: str | None
) -> None:
    assert examine(SEAMS, asked(**sections), {"cpu"}) >= 2
    delattr(upst, gone)
    if named is None:
        examine(SEAMS, asked(**sections), using)
        return
    with pytest.raises(SeamError) as refusal:
        examine(SEAMS, asked(**sections), using)
    message = str(refusal.value)
    assert message.startswith(named) and "upst 1.4.0 has changed upst/" in message, message
    assert "pip install upst==1.4.0" in message


@pytest.fixture
def checked(upst: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Return a function that lets `upst` be of a version and checks a block against it."""
    monkeypatch.setattr(compat, "declared", lambda: SEAMS)

    def check(version: str, **sections: Any) -> dict[str, str]:
        monkeypatch.setattr(versions, "_version_of", lambda name: version if name == "upst" else None)
        return compat.check(["upst"], asked(**sections), {"vllm"})

    return check


def test_a_version_that_was_run_is_checked_without_a_word_and_refused_all_the_same(
    upst: Any, checked: Callable[..., Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked("1.4.0", kl={})
        del upst.Engine.loss
        checked("1.4.0", lr={})
        with pytest.raises(SeamError, match="mismatch.kl: upst 1.4.0 has changed upst/loss"):
            checked("1.4.0", kl={})


def test_an_engine_that_nobody_ran_is_refused_where_weights_are_not_proven(
    checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    off = {"monitor": {"weight_sync": "off"}}
    with pytest.warns(UntestedVersionWarning):
        checked("1.5.0", **off)  # holds no weights of its own
    monkeypatch.setattr(compat, "ENGINES", ("upst",))
    checked("1.4.0", **off)
    with pytest.raises(PeerVersionError, match=r"weight_sync='off' with upst 1.5.0, .*\(pip install upst==1.4.0\)"):
        checked("1.5.0", **off)


# What is declared of the real peers.


def test_every_declared_seam_is_named_once_and_says_what_it_is_for() -> None:
    declared = compat.declared()
    names = [seam.name for seam in declared]
    assert len(names) == len(set(names)) > 20


def test_all_modules_of_the_installed_peers_are_there() -> None:
    found = compat.installed_environment()
    assert {name for name, peer in found["peers"].items() if peer["held"]} >= {
        "torch",
        "transformers",
        "trl",
        "vllm",
        "verl",
    }
    assert not [peer["changed"] for peer in found["peers"].values() if peer["changed"]]


# The table.

HOSTS = (Host("one", ("upst",), frozenset({"vllm"})), Host("two", ("upst", "trl"), frozenset()))


def test_the_table_says_what_is_there_and_why_the_rest_does_not_work(upst: Any) -> None:
    del upst.Engine.loss
    found = json.loads(json.dumps(survey(SEAMS, [Refusal(("vllm",), "lr", "it is slow. Buy another.")], HOSTS)))
    text, one = table(found), found["hosts"]["one"]
    assert found["hosts"]["two"] == {"not_installed": "trl"} and "two: trl is not installed." in text
    assert {name for name, reason in one.items() if reason} == {"lr", "kl", "correction", "routing.R2", "routing.R3"}
    assert one["lr"] == "Refused by name: it is slow. Buy another."
    assert found["peers"]["upst"]["changed"] == {"upst/loss": "upst.engine:Engine.loss is not there."}


def test_the_command_imports_no_peer() -> None:
    code = (
        "import sys; from mismatch_ext.adapters import cli; cli.main(['compat']); "
        "print('loaded:', *{'trl', 'vllm', 'transformers', 'verl', 'accelerate'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rsplit("loaded:", 1)[1].split() == []
