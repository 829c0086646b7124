"""Runs of the real TRL and vLLM with a `correction` section."""

from __future__ import annotations

import math
import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from typing import Any

import torch
from torch import Tensor

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


def phantom_by_hand(model: str, out: str) -> dict[str, Any]:
    """Return the logged measures of a clip on the ratio to the engine, and the same by plain loops over tokens."""
    trainer = build(model, out, {"correction": {"preset": "bypass_ppo_clip"}}, bf16=False, max_steps=1, epsilon=1e-3)
    trainer.train()  # the first step moves the policy
    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
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
