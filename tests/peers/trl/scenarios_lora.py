"""Runs of the real TRL and vLLM that train LoRA adapters."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
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


def sections(model: str, out: str, block: dict[str, Any], **overrides: Any) -> None:
    """Train with a block of every section: the base, in float32 or not, stays what it was."""
    trainer = build(model, out, block, learning_rate=1e-2, **overrides)
    before = frozen(trainer)
    trainer.train()
    assert trainer.mm.verdict is not None and trainer.mm.verdict.status == "in_sync" and frozen(trainer) == before
    logged = history(trainer)
    last = logged[-1]
    # In float16, over masks and with routes replayed.
    assert last["mismatch/k3_kl"] < 1e-4 and 0 < last["mismatch/lora_rounding"] < 0.5, last
    for name in ("loss_scale", "lr_multiplier", "kl_coef", "sampling_mask_size"):
        assert f"mismatch/{name}" in last, sorted(last)
    # Of the half of the passes that is measured.
    assert any("mismatch/routing/set_mismatch_frac" in entry for entry in logged)


def frozen(trainer: Any) -> str:
    """Return a digest of what LoRA does not train."""
    held = {name: p for name, p in trainer.model.named_parameters() if not p.requires_grad}
    return digest_of(nn.ParameterDict({name.replace(".", "/"): p for name, p in held.items()}))


def drift(model: str, out: str) -> None:
    """Merge and unmerge as TRL does for weight updates, without and with the repair; then lose an adapter on the way."""
    block = {"monitor": {"default_alarms": False, "weight_sync": "error"}}
    given = {"learning_rate": 1e-2, "model_init_kwargs": {"dtype": "bfloat16"}}
    trainer: Any = build(model, out, block, [AtStep(1, lambda: lose(trainer))], **given)
    checked = trainer.mm.checked
    weights = [base.weight for _, base in layers_of(trainer.model)]
    begun = [(p, p.detach().clone()) for p in trainer.model.parameters()]

    def drifted(iterate: Any) -> float:
        """Return how far the base has moved over many updates, as a share of it."""
        first = [weight.detach().float() for weight in weights]
        moves = torch.Generator().manual_seed(0)
        for _ in range(SYNCS):
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    if parameter.requires_grad:  # as Adam does at a rate of 1e-3
                        parameter += 1e-3 * torch.randn(parameter.shape, generator=moves).sign().to(parameter)
            deque(iterate(), maxlen=0)
        apart = sum(float((weight.float() - old).abs().sum()) for weight, old in zip(weights, first, strict=True))
        with torch.no_grad():
            for parameter, value in begun:
                parameter.copy_(value)
        return apart / sum(float(old.abs().sum()) for old in first)

    assert drifted(checked._sent_parameters) == 0.0 and 0 < checked.base.rounding < 10
    assert drifted(checked._plain_parameters) > 1e-3  # TRL's own leaves another base
    with pytest.raises(WeightSyncError, match="weight update.*stale"):
        trainer.train()


def lose(trainer: Any) -> None:
    """Let no adapter be merged any more, so that the engine gets the base alone."""
    for layer, _ in layers_of(trainer.model):
        layer.merge = lambda *args, **kwargs: None  # type: ignore[assignment]
        layer.unmerge = lambda *args, **kwargs: None  # type: ignore[assignment]


def loaded_to_be_read(model: str, out: str) -> None:
    """Train an adapter that peft has loaded without `is_trainable`: that is said at the start and in the report."""
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(dense, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(f"{out}/adapter")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=PeftModel.from_pretrained(base, f"{out}/adapter"),
        reward_funcs=graded,
        train_dataset=rows(),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=GRPOConfig(**arguments(f"{out}/run", max_steps=4, beta=0.04, gradient_checkpointing=True)),
    )
    attach(trainer)
    with pytest.warns(Warning, match="no parameter of the optimizer is trainable"):
        trainer.train()
    (verdict,) = build_report(f"{out}/run").to_dict()["runs"].values()
    assert verdict["warnings"][0].startswith("at step 0: no parameter of the optimizer is trainable")
    assert any("the last 3 weight updates sent the same weights" in warning for warning in verdict["warnings"])
    assert "is_trainable=True" in verdict["cause"]
