"""Real TRL and real vLLM in one process, on tiny models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from mismatch_ext.adapters import cli

from mismatch_ext.log_reading import read_run
from tests.cpu import packs_linears, without_float16_packing
from tests.oracle import expect_float32
from tests.peers.conformance import readiness
from tests.peers.conformance.origins import check_header
from tests.peers.scenarios import Run, named
from tests.peers.trl.ends import expect_ends

scenarios = named("tests.peers.trl.scenarios_training")

pytestmark = pytest.mark.engine


@pytest.mark.numeric
@pytest.mark.parametrize(
    "overrides",
    [
        {"use_vllm": False, "bf16": True},
        {"bf16": False, "model_init_kwargs": {"dtype": "float32"}},
    ],
    ids=["transformers-bf16", "vllm"],
)
def test_without_a_block_every_number_is_stock(
    run: Run, dense_fp16: Path, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    """Stock TRL can load weights one by one only into linear layers that vLLM has not packed.

    On a CPU, vLLM packs whatever oneDNN has products for: float32, with AVX-512 bfloat16 too, and float16 where the CPU has
    AVX512-FP16. There, both sides run with oneDNN limited to what other CPUs have.
    """
    limits = without_float16_packing()
    stock, ours = (
        run(
            scenarios.stock, model=dense_fp16, out=tmp_path / cls, cls=cls, env=limits, fresh=bool(limits), **overrides
        ).expect()
        for cls in ("stock", "ours")
    )
    assert stock["packed"] == (0 if overrides.get("use_vllm", True) else None)
    assert len(stock["history"]) == 3 and any(h["grad_norm"] > 0 for h in stock["history"])
    assert ours == stock


def test_measuring_changes_no_number(run: Run, dense: Path, tmp_path: Path) -> None:
    measured, unchecked = (
        run(
            scenarios.train, model=dense, out=tmp_path / sync, block={"monitor": {"weight_sync": sync, **more}}
        ).expect()
        for sync, more in (("error", {"alarms": {"k3_kl": {"above": 0.0, "patience": 1}}}), ("off", {}))
    )
    assert measured["parameters"] == unchecked["parameters"]
    for written in (read_run(tmp_path / "error/mismatch").steps[-1].metrics, measured["history"][-1]):
        assert {"mismatch/training_ppl", "mismatch/seq_kl", "mismatch/k3_kl"} <= written.keys()
    assert read_run(tmp_path / "error/mismatch").steps[-1].metrics["mismatch/alarms_raised"] == 1
    expect_ends(measured["ends"], 16)
    # Rows of the first batch were kept on the way, and of no other.
    assert [path.name for path in tmp_path.glob("*/mismatch/evidence-*")] == ["evidence-1.jsonl.gz"]
    assert measured["verdict"] == "in_sync" and unchecked["verdict"] is None
    # The trap that uniform precision closes: "auto" makes the engine bfloat16 whatever the checkpoint is.
    assert measured["engine_dtype"] == "bfloat16"


@pytest.mark.numeric
def test_the_rows_that_an_alarm_has_kept_name_its_cause(run: Run, dense: Path, tmp_path: Path) -> None:
    """TRL's engine reports log-probabilities of what top_p has left, and its trainer knows nothing of top_p."""
    alarms = {name: {"above": 1e-3, "patience": 1} for name in ("logp_abs_diff_mean", "k3_kl")}
    run(scenarios.train, model=dense, out=tmp_path, block={"monitor": {"alarms": alarms}},
        top_p=0.9, per_device_train_batch_size=64, num_generations=8,
    ).expect()  # fmt: skip
    assert "ratio_bias" in {event.name for event in read_run(tmp_path / "mismatch").events}
    # Two alarms at the first step have one file; the model that was trained is the checkpoint of the weights that scored it.
    file = tmp_path / "mismatch/evidence-1.jsonl.gz"
    assert [path.name for path in file.parent.glob("evidence-*")] == [file.name]
    out = file.parent / "doctor_step_1"
    assert cli.main(["doctor", "--rollouts", str(file), "--model", str(dense), "--quick", "--out", str(out)]) == 1
    found = json.loads((out / "doctor.json").read_text(encoding="utf-8"))
    (cause,) = found["causes"]
    assert (cause["key"], round(cause["parameter"], 2), found["verdict"]) == ("top_p", 0.9, "explained"), cause
    assert cause["remedy"]["trl"].startswith("top_p: 1.0  # or keep it")


