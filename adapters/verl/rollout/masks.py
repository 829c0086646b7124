"""Sampling masks on their way from verl's vLLM server to the trainer: beside each answer, then two fields of each rollout.

A rollout's masks are id lists of different lengths. A field of verl's batches has only one ragged dimension, so the ids and
their counts are two fields: 4 bytes for each id, and 4 for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from mismatch_ext.patches.vllm.top_logprobs import SampledLogprobs
from pydantic import PrivateAttr
from torch import Tensor
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from mismatch_ext.config import SamplingMaskConfig
from mismatch_ext.errors import MismatchError
from mismatch_ext.rollout import SamplingSettings
from mismatch_ext.sampling_mask import TokenSupport

FIELD = "sampling_mask"
"""Entry of an answer's `extra_fields`: its masks, or why they are not known."""
UNKNOWN = "sampling_mask_unknown"
"""Entry of a rollout's `extra_fields`: why it has no masks; absent where it has some."""
IDS, SIZES = "sampling_mask_ids", "sampling_mask_sizes"
"""Fields of a batch: the ids that were left to sample from at all tokens of a response, and how many there are at each token."""


def sampled_with(params: Any) -> SamplingSettings:
    """Return the settings by which a request of vLLM's truncates; those that cut nothing off if it is decoded greedily."""
    if not params.temperature:
        return SamplingSettings()
    return SamplingSettings(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=max(int(params.top_k), 0),
        min_p=float(params.min_p),
    )


def asked_for(section: SamplingMaskConfig, sampling: SamplingSettings, most: int) -> int:
    """Return how many of the most likely tokens vLLM is asked for.

    Args:
        section: The section.
        sampling: The request's settings.
        most: vLLM's limit, above which it refuses a request; a request that cuts less off than the run's may need more.
    """
    return min(section.asked(sampling), most)


def read(completion: Any, *, asked: int, vocabulary: int, name: str) -> TokenSupport | str:
    """Return the masks of a completion of vLLM's, or why they are unknown: an error here would only drop a rollout, silently.

    Args:
        completion: One of vLLM's, finished or aborted.
        asked: How many of its most likely tokens it was asked for.
        vocabulary: Tokens that its logits are over.
        name: Name of the request.
    """
    logprobs = completion.logprobs
    try:
        if isinstance(logprobs, SampledLogprobs):
            return logprobs.left.support(asked=asked, vocabulary=vocabulary, name=name)
        ids = [list(one) for one in logprobs or ()]
        values = [[entry.logprob for entry in one.values()] for one in logprobs or ()]
        return TokenSupport.from_top(ids, values, asked=asked, vocabulary=vocabulary, name=name)
    except MismatchError as error:
        return f"{type(error).__name__}: {error}"


def fields_of(support: TokenSupport) -> dict[str, Tensor]:
    """Return masks as fields of a rollout, always of the same dtype, because verl puts several rollouts into one tensor."""
    return {IDS: support.ids.to(torch.int32), SIZES: support.counts.to(torch.int32)}


def support_of(ids: Tensor, sizes: Tensor, vocabulary: int) -> TokenSupport:
    """Return the masks that a rollout's fields hold."""
    offsets = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    offsets[1:] = sizes.cpu().long().cumsum(0)
    narrow = TokenSupport.empty(0, vocabulary).ids.dtype
    return TokenSupport(ids=ids.cpu().to(narrow), offsets=offsets, vocabulary=vocabulary)


def with_masks(output: AgentLoopOutput, support: TokenSupport) -> AgentLoopOutput:
    """Return an agent loop's output with masks among the fields that it gives to a batch."""
    kind = _masked(type(output))
    found: AgentLoopOutput = kind.model_construct(_fields_set=output.model_fields_set, **output.__dict__)
    found._support = support  # type: ignore[attr-defined]
    return found


@cache
def _masked(kind: type[AgentLoopOutput]) -> type[AgentLoopOutput]:
    as_dict: Callable[[Any], dict[str, Any]] = kind.as_dict

    class MaskedOutput(kind):  # type: ignore[misc, valid-type]
        _support: TokenSupport = PrivateAttr()

        def as_dict(self) -> dict[str, Any]:
            return as_dict(self) | fields_of(self._support)

    return MaskedOutput
