"""Quantised engines: what a format costs and what of it goes with which part, an error that grows, and each host with one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mismatch_ext.rundata import read_run
from tests.models import tiny_model
from tests.peers.engines.sglang_environment import HELD, MAIN, PYTHON, environment
from tests.peers.engines.vllm_server import serving
from tests.peers.scenarios import named, run_fresh
from tests.peers.verl.main_ppo import run_verl
from tests.peers.verl.main_ppo_sglang import run_verl_sglang
from tests.readme import ROOT, in_readme, shell
from tests.rendezvous import rendezvous

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_server as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_server")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
SHARES = "share of the divergence"
EVERYWHERE = ("fp8 weights and activations, a scale per channel", "int8 weights and activations", "fp8 KV cache")
"""Beginnings of the formats that the pages make claims of; others are recorded where a CPU runs them."""
FORMAT = "fp8_per_channel"
PRECISION = {"dtype": "bfloat16", "quantized": {"weights": FORMAT}}


def table(printed: str) -> dict[str, Any]:
    """Return what `--json` printed, by format."""
    found: dict[str, Any] = {}
    for line in printed.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Hold what the pages say of every format that ran to its figures, and return all formats for the record."""
    ran = {name: figures for name, figures in found.items() if "refused" not in figures}
    plain = ran.pop("bf16")
    assert ran, "no quantised format runs here"
    for name, figures in ran.items():
        if not name.startswith(EVERYWHERE):
            continue
        assert figures["divergence"]["low"] > plain["divergence"]["high"], name
        assert sum(part["value"] for part in figures[SHARES].values()) == pytest.approx(1), name
        # Each part has a share, and it is known to within a tenth of the whole. How large it is depends on the CPU's kernels.
        for part, share in figures[SHARES].items():
            value, low, high = (share[key] for key in ("value", "low", "high"))
            assert low > 0 and value - low < 0.1 and high - value < 0.1, (name, part, share)
        assert figures["corrected"]["bias removed"]["low"] > 0.5, name
    return {"bf16": plain} | ran | {name: f["refused"] for name, f in found.items() if "refused" in f}


def test_a_quantised_engine_is_further_away_and_weights_mend_it(evidence: Callable[..., None]) -> None:
    """A quantised vLLM is further from its trainer than bf16, each part has its share; bounded weights mend half of the bias."""
    command = in_readme("python -m benchmarks.quantised")
    printed = shell(f"{command} --json")
    print(printed)
    evidence("quantised", judged(table(printed)), command=command)


def test_a_quantised_sglang_is_further_away_and_weights_mend_it(evidence: Callable[..., None], tmp_path: Path) -> None:
    """An SGLang with an fp8 KV cache is further from its trainer than bf16, and bounded weights mend half of the bias."""
    command = in_readme("python -m benchmarks.quantised --engine sglang")
    told = environment(HELD or MAIN, tmp_path / "stub.log")
    run = [str(PYTHON), *command.split()[1:], "--json"]
    done = subprocess.run(run, cwd=ROOT, env=told, capture_output=True, text=True, timeout=1500)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-5000:]
    evidence("quantised_sglang", judged(table(done.stdout)), command=command)


def test_trl_trains_with_a_quantised_server_and_verifies_its_updates(tmp_path: Path) -> None:
    """TRL trains with a vLLM server that quantises each update; a block that names another format is refused with the flag."""
    model = tiny_model("dense", tmp_path / "model")
    flags = ["--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs", "--quantization", FORMAT]
    flags += ["--weight-transfer-config", '{"backend": "mismatch_http"}']
    with serving(model, tmp_path, *flags, development=True) as url:

        def train(name: str, precision: dict[str, Any]) -> Any:
            block = {"precision": precision, "correction": {"preset": "token_truncate"}}
            given = {"model": model, "out": tmp_path / name, "url": url, "block": block}
            return run_fresh(scenarios.train, given, {**os.environ, **rendezvous(), "HF_HUB_OFFLINE": "1"}, 300)

        result = train("run", PRECISION).expect()
        other = train("other", PRECISION | {"quantized": {"weights": "fp8"}})
    print({name: value for name, value in result.items() if name != "history"})
    assert [status for status, *_ in result["verdicts"]] == ["unchanged", "in_sync", "in_sync"]
    assert result["engine"]["quantization"] == FORMAT
    assert "float8_e4m3fn" in result["engine"]["parameter_dtypes"]
    assert all(0 < step["mismatch/k3_kl"] < 0.1 for step in result["history"])
    assert other.code != 0 and "--quantization fp8 " in other.stderr and f"it has {FORMAT}" in other.stderr


def test_verl_trains_with_a_quantised_rollout_and_verifies_its_updates(tmp_path: Path) -> None:
    """verl's main_ppo trains with a vLLM that quantises each update; updates are verified."""
    model = tiny_model("dense", tmp_path / "model")
    overrides = [
        f"+mismatch.precision={{dtype:bfloat16,quantized:{{weights:{FORMAT}}}}}",
        f"+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization={FORMAT}",
    ]
    run = run_verl(tmp_path, overrides, model=model, plugin=True)
    steps = run.expect()
    assert all(0 < step["mismatch/k3_kl"] < 0.1 for step in steps), steps
    assert f"uniform bfloat16, engine's weights in {FORMAT}: audited on both sides" in run.log
    data = read_run(tmp_path / "checkpoints/mismatch")
    assert data.header["audit"]["ok"] and "float8_e4m3fn" in data.header["engine"]["parameter_dtypes"]
    # Each update was judged, and none was found to be of other weights.
    assert all(step["mismatch/weight_sync_gap"] > 0 for step in steps)
    assert not [event for event in data.events if event.name == "weight_sync"]


def test_verl_trains_with_sglang_whose_cache_is_quantised(tmp_path: Path) -> None:
    """verl's main_ppo trains with an SGLang whose KV cache is in fp8, as the block names it; updates are verified."""
    model = tiny_model("dense", tmp_path / "model")
    overrides = [
        "+mismatch.precision={dtype:bfloat16,quantized:{kv_cache:fp8_e4m3}}",
        "++actor_rollout_ref.rollout.engine_kwargs.sglang.kv_cache_dtype=fp8_e4m3",
    ]
    run = run_verl_sglang(tmp_path, overrides, model=model, plugin=True, version=MAIN)
    steps = run.expect()
    assert all(0 < step["mismatch/k3_kl"] < 0.1 and step["mismatch/weight_sync_gap"] > 0 for step in steps), steps
    assert "uniform bfloat16, engine's KV cache in fp8_e4m3: audited on both sides" in run.log
    assert not [event for event in read_run(tmp_path / "checkpoints/mismatch").events if event.name == "weight_sync"]


def test_the_alarm_fires_on_an_error_that_grows_and_on_no_constant_one(evidence: Callable[..., None]) -> None:
    """In TRL with vLLM the alarm on growth is raised where a planted error of the weights grows, never where it is constant."""
    command = in_readme("python -m benchmarks.quantised.growth")
    shell("rm -rf runs/quantised_growth")
    printed = shell(command)
    print(printed)
    found = json.loads(printed[printed.index("{") :])
    assert (ROOT / "runs/quantised_growth/growing/mismatch/metrics.jsonl").exists()
    assert found["constant"]["alarm raised at step"] == "never"
    assert isinstance(found["growing"]["alarm raised at step"], int)
    evidence("quantised_growth", found, command=command)
