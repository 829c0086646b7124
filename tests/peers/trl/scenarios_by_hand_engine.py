"""Drawn trainings with a vLLM engine: corrections and sampling masks under subclasses as users write them, each step by hand."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters.trl.rows import row_keys, rows_of_batch
from torch import Tensor
from trl.generation import vllm_generation

from mismatch_ext.config import CorrectionConfig
from mismatch_ext.presets import PRESETS, resolve
from tests.oracles.brute.correction import weights_and_mask
from tests.peers.trl.scenarios_by_hand import Generated, Hand, Inputs, compared, draw

ENGINE = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05, "vllm_max_model_length": 64}


@contextmanager
def one_engine() -> Iterator[None]:
    """Let trainers that ask for the same engine share it: each sends its own weights before it samples."""
    engines: dict[str, Any] = {}
    start = vllm_generation.LLM

    def shared(**given: Any) -> Any:
        given |= {"max_num_seqs": 64, "seed": 0}
        key = repr(sorted(given.items(), key=lambda item: item[0]))
        if key not in engines:
            engines[key] = start(**given)
        return engines[key]

    with mock.patch.object(vllm_generation, "LLM", shared):
        yield


def draw_correction(seed: int) -> dict[str, Any]:
    """Draw a training with a correction: a preset, as it is or with bounds that tell tokens apart, or settings of one's own."""
    case, rng = draw(seed), random.Random(f"correction {seed}")
    host, block, user = case["host"], case["block"], case["user"]
    case["lora"] = False
    host.pop("off_policy_mask_threshold", None)
    if host["loss_type"] == "sapo":
        host["loss_type"] = "dapo"
    if rng.random() < 0.5:
        asked: dict[str, Any] = {"preset": rng.choice(list(PRESETS))}
        settings = resolve(CorrectionConfig(**asked))
        if rng.random() < 0.7:
            if settings.level != "none":
                asked |= {name: x for name, x in (("upper", 1.002), ("lower", 0.998)) if getattr(settings, name)}
            if settings.rules:
                asked["reject"] = {"seq_mean_k1": [0.9995, 1.0005]}
    else:
        level = rng.choice(["none", "token", "sequence", "geometric"])
        asked = {} if level == "none" else {"level": level, "bound": rng.choice(["truncate", "mask", "clip", "icepop"])}
        if asked:
            asked |= {"upper": 1.001} if asked["bound"] == "truncate" else {"lower": 0.999, "upper": 1.001}
        if rng.random() < 0.5 or not asked:
            asked["reject"] = rng.choice([
                {"token_k1": [0.999, 1.001]}, {"seq_mean_k1": [0.999, 1.001]}, {"seq_sum_k1": [0.998, 1.002]},
                {"token_k2": 1e-6, "seq_max_k2": 1e-5},
            ])  # fmt: skip
        if rng.random() < 0.3:
            asked["veto"] = 0.995
        if rng.random() < 0.3:
            clips = level == "none" and rng.random() < 0.5
            asked |= {"mode": "bypass", "loss": "ppo_clip" if clips else "reinforce"}
        elif level != "none" and rng.random() < 0.2:
            asked["normalize"] = True
        if asked.get("loss") != "reinforce" and rng.random() < 0.2:
            asked["off_policy_threshold"] = 0.0003
    settings = resolve(CorrectionConfig(**asked))
    if settings.loss == "reinforce":
        for name in ("top_entropy_quantile", "importance_sampling_level", "delta"):
            host.pop(name, None)
        host["importance_sampling_level"] = "token"
        host["loss_type"] = "dr_grpo" if host["loss_type"] in ("cispo", "luspo") else host["loss_type"]
    if user["change"] == "tool mask":  # TRL's own weights are made before a user's code in the first order
        user["ours_first"] = False
    if settings.loss == "reinforce" or settings.off_policy_threshold is not None or user["change"] == "replayed":
        user["ours_first"] = False
    block |= {"correction": asked, "monitor": {"weight_sync": "off"}}
    return case


