"""Numerics in a run whose rollouts are all of older weights: a few tokens are sampled right after a weight update.

The batches of an asynchronous trainer have hardly a token of the weights that score them. Right after an update both sides
hold the same weights. The server is then asked for a few answers before rollouts go on, and the trainer scores them by the very
pass that it trains with.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mismatch_ext.adapters.trl.async_grpo.carried import Carried
from mismatch_ext.adapters.vllm.http import COMPLETIONS
from mismatch_ext.adapters.vllm.remote import RemoteEngine
from mismatch_ext.adapters.vllm.routing import unpacked

from mismatch_ext.drift import UNKNOWN
from mismatch_ext.rollout import SamplingSettings

LENGTH = 32
"""Most tokens of one answer: the longer the answers, the longer rollouts wait."""


class FreshRollouts:
    """Asks a server for answers of the weights that it holds now.

    Args:
        remote: The server.
        sampling: Settings that rollouts are sampled with.
        tokens: How many sampled tokens are enough.
        length: Most tokens of an answer in the run's rollouts.
    """

    def __init__(self, remote: RemoteEngine, sampling: SamplingSettings, *, tokens: int, length: int) -> None:
        self._remote, self._sampling = remote, sampling
        self._length = min(LENGTH, length)
        self._count = -(-tokens // self._length)

    def take(self, prompts: Sequence[Sequence[int]], step: int) -> list[dict[str, Any]]:
        """Return answers to prompts, in the form in which TRL hands rollouts to its collator.

        Args:
            prompts: Token ids; the server is asked them in turn, again from the first until there are enough answers.
            step: Version of the weights that the server holds.

        Raises:
            EngineError: The server cannot be reached, or refuses.
            NonFiniteLogprobError: A log-probability is not finite.
        """
        asked = list(itertools.islice(itertools.cycle(prompts), self._count))
        body = {
            "model": self._remote.model, "prompt": [list(map(int, prompt)) for prompt in asked], "max_tokens": self._length,
            "temperature": self._sampling.temperature, "top_p": self._sampling.top_p, "top_k": self._sampling.top_k,
            "min_p": self._sampling.min_p, "repetition_penalty": self._sampling.repetition_penalty, "logprobs": 0,
            "return_token_ids": True,
        }  # fmt: skip
        choices = self._remote.http.generate(COMPLETIONS, body)["choices"]
        return [_sample(prompt, choice, step) for prompt, choice in zip(asked, choices, strict=True)]


def _sample(prompt: Sequence[int], choice: Mapping[str, Any], step: int) -> dict[str, Any]:
    sampled = choice["token_ids"]
    found = Carried()
    found.versions = np.array([UNKNOWN] * len(prompt) + [step] * len(sampled), dtype=np.int64)
    found.routes, found.routes_step = unpacked(choice.get("routed_experts")), step
    return {
        "input_ids": np.array([*prompt, *sampled], dtype=np.int64),
        "completion_mask": np.array([0] * len(prompt) + [1] * len(sampled), dtype=np.int64),
        "old_log_probs": np.array([0.0] * len(prompt) + choice["logprobs"]["token_logprobs"], dtype=np.float32),
        "advantage": 0.0,
        "group_id": 0,
        "metrics": found,
    }
