"""Runs of the real TRL and vLLM with a `correction` section."""

from __future__ import annotations

import math
import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from typing import Any

import torch
from mismatch_ext.adapters.trl.correction import CorrectionTerm
from torch import Tensor

from mismatch_ext.config import CorrectionConfig
from mismatch_ext.presets import resolve
from tests.peers.trl.scenarios_kl import gradients, relative
from tests.peers.trl.scenarios_training import build, digest_of, history


def trained(model: str, out: str, block: Any, **overrides: Any) -> dict[str, Any]:
    """Train two steps; TRL's engine takes bfloat16 for this float32 checkpoint, so that ratios differ from 1."""
    trainer = build(model, out, block, max_steps=2, bf16=False, **overrides)
    trainer.train()
    metrics = [e for e in trainer.state.log_history if "loss" in e][-1]
    return {
        "history": [{k: v for k, v in h.items() if "mismatch/" not in k} for h in history(trainer)],
        "parameters": digest_of(trainer.model),
        "rollout_metrics": {
            k: v for k, v in metrics.items() if k.startswith(("mismatch/rollout_is_", "mismatch/rollout_rs_"))
        },
        "options": {k: v for k, v in vars(trainer.args).items() if k.startswith("vllm_importance_sampling")},
    }


def scored(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the trainer's own log-probabilities of a batch's responses."""
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logits = trainer.model(input_ids=tokens, attention_mask=attention).logits
    logits = logits[:, -inputs["completion_ids"].size(1) - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]


@torch.no_grad()
def mean_ratios(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    """Return each response's mean log-ratio between trainer and engine."""
    mask = inputs["completion_mask"]
    apart = scored(trainer, inputs) - inputs["sampling_per_token_logps"].double()
    return (apart * mask).sum(1) / mask.sum(1)


def by_hand(model: str, out: str) -> dict[str, Any]:
    """Compare weights and first-step gradients of presets that TRL does not have with plain formulas."""
    trainer = build(
        model, out, {"correction": {"preset": "decoupled_geo_rs_token_tis"}}, bf16=False, loss_type="dr_grpo",
        max_steps=1, epsilon=10.0, epsilon_high=10.0,
    )  # fmt: skip
    trainer.train()  # the first step updates the engine's weights and moves the policy
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    result: dict[str, Any] = {}
    # Bounds that keep some responses and not others, whatever the gap is on this machine and stack.
    middle = mean_ratios(trainer, trainer._generate_and_score_completions(rows)).abs().median().item()
    lower, upper = math.exp(-middle), math.exp(middle)
    for name, keys in (
        ("token", {"level": "token", "upper": 1.001, "bound": "truncate"}),
        ("geometric", {"level": "geometric", "bound": "mask", "lower": lower, "upper": upper}),
        (
            "reject",
            {"level": "token", "upper": 2.0, "reject": {"seq_mean_k1": [lower, upper]}},
        ),
        ("clip", {"mode": "bypass", "loss": "ppo_clip"}),
        ("reinforce", {"mode": "bypass", "loss": "reinforce", "level": "sequence", "upper": 1.002}),
    ):
        trainer.mm.correction = CorrectionTerm(resolve(CorrectionConfig(**keys)), trainer.mm.ranks)
        for _ in range(10):
            inputs = trainer._generate_and_score_completions(rows)
            if name not in ("geometric", "reject") or 0 < (mean_ratios(trainer, inputs).abs() < middle).sum() < len(
                rows
            ):
                break
        mask = inputs["completion_mask"].bool()
        old = scored(trainer, inputs).detach()
        rollout = inputs["sampling_per_token_logps"].double()
        ratio = torch.where(mask, (old - rollout).exp(), 1.0)
        total = torch.where(mask, old - rollout, 0.0).sum(1, keepdim=True)
        mean = total / mask.sum(1, keepdim=True)
        policy = torch.ones_like(ratio)  # weight of A grad log pi besides the multiplier
        if name == "token":
            weight = ratio.clamp(max=1.001)
        elif name == "geometric":
            weight = torch.where((mean.exp() >= lower) & (mean.exp() <= upper), mean.exp(), 0.0).expand_as(ratio)
        elif name == "reject":
            weight = torch.where((mean.exp() >= lower) & (mean.exp() <= upper), ratio.clamp(max=2.0), 0.0)
        elif name == "clip":
            weight, policy = torch.ones_like(ratio), ratio  # grad of exp(log pi - log mu) is pi/mu grad log pi
        else:
            weight, policy = torch.ones_like(ratio), total.exp().clamp(max=1.002).expand_as(ratio)
        ours = gradients(trainer, trainer.compute_loss(trainer.model, inputs))
        term = -inputs["advantages"].double()[:, None] * weight * policy * scored(trainer, inputs)
        hand = gradients(trainer, torch.where(mask, term, 0.0).sum() / (len(mask) * trainer.max_completion_length))
        plain = -inputs["advantages"].double()[:, None] * scored(trainer, inputs)
        without = gradients(trainer, torch.where(mask, plain, 0.0).sum() / (len(mask) * trainer.max_completion_length))
        multiplier = inputs["importance_sampling_ratio"].double()
        result[name] = {
            "gradient_error": relative(ours, hand),
            "effect": relative(without, hand),
            "weight_error": float((torch.where(mask, multiplier - weight, 0.0)).abs().max()),
            "largest_ratio": float(ratio.max()),
        }
    result["phantom"] = phantom_by_hand(trainer, rows)
    return result


def phantom_by_hand(trainer: Any, rows: Any) -> dict[str, Any]:
    """Return the logged measures of a clip on the ratio to the engine, and the same by plain loops over tokens."""
    trainer.mm.correction = CorrectionTerm(resolve(CorrectionConfig(preset="bypass_ppo_clip")), trainer.mm.ranks)
    trainer.epsilon_low = trainer.epsilon_high = 1e-3
    inputs = trainer._generate_and_score_completions(rows)
    logged = {
        name: trainer._metrics["train"][f"mismatch/{name}"][-1] for name in ("phantom_clip_frac", "advantage_gap")
    }
    found = (scored(trainer, inputs) - inputs["sampling_per_token_logps"].double()).tolist()
    stopped, tokens, gaps = 0, 0, {True: [0.0], False: [0.0]}
    for row, mask, advantage in zip(
        found, inputs["completion_mask"].tolist(), inputs["advantages"].tolist(), strict=True
    ):
        for d in (d for d, chosen in zip(row, mask, strict=True) if chosen):
            tokens += 1
            stopped += (advantage > 0 and math.exp(d) > 1.001) or (advantage < 0 and math.exp(d) < 0.999)
            if advantage:
                gaps[advantage > 0].append(d)
    up, down = (math.fsum(gaps[side]) / (len(gaps[side]) - 1) for side in (True, False))
    trainer.mm.correction = None
    trainer._generate_and_score_completions(rows)
    return {
        "logged": logged,
        "by_hand": {"phantom_clip_frac": stopped / tokens, "advantage_gap": up - down},
        # What does not clip the ratio to the engine stops nothing by it.
        "without": len(trainer._metrics["train"]["mismatch/phantom_clip_frac"]),
        "of_each": len(trainer._metrics["train"]["mismatch/advantage_gap"]),
    }
