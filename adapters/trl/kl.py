"""The `kl` section in TRL: the KL term under TRL's names of its inputs, and the reward function that subtracts the KL."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mismatch_ext.errors import ConfigError
from mismatch_ext.kl import KlTerm, kl_baseline, kl_terms
from mismatch_ext.ranks import Ranks, together

Prompt = tuple[int, ...]

BASELINE = "mismatch_kl_baseline"
"""Key of TRL's inputs under which the leave-one-out baseline of each token travels."""


def batch_baseline(
    term: KlTerm,
    output: Mapping[str, Any],
    old: Tensor,
    mask: Tensor,
    generated: Iterable[tuple[Sequence[int], Sequence[int]]],
    pad: int,
    ranks: Ranks,
) -> Tensor:
    """Return the leave-one-out baseline of each token of this rank's generation batch `[B, T]`; every rank must call it."""
    # A completion that was sampled once and stands in several rows, as in best-of-n, is no other sample of its own: its copies
    # would subtract the whole KL. TRL cuts a generation batch into equal parts, so that a prompt's may be on several ranks.
    length = mask.size(1)
    sampled = Counter(
        (tuple(prompt), (*completion, *[pad] * (length - len(completion)))) for prompt, completion in generated
    )
    prompts = zip(output["prompt_ids"].tolist(), output["prompt_mask"].tolist(), strict=True)
    keys = [
        (tuple(token for token, here in zip(ids, there, strict=True) if here), tuple(completion))
        for (ids, there), completion in zip(prompts, output["completion_ids"].tolist(), strict=True)
    ]
    samples: defaultdict[Any, list[int]] = defaultdict(list)
    of_row = []
    for row, key in enumerate(keys):
        if len(samples[key]) < max(sampled[key], 1):
            samples[key].append(row)
        of_row.append(samples[key][-1])
    rows = sorted(row for found in samples.values() for row in found)
    place = {row: index for index, row in enumerate(rows)}
    scored = (old, output["ref_per_token_logps"], output.get("sampling_per_token_logps"))
    logprobs = [one for one in scored if one is not None]
    widest_dtype = reduce(torch.promote_types, (one.dtype for one in logprobs))
    values = torch.stack([one.to(old.device, widest_dtype) for one in (mask, *logprobs)], dim=1)
    prompt_of = [keys[row][0] for row in rows]
    others = _of_other_ranks(prompt_of, values[rows], ranks)
    with together(ranks):
        widest = max([length, *(other.size(1) for _, other in others)])
        parts = (values[rows], *(other[None] for _, other in others))
        padded = torch.cat([F.pad(one, (0, widest - one.size(2))) for one in parts])
        chosen, policy, reference, *engine = padded.unbind(1)
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompt_of))}
        of_prompt = torch.tensor([numbers[prompt] for prompt in (*prompt_of, *(prompt for prompt, _ in others))])
        behavior = term.behavior(policy, old=policy, rollout=engine[0] if engine else None)
        baseline = kl_baseline(
            logprobs=policy,
            ref_logprobs=reference,
            mask=chosen,
            settings=term.config,
            behavior=behavior,
            groups=of_prompt.to(old.device),
        )
    return baseline[[place[row] for row in of_row], :length]


def _of_other_ranks(prompts: Sequence[Prompt], values: Tensor, ranks: Ranks) -> list[tuple[Prompt, Tensor]]:
    """Return prompt and values `[V, T]` of other ranks' samples of the same prompts; every rank must call it."""
    if ranks.size == 1:
        return []
    shared = _on_several_ranks({hash(prompt) for prompt in prompts}, ranks)
    if not shared:
        return []
    mine = [(prompt, one.cpu()) for prompt, one in zip(prompts, values, strict=True) if hash(prompt) in shared]
    here = set(prompts)
    return [
        (prompt, one.to(values))
        for rank, found in enumerate(ranks.gather(mine))
        if rank != ranks.rank
        for prompt, one in found
        if prompt in here
    ]


def _on_several_ranks(digests: set[int], ranks: Ranks) -> set[int]:
    """Return which digests several ranks have; every rank must call it. Only numbers travel, which take no pickle."""
    counts = torch.zeros(ranks.size, dtype=torch.int64)
    counts[ranks.rank] = len(digests)
    counts = ranks.sum(counts)
    by_rank = torch.zeros(ranks.size, int(counts.max()), dtype=torch.int64)
    by_rank[ranks.rank, : len(digests)] = torch.tensor(list(digests), dtype=torch.int64)
    rows = zip(ranks.sum(by_rank).tolist(), counts.tolist(), strict=True)
    holders = Counter(digest for row, count in rows for digest in row[:count])
    return {digest for digest, count in holders.items() if count > 1}


def kl_loss(term: KlTerm, logps: Tensor, inputs: Mapping[str, Any], mask: Tensor) -> Tensor:
    """Return what is added to TRL's per-token loss `[B, T]`, coefficient included."""
    if term.config.has_baseline and BASELINE not in inputs:
        raise ConfigError(
            f"mismatch.kl needs {BASELINE!r} in each micro-batch, and it is gone: what you override makes the inputs of "
            "_compute_loss anew. Keep the key, or use a kl setting without a leave-one-out baseline."
        )
    # TRL leaves the old log-probabilities out where the policy is still the old one.
    old, rollout = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
    return kl_terms(
        logprobs=logps,
        ref_logprobs=inputs["ref_per_token_logps"],
        mask=mask,
        settings=term.config,
        behavior=term.behavior(logps, old=old, rollout=rollout),
        coef=term.coef,
        baseline=inputs[BASELINE] if term.config.has_baseline else None,
    ).loss


class KlReward:
    """One of TRL's reward functions: minus the KL penalty of each completion."""

    def __init__(self) -> None:
        self.penalties: list[float] = []
        """KL penalties of the completions that are about to be rewarded."""

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        """Return the rewards, once for each batch."""
        penalties, self.penalties = self.penalties, []
        if len(penalties) != len(completions):
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards': {len(penalties)} KL penalties for {len(completions)} completions; use "
                "reward_path='surrogate' with this trainer."
            )
        return [-penalty for penalty in penalties]
