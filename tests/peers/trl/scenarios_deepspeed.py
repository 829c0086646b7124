"""Runs of the real TRL under the real DeepSpeed: `torchrun ... -m tests.peers.trl.scenarios_deepspeed NAME '{json}'`.

A scenario runs on every rank, and checks there what it has found. DeepSpeed is in a directory of its own, because TRL and
transformers import it wherever they find it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from mismatch_ext.adapters.accelerate.deepspeed import engine_of
from mismatch_ext.adapters.accelerate.sharded import held
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from mismatch_ext.adapters.vllm.engine import runner
from transformers import TrainerCallback

from mismatch_ext.errors import MismatchError, PrecisionError
from mismatch_ext.lr import innermost
from mismatch_ext.weights import fingerprint
from tests.peers.trl.scenarios_training import arguments, graded, rows

EAGER = {"experts_implementation": "eager"}


def allow_float16() -> None:
    """Let DeepSpeed train in float16 on a CPU: torch has all that it takes, and DeepSpeed asks for a unit of the CPU's."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    """Return DeepSpeed's configuration as its users write it for transformers."""
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "train_batch_size")
    zero = {"stage": stage}
    halves = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    return {"zero_optimization": zero, **halves, **dict.fromkeys(auto, "auto"), **more}


def build(model: str, out: str, block: Any, stage: int, more: dict[str, Any] | None = None, **overrides: Any) -> Any:
    """Build a trainer under DeepSpeed."""
    AcceleratorState._reset_state()
    given = {"bf16": None if "precision" in block else False, "router_aux_loss_coef": 0.0,
             "model_init_kwargs": EAGER, "deepspeed": config_of(stage, **(more or {})), **overrides}  # fmt: skip
    common = {"model": model, "reward_funcs": graded, "train_dataset": rows()}
    return MismatchGRPOTrainer(args=MismatchGRPOConfig(**arguments(out, mismatch=block, **given)), **common)


class Rates(TrainerCallback):
    """Notes the rates that the torch optimizer steps with in each step of DeepSpeed's: it is called for one group at a time."""

    def __init__(self) -> None:
        self.seen: list[set[float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Look on, behind every hook that is there."""
        if not self.seen:
            innermost(optimizer).register_step_pre_hook(self._note)
        self.seen.append(set())

    def _note(self, stepped: Any, *_: Any) -> None:
        self.seen[-1].update(group["lr"] for group in stepped.param_groups)


def release(llm: Any) -> None:
    """Free the KV cache of an engine, which its process would keep: a gigabyte of each."""
    for cache in runner(llm).kv_caches:
        cache.untyped_storage().resize_(0)


@dataclass(frozen=True)
class Trained:
    """A run under DeepSpeed that has ended."""

    logged: list[dict[str, Any]]
    rates: list[list[float]]
    weights: str
    steps: list[int]
    """Steps that DeepSpeed has taken, and those that it skipped."""

    def series(self, name: str) -> list[float]:
        """Return a metric of each step."""
        return [entry[name] for entry in self.logged]


def trained(
    model: str, out: str, stage: int, block: Any, more: Any = None, *, verdict: str | None = "in_sync", resume: str | None = None,
    **overrides: Any,
) -> Trained:  # fmt: skip
    """Train three steps, of which the last update's verdict is this one."""
    trainer = build(model, out, block, stage, more, **overrides)
    rates = Rates()
    trainer.add_callback(rates)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        release(trainer.vllm_generation.llm)
    engine = engine_of(trainer.accelerator)
    assert engine.zero_optimization_stage() == stage and trainer.mm.checked.weight_version == 3
    assert (trainer.mm.verdict and trainer.mm.verdict.status) == verdict and not trainer.mm.checks.counts
    return Trained(
        logged=[entry for entry in trainer.state.log_history if "loss" in entry],
        rates=[sorted(seen) for seen in rates.seen],
        weights=fingerprint(held(trainer.accelerator.unwrap_model(trainer.model))),
        steps=[engine.global_steps, engine.skipped_steps],
    )


FLOAT32 = {"precision": {"dtype": "float32"}}
FP16 = {"precision": {"dtype": "float16"}}
PERIOD = {"period": 2, "warmup_steps": 0}
# The model is small, and its loss at DeepSpeed's first scale overflows.
SMALL_SCALE = {"fp16": {"enabled": "auto", "initial_scale_power": 8}}
GAPS = ("mismatch/logp_abs_diff_mean", "mismatch/weight_sync_gap")


def expect_agreement(run: Trained) -> None:
    """Check that both sides agree in float32 after every update."""
    assert all(max(run.series(name)) < 1e-5 for name in GAPS)


def dense(model: str, out: str, stage: int) -> None:
    """Run each section on one process."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = trained(model, f"{out}/whole", stage, FLOAT32, **saving)
    expect_agreement(whole)
    resumed = trained(model, f"{out}/whole", stage, FLOAT32, resume=f"{out}/whole/checkpoint-2", **saving)
    assert resumed.logged[-1]["loss"] == whole.logged[-1]["loss"] and resumed.weights == whole.weights
    assert resumed.steps == whole.steps == [3, 0]

    measured = trained(model, f"{out}/measured", stage, {})
    assert all(min(measured.series(name)) > 0 for name in ("mismatch/k3_kl", "mismatch/weight_sync_gap"))

    # With masks, over the eight tokens that are left of each; over all of them the truncated mass would stand in the gap.
    sections = {**FLOAT32, "sampling_mask": {}, "correction": {"preset": "decoupled_token_is"}, "lr": PERIOD}
    found = trained(model, f"{out}/sections", stage, sections, top_k=8)
    expect_agreement(found)
    expect_halved(found)
    assert found.weights != whole.weights

    half = trained(model, f"{out}/half", stage, {**FP16, "lr": PERIOD}, SMALL_SCALE)
    expect_halved(half)
    assert half.series("mismatch/loss_scale") == [256.0] * 3


def faulty(model: str, out: str, stage: int) -> None:
    """Skip every step, have a setting refused, lose updates, and train without their verification."""
    # Steps that DeepSpeed skips are not counted: by the period, the second step would have been halved.
    skipped = trained(model, f"{out}/skipped", stage, {**FP16, "lr": PERIOD}, verdict="unchanged")
    assert skipped.steps == [3, 3] and skipped.rates == [[], [], []]
    assert skipped.series("mismatch/overflow_steps") == [1.0, 2.0, 3.0]
    scales = skipped.series("mismatch/loss_scale")
    assert scales[0] == 2.0**16 and scales == sorted(scales, reverse=True) and scales[-1] < scales[0]
    assert skipped.series("mismatch/lr_multiplier") == [1.0] * 3 and skipped.series("learning_rate") == [1e-3] * 3

    with pytest.raises(MismatchError, match="mismatch.precision.init_scale"):
        build(model, f"{out}/scale", {"precision": {"dtype": "float16", "init_scale": 256.0}}, stage)
    stale(model, f"{out}/stale", stage)
    # Verifying changes no bit of what is learned.
    off = {**FLOAT32, "monitor": {"weight_sync": "off"}}
    whole, unverified = (
        trained(model, f"{out}/{name}", stage, block, verdict=verdict)
        for name, block, verdict in (("whole", FLOAT32, "in_sync"), ("off", off, None))
    )
    assert unverified.weights == whole.weights


def expect_halved(run: Trained) -> None:
    """Check that the rate is multiplied in the engine's own step; the schedule is linear over three steps."""
    assert run.series("mismatch/lr_multiplier") == [1.0, 1.0, 0.5]
    rates = [rate for (rate,) in run.rates]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 0.5 * 1e-3 / 3], rel=1e-12)
    assert run.series("learning_rate") == pytest.approx(rates, rel=1e-12)


