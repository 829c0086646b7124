"""TRL with `vllm_mode="server"` against a real `vllm serve`: what a run shows, and what is named before a step is made of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from mismatch_ext.log_reading import read_run
from tests.peers.engines.vllm_server import serving
from tests.peers.scenarios import Ran, Run, named
from tests.peers.trl.kills import check_lines, metrics_of
from tests.peers.trl.ranks import launch

kills = named("tests.peers.trl.scenarios_server_kills")
ranks = named("tests.peers.trl.scenarios_server_ranks")
scenarios = named("tests.peers.trl.scenarios_server")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]
FLAGS = ["--dtype", "float32", "--logprobs-mode", "processed_logprobs"]
ROUTES = ["--enable-return-routed-experts"]
TRANSFER = ["--weight-transfer-config", '{"backend": "mismatch_http"}']
PRIORITY = ["--scheduling-policy", "priority"]
KEEPING = ["--worker-extension-cls", "tests.peers.engines.kept_decode.Keeping"]
NCCL = ["--weight-transfer-config", '{"backend": "nccl"}']


STEPS = 6
"""Optimizer steps of a run in which something is killed."""


@pytest.fixture(scope="module")
def start(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Return a function that starts a server, which stands to the end of this file."""
    flags = [*FLAGS, *ROUTES, *TRANSFER, *KEEPING, *PRIORITY]
    with ExitStack() as standing:

        def one(**given: Any) -> str:
            folder = tmp_path_factory.mktemp("server")
            return standing.enter_context(serving(moe, folder, *flags, development=True, **given))

        yield one


@pytest.fixture(scope="module")
def server(start: Callable[..., str]) -> str:
    return start()


def test_every_section_in_float32_agrees_and_every_update_is_verified(
    run: Run, moe: Path, server: str, tmp_path: Path
) -> None:
    run(scenarios.every_section, model=moe, out=tmp_path, url=server).expect()


@pytest.mark.nightly
def test_two_ranks_share_a_server_and_each_has_the_routes_of_its_own_rollouts(
    run: Run, moe: Path, server: str, tmp_path: Path
) -> None:
    launch(run, "ddp", ranks.train, tmp_path, limit=200, model=moe, url=server).expect()


def test_runs_without_a_block_measured_or_attached_are_stock(run: Run, moe: Path, server: str, tmp_path: Path) -> None:
    run(scenarios.stock, model=moe, out=tmp_path, url=server).expect()


def test_centering_takes_the_servers_most_likely_tokens(run: Run, moe: Path, server: str, tmp_path: Path) -> None:
    run(scenarios.centered, model=moe, out=tmp_path, url=server).expect()


def test_probes_that_a_busy_server_does_not_answer_leave_updates_unknown(
    run: Run, moe: Path, server: str, tmp_path: Path
) -> None:
    run(scenarios.unanswered, model=moe, out=tmp_path, url=server).expect()


@pytest.mark.nightly
def test_kills_of_trainer_and_server_leave_no_trace(
    run: Run, moe: Path, server: str, start: Callable[..., str], tmp_path: Path
) -> None:
    """The server is another one afterwards, at the same address."""

    def leg(name: str = "killed", **given: Any) -> Ran:
        return run(kills.leg, model=moe, out=tmp_path / name, url=server, steps=STEPS, **given)

    whole = leg("whole").expect()
    out = tmp_path / "killed"
    for number, kill in enumerate(({"where": "generation", "count": 2}, {"where": "update", "count": 2})):
        ran = leg(kill={"who": "trainer", **kill}, resume=number > 0)
        assert ran.code == -signal.SIGKILL, (kill, ran.code, ran.stderr[-3000:])
    # The second has left a server in the middle of an update.
    refused = leg(resume=True)
    assert refused.code != 0 and "failed half-way" in refused.stderr and "Restart it" in refused.stderr, refused.stderr
    renamed = requests.post(f"{server}/update_weight_version", json={"new_version": "mended"}, timeout=30)
    assert renamed.ok  # in truth no layer was touched

    left = leg(kill={"who": "server", "where": "generation", "count": 2}, resume=True).expect()
    assert f"the vLLM server at {server} cannot be reached" in left["error"], left
    assert left["step"] == 4
    kept = read_run(out / "mismatch")
    assert sorted({record.step for record in kept.steps}) == [1, 2, 3, 4] and kept.ends[-1].status == "failed"

    assert start(port=int(server.rpartition(":")[2])) == server
    assert leg(resume=True).expect() == whole
    check_lines(out / "mismatch", STEPS)
    series, expected = metrics_of(out), metrics_of(tmp_path / "whole")
    assert series.keys() == expected.keys() == set(range(1, STEPS + 1))
    for step, metrics in expected.items():
        # What was learned is the same to the last bit; what the engine's numbers are in, as its batches were rounded.
        assert series[step] == pytest.approx(metrics, rel=1e-3, abs=1e-4), step


@pytest.mark.nightly
def test_faults_are_named(run: Run, moe: Path, server: str, tmp_path: Path) -> None:
    run(scenarios.faults, timeout=600, model=moe, out=tmp_path, url=server).expect()


@pytest.mark.nightly
def test_a_restart_is_named_and_a_server_without_the_plugin_is_refused(
    run: Run, moe: Path, server: str, tmp_path: Path
) -> None:
    """Last: the server is another one afterwards."""
    run(scenarios.restarted, timeout=600, model=moe, out=tmp_path, url=server, flags=[*FLAGS, *NCCL]).expect()