@pytest.mark.numeric
def test_uniform_fp16_is_active_on_both_sides(run: Run, risky: Path, tmp_path: Path) -> None:
    """Whether vLLM packs float16 here or not: a block's updates go through vLLM's reload, which undoes and redoes the packing."""
    # A scale at which no gradient overflows: every step is taken, and every update moves the engine.
    block = {"precision": {"dtype": "float16", "init_scale": 1024.0}}
    ran = run(scenarios.train, model=risky, out=tmp_path, block=block)
    result = ran.expect()
    assert result["engine_dtype"] == "float16"
    assert (result["packed"] > 0) == packs_linears(torch.float16)
    assert result["verdict"] == "in_sync" and result["weight_version"] == 3
    assert result["scaler"]["scale"] >= 1
    assert all(math.isfinite(h["mismatch/loss_scale"]) for h in result["history"])
    assert "dtype=float16" in ran.stdout and "\n  audit " in ran.stdout
    header = read_run(tmp_path / "mismatch").header
    assert header["trainer"]["autocast_dtype"] == header["engine"]["model_dtype"] == "float16"
    check_header(header, "vllm")
    assert set(header["trainer"]["parameter_dtypes"]) == {"float32"}
    readiness.expect_told(read_run(tmp_path / "mismatch"))


@pytest.mark.numeric
def test_float32_is_the_oracle(run: Run, dense: Path, tmp_path: Path) -> None:
    result = run(
        scenarios.train, model=dense, out=tmp_path, block={"precision": {"dtype": "float32"}}, bf16=None
    ).expect()
    expect_float32(result["history"], result["float32_errors"])
    assert result["weight_version"] == 3 and result["packed"] > 0


def test_a_decode_that_keeps_old_weights_is_named_and_prefill_is_not(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.kept_decode, model=dense, out=tmp_path).expect()


def test_the_engine_wrapper_stays_settable_and_follows_weights_that_change_without_a_step(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    run(scenarios.seams, model=dense, out=tmp_path).expect()


def test_garbled_experts_are_caught_before_the_repair_and_pass_after(run: Run, moe: Path, tmp_path: Path) -> None:
    broken = run(scenarios.moe_sync, model=moe, out=tmp_path / "broken", repaired=False)
    assert broken.code != 0 and "WeightSyncError" in broken.stderr and "garbled" in broken.stderr
    repaired = run(scenarios.moe_sync, model=moe, out=tmp_path / "repaired", repaired=True).expect()
    assert repaired["verdict"] == "in_sync"
    expect_float32(repaired["history"], repaired["float32_errors"])


def test_an_engine_that_keeps_its_old_weights_is_caught(run: Run, dense: Path, tmp_path: Path) -> None:
    run(scenarios.stale, model=dense, out=tmp_path).expect()


def test_an_engine_that_sleeps_is_verified_awake_and_one_that_loses_a_buffer_is_caught(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    run(scenarios.sleeping, model=dense, out=tmp_path / "whole").expect()
    run(scenarios.sleeping, model=dense, out=tmp_path / "lost", loses="cos_sin_cache").expect()


def test_what_was_measured_since_the_last_log_survives_the_engines_death(run: Run, dense: Path, tmp_path: Path) -> None:
    ran = run(scenarios.engine_dies, model=dense, out=tmp_path)
    assert ran.code != 0
    data = read_run(tmp_path / "mismatch")
    (record,) = data.steps
    assert record.step == 2 and record.metrics["mismatch/sequences"] == 16
    assert data.ends[-1].status == "failed" and data.ends[-1].message.split(": ")[0] in ran.stderr