class Corrected(Hand):
    """The steps with a correction; its weights are those of loops over tokens."""

    def __init__(self, model: str, case: dict[str, Any], generated: list[Generated]) -> None:
        asked = resolve(CorrectionConfig(**case["block"]["correction"]))
        self.threshold, self.settings = (
            asked.off_policy_threshold,
            dataclasses.replace(asked, off_policy_threshold=None),
        )
        super().__init__(model, case, generated)

    def _weights(self, inputs: Inputs, logps: Tensor, mask: Tensor) -> Tensor:
        rollout, advantages = inputs["sampling_per_token_logps"].double(), inputs["advantages"]
        weights, kept = weights_and_mask(rollout, logps, mask, self.settings, advantages, None)
        return torch.where(kept, weights, 0.0), kept.double()

    def _of_batch(self, made: Generated) -> Tensor:
        batch, mask = made.batch, (made.batch["completion_mask"] * made.batch.get("tool_mask", 1)).bool()
        bypass = self.settings.mode == "bypass"
        if bypass:  # mu has taken its place
            made = dataclasses.replace(made, batch={**batch, "old_per_token_logps": None})
        d = super()._of_batch(made)
        if mask.any() and batch.get("importance_sampling_ratio") is not None:
            with torch.no_grad():
                old = self.scores(self.policy, batch)[0] if bypass else batch["old_per_token_logps"].double()
            weights, kept = self._weights(batch, old, mask)
            off = batch["importance_sampling_ratio"] - (kept if bypass else weights)
            self.differs("weights", torch.where(mask, off, 0.0))
        return d

    def policy_term(
        self, inputs: Inputs, logps: Tensor, mask: Tensor, lengths: Tensor, entropy: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return TRL's own term of each token, weighed, or the one that takes its place."""
        rollout, advantages = inputs["sampling_per_token_logps"].double(), inputs["advantages"].double()
        advantages = advantages if advantages.dim() == 2 else advantages[:, None]
        if self.settings.loss == "reinforce":
            return -self._weights(inputs, logps.detach(), mask.bool())[0] * advantages * logps, mask
        if self.settings.mode == "bypass":
            inputs = {**inputs, "old_per_token_logps": torch.where(mask.bool(), rollout, 0.0)}
        term, kept = super().policy_term(inputs, logps, mask, lengths, entropy)
        if self.threshold is not None:
            drift = ((rollout - logps.detach()) * mask).sum(1, keepdim=True) / lengths
            term = term * ((advantages >= 0) | (drift <= self.threshold)).double()
        weights = inputs.get("importance_sampling_ratio")
        return term if weights is None else term * weights.double(), kept


def draw_mask(seed: int) -> dict[str, Any]:
    """Draw a training whose engine samples from a part of the vocabulary."""
    case, rng = draw(seed), random.Random(f"mask {seed}")
    host, block, user = case["host"], case["block"], case["user"]
    case["lora"] = False
    for name in ("off_policy_mask_threshold", "entropy_coef", "top_entropy_quantile"):
        host.pop(name, None)
    host |= {"top_k": 8, "top_p": rng.choice([0.9, 1.0])}
    if user["call"] == "entropy":
        user["call"] = "nll"
    block |= {"sampling_mask": {}, "precision": {"dtype": "float32"}, "monitor": {"weight_sync": "off"}}
    return case


class Masked(Hand):
    """The steps of a policy over the tokens that were left to sample from."""

    def scores(self, model: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return log-probabilities over what was left, of unpadded rows."""
        full = super().scores(model, inputs)[1]
        known = {key: support for one in self.generated for key, support in one.supports.items()}
        left = torch.ones(full.shape, dtype=torch.bool)
        for row, key in enumerate(row_keys(*rows_of_batch(inputs))):
            support = known[key]
            for place in range(int(inputs["completion_mask"][row].sum())):
                left[row, place] = False
                left[row, place, support.slice(place, place + 1).ids.long()] = True
        full = full.masked_fill(~left, -1e4).log_softmax(-1)
        return full.gather(-1, inputs["completion_ids"][..., None])[..., 0], full


def draw_routed(seed: int) -> dict[str, Any]:
    """Draw a training of a mixture of experts under the engine's routes, which in float32 are the model's own."""
    case = draw(seed)
    case["lora"] = False
    case["host"] |= {"router_aux_loss_coef": 0.0, "model_init_kwargs": {"experts_implementation": "eager"}}
    case["block"] |= {"routing": {"mode": "R3"}, "precision": {"dtype": "float32"}, "monitor": {"weight_sync": "off"}}
    # Routes are the model's own until it is updated.
    case["host"] |= {"num_iterations": 1, "steps_per_generation": case["host"]["gradient_accumulation_steps"]}
    if case["user"]["change"] == "replayed":
        case["user"]["change"] = "permuted"
    return case


def routed(model: str, out: str, first: int, last: int) -> list[dict[str, Any]]:
    """Compare the runs of some seeds under routes."""
    return _compared(model, out, [draw_routed(seed) for seed in range(first, last)], Hand)


def corrected(model: str, out: str, first: int, last: int) -> list[dict[str, Any]]:
    """Compare the runs of some seeds with a correction."""
    return _compared(model, out, [draw_correction(seed) for seed in range(first, last)], Corrected)


def masked(model: str, out: str, first: int, last: int) -> list[dict[str, Any]]:
    """Compare the runs of some seeds with sampling masks."""
    return _compared(model, out, [draw_mask(seed) for seed in range(first, last)], Masked)


def _compared(model: str, out: str, cases: list[dict[str, Any]], by: type[Hand]) -> list[dict[str, Any]]:
    found = []
    with one_engine():
        for number, case in enumerate(cases):
            torch.set_num_threads(1)
            found.append(compared(model, f"{out}/{number}", case, by, **ENGINE))
    return found
