"""Runs that observe, with faults and without, beside the same runs of stock TRL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.trl import (
    MismatchCallback,
    MismatchGRPOConfig,
    MismatchGRPOTrainer,
    MismatchRLOOConfig,
    MismatchRLOOTrainer,
    MismatchTrainerMixin,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from mismatch_ext.log_reading import read_run
from mismatch_ext.report import build
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

Fault = Callable[[Any], Any]


@contextlib.contextmanager
def cpu() -> Iterator[None]:
    """Let stock TRL's engine take weights on any CPU, and start uncompiled, as ours does."""
    import trl.generation.vllm_generation as home

    plain = home.LLM

    def update(self: Any) -> None:
        engine.update_weights(self.llm, self._iter_named_params())

    def start(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **{**kwargs, "enforce_eager": True})

    with mock.patch.object(VLLMGeneration, "sync_weights", update), mock.patch.object(home, "LLM", start):
        yield


def _trained(trainer: Any, then: Fault | None) -> dict[str, Any]:
    trainer.train()
    if then is not None:
        then(trainer)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    hidden = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    return {
        "parameters": digest_of(trainer.model),
        "log": [{k: v for k, v in e.items() if k not in hidden and not k.startswith("mismatch/")} for e in logged],
        "ours": [{k: v for k, v in e.items() if k.startswith("mismatch/")} for e in logged],
        "rng": int(torch.randint(1 << 30, ())),
    }


def pair(
    model: str,
    out: str,
    block: dict[str, Any],
    fault: Fault | None = None,
    classes: tuple[type[Any], type[Any]] = (GRPOTrainer, MismatchGRPOTrainer),
    configs: tuple[type[Any], type[Any]] = (GRPOConfig, MismatchGRPOConfig),
    then: Fault | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Train stock, then with a block that observes; each with the same fault."""
    found: dict[str, Any] = {}
    for kind, trainer_class, config_class in zip(("stock", "observe"), classes, configs, strict=True):
        # Grouped products of experts do not come out the same each time.
        eager = {"experts_implementation": "eager"}
        given = {**arguments(f"{out}/{kind}"), "bf16": False, "model_init_kwargs": eager, **overrides}
        if configs[0] is RLOOConfig:
            del given["vllm_importance_sampling_mode"]
        if kind == "observe":
            given["mismatch"] = {"level": "observe", **block}
        torch.manual_seed(0)
        with cpu() if kind == "stock" else contextlib.nullcontext():
            trainer = trainer_class(model=model, reward_funcs=graded, args=config_class(**given), train_dataset=rows())
            if fault is not None:
                fault(trainer)
            found[kind] = _trained(trainer, then)
    folder = Path(out) / "observe" / "mismatch"
    run = read_run(folder)
    found["findings"] = [e.data for e in run.events if e.name == "observed"]
    found["end"] = [end.status for end in run.ends]
    found["report"] = build(folder).path.read_text(encoding="utf-8").partition("<script>")[0]
    return found


def sections(model: str, out: str, rloo: bool) -> dict[str, Any]:
    """Observe with every section, of which none acts, not even one that the trainer could not have."""
    block = {
        "precision": {"dtype": "float16"}, "routing": {"mode": "R3", "measured": 1.0},
        "correction": {"preset": "token_truncate", "upper": 2.0, "veto": 1e-4}, "kl": {"coef": 0.1},
        "lr": {"period": 2}, "monitor": {"weight_sync": "error"},
    }  # fmt: skip
    if rloo:
        return pair(
            model, out, block, classes=(RLOOTrainer, MismatchRLOOTrainer), configs=(RLOOConfig, MismatchRLOOConfig), beta=0.1
        )  # fmt: skip
    return pair(model, out, block, beta=0.1)


def _generations(trainer: Any, spoil: Callable[[int, Any], None]) -> None:
    """Let a function at what TRL's engine wrapper returns, generation after generation."""
    checked = getattr(getattr(trainer, "mm", None), "checked", None)
    owner, name = (trainer.vllm_generation, "generate") if checked is None else (checked, "plain_generate")
    generate, calls = getattr(owner, name), []

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result = generate(*args, **kwargs)
        calls.append(1)
        spoil(len(calls), result)
        return result

    setattr(owner, name, spoiled)


def faults(model: str, out: str) -> dict[str, Any]:
    """Contradicting settings, NaN, altered tokens, stale weights, a damaged state, an alarm that stops, a mistake of ours."""
    updates: list[int] = []
    send = engine.update_weights

    def stale(llm: Any, parameters: Any) -> None:
        kept = list(parameters)
        updates.append(1)
        if len(updates) == 1:
            send(llm, iter(kept))

    class Altering(GRPOTrainer):
        batches = 0

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            self.batches += 1
            if self.batches == 3:
                output["completion_ids"] = output["completion_ids"].clone()
                output["completion_ids"][1, 0] += 1
            return output

    class Observed(MismatchTrainerMixin, Altering):
        pass

    def fault(trainer: Any) -> None:
        updates.clear()

        def nan(call: int, result: Any) -> None:
            if call == 2:
                result[2][3][1][0] = None  # TRL's form of NaN: rollout 3, token 1

        _generations(trainer, nan)
        log = trainer.mm.log if getattr(trainer, "mm", None) else None
        if log is not None:
            plain, calls = log.flush, []

            def failing(*args: Any) -> Any:
                calls.append(1)
                if len(calls) == 4:
                    raise ZeroDivisionError("a mistake of our own")
                return plain(*args)

            log.flush = failing

    def go_on(trainer: Any) -> None:
        checkpoint = Path(trainer.args.output_dir) / "checkpoint-2"
        state = checkpoint / "mismatch.json"
        if state.exists():
            state.write_text("{")
        trainer.train(resume_from_checkpoint=str(checkpoint))

    block = {"monitor": {"alarms": {"reward": {"above": -1.0, "patience": 1, "action": "stop"}}}}
    with mock.patch.object(engine, "update_weights", stale):
        return pair(
            model, out, block, fault, (Altering, Observed), then=go_on, max_steps=4, save_strategy="steps", save_steps=2,
            generation_kwargs={"temperature": 0.5},
        )  # fmt: skip


def callback(model: str, out: str) -> dict[str, Any]:
    """Train stock TRL without an engine, alone and with a callback that observes."""
    block = {
        "level": "observe", "precision": {"dtype": "float16"}, "lr": {"period": 1},
        "monitor": {"alarms": {"reward": {"above": -1.0, "patience": 1, "action": "stop"}}},
    }  # fmt: skip
    found: dict[str, Any] = {}
    for kind in ("stock", "observe"):
        args = GRPOConfig(**arguments(f"{out}/{kind}", use_vllm=False, bf16=False))
        torch.manual_seed(0)
        callbacks = [MismatchCallback(block)] if kind == "observe" else []
        trainer = GRPOTrainer(
            model=model, reward_funcs=graded, args=args, train_dataset=rows(), callbacks=callbacks
        )  # fmt: skip
        found[kind] = _trained(trainer, None)
    run = read_run(Path(out) / "observe" / "mismatch")
    found["findings"] = [e.data for e in run.events if e.name == "observed"]
    return found
