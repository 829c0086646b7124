"""Replay is one in TRL and in verl: which routes are refused and how, and what outlives its batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.peers.conformance.routes import FAULTS
from tests.peers.scenarios import Run, named

trl = named("tests.peers.conformance.scenarios_replay_trl")
verl = named("tests.peers.conformance.scenarios_replay_verl")


@pytest.fixture(scope="module")
def hosts(run: Run, moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {
        "trl": run(trl.replay, model=moe, out=tmp_path_factory.mktemp("trl")).expect(),
        "verl": run(verl.replay, model=moe).expect(),
    }


@pytest.mark.parametrize("name", FAULTS)
def test_implausible_routes_are_refused_alike(hosts: dict[str, dict[str, Any]], name: str) -> None:
    messages = [hosts[host]["refused"][name] for host in ("trl", "verl")]
    assert all(re.match("RoutingError: .*" + FAULTS[name][1], message) for message in messages), messages
    # The same words; how many experts are shared depends on the tokens.
    assert len({re.sub(r"\d+%", "%", message) for message in messages}) == 1, messages


def test_the_models_own_routes_are_plausible(hosts: dict[str, dict[str, Any]]) -> None:
    assert [hosts[host]["refused"]["none"] for host in ("trl", "verl")] == ["", ""]


def test_nothing_of_a_batch_outlives_it(hosts: dict[str, dict[str, Any]]) -> None:
    for host, found in hosts.items():
        assert found["during"] > 0, host  # it would be seen
        losses = found["after a loss"]
        # What is made once, whenever that is, does not grow with the losses; what is kept of each does.
        assert found["after"] <= 0 and losses[-1] < len(losses), (host, found["after"], losses)