class SendsNothing(TrainerCallback):
    """Lets the second weight update and those after it send nothing."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Take the way to the engine away."""
        self._trainer.mm.engine.update = lambda plain, weights: None


def stale(model: str, out: str, stage: int) -> None:
    """Lose two weight updates in a row."""
    trainer = build(model, out, FLOAT32, stage)
    trainer.add_callback(SendsNothing(trainer))
    with pytest.raises(MismatchError, match="weight update 3: stale"):
        trainer.train()
    assert trainer.state.global_step == 2
    release(trainer.vllm_generation.llm)


def experts(model: str, out: str) -> None:
    """Replay routes and verify every update on two processes, an engine for each."""
    replays = {**FLOAT32, "routing": {"mode": "R3", "measured": 1.0}, "kl": {"coef": 0.05}}
    for stage in (2, 3):
        found = trained(model, f"{out}/{stage}", stage, replays)
        expect_agreement(found)
        assert found.series("mismatch/routing/set_mismatch_frac") == [0.0] * 3
        first, second = gather_object([[[entry["mismatch/k3_kl"] for entry in found.logged], found.weights]])
        assert first[0] == second[0]
        # Each holds another half of the weights, or both all of them.
        assert (first[1] == second[1]) == (stage == 2)
    half = {**SMALL_SCALE, "communication_data_type": "fp16"}
    with pytest.raises(PrecisionError, match="gradient reduction: expected float32, found float16"):
        trained(model, f"{out}/reduced", 2, {**FP16, "routing": {"mode": "R3"}}, half)


def main() -> None:
    """Run the scenario named on the command line."""
    name, payload = sys.argv[1], json.loads(sys.argv[2])
    faulthandler.dump_traceback_later(payload.pop("limit"), exit=True)
    allow_float16()
    torch.manual_seed(0)
    globals()[name](**payload)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
