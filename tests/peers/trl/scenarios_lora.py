"""Runs of the real TRL and vLLM that train LoRA adapters."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import torch
from mismatch_ext.adapters.trl import MismatchGRPOConfig, MismatchGRPOTrainer, attach
from mismatch_ext.adapters.trl.lora import layers_of
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.errors import WeightSyncError
from mismatch_ext.report import build as build_report
from tests.peers.trl.scenarios_training import AtStep, arguments, digest_of, graded, history, rows

SYNCS = 200


def build(model: str, out: str, block: Any, callbacks: Any = None, **overrides: Any) -> MismatchGRPOTrainer:
    """Build a trainer of adapters on attention and MLP, or on what `target_modules` names."""
    targets = overrides.pop("target_modules", ["q_proj", "o_proj"])
    return MismatchGRPOTrainer(
        model=model,
        reward_funcs=graded,
        args=MismatchGRPOConfig(**arguments(out, mismatch=block, **overrides)),
        train_dataset=rows(),
        callbacks=callbacks,
        peft_config=LoraConfig(r=4, target_modules=targets),
    )


def sections(model: str, out: str, block: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """Train with a block."""
    trainer = build(model, out, block, learning_rate=1e-2, **overrides)
    before = frozen(trainer)
    trainer.train()
    verdict = trainer.mm.verdict
    return {
        "history": history(trainer),
        "verdict": None if verdict is None else verdict.status,
        "base": frozen(trainer) == before,
    }


def frozen(trainer: Any) -> str:
    """Return a digest of what LoRA does not train."""
    held = {name: p for name, p in trainer.model.named_parameters() if not p.requires_grad}
    return digest_of(nn.ParameterDict({name.replace(".", "/"): p for name, p in held.items()}))


def drift(model: str, out: str) -> dict[str, Any]:
    """Merge and unmerge as TRL does for weight updates, without and with the repair; then lose an adapter on the way."""
    block = {"monitor": {"default_alarms": False, "weight_sync": "error"}}
    trainer: Any = build(
        model,
        out,
        block,
        [AtStep(1, lambda: lose(trainer))],
        learning_rate=1e-2,
        model_init_kwargs={"dtype": "bfloat16"},
    )
    checked = trainer.mm.checked
    weights = [base.weight for _, base in layers_of(trainer.model)]
    found: dict[str, Any] = {}
    begun = [(p, p.detach().clone()) for p in trainer.model.parameters()]
    # TRL's own last: it leaves another base.
    for name, iterate in (("ours", checked._sent_parameters), ("TRL's", checked._plain_parameters)):
        first = [weight.detach().float() for weight in weights]
        moves = torch.Generator().manual_seed(0)
        for _ in range(SYNCS):
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    if parameter.requires_grad:  # as Adam does at a rate of 1e-3
                        parameter += 1e-3 * torch.randn(parameter.shape, generator=moves).sign().to(parameter)
            deque(iterate(), maxlen=0)
        apart = sum(float((weight.float() - old).abs().sum()) for weight, old in zip(weights, first, strict=True))
        found[name] = apart / sum(float(old.abs().sum()) for old in first)
        if name == "ours":
            found["rounding"] = checked.base.rounding
        with torch.no_grad():
            for parameter, old in begun:
                parameter.copy_(old)
    try:
        trainer.train()
    except WeightSyncError as error:
        found["lost"] = str(error)
    return found


def lose(trainer: Any) -> None:
    """Let no adapter be merged any more, so that the engine gets the base alone."""
    for layer, _ in layers_of(trainer.model):
        layer.merge = lambda *args, **kwargs: None  # type: ignore[assignment]
        layer.unmerge = lambda *args, **kwargs: None  # type: ignore[assignment]


def loaded_to_be_read(model: str, out: str, way: str) -> dict[str, Any]:
    """Train an adapter that peft has loaded without `is_trainable`, by our trainer or attached to TRL's own."""
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(dense, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(f"{out}/adapter")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy = PeftModel.from_pretrained(base, f"{out}/adapter")
    given = {"model": policy, "reward_funcs": graded, "train_dataset": rows()}
    given["processing_class"] = AutoTokenizer.from_pretrained(model)
    settings = arguments(f"{out}/run", max_steps=4, beta=0.04, gradient_checkpointing=True)
    if way == "ours":
        trainer: Any = MismatchGRPOTrainer(args=MismatchGRPOConfig(**settings, mismatch={}), **given)
    else:
        trainer = GRPOTrainer(args=GRPOConfig(**settings), **given)
        attach(trainer)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.train()
    (verdict,) = build_report(f"{out}/run").to_dict()["runs"].values()
    return {
        "warned": [str(entry.message) for entry in warned],
        "warnings": verdict["warnings"],
        "cause": verdict["cause"],
    }
