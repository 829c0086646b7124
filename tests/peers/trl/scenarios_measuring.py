"""Runs of configs that do not act, with faults and without, beside the same runs of stock TRL."""

from __future__ import annotations

import contextlib
import functools
import warnings
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
    attach,
)
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from mismatch_ext.log_reading import read_run
from mismatch_ext.report import build
from tests.peers.trl.scenarios_attach import FLOAT32
from tests.peers.trl.scenarios_attach import build as build_stock
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

SECTIONS = {
    "precision": {"dtype": "float16"}, "routing": {"mode": "R3", "measured": 1.0},
    "correction": {"preset": "token_truncate", "upper": 2.0, "veto": 1e-4}, "kl": {"coef": 0.1},
    "lr": {"period": 2}, "monitor": {"weight_sync": "error"},
}  # fmt: skip
ATTACHED = "attached"
OF_GRPO = (GRPOTrainer, GRPOConfig), (MismatchGRPOTrainer, MismatchGRPOConfig)
OF_RLOO = (RLOOTrainer, RLOOConfig), (MismatchRLOOTrainer, MismatchRLOOConfig)


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


def _trained(trainer: Any, then: Callable[[Any], Any] | None = None) -> dict[str, Any]:
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


def _run_of(out: str) -> dict[str, Any]:
    """Return what a run's folder says of it."""
    folder = Path(out) / "mismatch"
    run = read_run(folder)
    return {
        "failed": [e.data for e in run.events if e.name == "check_failed"],
        "bad_rows": [e.message for e in run.events if e.name == "bad_rows"],
        "last": run.steps[-1].metrics,
        "end": [end.status for end in run.ends],
        "acts": run.header["acts"],
        "report": build(folder).path.read_text(encoding="utf-8").partition("<script>")[0],
    }


def compared(
    model: str,
    out: str,
    blocks: dict[str, Any],
    kinds: Any = OF_GRPO,
    then: Callable[[Any], Any] | None = None,
    callback: Callable[[], TrainerCallback] | None = None,
    faults: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    **overrides: Any,
) -> dict[str, Any]:
    """Train stock TRL, then once with each block (`ATTACHED`: with stock classes and `attach`), each under the same faults."""
    found: dict[str, Any] = {}
    for name, block in {"stock": None, **blocks}.items():
        is_stock = block is None or block == ATTACHED
        trainer_class, config_class = kinds[0] if is_stock else kinds[1]
        # Grouped products of experts do not come out the same each time.
        eager = {"experts_implementation": "eager"}
        given = {**arguments(f"{out}/{name}"), "bf16": False, "model_init_kwargs": eager, **overrides}
        if issubclass(config_class, RLOOConfig):
            del given["vllm_importance_sampling_mode"]
        if not is_stock:
            given["mismatch"] = block
        callbacks = [] if callback is None else [callback()]
        torch.manual_seed(0)
        with cpu() if is_stock else contextlib.nullcontext(), faults():
            trainer = trainer_class(
                model=model,
                reward_funcs=graded,
                args=config_class(**given),
                train_dataset=rows(),
                callbacks=callbacks,
            )
            for own in callbacks:
                own.trainer = trainer  # type: ignore[attr-defined]
            if block == ATTACHED:
                attach(trainer)
            found[name] = _trained(trainer, then)
        if block is not None:
            found[name] |= _run_of(f"{out}/{name}")
    return found


def measured(model: str, out: str, rloo: bool) -> dict[str, Any]:
    """Measure in three ways; of sections that are checked and left out, not even one that the trainer could not have acts."""
    blocks = {"measured": {}, "attached": ATTACHED, "observed": {"level": "observe", **SECTIONS}}
    return compared(model, out, blocks, OF_RLOO if rloo else OF_GRPO, beta=0.1)


class MovedTemperature(TrainerCallback):
    """Lets the engine sample at another temperature from the fourth batch on."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move it."""
        if state.global_step == 3:
            self.trainer.vllm_generation.temperature = 0.7


class Retokenized(GRPOTrainer):
    """Changes a token of a row of the fifth batch after it was sampled."""

    batches = 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        self.batches += 1
        if self.batches == 5:
            output["completion_ids"] = output["completion_ids"].clone()
            output["completion_ids"][1, 0] += 1
        return output


class MeasuredRetokenized(MismatchTrainerMixin, Retokenized):
    """The same, with a config."""


