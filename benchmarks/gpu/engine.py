"""The engine that is always there: transformers' decode with a KV cache, and the trainer's pass over the same tokens.

Shapes: B responses, P prompt tokens, T new tokens, V vocabulary, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from mismatch_ext.adapters.transformers.routing import record_routing
from torch import Tensor, nn

from mismatch_ext.doctor import Sample
from mismatch_ext.routing import RoutingTrace

Warper = Callable[[Tensor, Tensor], Tensor]
Context = Callable[[], AbstractContextManager[Any]]
# Elements of the logits of one pass of the trainer: 2 GiB in float32.
MOST_LOGITS = 2**29


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What the engine sampled.

    Args:
        ids: Prompt and response `[B, P + T]`, int64.
        logprobs: Of the sampled tokens under the distribution they were drawn from `[B, T]`, float64, on the CPU.
        mask: True up to the end of each response `[B, T]`, on the CPU.
        routes: The engine's experts, a trace per response; None for a model without.
        support: True for tokens that the truncation kept `[B, T, V]`, on the CPU; None where it was not asked for.
    """

    ids: Tensor
    logprobs: Tensor
    mask: Tensor
    routes: tuple[RoutingTrace, ...] | None = None
    support: Tensor | None = None

    @property
    def prompt(self) -> int:
        """P."""
        return self.ids.shape[1] - self.logprobs.shape[1]

    def sample(self) -> Sample:
        """Return it as the doctor takes it."""
        ids, lengths = self.ids.cpu(), self.mask.sum(1).tolist()
        return Sample(
            prompts=tuple(tuple(row[: self.prompt].tolist()) for row in ids),
            responses=tuple(
                tuple(row[self.prompt : self.prompt + n].tolist()) for row, n in zip(ids, lengths, strict=True)
            ),
            masks=tuple((True,) * n for n in lengths),
            logprobs=tuple(tuple(row[:n].tolist()) for row, n in zip(self.logprobs, lengths, strict=True)),
            routes=self.routes,
        )


def logits_of(model: nn.Module, head: torch.dtype | None = None, **inputs: Any) -> tuple[Tensor, Any]:
    """Return logits `[B, S, V]` in float32, and the cache.

    Args:
        model: A causal language model of transformers.
        head: Dtype in which the head multiplies; None for the model's own.
        inputs: Of its forward pass.
    """
    keep = inputs.pop("logits_to_keep", 0)
    if head is None:
        output = model(**inputs, logits_to_keep=keep)
        return output.logits.float(), output.past_key_values
    output = model.base_model(**inputs)  # type: ignore[operator]
    hidden = output.last_hidden_state[:, -keep:] if keep else output.last_hidden_state
    weight = model.get_output_embeddings().weight  # type: ignore[operator]
    # Autocast would take the product back to half precision.
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden.to(head), weight.to(head)).float(), output.past_key_values


