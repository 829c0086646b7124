"""The most likely tokens that vLLM reports at each place of a response, for score centering."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mismatch_ext.centering import TokenHead
from mismatch_ext.errors import EngineError

if TYPE_CHECKING:
    from vllm import LLM


def expect_top_k(llm: LLM, top_k: int) -> int:
    """Return how many tokens an engine is asked for: `top_k`, or all of a smaller vocabulary.

    Raises:
        EngineError: The engine reports fewer.
    """
    model: Any = llm.llm_engine.model_config
    asked = min(top_k, int(model.get_vocab_size()))
    if 0 <= model.max_logprobs < asked:
        raise EngineError(
            f"mismatch.correction.centering.top_k={asked}, and the vLLM engine reports at most {model.max_logprobs} "
            f"log-probabilities per token. Start it with max_logprobs={asked}, or lower top_k."
        )
    return asked


def flat_logprobs() -> dict[str, Any]:
    """Return the sampling argument by which vLLM keeps log-probabilities as numbers; empty for one that has none."""
    from vllm import SamplingParams

    names = getattr(SamplingParams, "__struct_fields__", None) or [f.name for f in dataclasses.fields(SamplingParams)]
    return {"flat_logprobs": True} if "flat_logprobs" in names else {}


def is_flat(tops: Any) -> bool:
    """Tell whether log-probabilities are vLLM's `FlatLogprobs`, which would make an object of each when it is read as a list."""
    return hasattr(tops, "start_indices")


def head_of(tops: Any, top_k: int) -> TokenHead:
    """Return the head of a response from what vLLM reported at its places, the sampled token first."""
    if not is_flat(tops):
        ranked = [sorted(top.items(), key=lambda entry: entry[1].rank) for top in tops]
        names = [[token for token, _ in place] for place in ranked]
        return TokenHead.from_lists(names, [[entry.logprob for _, entry in place] for place in ranked], top_k)
    places = len(tops)
    ids = torch.from_numpy(np.array(tops.token_ids, np.int32).reshape(places, -1)[:, 1:].copy())
    logprobs = torch.from_numpy(np.array(tops.logprobs, np.float32).reshape(places, -1)[:, 1:].copy())
    return TokenHead(ids=ids, logprobs=logprobs.masked_fill(logprobs.isnan(), -torch.inf))