@contextlib.contextmanager
def nan_and_garbled() -> Iterator[None]:
    """Let the engine miss a log-probability of the second batch, and get one tensor far too large in the third update."""
    generate, send = VLLMGeneration.generate, engine.update_weights
    batches: list[int] = []
    updates: list[int] = []

    @functools.wraps(generate)  # its signature is read
    def missing(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = generate(self, *args, **kwargs)
        batches.append(1)
        if len(batches) == 2:
            result[2][3][1][0] = None  # TRL's form of NaN: rollout 3, token 1
        return result

    def garbled(llm: Any, parameters: Any) -> None:
        updates.append(1)
        garbles = len(updates) == 3
        garbled_name = "layers.0.mlp.down_proj.weight"
        send(llm, ((n, -50 * p if garbles and n.endswith(garbled_name) else p) for n, p in parameters))

    with mock.patch.object(VLLMGeneration, "generate", missing), mock.patch.object(engine, "update_weights", garbled):
        yield


def four_faults(model: str, out: str) -> dict[str, Any]:
    """Train with a NaN of the engine's, a garbled weight update, a moved temperature and a row that was tokenized again."""
    kinds = (Retokenized, GRPOConfig), (MeasuredRetokenized, MismatchGRPOConfig)
    return compared(
        model, out, {"measured": {}}, kinds, callback=MovedTemperature, faults=nan_and_garbled, max_steps=5
    )  # fmt: skip


def resumed(model: str, out: str) -> dict[str, Any]:
    """Train four steps, then resume from the second: with a state that is damaged, and with one that is whole."""
    found: dict[str, Any] = {}

    def go_on(trainer: Any) -> None:
        checkpoint = Path(trainer.args.output_dir) / "checkpoint-2"
        state = checkpoint / "mismatch.json"
        if state.exists():
            found["whole"] = state.read_text()
        for damaged in (True, False):
            if state.exists():
                state.write_text("{" if damaged else found["whole"])
            trainer.train(resume_from_checkpoint=str(checkpoint))
            if getattr(trainer, "mm", None) is not None:
                found.setdefault("versions", []).append(trainer.mm.checked.weight_version)

    return found | compared(
        model, out, {"measured": {}}, then=go_on, max_steps=4, save_strategy="steps", save_steps=2
    )  # fmt: skip


def errors(model: str, out: str) -> dict[str, Any]:
    """Let the engine fail at the probes of one training, and a line of ours in another; return how both end."""
    trainer = build_stock(model, out, max_steps=2, **FLOAT32)
    measuring = attach(trainer)
    llm = trainer.vllm_generation.llm
    generate = llm.generate

    def failing(prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        if isinstance(sampling_params, list):  # one for each probe that is decoded
            raise RuntimeError("the engine is out of memory")
        return generate(prompts, sampling_params=sampling_params, **kwargs)

    llm.generate = failing
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.train()
    llm.generate = generate
    run = read_run(measuring.log.run_dir)
    found: dict[str, Any] = {
        "failed": [e.data for e in run.events if e.name == "check_failed"],
        "unanswered": [e.message for e in run.events if e.name == "weight_sync_unanswered"],
        "told": [str(warning.message) for warning in told],
        "steps": trainer.state.global_step,
    }

    def mistake(*_: Any, **__: Any) -> None:
        raise AttributeError("a mistake of ours")

    measuring.log.sums.add_gap = mistake  # type: ignore[method-assign]
    try:
        trainer.train()
    except AttributeError as error:
        found["left"] = str(error)
    return found


def alone(model: str, out: str) -> dict[str, Any]:
    """Train without an engine, stock and with alarms on what TRL logs."""
    alarms = {"reward": {"above": -1.0, "patience": 1}}
    return compared(model, out, {"measured": {"monitor": {"alarms": alarms}}}, use_vllm=False)


def callback(model: str, out: str) -> dict[str, Any]:
    """Train stock TRL without an engine, alone and with a callback whose sections are left out."""
    block = {
        "level": "observe", "precision": {"dtype": "float16"}, "lr": {"period": 1},
        "monitor": {"alarms": {"reward": {"above": -1.0, "patience": 1, "action": "stop"}}},
    }  # fmt: skip
    found: dict[str, Any] = {}
    for kind in ("stock", "measured"):
        args = GRPOConfig(**arguments(f"{out}/{kind}", use_vllm=False, bf16=False))
        torch.manual_seed(0)
        callbacks = [MismatchCallback(block)] if kind == "measured" else []
        trainer = GRPOTrainer(
            model=model, reward_funcs=graded, args=args, train_dataset=rows(), callbacks=callbacks
        )  # fmt: skip
        found[kind] = _trained(trainer)
    events = read_run(Path(out) / "measured" / "mismatch").events
    found["alarms"] = [event.data for event in events if event.name == "alarm"]
    return found