@torch.no_grad()
def decode(
    model: nn.Module,
    prompts: Tensor,
    new: int,
    *,
    generator: torch.Generator,
    rows: int = 256,
    warpers: Sequence[Warper] = (),
    temperature: float = 1.0,
    cache: Callable[[int, int], Any] | None = None,
    head: torch.dtype | None = None,
    routed: bool = False,
    support: bool = False,
    ends: Collection[int] = (),
) -> Rollout:
    """Sample responses token by token with a KV cache.

    Args:
        model: The engine's model, in the engine's dtype.
        prompts: Of equal length `[B, P]`, int64.
        new: Most new tokens.
        generator: On the model's device.
        rows: Responses at once.
        warpers: transformers' logits processors that truncate; the log-probabilities are those after them.
        temperature: What logits are divided by before that.
        cache: Makes the cache for a number of rows and tokens; None for transformers' own.
        head: Dtype in which the head multiplies; None for the model's own.
        routed: Whether to record the experts.
        support: Whether to keep which tokens the warpers left.
        ends: Ids that end a response.
    """
    parts = [
        _decode(model, part, new, generator, warpers, temperature, cache, head, routed, support, ends)
        for part in prompts.split(rows)
    ]
    routes = tuple(trace for part in parts for trace in part.routes or ())
    kept = [part.support for part in parts if part.support is not None]
    return Rollout(
        ids=torch.cat([part.ids for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        mask=torch.cat([part.mask for part in parts]),
        routes=routes or None,
        support=torch.cat(kept) if kept else None,
    )


def _decode(
    model: nn.Module,
    prompts: Tensor,
    new: int,
    generator: torch.Generator,
    warpers: Sequence[Warper],
    temperature: float,
    cache: Callable[[int, int], Any] | None,
    head: torch.dtype | None,
    routed: bool,
    support: bool,
    ends: Collection[int],
) -> Rollout:
    ids, logprobs, kept = prompts, [], []
    stops = torch.tensor(sorted(ends), dtype=torch.int64, device=prompts.device)
    going = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    masks = []
    state = cache(len(prompts), prompts.shape[1] + new) if cache is not None else None
    with record_routing(model) if routed else nullcontext() as recording:
        seen = prompts
        for _ in range(new):
            logits, state = logits_of(
                model, head, input_ids=seen, past_key_values=state, use_cache=True, logits_to_keep=1
            )
            scores = logits[:, -1] / temperature
            for warper in warpers:
                scores = warper(ids, scores)
            logp = scores.log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1, generator=generator)
            logprobs.append(logp.gather(1, token)[:, 0])
            masks.append(going)
            if support:
                kept.append((logp > -torch.inf).cpu())
            going = going & ~torch.isin(token[:, 0], stops)
            ids, seen = torch.cat([ids, token], 1), token
            if len(stops) and not bool(going.any()):
                break
    mask = torch.stack(masks, 1).cpu()
    return Rollout(
        ids=ids,
        logprobs=torch.stack(logprobs, 1).double().cpu(),
        mask=mask,
        routes=_traces(recording.passes, ids, mask.sum(1).tolist()) if recording is not None else None,
        support=torch.stack(kept, 1) if kept else None,
    )


def _traces(passes: Sequence[RoutingTrace], ids: Tensor, lengths: Sequence[int]) -> tuple[RoutingTrace, ...]:
    """Return a trace per response: a row for each token but the last, which the model never saw."""
    steps = [one.experts.view(len(ids), -1, *one.experts.shape[1:]) for one in passes]
    whole, head = torch.cat(steps, 1), passes[0]
    prompt = steps[0].shape[1]
    found = []
    for row, length in enumerate(lengths):
        count = prompt + length - 1
        found.append(
            RoutingTrace(
                parts=(whole[row, :count].cpu(),),
                layers=head.layers,
                num_experts=head.num_experts,
                versions=((0, 0),),
                tokens=ids[row, :count].cpu().to(torch.int32),
            )
        )
    return tuple(found)


@torch.no_grad()
def score(
    model: nn.Module,
    rollout: Rollout,
    *,
    batch: int = 8,
    padding: int = 0,
    head: torch.dtype | None = None,
    context: Context = nullcontext,
) -> Tensor:
    """Return the trainer's log-probabilities of the sampled tokens `[B, T]`, float64, on the CPU.

    Args:
        model: The trainer's.
        rollout: The tokens.
        batch: Most responses in a pass.
        padding: Masked tokens to the left of each.
        head: Dtype in which the head multiplies; None for the model's own.
        context: Entered around each pass, such as autocast.
    """
    width: int = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    most = max(1, MOST_LOGITS // (width * (rollout.ids.shape[1] + padding)))
    parts = []
    for ids in rollout.ids.split(min(batch, most)):
        left = torch.zeros(len(ids), padding, dtype=ids.dtype, device=ids.device)
        inputs: dict[str, Any] = {"input_ids": torch.cat([left, ids], 1), "use_cache": False}
        if padding:
            mask = torch.cat([left, torch.ones_like(ids)], 1)
            inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
        with context():
            logits, _ = logits_of(model, head, **inputs)
        logits = logits[:, padding + rollout.prompt - 1 : -1]
        parts.append(picked(logits, ids[:, rollout.prompt :]).cpu())
    return torch.cat(parts)


def picked(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of tokens `[B, T]`, float64, row by row: logits of many rows are large."""
    rows = [
        row.double().log_softmax(-1).gather(-1, ids[:, None])[:, 0] for row, ids in zip(logits, tokens, strict=True)
    ]
    return torch.stack(rows)
