"""Every section and preset in TRL's trainers and by the callback: built, stepped once, and read back."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

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
)
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.config import CorrectionConfig, KlConfig
from mismatch_ext.correction import correct
from mismatch_ext.errors import MismatchError
from mismatch_ext.log_reading import read_run
from mismatch_ext.presets import resolve
from tests.peers.section_cases import CASES, names
from tests.peers.trl.scenarios_by_hand import compare
from tests.peers.trl.scenarios_kl import moved
from tests.peers.trl.scenarios_training import arguments, graded, rows

STEP = {"max_completion_length": 8, "max_steps": 2, "bf16": False, "model_init_kwargs": {"dtype": "float32"}}
OWN = {"use_vllm": False}
HAND = {
    "loss_type": "dr_grpo", "num_generations": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "steps_per_generation": 1, "num_iterations": 2, "importance_sampling_level": "token", "temperature": 1.0,
    "scale_rewards": "group", "max_completion_length": 8,
}  # fmt: skip
"""Settings of the trainings whose steps are made by hand."""
KINDS = ("TRL GRPO", "TRL RLOO", "MismatchCallback")
NEEDS_ENGINE = {
    "precision",
    "correction",
    "monitor/defaults",
    "lr/trigger: mismatch_kl",
    "lr/trigger: f_tau",
}


@contextlib.contextmanager
def shared_engines() -> Iterator[None]:
    """Start one engine of each model and dtype, the real one, and give it to every trainer that asks for it."""
    import vllm

    started: dict[tuple[str, str], Any] = {}
    make, start = vllm.LLM.__new__, vllm.LLM.__init__

    def find(cls: Any, *args: Any, model: str, dtype: str = "auto", **kwargs: Any) -> Any:
        return started.setdefault((model, {"auto": "bfloat16"}.get(dtype, dtype)), make(cls))

    def start_once(self: Any, *args: Any, **kwargs: Any) -> None:
        if not vars(self):
            start(self, *args, **kwargs)

    with mock.patch.object(vllm.LLM, "__new__", find), mock.patch.object(vllm.LLM, "__init__", start_once):
        yield


class AtStep(TrainerCallback):
    """Notes the rate that each step applies, and what the control has measured."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.measured: list[list[float]] = []
        self.control: Callable[[], Any] = lambda: None

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Read the rate after every other hook that sets it."""
        optimizer.optimizer.register_step_pre_hook(lambda o, *_: self.rates.append(float(o.param_groups[0]["lr"])))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the statistics that the control has."""
        if (found := self.control()) is not None:
            self.measured = [[m.step, m.value, m.truncated] for m in found.state.history]


def build(kind: str, model: Any, out: str, block: Any, **overrides: Any) -> Any:
    """Build a trainer of TRL with a block."""
    given = arguments(out, mismatch=block, **{**STEP, **overrides})
    if not given["use_vllm"]:
        given.pop("model_init_kwargs")  # a model that is given
    if kind == "TRL RLOO":
        given = {k: v for k, v in given.items() if not k.startswith("vllm_importance")}
        config: Any = MismatchRLOOConfig(**given)
        return MismatchRLOOTrainer(model=model, reward_funcs=graded, args=config, train_dataset=rows())
    given.pop("vllm_importance_sampling_mode")
    config = MismatchGRPOConfig(**given)
    return MismatchGRPOTrainer(model=model, reward_funcs=graded, args=config, train_dataset=rows())


def stepped(trainer: Any) -> tuple[dict[str, Any], Tensor]:
    """Take TRL's own training step on the first batch: the batch that its loss was of, and the gradient."""
    seen: dict[str, Any] = {}
    compute = trainer._compute_loss

    def spied(model: Any, inputs: Any) -> Tensor:
        seen.setdefault("inputs", dict(inputs))
        loss: Tensor = compute(model, inputs)
        return loss

    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    batch = next(iter(trainer.get_train_dataloader()))
    torch.manual_seed(3)
    with mock.patch.object(trainer, "_compute_loss", spied):
        trainer.training_step(trainer.model, batch, None)
    return seen["inputs"], flat(trainer)


