"""Runs of the real TRL with an `lr` section."""

from __future__ import annotations

import os
import signal
from typing import Any

from mismatch_ext.adapters.trl import MismatchCallback, MismatchGRPOConfig, MismatchGRPOTrainer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

OWN = {"use_vllm": False, "bf16": False, "max_completion_length": 4}


class Watch(TrainerCallback):
    """Notes the rate in the optimizer while it steps; grows responses, or dies, at a step."""

    def __init__(self, grow_at: int | None = None, kill_after: int | None = None) -> None:
        self.grow_at, self.kill_after = grow_at, kill_after
        self.trainer: Any = None
        self.rates: list[list[float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Read the rate after every other hook that sets it."""
        optimizer.optimizer.register_step_pre_hook(
            lambda opt, *_: self.rates.append([float(group["lr"]) for group in opt.param_groups])
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let responses grow from 4 tokens to 16: a random model hardly ever ends one."""
        if self.grow_at is not None and state.global_step >= self.grow_at:
            self.trainer.generation_config.max_new_tokens = 16

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Die as from outside, before this step is saved."""
        if state.global_step == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    model: str,
    out: str,
    lr: dict[str, Any] | None,
    grow_at: int | None = None,
    kill_after: int | None = None,
    resume: str | None = None,
    rest: dict[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Train with an `lr` section, or as stock; return rates and metrics of every step."""
    given = arguments(out, **{**OWN, **overrides})
    if lr is None:
        kind, config = GRPOTrainer, GRPOConfig(**given)
    else:
        kind, config = MismatchGRPOTrainer, MismatchGRPOConfig(**given, mismatch={"lr": lr, **(rest or {})})
    trainer = kind(model=model, reward_funcs=graded, args=config, train_dataset=rows(40))
    watch = Watch(grow_at, kill_after)
    watch.trainer = trainer
    trainer.add_callback(watch)
    trainer.train(resume_from_checkpoint=resume)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "applied": watch.rates,
        "logged": [entry["learning_rate"] for entry in logs],
        "lengths": [entry["completions/mean_length"] for entry in logs],
        "metrics": [{k: v for k, v in entry.items() if k.startswith("mismatch/lr")} for entry in logs],
        "scale": [entry.get("mismatch/loss_scale") for entry in logs],
        "between": [float(group["lr"]) for group in trainer.optimizer.param_groups],
        "parameters": digest_of(trainer.model),
    }


class Interrupt(TrainerCallback):
    """Ends the first training at a step, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Interrupt once."""
        if state.global_step == self.step:
            self.step = None
            raise KeyboardInterrupt


def again(model: str, out: str, kind: str) -> list[float]:
    """Interrupt a training, train anew, and return the rates that were applied from then on."""
    given = arguments(out, **OWN, max_steps=6, lr_scheduler_type="constant", num_iterations=2)
    block = {"lr": {"period": 2, "warmup_steps": 0}}
    rest = {"model": model, "reward_funcs": graded, "train_dataset": rows(40)}
    if kind == "callback":
        trainer = GRPOTrainer(args=GRPOConfig(**given), callbacks=[MismatchCallback(block)], **rest)
    else:
        trainer = MismatchGRPOTrainer(args=MismatchGRPOConfig(**given, mismatch=block), **rest)
    watch = Watch()
    trainer.add_callback(Interrupt(5))
    try:
        trainer.train()
    except KeyboardInterrupt:
        trainer.add_callback(watch)
        trainer.train()
    return [rates[0] for rates in watch.rates]


def whole_batch(model: str, out: str) -> dict[str, Any]:
    """Generate four times per optimizer step, and return the lengths that were logged and those that lead the rate."""
    given = arguments(
        out, **OWN, max_steps=3, gradient_accumulation_steps=4, steps_per_generation=1, per_device_train_batch_size=4
    )
    block = {"lr": {"baseline_window": 50}}
    trainer = MismatchGRPOTrainer(
        model=model,
        reward_funcs=graded,
        args=MismatchGRPOConfig(**given, mismatch=block),
        train_dataset=rows(40),
    )
    taken: list[list[float]] = []

    class Read(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Read what the controller remembers, before it is taken off."""
            taken.append([m.value for m in trainer.mm.lr.rate.state.history])

    trainer.callback_handler.callbacks.insert(0, Read())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"logged": [entry["completions/mean_length"] for entry in logs], "taken": taken[0]}
