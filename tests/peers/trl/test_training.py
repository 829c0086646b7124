"""Real TRL and real vLLM in one process, on tiny models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mismatch_ext.adapters import cli
from transformers import AutoModelForCausalLM, AutoTokenizer

from mismatch_ext.log_reading import read_run
from mismatch_ext.report import build
from tests.cpu import packs_linears, without_float16_packing
from tests.models import tiny_model
from tests.oracle import expect_float32
from tests.peers.conformance import readiness
from tests.peers.conformance.origins import check_header
from tests.peers.scenarios import Run, named
from tests.peers.trl.ends import expect_ends

if TYPE_CHECKING:
    from tests.peers.trl import scenarios_training as scenarios
else:
    scenarios = named("tests.peers.trl.scenarios_training")

pytestmark = pytest.mark.engine
ALWAYS = ("logp_abs_diff_mean", "k3_kl", "f_2", "ess_token", "weight_sync_gap", "alarms_raised", "masked_token_frac")
FP16 = {"precision": {"dtype": "float16"}}


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
    # A logger gets the short list; the metrics file and `trainer_state.json` get everything.
    assert set(measured["seen"][-1]) == {f"mismatch/{name}" for name in ALWAYS}
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
    # Two alarms at the first step have one file; the model that was trained is the checkpoint of the weights that scored it.
    file = tmp_path / "mismatch/evidence-1.jsonl.gz"
    assert [path.name for path in file.parent.glob("evidence-*")] == [file.name]
    out = file.parent / "doctor_step_1"
    assert cli.main(["doctor", "--rollouts", str(file), "--model", str(dense), "--quick", "--out", str(out)]) == 1
    found = json.loads((out / "doctor.json").read_text(encoding="utf-8"))
    (cause,) = found["causes"]
    assert (cause["key"], round(cause["parameter"], 2), found["verdict"]) == ("top_p", 0.9, "explained"), cause
    assert cause["remedy"]["trl"].startswith("top_p: 1.0  # or keep it")
    page = build(tmp_path / "mismatch").path.read_text(encoding="utf-8").partition("<script>")[0]
    assert "Why the two sides differ" in page and "--rollouts" in page


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


def test_the_gap_is_measured_with_importance_sampling_off_too(run: Run, dense: Path, tmp_path: Path) -> None:
    result = run(scenarios.train, model=dense, out=tmp_path, block={"precision": {"dtype": "float32"}},
        vllm_importance_sampling_correction=False,
    ).expect()  # fmt: skip
    expect_float32(result["history"], result["float32_errors"])


def test_mixin_over_a_users_own_trainer(run: Run, dense: Path, tmp_path: Path) -> None:
    result = run(scenarios.mixin, model=dense, out=tmp_path, block={}).expect()
    assert result["own_called"] == 1
    assert "mismatch/k3_kl" in result["history"][0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_adapters_reach_the_engine_and_are_left_unmerged(
    run: Run, untied: Path, tmp_path: Path, dtype: str
) -> None:
    result = run(scenarios.lora, model=untied, out=tmp_path, dtype=dtype).expect()
    assert result["verdict"] == "in_sync" and result["moved"] > 1e-2 and result["merged"] == []
    if dtype == "float32":
        expect_float32(result["history"], result["float32_errors"])


def test_a_decode_that_keeps_old_weights_is_named_and_prefill_is_not(run: Run, dense: Path, tmp_path: Path) -> None:
    result = run(scenarios.kept_decode, model=dense, out=tmp_path, dtype="float16").expect()
    assert result["error"] is not None, result
    assert "decode path does not compute with the weights that its prefill has" in result["error"]
    # Kept after the first step; nothing of the first batch that it would have sampled is trained on.
    assert result["steps"] == 1
    verdict = result["verdict"]
    assert verdict["status"] == "stale_decode" and verdict["gap_mean"] < verdict["threshold"], verdict


def test_the_engine_wrapper_stays_settable_and_follows_weights_that_change_without_a_step(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    result = run(scenarios.seams, model=dense, out=tmp_path).expect()
    assert result["inner"] == 3 and result["longest"] <= 3
    assert result["updates"] == 1 and result["verdict"] == "in_sync"


def test_metrics_reach_the_stream_and_the_trainers_loggers(run: Run, dense: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(scenarios.train, model=dense, out=tmp_path, block={}, report_to="tensorboard",
        env={"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tb")},
    ).expect()  # fmt: skip
    steps, values = read_run(tmp_path / "mismatch").series("mismatch/k3_kl")
    assert steps == [1, 2, 3]
    assert values == [h["mismatch/k3_kl"] for h in result["history"]]
    board = EventAccumulator(str(next(tmp_path.rglob("events.out.*")).parent)).Reload()
    logged = [e.value for e in board.Scalars("train/mismatch/k3_kl")]
    assert logged == pytest.approx(values, rel=1e-6)


def test_garbled_experts_are_caught_before_the_repair_and_pass_after(run: Run, moe: Path, tmp_path: Path) -> None:
    broken = run(scenarios.moe_sync, model=moe, out=tmp_path / "broken", repaired=False)
    assert broken.code != 0 and "WeightSyncError" in broken.stderr and "garbled" in broken.stderr
    repaired = run(scenarios.moe_sync, model=moe, out=tmp_path / "repaired", repaired=True).expect()
    assert repaired["verdict"] == "in_sync"
    expect_float32(repaired["history"], repaired["float32_errors"])


def test_an_engine_that_keeps_its_old_weights_is_caught(run: Run, dense: Path, tmp_path: Path) -> None:
    ran = run(scenarios.stale, model=dense, out=tmp_path, dtype="bfloat16")
    assert ran.code != 0 and "WeightSyncError" in ran.stderr and "stale" in ran.stderr


def test_an_engine_that_sleeps_is_verified_awake_and_one_that_loses_a_buffer_is_caught(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    found = run(scenarios.sleeping, model=dense, out=tmp_path / "whole").expect()
    assert found["error"] == "" and found["verdict"] in ("in_sync", "unchanged")
    # The cache is woken for the probes, and again by TRL.
    each = ["kv_cache", "loaded", "kv_cache", "asleep"]
    assert found["slept"] == ["asleep", *each * len(found["history"])]
    lost = run(scenarios.sleeping, model=dense, out=tmp_path / "lost", loses="cos_sin_cache").expect()
    # The first update is doubted, and the second one leaves no doubt.
    assert "weight update 2: garbled" in lost["error"] and len(lost["history"]) == 1


def test_engine_death_is_named_and_no_metric_is_lost(run: Run, dense: Path, tmp_path: Path) -> None:
    ran = run(scenarios.engine_dies, model=dense, out=tmp_path)
    assert ran.code != 0
    data = read_run(tmp_path / "mismatch")
    assert data.series("mismatch/k3_kl")[0] == [1, 2]
    assert data.ends[-1].status == "failed" and data.ends[-1].message.split(": ")[0] in ran.stderr, data.ends[
        -1
    ].message


def test_what_was_measured_since_the_last_log_survives_a_failure(run: Run, dense: Path, tmp_path: Path) -> None:
    ran = run(scenarios.engine_dies, model=dense, out=tmp_path, logging_steps=10)
    assert ran.code != 0
    (record,) = read_run(tmp_path / "mismatch").steps
    assert record.step == 2 and record.metrics["mismatch/sequences"] == 16


def test_an_evaluation_before_resuming_joins_the_resumed_run(run: Run, dense: Path, tmp_path: Path) -> None:
    died = run(scenarios.killed, model=dense, out=tmp_path, block={}, kill_after=3)
    assert died.code == -9
    checkpoint = tmp_path / "checkpoint-2"
    ran = run(scenarios.evaluated_then_resumed, model=dense, out=tmp_path, resume=checkpoint).expect()
    assert [text.split(":")[0] for _, text in ran["missing in the evaluation"]] == [
        "no end line"
    ]  # of the killed training
    data = read_run(tmp_path / "mismatch")
    assert data.series("mismatch/k3_kl")[0] == [1, 2, 3, 4]
    assert data.series("mismatch/k3_kl", "eval/default")[0] == [0]
    assert (data.ending.of, data.ending.status) == ("training", "completed")


def test_vocabulary_larger_than_the_tokenizer_is_told_with_the_size_of_the_effect(run: Run, tmp_path: Path) -> None:
    model = tiny_model("dense", tmp_path / "model", extra_vocabulary=48)
    ran = run(scenarios.train, model=model, out=tmp_path / "run", block={}, max_steps=1)
    ran.expect()
    assert "64 ids, its tokenizer 16: 48 ids can be sampled but not decoded" in ran.stderr
    (event,) = [e for e in read_run(tmp_path / "run" / "mismatch").events if e.name == "vocabulary"]
    assert 0.3 < event.data["mass_mean"] < 1  # 48 of 64 ids in a random model


def test_a_checkpoint_that_does_not_fit_fp16_is_refused_before_the_first_step(
    run: Run, dense: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5  # float16 ends at 65504
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(dense).save_pretrained(tmp_path / "model")
    ran = run(scenarios.train, model=tmp_path / "model", out=tmp_path / "run", block=FP16)
    assert ran.code != 0 and "PrecisionError" in ran.stderr
    assert "up_proj" in ran.stderr and "mismatch.precision.readiness='warn'" in ran.stderr


def test_top_p_is_said_to_bias_the_ratio(run: Run, dense: Path, tmp_path: Path) -> None:
    ran = run(scenarios.train, model=dense, out=tmp_path, block={}, top_p=0.9, max_steps=1)
    result = ran.expect()
    assert result["history"][0]["mismatch/support_truncated"] == 1.0
    assert "top_p" in ran.stderr
    assert [e.name for e in read_run(tmp_path / "mismatch").events] == ["ratio_bias"]


def test_penalties_of_the_engine_alone_are_said(run: Run, dense: Path, tmp_path: Path) -> None:
    run(
        scenarios.train, model=dense, out=tmp_path, block={}, max_steps=1, generation_kwargs={"presence_penalty": 0.5}
    ).expect()
    (event,) = read_run(tmp_path / "mismatch").events
    assert event.name == "ratio_bias" and "presence_penalty" in event.message


@pytest.mark.parametrize("form", ["json", "yaml-file"])
def test_the_block_from_a_command_line_and_from_a_config_file(run: Run, tmp_path: Path, form: str) -> None:
    if form == "json":
        argv = ["--mismatch", json.dumps(FP16)]
    else:
        (tmp_path / "config.yaml").write_text("mismatch:\n  precision:\n    dtype: float16\n")
        argv = ["--config", str(tmp_path / "config.yaml")]
    argv += ["--output_dir", str(tmp_path), "--use_vllm", "true", "--use_cpu", "true"]
    result = run(scenarios.parsed, argv=argv).expect()
    assert (result["fp16"], result["bf16"]) == (True, False)
    assert result["mismatch"]["precision"]["dtype"] == "float16"
