"""The zero-mismatch control: rollouts sampled by the trainer's own model, in the trainer's own precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TrainerSampler:
    """Stands in for the `generate` of TRL's vLLM wrapper, so that all else of a run stays as it is.

    The forward pass is the trainer's: same weights, same autocast, same left padding. With eager attention a pass with a KV
    cache gives the logits of TRL's scoring pass bit for bit, but for a few tokens in a run, so what is left of the gap is the
    float32 rounding of log-softmax. The run measures that gap like any other.

    Args:
        trainer: The GRPOTrainer.
        seed: Seed of the random numbers, which are drawn apart from the trainer's.
    """

    def __init__(self, trainer: Any, seed: int) -> None:
        self.trainer = trainer
        self.generator = torch.Generator().manual_seed(seed)
        self.eos, self.pad = trainer._tokenizer.eos_token_id, trainer._tokenizer.pad_token_id

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Sample one completion per prompt; returns what TRL's `VLLMGeneration.generate` returns."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        rows, cache = torch.arange(len(prompts)), None
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        for _ in range(self.trainer.args.max_completion_length):
            with self.trainer.accelerator.autocast():
                output = model(
                    input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
                )
            cache = output.past_key_values
            drawn, logprob = self._draw(output.logits[:, -1])
            for row, token, value in zip(rows.tolist(), drawn.tolist(), logprob.tolist(), strict=True):
                tokens[row].append(token)
                logprobs[row].append(value)
            # A row's logits do not depend on the others, so those that are finished can leave.
            (going,) = (drawn != self.eos).nonzero(as_tuple=True)
            if len(going) == 0:
                break
            if len(going) < len(rows):
                cache.batch_select_indices(going)
            rows, ids = rows[going], drawn[going, None]
            mask = torch.cat([mask[going], torch.ones_like(ids)], dim=1)
        return prompts, tokens, [[[x] for x in row] for row in logprobs], [[[x] for x in row] for row in tokens]

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits.float() / self.trainer.temperature, dim=-1)
        token = torch.multinomial(logp.exp(), 1, generator=self.generator)
        return token[:, 0], logp.gather(1, token)[:, 0]