def flat(trainer: Any) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in trainer.model.parameters() if p.grad is not None])


def logits_of(model: Any, inputs: Any) -> Tensor:
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].size(1)
    found: Tensor = model(input_ids=tokens, attention_mask=attention).logits[:, -length - 1 : -1].double()
    return found


def scored(logits: Tensor, inputs: Any) -> Tensor:
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]


def gradient(trainer: Any, term: Tensor, mask: Tensor) -> Tensor:
    """Return the gradient of TRL's mean of a term `[B, T]` under loss_type dr_grpo."""
    trainer.model.zero_grad()
    (torch.where(mask, term, 0.0).sum() / (len(mask) * trainer.max_completion_length)).backward()
    return flat(trainer)


def apart(a: Tensor, b: Tensor, scale: Tensor) -> float:
    return float((a - b).norm() / scale.norm())


def correction(model: str, out: str, label: str) -> dict[str, Any]:
    """Hold the gradient of a correction preset against A * weight * grad log pi, computed by hand."""
    section = CASES["correction"][label]
    block = {"correction": section, "monitor": {"weight_sync": "off"}}
    wide = {"loss_type": "dr_grpo", "epsilon": 1e9, "epsilon_high": 1e9}
    trainer = build("TRL GRPO", model, out, block, **wide)
    moved(trainer, 0.05)  # far enough for ratios on both sides of every bound
    trainer._last_loaded_step = 0  # the engine keeps the weights that it was started with
    inputs, ours = stepped(trainer)
    mask, rollout = inputs["completion_mask"].bool(), inputs["sampling_per_token_logps"].double()
    logps = scored(logits_of(trainer.model, inputs), inputs)
    settings, old, advantages = resolve(CorrectionConfig(**section)), logps.detach(), inputs["advantages"].double()
    found = correct(
        old_logprobs=old, rollout_logprobs=rollout, response_mask=mask, config=settings, advantages=advantages
    )
    weight = found.as_multiplier().double()
    if settings.mode == "bypass" and settings.loss == "ppo_clip":
        weight = torch.where(mask, (old - rollout).exp(), 0.0) * found.mask
    stock = (
        torch.where(mask, old - rollout, 0.0).sum(1, keepdim=True).exp()
    )  # TRL's own: a sequence's, masked from 3 on
    plain = -advantages[:, None] * logps
    hand, without, unweighed = (
        gradient(trainer, (w * -advantages[:, None] * scored(logits_of(trainer.model, inputs), inputs)), mask)
        for w in (weight, stock * (stock <= 3.0), torch.ones_like(plain))
    )
    return {
        "what": "the gradient of the step is that of A times the preset's weight times log pi, by hand",
        "error": apart(ours, hand, unweighed),
        "effect": max(apart(ours, without, unweighed), apart(ours, unweighed, unweighed)),
    }


def kl(kind: str, model: str, out: str, label: str) -> dict[str, Any]:
    """Hold the steps with a KL section against those by hand."""
    section = CASES["kl"][label]
    if kind == "TRL RLOO":
        build(kind, model, out, {"kl": section})
    config = KlConfig(**section)
    names = ("estimator", "target", "ratio", "coef", "reward_path", "baseline")
    resolved = {name: getattr(config, name) for name in names} | {"placement": config.applied_placement}
    case = {"host": HAND, "block": {"kl": resolved}, "user": {"change": "none", "call": "none", "ours_first": True}}
    if section.get("estimator") == "full":
        case["refused"] = "estimator='full'"
    said = compare(model, out, case)
    if said is not None:
        return {"refused": said}
    return {"what": "each step is what it comes to by hand, in float64", "error": 0.0, "effect": 1.0}


