"""Stock trainers of TRL, alone and with `attach`."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, attach
from mismatch_ext.adapters.vllm import weights
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTTrainer
from trl.generation import vllm_generation

from mismatch_ext.errors import ConfigError
from mismatch_ext.log_reading import read_run
from mismatch_ext.report import build as build_report
from tests.peers.engines.sleeping import note_updates, sleepy
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

FLOAT32 = {"bf16": False, "model_init_kwargs": {"dtype": "float32"}}


class Mine(GRPOTrainer):
    """A user's trainer: another loss, and a batch whose advantages are halved."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return 0.5 * super()._compute_loss(model, inputs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        return {**output, "advantages": output["advantages"] / 2}


class Counted(TrainerCallback):
    """Counts the model's forward passes and the engine's calls by step; an attribute of `seen` for each."""

    def __init__(self) -> None:
        self.passes = self.calls = 0
        self.seen: list[list[int]] = []

    def watch(self, trainer: Any) -> None:
        """Count from here on."""
        trainer.add_callback(self)
        trainer.model.register_forward_pre_hook(lambda *_: self._add("passes"))
        llm = trainer.vllm_generation.llm
        generate = llm.generate

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._add("calls")
            return generate(*args, **kwargs)

        llm.generate = counted

    def _add(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note what the step took, or what came before the first."""
        self.seen.append([self.passes, self.calls])
        self.passes = self.calls = 0


@contextmanager
def eager() -> Iterator[None]:
    """Let TRL's engine compile nothing, on both sides of a comparison: what torch compiles depends on what it did before."""
    with mock.patch.object(vllm_generation, "LLM", functools.partial(vllm_generation.LLM, enforce_eager=True)):
        yield


def build(model: str, out: str, cls: str = "stock", **overrides: Any) -> Any:
    """Build a trainer of TRL's class or of a user's, with a test set."""
    with eager():
        return {"stock": GRPOTrainer, "mine": Mine}[cls](
            model=model,
            reward_funcs=graded,
            args=GRPOConfig(**arguments(out, **FLOAT32 | overrides)),
            train_dataset=rows(),
            eval_dataset=rows(1),
        )


def train(
    model: str, out: str, attached: bool, cls: str = "stock", lost: bool = False, **overrides: Any
) -> dict[str, Any]:
    """Train and evaluate; return all that training has left, and what was measured if something measured."""
    trainer, count, sampled = build(model, out, cls, **overrides), Counted(), []
    dropped: list[float] = []
    score = trainer._generate_and_score_completions

    def noted(inputs: Any) -> Any:
        output = score(inputs)
        sampled.append(output["completion_ids"].tolist())
        if "importance_sampling_ratio" in output:
            dropped.append(float((output["importance_sampling_ratio"] == 0).double().mean()))
        return output

    trainer._generate_and_score_completions = noted
    count.watch(trainer)
    measured = attach(trainer) if attached else None
    count.on_step_end()
    updates: list[int] = []
    update = weights.update_weights

    def forgetful(llm: Any, named: Any) -> None:
        updates.append(1)
        if not lost or len(updates) == 1:
            update(llm, named)

    with (
        mock.patch("mismatch_ext.adapters.vllm.update_weights", forgetful),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        trainer.train()
        evaluated = trainer.evaluate()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "parameters": digest_of(trainer.model),
        "optimizer": hashlib.sha256(
            b"".join(
                value.numpy().tobytes()
                for state in trainer.optimizer.state_dict()["state"].values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            )
        ).hexdigest(),
        "sampled": sampled,
        "dropped": dropped,
        "random": torch.get_rng_state().sum().item(),
        "training": trainer.model.training,
        "checkpointing": trainer.model.is_gradient_checkpointing,
        "logged": [_stable(entry) for entry in [*logged, evaluated]],
        "passes and calls": count.seen,
    }
    if measured is None:
        return found
    run = read_run(measured.log.run_dir)
    return found | {
        "host": run.header["run"]["host"],
        "measured": [{k: v for k, v in entry.items() if "mismatch/" in k} for entry in [*logged, evaluated]],
        "verdict": measured.verdict and measured.verdict.status,
        "events": [[event.name, event.message] for event in run.events],
        "told": [str(warning.message) for warning in told],
        "report": len(build_report(measured.log.run_dir).path.read_text(encoding="utf-8")),
    }


def _stable(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what TRL logged, without times and without what we added."""
    timed = ("time", "runtime", "per_second")
    return {k: v for k, v in entry.items() if "mismatch/" not in k and not k.endswith(timed)}


def sleeping(model: str, out: str, loses: str = "") -> dict[str, Any]:
    """Measure an engine that sleeps between generations."""
    with sleepy(loses) as slept:
        trainer = build(model, out, vllm_enable_sleep_mode=True)
        measured = attach(trainer)
        note_updates(measured.engine, trainer.vllm_generation, slept)
        trainer.train()
    return {
        "slept": slept,
        "steps": trainer.state.global_step,
        "verdict": measured.verdict and measured.verdict.status,
        "findings": [event.message for event in read_run(measured.log.run_dir).events if event.name == "check_failed"],
    }


def at_two_temperatures(model: str, out: str) -> list[str]:
    """Measure an engine that samples at another temperature than the trainer scores with, and return what failed."""
    trainer = build(model, out, generation_kwargs={"temperature": 0.5}, max_steps=1)
    measured = attach(trainer)
    trainer.train()
    return [event.message for event in read_run(measured.log.run_dir).events if event.name == "check_failed"]


def refused(model: str, out: str) -> dict[str, str]:
    """Attach to what it cannot serve, and twice."""
    said = {}

    def ask(name: str, trainer: Any) -> None:
        try:
            attach(trainer)
        except ConfigError as error:
            said[name] = str(error)

    ask("other", object.__new__(SFTTrainer))
    args = arguments(out, use_vllm=False, bf16=False)
    given: dict[str, Any] = {"model": model, "reward_funcs": graded, "train_dataset": rows()}
    ask("no engine", GRPOTrainer(args=GRPOConfig(**args), **given))
    block = MismatchGRPOTrainer(args=MismatchGRPOConfig(mismatch={"lr": {}}, **args), **given)
    block.use_vllm = True
    ask("block", block)
    twice = object.__new__(GRPOTrainer)
    vars(twice).update(use_vllm=True, mm=object())
    ask("twice", twice)
    return said


def documented(model: str, out: str, block: str) -> dict[str, Any]:
    """Run the first block of docs/trl.md, with a tiny model and arguments for a CPU."""
    space: dict[str, Any] = {}
    short = arguments(out, max_steps=1, **FLOAT32)
    config = functools.partial(
        GRPOConfig, **{name: value for name, value in short.items() if name not in ("output_dir", "use_vllm")}
    )
    with eager(), mock.patch("trl.GRPOConfig", config):
        exec(block, {"dataset": rows(), "reward": graded}, space)
    run = read_run(Path(out, "mismatch"))
    return json.loads(
        json.dumps({"steps": space["trainer"].state.global_step, "metrics": sorted(run.steps[-1].metrics)})
    )
