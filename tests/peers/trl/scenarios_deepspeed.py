"""Runs of the real TRL under the real DeepSpeed: `torchrun ... -m tests.peers.trl.scenarios_deepspeed NAME '{json}'`.

A scenario runs on every rank; what the ranks return is gathered, and rank 0 writes the list to the payload's file `result`.
DeepSpeed is in a directory of its own, because TRL and transformers import it wherever they find it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from mismatch_ext.adapters.accelerate.deepspeed import engine_of
from mismatch_ext.adapters.accelerate.sharded import held
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from mismatch_ext.adapters.vllm.engine import runner
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.errors import MismatchError
from mismatch_ext.lr import innermost
from mismatch_ext.weights import fingerprint
from tests.peers.trl.scenarios_training import arguments, graded, rows

EAGER = {"experts_implementation": "eager"}
LOGGED = ("loss", "grad_norm", "learning_rate")


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
    """Build a trainer under DeepSpeed; without a block it is TRL's own."""
    AcceleratorState._reset_state()
    given = {"bf16": None if block is not None and "precision" in block else False, "router_aux_loss_coef": 0.0,
             "model_init_kwargs": EAGER, "deepspeed": config_of(stage, **(more or {})), **overrides}  # fmt: skip
    common = {"model": model, "reward_funcs": graded, "train_dataset": rows()}
    if block is None:
        return GRPOTrainer(args=GRPOConfig(**arguments(out, **given)), **common)
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


class SendsNothing(TrainerCallback):
    """Lets the second weight update and those after it send nothing."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Take the way to the engine away."""
        self.trainer.mm.engine.update = lambda plain, weights: None


def outcome(trainer: Any, resume: str | None = None) -> dict[str, Any]:
    """Train, and return what tests compare."""
    rates = Rates()
    trainer.add_callback(rates)
    trainer.train(resume_from_checkpoint=resume)
    engine = engine_of(trainer.accelerator)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    mm = getattr(trainer, "mm", None)
    verdict = None if mm is None else mm.verdict
    return {
        "stage": engine.zero_optimization_stage(),
        "logged": [{key: value for key, value in entry.items() if key in LOGGED or "mismatch/" in key} for entry in entries],
        "rates": [sorted(seen) for seen in rates.seen],
        "weights": fingerprint(held(trainer.accelerator.unwrap_model(trainer.model))),
        "parameters": sorted({str(p.dtype) for p in trainer.model.parameters()}),
        "steps": [engine.global_steps, engine.skipped_steps],
        "verdict": None if verdict is None else verdict.status,
        "version": getattr(getattr(mm, "checked", None), "weight_version", None),
        "failed": None if mm is None else dict(mm.checks.counts),
    }  # fmt: skip


def release(llm: Any) -> None:
    """Free the KV cache of an engine, which its process would keep: a gigabyte of each."""
    for cache in runner(llm).kv_caches:
        cache.untyped_storage().resize_(0)


def one(
    model: str, out: str, stage: int, block: Any = None, more: Any = None, overrides: Any = None, *, resume: str | None = None,
    stale: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Run one trainer, or return why it was refused and whether an engine had been built."""
    trainer = None
    try:
        trainer = build(model, out, block, stage, more, **(overrides or {}))
        if stale:
            nothing = SendsNothing()
            nothing.trainer = trainer
            trainer.add_callback(nothing)
        return outcome(trainer, resume)
    except MismatchError as error:
        step = None if trainer is None else trainer.state.global_step
        return {"refused": f"{type(error).__name__}: {error}", "step": step}
    finally:
        if trainer is not None:
            release(trainer.vllm_generation.llm)


def several(runs: dict[str, dict[str, Any]], out: str) -> dict[str, Any]:
    """Run trainers one after the other."""
    return {name: one(out=f"{out}/{name}", **given) for name, given in runs.items()}


def main() -> None:
    """Run the scenario named on the command line."""
    name, payload = sys.argv[1], json.loads(sys.argv[2])
    faulthandler.dump_traceback_later(payload.pop("limit"), exit=True)
    allow_float16()
    torch.manual_seed(0)
    result = Path(payload.pop("result"))
    found = gather_object([globals()[name](**payload)])
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found, default=str), encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
