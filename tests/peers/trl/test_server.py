"""TRL with `vllm_mode="server"` against a real `vllm serve`: what a run shows, and what is named before a step is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mismatch_ext.rundata import read_run
from tests.oracle import expect_float32
from tests.peers.engines.vllm_server import serving
from tests.peers.scenarios import Run, named

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_server as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_server")

pytestmark = [pytest.mark.engine, pytest.mark.numeric]
FLAGS = ["--dtype", "float32", "--logprobs-mode", "processed_logprobs"]
ROUTES = ["--enable-return-routed-experts"]
TRANSFER = ["--weight-transfer-config", '{"backend": "mismatch_http"}']
KEEPING = ["--worker-extension-cls", "tests.peers.engines.kept_decode.Keeping"]
NCCL = ["--weight-transfer-config", '{"backend": "nccl"}']


@pytest.fixture(scope="module")
def server(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = [*FLAGS, *ROUTES, *TRANSFER, *KEEPING]
    with serving(moe, tmp_path_factory.mktemp("server"), *flags, development=True) as found:
        yield found


def test_every_section_in_float32_agrees_and_every_update_is_verified(
    run: Run, moe: Path, server: str, tmp_path: Path
) -> None:
    block = {
        "precision": {"dtype": "float32"},
        "correction": {"preset": "token_truncate"},
        "kl": {"coef": 0.01},
        "lr": {},
        "routing": {"mode": "R3", "agreement_rate": 1.0},
        "monitor": {"doctor": "first_batch"},
    }
    ran = run(scenarios.train, model=moe, out=tmp_path, url=server, block=block)
    result = ran.expect()
    expect_float32(result["history"], result["float32_errors"])
    # The first update is of what the server was started with.
    assert [status for status, *_ in result["verdicts"]] == ["unchanged", "in_sync", "in_sync"]
    assert all("tensors are equal bit by bit" in message for *_, message in result["verdicts"][1:])
    assert result["weight_version"] == 3
    # Experts are chosen by the engine, and in float32 the trainer would have chosen them, too.
    assert [step["mismatch/routing/set_mismatch_frac"] for step in result["history"]] == [0.0] * 3
    assert result["engine"]["model_dtype"] == result["engine"]["kv_cache_dtype"] == "float32"
    assert set(result["engine"]["parameter_dtypes"]) == {"float32"}
    assert "uniform float32: audited on both sides" in ran.stdout and "trl/server_client" in ran.stdout
    (examined,) = (event for event in read_run(tmp_path / "mismatch").events if event.name == "doctor")
    assert examined.data["causes"] == [], examined.message  # type: ignore[index]


def test_without_a_block_and_observed_runs_are_stock(run: Run, moe: Path, server: str, tmp_path: Path) -> None:
    found = run(scenarios.stock, model=moe, out=tmp_path, url=server).expect()
    assert len(found["stock"]) == 2 and all(step["grad_norm"] > 0 for step in found["stock"])
    for stock, ours, observed in zip(*(found[name] for name in ("stock", "ours", "observed")), strict=True):
        # The server forms batches as requests come in, and rounds by batches: tokens are the same, sums nearly.
        assert ours == pytest.approx(stock, rel=1e-3, abs=1e-5)
        assert {key: observed[key] for key in stock} == pytest.approx(stock, rel=1e-3, abs=1e-5)
    assert any("--dtype float16" in finding for finding in found["findings"]), found["findings"]


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
        "broken off": ["EngineError", "planted"],
        "after it": ["EngineError", "failed half-way", "Restart it"],
        "hung": ["EngineError", "did not answer", "within 5 s"],
        "stale decode": ["WeightSyncError", "decode path does not compute with the weights that its prefill has"],
    }.items():
        assert all(word in found[fault] for word in words), (fault, found[fault])
    # Whether its KV cache still holds NaN where the next run decodes is up to vLLM.
    assert found["after nan"] == "went on" or "decoded tokens are not finite" in found["after nan"], found["after nan"]


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
