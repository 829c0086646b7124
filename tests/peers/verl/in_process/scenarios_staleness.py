"""Older weights that verl's engine puts back for a while, and parts of a gap by version, without Ray."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import torch
from mismatch_ext.adapters.verl.driver.staleness import enough_rows
from mismatch_ext.adapters.verl.rollout.client import versioned
from mismatch_ext.adapters.verl.worker.staleness import KeptWeights, segments_of, stale_gap
from omegaconf import OmegaConf
from tensordict import NonTensorStack
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from mismatch_ext.errors import RecordError
from mismatch_ext.staleness import StaleGap
from tests.peers.verl.in_process.workers import batch, logprobs, parameters, scored, update, worker


def kept(model: str) -> dict[str, Any]:
    """Score by the weights of before two updates, and go on with those of after them."""
    built = worker(model, {})
    module, weights, data = built.engine.module, KeptWeights(), batch()
    seen = []
    for version in range(3):
        weights.keep(module, version, 1)
        seen.append(logprobs(built, data))
        if version < 2:
            update(built, scored(built, data))
    present = parameters(built)
    weights.use(module, 1)
    again = logprobs(built, data)
    weights.use(module, 2)
    try:
        weights.use(module, 0)
        forgotten = ""
    except RecordError as error:
        forgotten = f"{type(error).__name__}: {error}"
    return {
        "versions": weights.versions,
        "again": again == seen[1],
        "moved": max(abs(a - b) for x, y in zip(seen[1], seen[2], strict=True) for a, b in zip(x, y, strict=True)),
        "kept": parameters(built) == present and logprobs(built, data) == seen[2],
        "forgotten": forgotten,
    }


def parts() -> dict[str, Any]:
    """Measure nested rows of several versions, as a worker does, and choose rows, as the driver does."""
    lengths, prompts = [4, 3, 2], [2, 1, 3]
    nested = lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged)  # noqa: E731
    rollout = nested([torch.full((n,), -1.0) for n in lengths])
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
        "old_log_probs": nested([torch.full((n,), -3.0) for n in lengths]),
        "extra_fields": NonTensorStack(*extra),
        "prompts": nested([torch.zeros(n, dtype=torch.int64) for n in prompts]),
    }
    found: dict[str, Any] = {
        "segments": [[(s.version, s.start) for s in segments_of(e, p)] for e, p in zip(extra, prompts, strict=True)]
    }
    for part, version in (("batch", 7), ("buffer", 7), ("kept", 6), ("ahead", 6)):
        state = stale_gap(fields, nested(whole), part=part.replace("ahead", "batch"), version=version, least=1)
        if isinstance(state, Exception):
            found[part] = f"{type(state).__name__}: {state}"
            continue
        gap = StaleGap(least=1)
        gap.load_state_dict(state)
        found[part] = gap.metrics()
    rows = [(str(number), {"response_len": 10}) for number in range(7)]
    more = [("filling", {"response_len": 9})]
    found["rows"] = [
        [key for key, _ in enough_rows(*given[:3], filling=given[3])]  # type: ignore[misc]
        for given in ((rows, 25, 2, ()), (rows, 1000, 4, ()), (rows, 1000, 4, more), (rows[:1], 5, 4, ()))
    ]
    return found


def resumed() -> dict[str, Any]:
    """Let verl's own client resume an answer that weight updates interrupt, over two turns of one conversation."""
    answers = iter([([1, 2], 4, "aborted"), ([], 5, "aborted"), ([3], 5, "completed"), ([4, 5], 6, "completed")])

    async def answer(self: Any, request_id: Any, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        tokens, version, reason = next(answers)
        return TokenOutput(
            token_ids=tokens, log_probs=[-1.0] * len(tokens), stop_reason=reason, extra_fields={"global_steps": version}
        )

    client = object.__new__(FullyAsyncLLMServerClient)
    client.config = OmegaConf.create({})
    asked, Asked = versioned(client), LLMServerClient.generate
    LLMServerClient.generate = answer  # type: ignore[method-assign]
    try:

        async def turns() -> tuple[Any, Any]:
            first = await asked.generate("a", prompt_ids=[7, 8, 9], sampling_params={"max_tokens": 9})
            tool = [7, 8, 9, 1, 2, 3, 0, 0]
            return first, await asked.generate("a", prompt_ids=tool, sampling_params={"max_tokens": 9})

        first, second = asyncio.run(turns())
    finally:
        LLMServerClient.generate = Asked  # type: ignore[method-assign]
    noted = pickle.loads(pickle.dumps(first.extra_fields["weight_versions"]))
    return {
        "tokens": [first.token_ids, second.token_ids],
        "noted": [list(one) for one in noted],
        "shared": first.extra_fields["weight_versions"] is second.extra_fields["weight_versions"],
        "ends": [first.extra_fields["min_global_steps"], first.extra_fields["max_global_steps"]],
        "other": type(versioned(object())).__name__,
    }
