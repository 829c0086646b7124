"""Runs of the real TRL with all sections, alarms, a callback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from mismatch_ext.adapters.trl import MismatchCallback
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext import patching
from tests.peers.trl.scenarios_training import AtStep, arguments, build, digest_of, graded, keep_names, rows

KEPT = ("loss", "grad_norm", "reward", "learning_rate", "completions/mean_length")


def outcome(trainer: Any) -> dict[str, Any]:
    """Return what tests compare."""
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    out = Path(trainer.args.output_dir)
    return {
        "history": [{k: v for k, v in entry.items() if k in KEPT or k.startswith("mismatch/")} for entry in logs],
        "parameters": digest_of(trainer.model),
        "step": trainer.state.global_step,
        "checkpoints": sorted(path.name for path in out.glob("checkpoint-*")),
    }


def everything(
    model: str, out: str, block: dict[str, Any], kill_after: int | None = None, resume: str | None = None, **rest: Any
) -> dict[str, Any]:
    """Train with a block, dying after a step or resuming, with vLLM unless told otherwise."""
    callbacks = [AtStep(kill_after, lambda: os.kill(os.getpid(), signal.SIGKILL))] if kill_after else []
    rest = {"model_init_kwargs": {"experts_implementation": "eager"}, **rest}
    with put_in_place() as names:
        trainer = build(model, out, block, callbacks, **rest)
        keep_names(trainer)
        trainer.train(resume_from_checkpoint=resume)
    rollouts = vars(trainer.mm.checked) if trainer.use_vllm else {}
    return {**outcome(trainer), "patched": sorted(names), "patch_digest": rollouts.get("patch_digest")}


@contextmanager
def put_in_place() -> Iterator[set[str]]:
    """Collect the names of all patches that are put in place meanwhile, for however short a time."""
    names: set[str] = set()

    def write(place: Any) -> None:
        names.add(place.patch.name)
        plain(place)

    plain = patching._Place.write
    with mock.patch.object(patching._Place, "write", write):
        yield names


class Lengthen(TrainerCallback):
    """Lets responses grow from 4 tokens to 16 at step 3: what a random model samples hardly ever ends before."""

    trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the longest response."""
        self.trainer.generation_config.max_new_tokens = 16 if state.global_step >= 3 else 4


def by_callback(
    model: str, out: str, block: dict[str, Any], kill_after: int | None = None, resume: str | None = None, **rest: Any
) -> dict[str, Any]:
    """Train stock GRPOTrainer with our callback."""
    callbacks: list[Any] = [MismatchCallback(block), Lengthen()]
    if kill_after:
        callbacks.append(AtStep(kill_after, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    given = {"use_vllm": False, "bf16": False, "max_completion_length": 4, **rest}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=graded,
        args=GRPOConfig(**arguments(out, **given)),
        train_dataset=rows(40),
        callbacks=callbacks,
    )
    Lengthen.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)
