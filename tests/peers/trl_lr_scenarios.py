"""Runs of the real TRL with an `lr` section: `python -m tests.peers.trl_lr_scenarios NAME '{json}'`."""

from __future__ import annotations

import os
import signal
from typing import Any

from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.peers.scenarios import arguments, digest_of, graded, main, rows

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


if __name__ == "__main__":
    main()