def fresh(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def precision(kind: str, model: str, out: str, label: str) -> dict[str, Any]:
    """Read back the dtype that the products of the step's forward pass and the engine's weights have."""
    dtype = CASES["precision"][label]["dtype"]
    block = {"precision": {"dtype": dtype}, "monitor": {"weight_sync": "off"}}
    trainer = build(kind, model, out, block, bf16=None, max_steps=1)
    seen: set[str] = set()
    layer = trainer.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, args, output: seen.add(str(output.dtype).removeprefix("torch.")))
    trainer.train()
    held = str(engine.runner(trainer.vllm_generation.llm).model_config.dtype).removeprefix("torch.")
    scaler = trainer.accelerator.scaler is not None
    return {
        "what": "the dtype of matrix products in the step's forward pass and of the live engine, and the loss scaler",
        "error": 0.0 if seen == {dtype} and held == dtype and scaler == (dtype == "float16") else 1.0,
        "effect": 1.0,
        "read": [sorted(seen), held, scaler],
    }


def control_of(host: Any) -> Any:
    """Return the live control of a trainer or callback, if there is one."""
    lr = host._lr if isinstance(host, MismatchCallback) else host.mm.lr
    return None if lr is None else lr.rate


def trained(kind: str, model: str, out: str, block: Any, watch: AtStep, **overrides: Any) -> tuple[Any, list[Any]]:
    """Train two steps."""
    if kind == "MismatchCallback":
        given = arguments(out, **{**STEP, **OWN, **overrides})
        given.pop("model_init_kwargs")
        callback = MismatchCallback(block)
        trainer: Any = GRPOTrainer(
            model=fresh(model),
            reward_funcs=graded,
            args=GRPOConfig(**given),
            train_dataset=rows(),
            callbacks=[callback],
        )
        watch.control = lambda: control_of(callback)
    else:
        given_model = model if overrides.get("use_vllm", True) else fresh(model)
        trainer = build(kind, given_model, out, block, **overrides)
        watch.control = lambda: control_of(trainer)
    trainer.add_callback(watch)
    trainer.train()
    return trainer, [entry for entry in trainer.state.log_history if "loss" in entry]


LOGGED = {
    "response_length": "completions/mean_length",
    "grad_norm": "grad_norm",
    "mismatch_kl": "mismatch/k3_kl",
    "f_tau": "mismatch/f_1.1",
}


def lr(kind: str, model: str, out: str, label: str, options: dict[str, Any]) -> dict[str, Any]:
    """Read the rate that the optimizer stepped with, or the statistics that the control was given."""
    section, watch = CASES["lr"][label], AtStep()
    block = {"lr": section, "monitor": {"weight_sync": "off"}}
    _, logs = trained(kind, model, out, block, watch, lr_scheduler_type="constant", **options)
    if "period" in section:
        rates = [rate / watch.rates[0] for rate in watch.rates]
        return {
            "what": "the rate that the optimizer stepped with",
            "error": abs(rates[1] - 0.5),
            "effect": 0.5,
            "read": rates,
        }
    trigger = section.get("trigger", "response_length")
    values = [value for _, value, *_ in watch.measured]
    name = next((n for n in logs[0] if n == LOGGED[trigger]), None)
    expected = [entry[name] for entry in logs] if name else []
    expected = expected if kind != "MismatchCallback" else expected[: len(values)]
    close = len(values) == len(expected) > 0 and all(
        abs(a - b) <= 1e-5 * max(abs(b), 1e-9) for a, b in zip(values, expected, strict=True)
    )
    return {
        "what": "the rate that the optimizer stepped with, and the trigger's statistic in the live control",
        "error": 0.0 if close and len(watch.rates) == 2 else 1.0,
        "effect": 1.0,
        "read": [values, expected, sorted(n for n in logs[0] if "mismatch" in n)],
    }


