"""Stock trainers of TRL, alone and with `attach`."""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from mismatch_ext.adapters.trl import attach
from mismatch_ext.adapters.trl.host import TrainerRun
from mismatch_ext.adapters.vllm import weights
from trl import GRPOConfig, GRPOTrainer, SFTTrainer
from trl.generation import vllm_generation

from mismatch_ext.errors import ConfigError
from mismatch_ext.log_reading import read_run
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
    trainer, sampled = build(model, out, cls, **overrides), []
    dropped: list[float] = []
    score = trainer._generate_and_score_completions

    def noted(inputs: Any) -> Any:
        output = score(inputs)
        sampled.append(output["completion_ids"].tolist())
        if "importance_sampling_ratio" in output:
            dropped.append(float((output["importance_sampling_ratio"] == 0).double().mean()))
        return output

    trainer._generate_and_score_completions = noted
    measured = attach(trainer) if attached else None
    updates: list[int] = []
    update = weights.update_weights

    def forgetful(llm: Any, named: Any) -> None:
        updates.append(1)
        if not lost or len(updates) == 1:
            update(llm, named)

    with mock.patch("mismatch_ext.adapters.vllm.update_weights", forgetful):
        trainer.train()
        evaluated = trainer.evaluate()
    logged = [*(entry for entry in trainer.state.log_history if "loss" in entry), evaluated]
    states = trainer.optimizer.state_dict()["state"].values()
    moments = [value.tolist() for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    found = {
        "parameters": digest_of(trainer.model),
        "optimizer": hashlib.sha256(repr(moments).encode()).hexdigest(),
        "sampled": sampled,
        "random": torch.get_rng_state().sum().item(),
        "modes": [trainer.model.training, trainer.model.is_gradient_checkpointing],
        "logged": [_stable(entry) for entry in logged],
    }
    if measured is None:
        return found
    run = read_run(measured.log.run_dir)
    return found | {
        "measured": [{k: v for k, v in entry.items() if "mismatch/" in k} for entry in logged],
        "verdict": measured.verdict and measured.verdict.status,
        "events": [[event.name, event.message] for event in run.events],
        "dropped": dropped,
    }


def _stable(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what TRL logged, without times and without what we added."""
    timed = ("time", "runtime", "per_second")
    return {k: v for k, v in entry.items() if "mismatch/" not in k and not k.endswith(timed)}


def sleeping(model: str, out: str, loses: str = "") -> None:
    """Measure an engine that sleeps between generations, and one that loses a buffer by it."""
    with sleepy(loses) as slept:
        trainer = build(model, out, vllm_enable_sleep_mode=True)
        measured = attach(trainer)
        note_updates(measured.engine, trainer.vllm_generation, slept)
        trainer.train()
    findings = findings_of(measured)
    assert measured.verdict is not None and measured.verdict.status == ("garbled" if loses else "in_sync")
    if loses:
        assert any("'weight_sync' failed" in message for message in findings)
    else:
        assert slept == ["asleep", *["kv_cache", "loaded", "kv_cache", "asleep"] * trainer.state.global_step]
        assert findings == []


def findings_of(measured: Any) -> list[str]:
    """Return what has failed in a run."""
    return [event.message for event in read_run(measured.log.run_dir).events if event.name == "check_failed"]


def at_two_temperatures(model: str, out: str) -> None:
    """Measure an engine that samples at another temperature than the trainer scores with."""
    trainer = build(model, out, generation_kwargs={"temperature": 0.5}, max_steps=1)
    measured = attach(trainer)
    trainer.train()
    messages = findings_of(measured)
    assert len(messages) == 2  # at the start, and with its only batch
    for message in messages:
        assert "'sampling' failed" in message
        assert "generation_kwargs['temperature']=0.5 but temperature=1.0" in message


def refused(model: str, out: str) -> None:
    """Attach to what it cannot serve, and twice."""
    args = arguments(out, use_vllm=False, bf16=False)
    given: dict[str, Any] = {"model": model, "reward_funcs": graded, "train_dataset": rows()}
    twice = object.__new__(GRPOTrainer)
    vars(twice).update(use_vllm=True, mm=object())
    for trainer, words in (
        (object.__new__(SFTTrainer), "SFTTrainer"),
        (GRPOTrainer(args=GRPOConfig(**args), **given), "use_vllm=False"),
        (twice, "measured already"),
    ):
        with pytest.raises(ConfigError, match=words):
            attach(trainer)


def documented(model: str, out: str, block: str) -> None:
    """Run the first block of docs/trl.md, with a tiny model and arguments for a CPU."""
    space: dict[str, Any] = {}
    short = arguments(out, max_steps=1, **FLOAT32)
    given = {name: value for name, value in short.items() if name not in ("output_dir", "use_vllm")}
    with eager(), mock.patch("trl.GRPOConfig", functools.partial(GRPOConfig, **given)):
        exec(block, {"dataset": rows(), "reward": graded}, space)
    assert space["trainer"].state.global_step == 1
    metrics = read_run(Path(out, "mismatch")).steps[-1].metrics
    assert {"loss", "mismatch/k3_kl", "mismatch/weight_sync_gap"} <= metrics.keys()


def unsent(model: str, out: str) -> None:
    """Load other weights after a training, as `load_best_model_at_end` does, and let TRL sample without an update."""
    trainer = build(model, out, max_steps=2)
    measured = attach(trainer)
    trainer.train()
    trainer.evaluate()  # TRL sends the weights of the last step
    assert not measured.checks.counts["weight_sync"]
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.5)
    with pytest.warns(UserWarning, match="sampled without an update"):
        trainer.evaluate()


def published(out: str) -> None:
    """Keep evidence in a folder that is uploaded to the Hub, and in one elsewhere."""
    arguments, kept = SimpleNamespace(output_dir=out, push_to_hub=True), {}
    for name, folder in (("inside", Path(out, "mismatch")), ("elsewhere", Path(out).parent / "elsewhere")):
        told: list[str] = []
        run: Any = object.__new__(TrainerRun)
        run.log = SimpleNamespace(
            evidence=object(), run_dir=folder, event=lambda *event, told=told, **_: told.append(event[2])
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run._keep_prompts_private(arguments)
        kept[name] = (run.log.evidence is not None, len(told))
    assert kept == {"inside": (False, 1), "elsewhere": (True, 0)}
