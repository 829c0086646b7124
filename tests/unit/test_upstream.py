"""The scripts of docs/upstream: short, with a link or without, on the page; and what tells a fault from its absence."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from docs.upstream.runs import groups
from docs.upstream.scripts import SCRIPTS, read
from docs.upstream.shown import FAILED, HOLDS, MENDED, NOT_INSTALLED, run_here, same, show
from mismatch_ext.errors import ConfigError
from mismatch_ext.versions import PEERS

LONGEST = 40
LINK = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|not reported")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_says_what_is_known(name: str) -> None:
    script = read(name)
    assert script.lines <= LONGEST
    assert script.peer in PEERS and name.startswith(script.peer.partition("-")[0])
    assert LINK.fullmatch(script.reported)
    assert script.says and script.workaround


def script(seen: Any, workaround: Any = 1.0) -> dict[str, Any]:
    def figure(value: Any) -> Any:
        def found() -> Any:
            if isinstance(value, Exception):
                raise value
            return value

        return found

    return {"PEER": "torch", "EXPECTED": 1.0, "seen": figure(seen), "with_workaround": figure(workaround)}


def test_a_fault_is_told_from_its_absence() -> None:
    assert show("a", script(seen=2.0), workaround=False).status == HOLDS
    assert show("a", script(seen=1.0), workaround=False).status == MENDED
    assert show("a", script(seen=2.0, workaround=2.0), workaround=True).status == HOLDS
    assert show("a", script(seen=2.0, workaround=1.0001), workaround=True).status == MENDED


def test_a_refusal_of_ours_is_no_fault_and_any_other_error_is_an_error() -> None:
    refused = show("a", script(seen=2.0, workaround=ConfigError("no")), workaround=True)
    assert (refused.status, refused.seen) == (MENDED, "refused: ConfigError")
    with pytest.raises(ConfigError):
        show("a", script(seen=ConfigError("no")), workaround=False)
    with pytest.raises(KeyError):
        show("a", script(seen=2.0, workaround=KeyError("renamed")), workaround=True)


def test_a_script_that_breaks_or_lacks_its_peer_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def imported(name: str) -> Any:
        if name.endswith("sglang_overflow"):
            raise ModuleNotFoundError("no module", name="sglang")
        return SimpleNamespace(**script(seen=KeyError("gone") if name.endswith("trl_candidates") else 2.0))

    monkeypatch.setattr("docs.upstream.shown.importlib", SimpleNamespace(import_module=imported))
    monkeypatch.setattr("docs.upstream.shown.installed", lambda name: None if name == "sglang" else "1.0")
    found = run_here(["trl_candidates", "sglang_overflow", "torch_sharded_scaler"])
    assert [one.status for one in found] == [FAILED, MENDED, NOT_INSTALLED, NOT_INSTALLED, HOLDS, MENDED]
    assert found[0].seen.startswith("KeyError")


def test_small_figures_are_not_taken_for_nothing() -> None:
    assert not same(0.0, 5e-9) and same(5.001e-9, 5e-9) and same(1e-9, 0.0) and not same("inf", 1.0)


def test_what_starts_an_engine_has_a_process_for_itself() -> None:
    scripts = [read(name) for name in SCRIPTS]
    found = groups(scripts)
    assert sorted(script.name for group in found for script in group) == sorted(SCRIPTS)
    assert all(len(group) == 1 or not any(script.alone for script in group) for group in found)
    assert all(len({script.peer for script in group}) == 1 for group in found)
