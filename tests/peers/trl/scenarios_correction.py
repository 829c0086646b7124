"""Runs of the real TRL and vLLM with a `correction` section."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from typing import Any

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
