"""`Run`, the gate's engine and the doctor on a real vocabulary with a tied head, each in one process."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import json
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from mismatch_ext.adapters import cli
from mismatch_ext.adapters.transformers import TrainedModel
from mismatch_ext.adapters.vllm import Rollout, weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, get_constant_schedule_with_warmup

from mismatch_ext import MismatchConfig, Run, SamplingSettings
from tests.oracle import float32_error, logprobs

BLOCK: dict[str, Any] = {"precision": {"dtype": "float32"}, "monitor": {"weight_sync": "error"}}


@dataclass
class Looks:
    """Compares an engine with the trainer's model after each update, on tokens that neither has chosen.

    Args:
        model: The trainer's model, in float32.
        score: Returns the engine's log-probabilities `[N, T-1]` of tokens `[N, T]` after the first.

    Attributes:
        found: For each look, the mean gap over this model's own float32 rounding on the same tokens, how far the policy has
            moved since the look before in the same unit, and the names of the tensors that have not changed since.
    """

    model: nn.Module
    score: Callable[[Tensor], Tensor]
    found: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        vocabulary = self.model.config.vocab_size
        self._tokens = torch.randint(3, vocabulary, (4, 24), generator=generator)
        self._everywhere = torch.ones_like(self._tokens)
        self._remember()

    def _remember(self) -> None:
        self._scores = self._own_scores()
        self._before = {name: values.detach().clone() for name, values in self.model.named_parameters()}

    def _own_scores(self) -> Tensor:
        self.model.eval()
        return logprobs(self.model, self._tokens, self._everywhere).double()

    def look(self) -> None:
        """Note what the last update came to."""
        own = self._own_scores()
        rounding = float32_error(self.model, self._tokens, self._everywhere, self._everywhere)
        same = [name for name, values in self.model.named_parameters() if torch.equal(values, self._before[name])]
        self.found.append(
            {
                "gap": float((self.score(self._tokens) - own).abs().mean()) / rounding,
                "moved": float((own - self._scores).abs().mean()) / rounding,
                "same": same,
            }
        )
        self._remember()


def without_packed_heads(plant: bool) -> Any:
    """Leave the engine's packed copy of the output head as it was, if a fault is to be planted."""
    return patch.object(weights, "repack_tied_heads", lambda model: None) if plant else nullcontext()


def updated_by_run(model: str, out: str, updates: int, stale_head: bool = False) -> dict[str, Any]:
    """Train some steps with `Run`, and compare engine and trainer after each of its weight updates.

    Args:
        model: Folder of the model.
        out: Folder of the run.
        updates: Number of steps, each with an update.
        stale_head: Plant a fault: updates do not reach the head that the engine computes with.
    """
    block = MismatchConfig.parse(BLOCK | ({"monitor": {"weight_sync": "off"}} if stale_head else {}))
    rollout = Rollout.launch(
        model, block, SamplingSettings(), max_new_tokens=8, max_model_len=64, gpu_memory_utilization=0.1, seed=0
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    scheduler = get_constant_schedule_with_warmup(optimizer, 0)
    trainer = TrainedModel(policy, optimizer, scheduler, tokenizer=tokenizer)
    prompts = [tokenizer(f"What is {n} + {n}?").input_ids for n in range(4)]
    statuses = []
    with Run(block, trainer, rollout, out).start() as run, without_packed_heads(stale_head):
        looks = Looks(policy, rollout.score)
        for _ in range(updates):
            batch = run.batch(rollout.generate(prompts))
            sampled = run.score(batch)
            run.measure(batch, old=sampled.detach())
            run.step(sampled[batch.response_mask].mean())
            verdict = run.send()
            statuses.append(None if verdict is None else verdict.status)
            run.log()
            looks.look()
    rollout.shutdown()
    return {"looks": looks.found, "statuses": statuses}


def diagnosed(model: str, out: str, sampling: str) -> dict[str, Any]:
    """Return the doctor's status, what it printed and its JSON, of an engine that samples with a setting of its own.

    Args:
        model: Folder of the model.
        out: Folder of the result.
        sampling: The setting, as for `--sampling`.
    """
    words = ["doctor", "--model", model, "--prompts", "examples/doctor/prompts.jsonl", "--out", out, "--quick"]
    words += ["--dtype", "float32", "--responses", "16", "--max-tokens", "16", "--engine-arg", "max_model_len=256"]
    log = Path(out) / "printed.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as printed, redirect_stdout(printed):
        status = cli.main([*words, "--sampling", sampling])
    data = json.loads((Path(out) / "doctor.json").read_text(encoding="utf-8"))
    return {"status": status, "printed": log.read_text(encoding="utf-8"), **data}
