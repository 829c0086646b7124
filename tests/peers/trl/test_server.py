"""TRL with `vllm_mode="server"` against a real `vllm serve`: what a run shows, and what is named before a step is made of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests

from mismatch_ext.log_reading import read_run
from tests.oracle import expect_float32
from tests.peers.engines.vllm_server import serving
from tests.peers.scenarios import Ran, Run, named
from tests.peers.trl.ends import expect_ends
from tests.peers.trl.kills import check_lines, metrics_of
from tests.peers.trl.ranks import check_ranks, launch, series

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_server as scenarios
    from tests.peers.trl import scenarios_server_kills as kills
    from tests.peers.trl import scenarios_server_ranks as ranks
else:
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
    block = {
        "precision": {"dtype": "float32"},
        "correction": {"preset": "token_truncate"},
        "kl": {"coef": 0.01},
        "lr": {},
        "routing": {"mode": "R3", "measured": 1.0},
    }
    ran = run(scenarios.train, model=moe, out=tmp_path, url=server, block=block)
    result = ran.expect()
    expect_float32(result["history"], result["float32_errors"])
    # The first update is of what the server was started with.
    assert [status for status, *_ in result["verdicts"]] == ["unchanged", "in_sync", "in_sync"]
    assert all("tensors are equal bit by bit" in message for *_, message in result["verdicts"][1:])
    assert result["weight_version"] == 3
    expect_ends(result["ends"], 16)
    # Experts are chosen by the engine, and in float32 the trainer would have chosen them, too.
    assert [step["mismatch/routing/set_mismatch_frac"] for step in result["history"]] == [0.0] * 3
    assert result["engine"]["model_dtype"] == result["engine"]["kv_cache_dtype"] == "float32"
    assert set(result["engine"]["parameter_dtypes"]) == {"float32"}
    assert "dtype=float32" in ran.stdout
    patches = read_run(tmp_path / "mismatch").header["patches"]
    assert "trl/server_client" in {patch["name"] for patch in patches}


def test_two_ranks_share_a_server_and_each_has_the_routes_of_its_own_rollouts(
    moe: Path, server: str, tmp_path: Path
) -> None:
    found = launch("ddp", ranks.train, tmp_path, limit=200, model=moe, url=server).expect()
    check_ranks("ddp", found)
    # One client, and what it learns is known to both.
    assert [rank["client"] for rank in found] == [True, False]
    assert found[0]["verdicts"] == found[1]["verdicts"]
    for rank in found:
        assert [status for status, *_ in rank["verdicts"][1:]] == ["in_sync"] * 2
        assert all("tensors are equal bit by bit" in message for *_, message in rank["verdicts"][1:])
        assert rank["weight_version"] == 3
        expect_float32(rank["logged"], [error for each in found for error in each["float32_errors"]])
        # The old-logprob pass and the update, in each of three steps.
        assert rank["forwards"] == 6
        assert series(rank, "mismatch/routing/set_mismatch_frac") == [0.0] * 3
    for step, entry in enumerate(found[0]["logged"]):
        mine, others = (rank["heard"]["agreement"][step]["tokens"] for rank in found)
        assert min(mine, others) > 0 and entry["mismatch/routing/compared_tokens"] == mine + others
        (tokens, total, largest), (theirs, their_total, their_largest) = (rank["heard"]["gap"][step] for rank in found)
        union = (total + their_total) / (tokens + theirs)
        assert entry["mismatch/logp_abs_diff_mean"] == pytest.approx(union, rel=1e-6)
        assert entry["mismatch/logp_abs_diff_max"] == pytest.approx(max(largest, their_largest), rel=1e-6)
    # A failure that the main process alone can see ends both, and neither has stepped on.
    first, second = (rank["overtaken"] for rank in found)
    assert "another trainer, elsewhere:1:0" in first and second == f"rank 0: {first}", (first, second)
    assert [rank["steps of the overtaken"] for rank in found] == [1, 1]


def test_runs_without_a_block_measured_or_attached_are_stock(run: Run, moe: Path, server: str, tmp_path: Path) -> None:
    found = run(scenarios.stock, model=moe, out=tmp_path, url=server).expect()
    assert len(found["stock"]) == 2 and all(step["grad_norm"] > 0 for step in found["stock"])
    for stock, *others in zip(*(found[name] for name in ("stock", "ours", "measured", "attached")), strict=True):
        for logged in others:
            # The server forms batches as requests come in, and rounds by batches: tokens are the same, sums nearly.
            assert {key: logged[key] for key in stock} == pytest.approx(stock, rel=1e-3, abs=1e-5)
        assert others[0].keys() == stock.keys() and others[2]["mismatch/weight_sync_gap"] > 0
    assert not found["failed"] and found["verdict"] == "in_sync"


def test_centering_takes_the_servers_most_likely_tokens(run: Run, moe: Path, server: str, tmp_path: Path) -> None:
    found = run(scenarios.centered, model=moe, out=tmp_path, url=server).expect()
    assert found["places"] > 32
    # Both sides compute in float32. A head of another place or row is off by whole nats.
    assert found["apart"] < 1e-3 and found["sampled"] < 1e-3, found
    assert len(found["history"]) == 2
    assert all(step["mismatch/sampler_bias"] > 0 for step in found["history"])
    # The server was started with vLLM's 20.
    assert "--max-logprobs 128" in found["refused"] and "it reports 20 at most" in found["refused"], found["refused"]


def test_probes_that_a_busy_server_does_not_answer_leave_updates_unknown(
    run: Run, moe: Path, server: str, tmp_path: Path
) -> None:
    found = run(scenarios.unanswered, model=moe, out=tmp_path, url=server, seconds=3.0).expect()
    assert found["steps"] == 6
    first, *later = found["verdicts"]
    # The server may hold the weights that an earlier test has sent.
    assert first in ("unchanged", "in_sync")
    assert later == [None, None, None, "in_sync", "in_sync"]
    assert len(found["said"]) == 3
    for message in found["said"]:
        assert message.startswith("nothing is known of this weight update") and "within 3 s" in message, message
    (line,) = [line for line in found["closing"] if line.startswith("  sync")]
    assert "3 unknown, first at step 1, last at step 3" in line and "no weight update failed" in line
    # The server orders requests by priority: the probes' come first.
    assert len(found["priorities"]) == 2 and None in found["priorities"]


@pytest.mark.nightly
def test_one_update_that_looks_wrong_is_checked_again_and_two_in_a_row_end_the_run(
    run: Run, moe: Path, server: str, tmp_path: Path
) -> None:
    found = run(scenarios.garbled, model=moe, out=tmp_path, url=server).expect()
    assert found["one"] == {"ended": "went on", "steps": 4, "said": ["warning"], "status": "in_sync"}
    assert found["two"]["ended"].startswith("WeightSyncError") and found["two"]["said"] == ["warning", "error"]
    assert found["two"]["steps"] == 2


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
    # The rollouts of each step, as TRL keeps them, and a sample of their tokens as both sides saw them.
    assert [path.stem for path in sorted((out / "completions").iterdir())] == [
        f"completions_{n:05d}" for n in range(1, 7)
    ]
    assert {record.step for record in read_run(out / "mismatch").scatters} == {
        1,
        6,
    }  # each fifth log, whoever was killed


@pytest.mark.nightly
def test_faults_are_named(run: Run, moe: Path, server: str, tmp_path: Path) -> None:
    found = run(scenarios.faults, timeout=600, model=moe, out=tmp_path, url=server).expect()
    for fault, words in {
        "precision": ["EngineError", "--dtype float16", "it computes in float32"],
        "nothing": ["WeightSyncError", "stale"],
        "old again": ["WeightSyncError", "stale"],
        "left out": ["WeightSyncError", "no weight update was finished"],
        "nan": ["WeightSyncError", "garbled", "not finite"],
        "other trainer": ["EngineError", "another trainer"],
        "cache": ["EngineError", "did not reset its prefix cache"],
        "broken off": ["ConnectionError", "planted"],  # the host's own
        "after it": ["EngineError", "failed half-way", "Restart it"],
        "hung": ["EngineError", "did not answer", "within 5 s"],
        "stale decode": ["WeightSyncError", "decode path does not compute with the weights that its prefill has"],
    }.items():
        assert all(word in found[fault] for word in words), (fault, found[fault])
    # Whether its KV cache still holds NaN where the next run decodes is up to vLLM.
    assert found["after nan"] == "went on" or "decoded tokens are not finite" in found["after nan"], found["after nan"]


@pytest.mark.nightly
def test_a_restart_is_named_and_a_server_without_the_plugin_is_refused(
    run: Run, moe: Path, server: str, tmp_path: Path
) -> None:
    """Last: the server is another one afterwards."""
    found = run(
        scenarios.restarted, timeout=600, model=moe, out=tmp_path, url=server, folder=tmp_path,
        flags=[*FLAGS, *NCCL],
    ).expect()  # fmt: skip
    assert "EngineError" in found["restarted"] and "was restarted" in found["restarted"], found
    for word in (
        '--weight-transfer-config \'{"backend": "mismatch_http"}\'',
        "mismatch-ext must be installed",
        "--enable-return-routed-experts",
    ):
        assert word in found["no plugin"], found
