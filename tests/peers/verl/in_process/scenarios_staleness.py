"""The versions that verl's client notes for each answer, without Ray."""

from __future__ import annotations

import asyncio
import pickle
import warnings
from typing import Any

import numpy as np
from mismatch_ext.adapters.verl.rollout.client import TurnsClient, versioned
from omegaconf import OmegaConf
from transformers import BatchEncoding
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from tests.peers.verl.in_process.routes import refused


def resumed() -> dict[str, Any]:
    """Let verl's own client resume an answer that weight updates interrupt, over two turns of one conversation."""
    answers = iter(
        [
            ([1, 2], 4, "aborted"),
            ([], 5, "aborted"),
            ([3], 5, "completed"),
            ([4, 5], 6, "completed"),
            ([6], 8, "completed"),
        ]
    )

    async def answer(self: Any, request_id: Any, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        tokens, version, reason = next(answers)
        # As vLLM does, all rows are of the weights of this request, but the last token's, which it is not given.
        rows = np.full((len(prompt_ids) + len(tokens) - 1, 1, 1), version) if tokens else None
        extra = {"global_steps": version}
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-1.0] * len(tokens),
            stop_reason=reason,
            routed_experts=rows,
            extra_fields=extra,
        )

    client = object.__new__(FullyAsyncLLMServerClient)
    client.config = OmegaConf.create({})
    asked, Asked = versioned(client, replayed=True), LLMServerClient.generate
    LLMServerClient.generate = answer  # type: ignore[method-assign]
    try:

        async def turns() -> tuple[Any, Any, Any]:
            # As transformers 5 returns it from a chat template, and in a batch of one: verl takes both.
            prompt: Any = BatchEncoding({"input_ids": [7, 8, 9]})
            first = await asked.generate("a", prompt_ids=prompt, sampling_params={"max_tokens": 9})
            tool = [7, 8, 9, 1, 2, 3, 0, 0]
            second = await asked.generate("a", prompt_ids=[tool], sampling_params={"max_tokens": 9})  # type: ignore[list-item]
            # The tokens that the second turn sampled are tokenized anew.
            return (
                first,
                second,
                await asked.generate("a", prompt_ids=[*tool, 4, 9, 0], sampling_params={"max_tokens": 9}),
            )

        first, second, third = asyncio.run(turns())
    finally:
        LLMServerClient.generate = Asked  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        other = versioned(object())
        versioned(object.__new__(LLMServerClient))
        versioned(object.__new__(type("Derived", (TurnsClient,), {})))
    unnoted = refused(versioned, object(), replayed=True)
    noted = pickle.loads(pickle.dumps(first.extra_fields["weight_versions"]))
    return {
        "tokens": [first.token_ids, second.token_ids],
        "noted": [list(one) for one in noted],
        # The first layer is the model's own; behind it R3's routes have digests.
        "routes": [one.routed_experts[:, 0].flatten().tolist() for one in (first, second, third)],
        "travels_as": type(noted).__name__,
        "shared": first.extra_fields["weight_versions"] is second.extra_fields["weight_versions"],
        "ends": [first.extra_fields["min_global_steps"], first.extra_fields["max_global_steps"]],
        "other": type(other).__name__,
        "told": [str(one.message) for one in told],
        "refused": unnoted,
    }
