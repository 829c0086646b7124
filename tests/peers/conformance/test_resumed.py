"""A checkpoint's file of ours, and alarms that a resumed run begins anew: TRL, verl's driver and verl's worker do the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mismatch_ext.checkpoint import SCHEMA
from mismatch_ext.config import MismatchConfig
from mismatch_ext.states import to_json
from tests.peers.scenarios import Run, named
from tests.watching import Watching

trl, verl = named("tests.peers.trl.scenarios_hosts"), named("tests.peers.verl.in_process.scenarios_hosts")

pytestmark = pytest.mark.engine

BLOCK: dict[str, Any] = {
    "monitor": {
        "alarms": {
            "mine/stops": {"above": 0.5, "patience": 1, "action": "stop"},
            "mine/changed": {"above": 0.5, "patience": 1},
            "mine/kept": {"above": 0.5, "patience": 1},
        },
    },
}
BEFORE: dict[str, Any] = {
    "monitor": {"alarms": BLOCK["monitor"]["alarms"] | {"mine/changed": {"above": 0.1, "patience": 1}}},
}


def saved(block: dict[str, Any]) -> str:
    """Return the file of a run in which every alarm is raised."""
    config = MismatchConfig.parse(block)
    assert config is not None
    monitor = Watching(config.monitor)
    assert len(monitor.observe(3, dict.fromkeys(block["monitor"]["alarms"], 1.0))) == 3
    return json.dumps({"schema": SCHEMA, "config": config.to_dict(), "monitor": to_json(monitor.state)})


FILES = {
    "alarms": saved(BEFORE),
    "torn": saved(BLOCK)[:-40],
    "another schema": json.dumps({"schema": 9}),
    "other sections": saved({"kl": {"coef": 0.05}, "lr": {}, **BLOCK}),
}
HOSTS = ("trl", "verl")
Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def hosts(run: Run, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """Return what each host makes of each file."""
    out = tmp_path_factory.mktemp("hosts")
    return {
        "trl": run(trl.resumed, model=dense, out=out / "trl", block=BLOCK, files=FILES).expect(),
        "verl": run(verl.resumed, out=out / "verl", block=BLOCK, files=FILES).expect(),
        "verl's worker": run(verl.resumed_by_a_worker, out=out / "worker", files=FILES).expect(),
    }


@pytest.mark.parametrize("host", HOSTS)
def test_alarms_that_begin_anew_are_the_same_events(hosts: dict[str, Answers], host: str) -> None:
    found = hosts[host]["alarms"]
    assert found["error"] == ""
    changed, stops = [event for event in found["events"] if event[2] == "alarms_anew"]
    assert changed == [
        3, "info", "alarms_anew", "alarms begin anew, because their rules have changed: mine/changed.",
        {"metrics": ["mine/changed"]},
    ]  # fmt: skip
    assert stops == [
        3, "info", "alarms_anew",
        "alarms that stopped training begin anew, and stop it again if they are raised: mine/stops.",
        {"metrics": ["mine/stops"]},
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["torn", "another schema"])
def test_a_file_that_is_not_as_it_should_be_is_refused_in_the_same_words(hosts: dict[str, Answers], file: str) -> None:
    errors = {host: answers[file]["error"] for host, answers in hosts.items()}
    assert len(errors) == 3 and len(set(errors.values())) == 1, errors
    (error,) = set(errors.values())
    assert error.startswith("RecordError: FILE ") and "Resume from another checkpoint" in error


def test_a_file_of_other_sections_loads_and_is_told_alike(hosts: dict[str, Answers]) -> None:
    found = {host: answers["other sections"] for host, answers in hosts.items()}
    assert {answer["error"] for answer in found.values()} == {""}
    assert found["trl"]["events"] == found["verl"]["events"]
    assert "settings_changed" in [event[2] for event in found["trl"]["events"]]
