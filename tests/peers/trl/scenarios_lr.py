"""Runs of the real TRL with an `lr` section."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from mismatch_ext.adapters.trl import MismatchCallback, MismatchGRPOConfig, MismatchGRPOTrainer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tests.peers.trl.scenarios_training import arguments, build, graded, rows

OWN = {"use_vllm": False, "bf16": False, "max_completion_length": 4}


class Watch(TrainerCallback):
    """Notes the rate in the optimizer while it steps."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Read the rate after every other hook that sets it."""
        optimizer.optimizer.register_step_pre_hook(
            lambda opt, *_: self.rates.append([float(group["lr"]) for group in opt.param_groups])
        )


def joined(model: str, out: str) -> None:
    """Resume a run of stock TRL with an `lr` section, for which its checkpoint holds no state."""
    given = {**OWN, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    rest = {"model": model, "reward_funcs": graded, "train_dataset": rows(40)}
    GRPOTrainer(args=GRPOConfig(**arguments(out, **given, max_steps=2)), **rest).train()
    config = MismatchGRPOConfig(**arguments(out, **given, max_steps=5), mismatch={"lr": {"period": 2}})
    trainer = MismatchGRPOTrainer(args=config, **rest)
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-2")
    logged = [
        entry["mismatch/lr_multiplier"] for entry in trainer.state.log_history if "mismatch/lr_multiplier" in entry
    ]
    assert logged == [0.5, 0.5, 0.25]


class Interrupt(TrainerCallback):
    """Ends the first training at a step, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step: int | None = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Interrupt once."""
        if state.global_step == self.step:
            self.step = None
            raise KeyboardInterrupt


def again(model: str, out: str, kind: str) -> None:
    """Interrupt a training at step 5, where the multiplier is 0.25, and train anew: it begins with the whole rate."""
    given = arguments(out, **OWN, max_steps=6, lr_scheduler_type="constant", num_iterations=2)
    block = {"lr": {"period": 2, "warmup_steps": 0}}
    rest = {"model": model, "reward_funcs": graded, "train_dataset": rows(40)}
    if kind == "callback":
        trainer = GRPOTrainer(args=GRPOConfig(**given), callbacks=[MismatchCallback(block)], **rest)
    else:
        trainer = MismatchGRPOTrainer(args=MismatchGRPOConfig(**given, mismatch=block), **rest)
    watch = Watch()
    trainer.add_callback(Interrupt(5))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.add_callback(watch)
    trainer.train()
    assert [rate for (rate, *_) in watch.rates] == [1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4, 2.5e-4]


def skipped(model: str, out: str) -> None:
    """Overflow float16 at first, on every machine: neither the linear schedule nor the rule moves while steps are skipped."""
    scale = {"init_scale": 2.0**17, "growth_interval": 1000}
    block = {"lr": {"period": 1}, "precision": {"dtype": "float16", **scale}}
    watch = Watch()
    trainer = build(model, out, block, [watch], max_steps=14)
    trainer.train()
    scales = [entry["mismatch/loss_scale"] for entry in trainer.state.log_history if "loss" in entry]
    count = sum(now < before for before, now in pairwise([scale["init_scale"], *scales]))
    assert 1 <= count <= 12
    wanted = [1e-3 * (1 - step / 14) * max(0.5**step, 0.1) for step in range(14 - count)]
    assert [rates[0] for rates in watch.rates] == pytest.approx(wanted, rel=1e-12)


def whole_batch(model: str, out: str) -> None:
    """Generate four times per optimizer step: the lengths that lead the rate are those that are logged."""
    given = arguments(
        out, **OWN, max_steps=3, gradient_accumulation_steps=4, steps_per_generation=1, per_device_train_batch_size=4
    )
    args = MismatchGRPOConfig(**given, mismatch={"lr": {"baseline_window": 50}})
    trainer = MismatchGRPOTrainer(model=model, reward_funcs=graded, args=args, train_dataset=rows(40))
    taken: list[float] = []

    class Read(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Read what the controller remembers, before it is taken off."""
            taken.extend(m.value for m in trainer.mm.lr.rate.state.history)

    trainer.callback_handler.callbacks.insert(0, Read())
    trainer.train()
    logged = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(taken) == 3 and taken == pytest.approx(logged, rel=1e-12)
