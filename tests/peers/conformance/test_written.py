"""Hosts write the same of a run: the header's keys, the events of the same alarms, and the rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.conformance import scenarios_written as scenarios
else:
    scenarios = named("tests.peers.conformance.scenarios_written")

HOSTS = ("trainer", "callback", "verl")


@pytest.fixture(scope="module")
def found(run: Run, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what TRL's trainer, the callback and verl have written."""
    trl = run(scenarios.in_trl, model=dense, out=tmp_path_factory.mktemp("trl")).expect()
    verl = run(scenarios.in_verl, model=dense, out=tmp_path_factory.mktemp("verl")).expect()
    return {**trl, "verl": verl["verl"], "in verl": verl}


@pytest.mark.parametrize("host", HOSTS)
def test_the_header_has_the_same_keys(found: dict[str, Any], host: str) -> None:
    keys, first = found[host]["keys"], found[HOSTS[0]]["keys"]
    assert set(keys) - {"worker"} == set(first)
    assert keys["run"] == first["run"] and keys["names"] == first["names"] and keys["trainer"] == first["trainer"]
    assert {"mismatch-ext", "torch", "transformers"} < set(keys["versions"])
    assert all(found[host]["known"].values()), found[host]["known"]
    # What is not known is there, and null.
    assert (keys["sampling"] is None) == (host == "callback") and (keys["engine"] is None) == (host != "verl")


@pytest.mark.parametrize("host", HOSTS)
def test_the_same_alarms_are_the_same_events(found: dict[str, Any], host: str) -> None:
    assert found[host]["events"] == [
        [1, "warning", "unwatched", "misspelt", None],
        [1, "warning", "alarm", "learning_rate", "raised"],
        [3, "info", "alarm", "learning_rate", "cleared"],
        [4, "warning", "alarm", "grad_norm", "raised"],
    ]
    assert found[host]["end"] == [["completed", True]]  # the alarm that stopped it is why
    assert found["in verl"]["stopped"] == 4


@pytest.mark.parametrize("host", HOSTS)
def test_the_rate_is_logged_alike(found: dict[str, Any], host: str) -> None:
    multipliers = [1.0, 1.0, 0.5, 0.5]
    assert found[host]["rate"] == [
        {
            "mismatch/lr_multiplier": multiplier,
            "mismatch/lr_surges": 0.0,
            "mismatch/lr_period": 2.0,
            "learning_rate": pytest.approx(1e-3 * multiplier, rel=1e-12),
        }
        for multiplier in multipliers
    ]
