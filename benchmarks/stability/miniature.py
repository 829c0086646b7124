"""A language model of a few hundred thousand parameters that learns in seconds, with an engine of any precision.

The language is a Markov chain over a Zipf vocabulary whose sentences end by chance. Reward is minus the length of a response, so
that learning is seen in steps until responses are half as long. Weights are float32 masters; a side of the run computes in a
`Grid`: a dtype, and the integers that an engine stores the weights of its linear layers as.

Shapes: B responses, P prompt tokens, T new tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.dither import IntegerCells

END = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a miniature and of its training."""

    vocabulary: int = 512
    hidden: int = 128
    layers: int = 4
    pretraining: int = 200
    prompts: int = 8
    samples: int = 8
    new: int = 32


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What a side computes in.

    Args:
        dtype: Of weights and activations.
        bits: Of the integers that linear layers' weights are, with a scale per row; 0 for none.
    """

    dtype: torch.dtype = torch.float32
    bits: int = 0


def on_grid(weight: Tensor, bits: int) -> Tensor:
    """Round a matrix to signed integers of so many bits, with a scale per row by its largest entry."""
    return IntegerCells(bits).held(weight)


def coarse(name: str, weight: Tensor) -> bool:
    """Tell whether an engine stores a weight as integers: those of linear layers, not embedding, head or norms."""
    return weight.ndim == 2 and "proj" in name


class Language:
    """A Markov chain: every token has a few successors with Zipf weights, and any may end the sentence.

    Args:
        vocabulary: Tokens, the end among them.
    """

    def __init__(self, vocabulary: int, *, successors: int = 16, hazard: float = 2e-3) -> None:
        made = torch.Generator().manual_seed(1)
        zipf = 1.0 / torch.arange(1, vocabulary, dtype=torch.float64)
        rows = [torch.multinomial(zipf, successors, generator=made) + 1 for _ in range(vocabulary)]
        weights = 1.0 / torch.arange(1, successors + 1, dtype=torch.float64) ** 1.2
        self.zipf, self.weights = zipf, weights
        self.successors, self.hazard = torch.stack(rows), hazard

    def sample(self, count: int, length: int, generator: torch.Generator, *, end: bool = True) -> Tensor:
        """Return sentences `[count, length]`, int64; without ends where these are not asked for."""
        draw = {"replacement": True, "generator": generator}
        columns = [torch.multinomial(self.zipf, count, **draw) + 1]
        for _ in range(length - 1):
            last = columns[-1]
            following = self.successors[last, torch.multinomial(self.weights, count, **draw)]
            following = torch.where(last == END, torch.multinomial(self.zipf, count, **draw) + 1, following)
            ends = torch.rand(count, generator=generator) < self.hazard
            columns.append(torch.where(ends & end, END, following))
        return torch.stack(columns, 1)


def pretrained(shape: Shape, seed: int, *, spread: float = 0.05, **experts: Any) -> tuple[nn.Module, Language]:
    """Return a float32 model that has learned the language, and the language.

    Args:
        shape: Its sizes.
        seed: Of its first weights, and of what it learns from.
        spread: Standard deviation of its first weights.
        experts: Fields of a mixture of experts; a dense model without.
    """
    language = Language(shape.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = (Qwen3MoeConfig if experts else Qwen3Config)(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.hidden // 32,
            num_key_value_heads=max(1, shape.hidden // 64),
            head_dim=32,
            intermediate_size=2 * shape.hidden,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            initializer_range=spread,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=None,
            # The softmax is then in float32, and the two sides' kernels differ by their shapes alone.
            attn_implementation="eager",
            **experts,
        )
        model = (Qwen3MoeForCausalLM if experts else Qwen3ForCausalLM)(config).float()
    if experts:
        model.set_experts_implementation("eager")  # on a CPU faster than the grouped matrix product
    learn(model, language, shape.pretraining, torch.Generator().manual_seed(seed + 100))
    return model, language


def learn(model: nn.Module, language: Language, steps: int, generator: torch.Generator) -> None:
    """Train a model on a language, in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for at in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * at / steps))
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, (at + 1) / 30) * (0.05 + 0.95 * cosine)
        ids = language.sample(32, 48, generator)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


class Sides:
    """A model's float32 masters, and its forward pass in any precision, with gradients to the masters.

    Args:
        master: In float32.
    """

    def __init__(self, master: nn.Module) -> None:
        self.master = master
        # Forward passes are of these, with weights that are handed to them: their own decide buffers and dtype alone.
        self._bodies: dict[torch.dtype, Any] = {}

    def weights(self, grid: Grid, *, gradient: bool = False) -> dict[str, Tensor]:
        """Return the masters as a side holds them; rounding passes gradients as if it were not there."""
        found = {}
        for name, parameter in self.master.named_parameters():
            weight = parameter if gradient else parameter.detach()
            if grid.bits and coarse(name, weight):
                weight = weight + (on_grid(weight.detach(), grid.bits) - weight).detach()
            found[name] = weight.to(grid.dtype)
        return found

    def logits(self, grid: Grid, weights: Mapping[str, Tensor], ids: Tensor, cache: Any = None) -> Tensor:
        """Return the logits of every token `[B, S, V]`, float32."""
        if grid.dtype not in self._bodies:
            body = copy.deepcopy(self.master).requires_grad_(False)
            for parameter in body.parameters():
                parameter.data = parameter.data.to(grid.dtype)
            self._bodies[grid.dtype] = body
        given = {"input_ids": ids, "past_key_values": cache, "use_cache": cache is not None}
        logits: Tensor = functional_call(self._bodies[grid.dtype], dict(weights), (), given).logits
        return logits.float()

    @torch.no_grad()
    def rollout(
        self, grid: Grid, prompts: Tensor, new: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample with a KV cache.

        Returns:
            Ids `[B, P + T]`, which of the new tokens count `[B, T]`, and the engine's log-probabilities of them `[B, T]`.
        """
        weights, cache = self.weights(grid), DynamicCache()
        going = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
        ids, seen, masks, logprobs = prompts, prompts, [], []
        for _ in range(new):
            logp = self.logits(grid, weights, seen, cache)[:, -1].log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1, generator=generator)
            masks.append(going)
            logprobs.append(logp.gather(1, token)[:, 0])
            going = going & (token[:, 0] != END)
            ids, seen = torch.cat([ids, token], 1), token
            if not bool(going.any()):
                break
        return ids, torch.stack(masks, 1), torch.stack(logprobs, 1)


def advantages(lengths: Tensor, samples: int) -> Tensor:
    """Return the advantages `[B]` of rewards that are minus the length, by the mean and spread of each prompt's responses."""
    grouped = -lengths.float().view(-1, samples)
    return ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