def routing(kind: str, model: str, out: str, label: str) -> dict[str, Any]:
    """Move the routers between sampling and loss: replay holds the experts, which the model would choose otherwise now."""
    block = {"routing": CASES["routing"][label], "monitor": {"weight_sync": "off"}}
    watch = AtStep()
    # The second update of a batch sees weights that chose otherwise: a large step on plain gradients.
    own = OWN if CASES["routing"][label]["mode"] == "R2" else {}
    options = {**own, "num_iterations": 2, "max_steps": 3, "learning_rate": 1.0, "optim": "sgd"}
    _, logs = trained(kind, model, out, block, watch, **options)
    compared = sum(entry.get("mismatch/routing/compared_tokens", 0.0) for entry in logs)
    flipped = max(entry.get("mismatch/routing/set_mismatch_frac", 0.0) for entry in logs)
    return {
        "what": "tokens whose experts were replayed in the step, and those of them that the moved model would route otherwise",
        "error": 0.0 if compared > 0 else 1.0,
        "effect": flipped,
        "read": [compared, flipped],
    }


def monitor(kind: str, model: str, out: str, label: str, options: dict[str, Any]) -> dict[str, Any]:
    """Read the run's own file: the gap of each step, or the alarm."""
    watch = AtStep()
    trained(kind, model, out, {"monitor": CASES["monitor"][label]}, watch, **options)
    run = read_run(Path(out) / "mismatch")
    if label == "alarms":
        raised = [event for event in run.events if event.name == "alarm"]
        what, good = "the alarm in the run's metrics file", bool(raised)
    elif kind == "MismatchCallback":
        what, good = "the trainer's logs in the run's metrics file", len(run.series("loss")[0]) == 2
    else:
        what, good = "the gap of every step in the run's metrics file", len(run.series("mismatch/k3_kl")[0]) == 2
    return {"what": what, "error": 0.0 if good else 1.0, "effect": 1.0}


def one(kind: str, dense: str, moe: str, out: str, section: str, label: str) -> dict[str, Any]:
    """Build, step and read back one case, or return the message with which it is refused."""
    case = f"{section}/{label}"
    needs = section in NEEDS_ENGINE or case in NEEDS_ENGINE
    options = {} if needs and kind != "MismatchCallback" else OWN
    try:
        if kind == "MismatchCallback" and section not in ("lr", "monitor"):
            MismatchCallback({section: CASES[section][label]})
            return {"error": 1.0, "effect": 0.0, "what": "nothing"}
        if section == "correction":
            if kind == "TRL RLOO":
                build(kind, dense, out, {"correction": CASES[section][label]})
                return {"error": 1.0, "effect": 0.0, "what": "nothing"}
            return correction(dense, out, label)
        if section == "kl":
            return kl(kind, dense, out, label)
        if section == "precision":
            return precision(kind, dense, out, label)
        if section == "routing":
            return routing(kind, moe, out, label)
        if section == "lr":
            return lr(kind, dense, out, label, options)
        return monitor(kind, dense, out, label, options)
    except MismatchError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def every(kind: str, dense: str, moe: str, out: str, only: list[str] | None = None) -> dict[str, Any]:
    """Return what became of every case in one of TRL's hosts."""
    found = {}
    # The engine with experts comes first: of a process, vLLM prepares its first engine alone for sharing experts among ranks.
    for section in sorted(CASES, key=lambda section: section != "routing"):
        for number, label in enumerate(CASES[section]):
            case = f"{section}/{label}"
            if only is None or case in only or section in only:
                found[case] = one(kind, dense, moe, f"{out}/{section}-{number}", section, label)
    return {case: found[case] for case in names() if case in found}


def hosts(
    dense: str, moe: str, out: str, kinds: list[str] | None = None, only: list[str] | None = None
) -> dict[str, Any]:
    """Return what became of every case in TRL's hosts, which share engines."""
    torch.set_num_threads(1)
    with shared_engines():
        return {kind: every(kind, dense, moe, f"{out}/{kind}", only) for kind in kinds or KINDS}
