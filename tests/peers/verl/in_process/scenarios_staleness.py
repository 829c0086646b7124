"""Parts of a gap by the versions of its tokens, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from mismatch_ext.adapters.verl.rollout.client import versioned
from mismatch_ext.adapters.verl.worker.actor import MismatchWorker
from mismatch_ext.adapters.verl.worker.staleness import segments_of, stale_gap
from omegaconf import OmegaConf
from tensordict import NonTensorStack
from transformers import BatchEncoding
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from mismatch_ext.drift import drift_metrics
from mismatch_ext.verdicts import Level, Verdicts
from tests.peers.verl.in_process.workers import batch, worker


def parts() -> dict[str, Any]:
    """Measure nested rows of several versions, as a worker does."""
    lengths, prompts = [4, 3, 2], [2, 1, 3]
    nested = lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # noqa: E731
    rollout = nested([torch.full((n,), -1.0) for n in lengths])
    first_turn = {"weight_versions": [(6, 2)], "min_global_steps": 6, "max_global_steps": 7}
    # A token's log-probability stands at the place before it, and the last place has none.
    whole = [torch.full((p + n,), -1.0 - 0.5**row) for row, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
    extra = [
        {"weight_versions": [(6, 2), (7, 4)], "min_global_steps": 6, "max_global_steps": 7},
        {"min_global_steps": 7, "max_global_steps": 7},
        {"weight_versions": [(7, 5)], "min_global_steps": 6, "max_global_steps": 7},  # of its second turn alone
    ]
    fields = {
        "rollout_log_probs": rollout,
        "response_mask": nested([torch.ones(n, dtype=torch.int64) for n in lengths]),
        "extra_fields": NonTensorStack(*extra),
        "prompts": nested([torch.zeros(n, dtype=torch.int64) for n in prompts]),
    }
    found: dict[str, Any] = {
        "segments": [segments_of(e, p) for e, p in zip(extra, prompts, strict=True)],
        "first_turn": segments_of(first_turn, 2),
    }
    for name, version in (("batch", 7), ("ahead", 6), ("replayed", 7)):
        state = stale_gap(fields, nested(whole), version=version, replayed=name == "replayed")
        if isinstance(state, Exception):
            found[name] = f"{type(state).__name__}: {state}"
            continue
        found[name] = drift_metrics(state)
    return found


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
    asked, Asked = versioned(client), LLMServerClient.generate
    LLMServerClient.generate = answer  # type: ignore[method-assign]
    try:

        async def turns() -> tuple[Any, Any, Any]:
            # As transformers 5 returns it from a chat template, and in a batch of one: verl takes both.
            prompt: Any = BatchEncoding({"input_ids": [7, 8, 9]})
            first = await asked.generate("a", prompt_ids=prompt, sampling_params={"max_tokens": 9})
            tool = [7, 8, 9, 1, 2, 3, 0, 0]
            second = await asked.generate("a", prompt_ids=[tool], sampling_params={"max_tokens": 9})  # type: ignore[list-item]
            # The tokens that the second turn sampled are tokenised anew.
            return (
                first,
                second,
                await asked.generate("a", prompt_ids=[*tool, 4, 9, 0], sampling_params={"max_tokens": 9}),
            )

        first, second, third = asyncio.run(turns())
    finally:
        LLMServerClient.generate = Asked  # type: ignore[method-assign]
    noted = pickle.loads(pickle.dumps(first.extra_fields["weight_versions"]))
    return {
        "tokens": [first.token_ids, second.token_ids],
        "noted": [list(one) for one in noted],
        "routes": [one.routed_experts.flatten().tolist() for one in (first, second, third)],
        "pickled": [one.nbytes for one in vars(noted).values() if hasattr(one, "nbytes")],
        "shared": first.extra_fields["weight_versions"] is second.extra_fields["weight_versions"],
        "ends": [first.extra_fields["min_global_steps"], first.extra_fields["max_global_steps"]],
        "other": type(versioned(object())).__name__,
    }


def one_id() -> list[list[Any]]:
    """Ask for three answers to one prompt under one id, two of them at the same time, as `full_determinism` does."""

    async def answer(
        self: Any, request_id: Any, *, prompt_ids: list[int], sampling_params: Any, **_: Any
    ) -> TokenOutput:
        await asyncio.sleep(sampling_params["wait"])
        version = sampling_params["version"]
        return TokenOutput(
            token_ids=[1], log_probs=[-1.0], stop_reason="completed", extra_fields={"global_steps": version}
        )

    client = object.__new__(FullyAsyncLLMServerClient)
    client.config = OmegaConf.create({})
    asked, before = versioned(client), LLMServerClient.generate
    LLMServerClient.generate = answer  # type: ignore[method-assign]

    async def ask(version: int, wait: float) -> Any:
        limits = {"max_tokens": 9, "version": version, "wait": wait}
        return await asked.generate("det-0", prompt_ids=[7, 8], sampling_params=limits)

    async def all_of_them() -> list[Any]:
        return [*await asyncio.gather(ask(4, 0.02), ask(5, 0.0)), await ask(6, 0.0)]

    try:
        found = asyncio.run(all_of_them())
    finally:
        LLMServerClient.generate = before  # type: ignore[method-assign]
    return [[list(one) for one in output.extra_fields["weight_versions"]] for output in found]


@contextlib.contextmanager
def _asked(built: Any, level: Level) -> Iterator[Any]:
    """Yield verl's worker with the block around an engine that is there."""
    whole: Any = object.__new__(MismatchWorker)
    whole.actor, whole._verdicts, whole.enable_routing_replay = built, Verdicts(level), False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield whole


def unreadable(model: str) -> dict[str, Any]:
    """Score rows whose versions nobody can read, as both levels do."""
    found: dict[str, Any] = {}
    levels: tuple[Level, ...] = ("enforce", "observe")
    for level in levels:
        data = batch()
        mask = data["response_mask"]
        data["rollout_log_probs"] = torch.nested.nested_tensor_from_jagged(-mask.values().float(), mask.offsets())
        data["extra_fields"] = NonTensorStack(1, 2, 3, 4)
        tu.assign_non_tensor_data(data, "mismatch_stale", {"version": 1, "replayed": False})
        with _asked(worker(model, {}), level) as asked:
            try:
                found[level] = len(asked.compute_log_prob(data)["log_probs"].offsets())
            except AttributeError as error:
                found[level] = type(error).__name__
            found[f"{level}_findings"] = [one.check for one in asked._verdicts.take()]
    return found
