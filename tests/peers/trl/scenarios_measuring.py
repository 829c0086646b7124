"""Runs of configs that do not act, with faults and without, beside the same runs of stock TRL."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
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
    run = read_run(Path(out) / "mismatch")
    return {"run": run, "failed": [event.data for event in run.events if event.name == "check_failed"]}


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
    """Train stock TRL, then once with each block (`ATTACHED`: with stock classes and `attach`), each under the same faults.

    Every number of stock's log, its weights and its random numbers are those of each block.
    """
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
                model=model, reward_funcs=graded, args=config_class(**given), train_dataset=rows(), callbacks=callbacks
            )
            for own in callbacks:
                own.trainer = trainer  # type: ignore[attr-defined]
            if block == ATTACHED:
                attach(trainer)
            found[name] = _trained(trainer, then)
        if block is not None:
            expect_stock(found["stock"], found[name])
            found[name] |= _run_of(f"{out}/{name}")
    return found


def expect_stock(stock: dict[str, Any], measured: dict[str, Any]) -> None:
    """Compare a measured run with stock TRL."""
    assert any(entry["grad_norm"] > 0 for entry in stock["log"])
    for mine, theirs in zip(measured["log"], stock["log"], strict=True):
        assert str(mine) == str(theirs), {n: (mine[n], theirs[n]) for n in mine if str(mine[n]) != str(theirs[n])}
    assert measured["parameters"] == stock["parameters"] and measured["rng"] == stock["rng"]


def measured(model: str, out: str, rloo: bool) -> None:
    """Measure in three ways; of sections that are checked and left out, not even one that the trainer could not have acts."""
    blocks = {"measured": {}, "attached": ATTACHED, "observed": {"level": "observe", **SECTIONS}}
    found = compared(model, out, blocks, OF_RLOO if rloo else OF_GRPO, beta=0.1)
    for name in blocks:
        of_name = found[name]
        assert of_name["run"].ending.status == "completed" and of_name["failed"] == []
        assert of_name["run"].header["acts"] is False and of_name["ours"] == found["measured"]["ours"]
    for entry in found["measured"]["ours"]:
        assert entry["mismatch/k3_kl"] > 0 and not {"mismatch/lr_multiplier", "mismatch/kl_coef"} & set(entry)
    assert entry["mismatch/weight_sync_gap"] >= 0


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


def four_faults(model: str, out: str) -> None:
    """Train with a NaN of the engine's, a garbled weight update, a moved temperature and a row that was tokenized again."""
    kinds = (Retokenized, GRPOConfig), (MeasuredRetokenized, MismatchGRPOConfig)
    found = compared(
        model, out, {"measured": {}}, kinds, callback=MovedTemperature, faults=nan_and_garbled, max_steps=5
    )["measured"]  # fmt: skip
    run, last = found["run"], found["ours"][-1]
    assert run.ending.status == "completed"
    # The check, and words of the error that ends a run whose config acts.
    checks = {"weight_sync": "garbled", "sampling": "the temperature is 0.7 in trainer.vllm_generation"}
    assert {failed["check"] for failed in found["failed"]} == set(checks)
    for check, words in checks.items():
        assert any(words in failed["message"] for failed in found["failed"] if failed["check"] == check), check
        assert run.steps[-1].metrics[f"mismatch/checks_failed/{check}"] == last[f"mismatch/checks_failed/{check}"] >= 1
    # A config that does not act counts bad rows, and measures the others of their batches.
    bad_rows = {
        "rollout_logprobs": "rollout 3, token 1",
        "tokens": "row 1: the tokens to be trained on are not those that the engine sampled",
    }
    said = [event.message for event in run.events if event.name == "bad_rows"]
    for reason, words in bad_rows.items():
        assert sum(entry.get(f"mismatch/bad_rows/{reason}", 0) for entry in found["ours"]) == 1, reason
        (message,) = [message for message in said if f"bad rows ({reason})" in message]
        assert words in message and "only measures" in message
    assert all(entry["mismatch/k3_kl"] >= 0 for entry in found["ours"])


def resumed(model: str, out: str) -> None:
    """Train four steps, then resume from the second: with a state that is damaged, and with one that is whole."""
    versions: list[int] = []

    def go_on(trainer: Any) -> None:
        checkpoint = Path(trainer.args.output_dir) / "checkpoint-2"
        state = checkpoint / "mismatch.json"
        whole = state.read_text() if state.exists() else ""
        for damaged in (True, False):
            if whole:
                state.write_text("{" if damaged else whole)
            trainer.train(resume_from_checkpoint=str(checkpoint))
            if whole:
                versions.append(trainer.mm.checked.weight_version)

    found = compared(model, out, {"measured": {}}, then=go_on, max_steps=4, save_strategy="steps", save_steps=2)
    (failed,) = found["measured"]["failed"]
    assert failed["check"] == "checkpoint" and "is damaged" in failed["message"]
    # Updates of two steps on top of the four before, then on top of the checkpoint's two.
    assert versions == [6, 4]


def errors(model: str, out: str) -> None:
    """Let the engine fail at the probes of one training, and a line of ours in another; both go on."""
    trainer = build_stock(model, out, max_steps=2, **FLOAT32)
    measuring = attach(trainer)
    llm = trainer.vllm_generation.llm
    generate = llm.generate

    def failing(prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        if isinstance(sampling_params, list):  # one for each probe that is decoded
            raise RuntimeError("the engine is out of memory")
        return generate(prompts, sampling_params=sampling_params, **kwargs)

    llm.generate = failing
    with pytest.warns(Warning, match="nothing is known of this weight update"):
        trainer.train()
    llm.generate = generate
    events = read_run(measuring.log.run_dir).events
    unanswered = [event.message for event in events if event.name == "weight_sync_unanswered"]
    assert unanswered and all("RuntimeError: the engine is out of memory" in message for message in unanswered)
    assert not any(event.name == "check_failed" for event in events) and trainer.state.global_step == 2

    def mistake(*_: Any, **__: Any) -> None:
        raise AttributeError("a mistake of ours")

    measuring.log.sums.add_gap = mistake  # type: ignore[method-assign]
    with pytest.warns(
        UserWarning, match="the check 'gap' failed at step 0; the run goes on. AttributeError: a mistake of ours"
    ):
        trainer.train()


def callback(model: str, out: str) -> None:
    """Train stock TRL without an engine, alone and with a callback whose sections are left out and whose alarms watch."""
    block = {
        "level": "observe", "precision": {"dtype": "float16"}, "lr": {"period": 1},
        "monitor": {"alarms": {"reward": {"above": -1.0, "patience": 1, "action": "stop"}}},
    }  # fmt: skip
    found = []
    for callbacks in ([], [MismatchCallback(block)]):
        args = GRPOConfig(**arguments(f"{out}/{len(callbacks)}", use_vllm=False, bf16=False))
        torch.manual_seed(0)
        trainer = GRPOTrainer(model=model, reward_funcs=graded, args=args, train_dataset=rows(), callbacks=callbacks)
        found.append(_trained(trainer))
    expect_stock(*found)
    alarms = [event.data for event in read_run(Path(out) / "1" / "mismatch").events if event.name == "alarm"]
    assert [alarm["metric"] for alarm in alarms] == ["reward"]
