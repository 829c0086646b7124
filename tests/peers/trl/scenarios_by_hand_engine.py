"""Trainings with an engine: corrections, sampling masks and routes under subclasses as users write them, each step by hand."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters.trl.rows import row_keys, rows_of_batch
from torch import Tensor
from trl.generation import vllm_generation

from mismatch_ext.config import CorrectionConfig
from mismatch_ext.presets import resolve
from tests.oracles.brute.correction import weights_and_mask
from tests.peers.trl.scenarios_by_hand import Generated, Hand, Inputs, cases_of, compare

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

    def _of_batch(self, made: Generated) -> None:
        batch, mask = made.batch, (made.batch["completion_mask"] * made.batch.get("tool_mask", 1)).bool()
        bypass = self.settings.mode == "bypass"
        if bypass:  # mu has taken its place
            made = dataclasses.replace(made, batch={**batch, "old_per_token_logps": None})
        super()._of_batch(made)
        if batch.get("importance_sampling_ratio") is not None:
            old = self.scores(self.policy, batch)[0].detach() if bypass else batch["old_per_token_logps"].double()
            weights, kept = self._weights(batch, old, mask)
            wanted = kept if bypass else weights
            found = batch["importance_sampling_ratio"].expand(mask.shape)  # a sequence's is one for its tokens
            self.expect_near("weights", found[mask], wanted[mask])

    def policy_term(self, inputs: Inputs, logps: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Return TRL's own term of each token, weighed, or the one that takes its place."""
        rollout, advantages = inputs["sampling_per_token_logps"].double(), inputs["advantages"].double()
        advantages = advantages if advantages.dim() == 2 else advantages[:, None]
        if self.settings.loss == "reinforce":
            return -self._weights(inputs, logps.detach(), mask.bool())[0] * advantages * logps
        if self.settings.mode == "bypass":
            inputs = {**inputs, "old_per_token_logps": torch.where(mask.bool(), rollout, 0.0)}
        term = super().policy_term(inputs, logps, mask, lengths)
        if self.threshold is not None:
            drift = ((rollout - logps.detach()) * mask).sum(1, keepdim=True) / lengths
            term = term * ((advantages >= 0) | (drift <= self.threshold)).double()
        weights = inputs.get("importance_sampling_ratio")
        return term if weights is None else term * weights.double()


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


BY = {"corrected": Corrected, "masked": Masked, "routed": Hand}


def compare_some(model: str, out: str, kind: str, first: int, last: int) -> None:
    """Compare the runs of some cases of a kind, which share engines."""
    with one_engine():
        for number, case in enumerate(cases_of(kind)[first:last]):
            compare(model, f"{out}/{number}", case, BY[kind], **ENGINE)
