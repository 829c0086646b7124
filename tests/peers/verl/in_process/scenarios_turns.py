"""Masks of what verl's agent loops make of their turns, by what its client was answered; no server is started."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from mismatch_ext.adapters.verl.rollout.client import MASKS, following, versioned
from mismatch_ext.adapters.verl.sampling_mask import IDS, SIZES, UNKNOWN, add_masks, support_of
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from mismatch_ext.sampling_mask import TokenSupport

PROMPT, ANSWERS, TOOL = [7, 8, 9], ([1, 2], [3, 4], [5]), [0, 6]


def masked() -> dict[str, Any]:
    """Return the masks that an answer of three turns is put into a batch with, or what was said of it, by what was sent."""
    found: dict[str, Any] = {}
    for case in ("nothing", "no masks", "unknown masks", "fewer masks", "another client"):
        fields = asyncio.run(_answered(case))
        if UNKNOWN in fields["extra_fields"]:
            # Beside an output that has masks, as an agent loop may return several.
            assert (
                not fields[IDS].numel()
                and fields[IDS].dtype == torch.int32
                and len(fields[SIZES]) == len(fields["responses"])
            )
            found[case] = fields["extra_fields"][UNKNOWN]
            continue
        support = support_of(fields[IDS], fields[SIZES], 20)
        found[case] = [support.slice(place, place + 1).ids.tolist() for place in range(len(support))]
    return found


def _masks_of(case: str, tokens: list[int], later: bool) -> dict[str, Any]:
    """Return what a server sends with an answer: 0 and the token itself."""
    if case == "no masks" and later:
        return {}
    if case == "unknown masks" and later:
        return {MASKS: "RecordError: rollout r, token 1: at least 24 tokens were left"}
    kept = tokens[1:] if case == "fewer masks" and later else tokens
    return {MASKS: TokenSupport.from_lists([(0, token) for token in kept], 20)}


async def _answered(case: str) -> dict[str, Any]:
    answers = iter(ANSWERS)

    async def answer(self: Any, request_id: Any, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        tokens, later = next(answers), len(prompt_ids) > len(PROMPT)
        extra = {"global_steps": 4, **_masks_of(case, tokens, later)}
        return TokenOutput(token_ids=tokens, log_probs=[-0.5 * token for token in tokens], extra_fields=extra)

    client = object.__new__(LLMServerClient)
    client.config = OmegaConf.create({})
    stock, LLMServerClient.generate = LLMServerClient.generate, answer  # type: ignore[method-assign]
    try:
        with following() as calls:
            output = await _loop(client if case == "another client" else versioned(client, turns=True))
            outputs = [output]
            add_masks(outputs, calls, "uid_0")
    finally:
        LLMServerClient.generate = stock  # type: ignore[method-assign]
    return outputs[0].as_dict()


async def _loop(client: Any) -> AgentLoopOutput:
    """Ask for the turns, one request id each, as an agent loop may."""
    ids, mask, logprobs = [*PROMPT], [0] * len(PROMPT), [0.0] * len(PROMPT)
    for number in range(len(ANSWERS)):
        turn = await client.generate(f"request {number}", prompt_ids=ids, sampling_params={})
        tool = TOOL if number + 1 < len(ANSWERS) else []
        ids = [*ids, *turn.token_ids, *tool]
        mask += [1] * len(turn.token_ids) + [0] * len(tool)
        logprobs += [*turn.log_probs, *[0.0] * len(tool)]
    first = len(PROMPT)
    return AgentLoopOutput(
        prompt_ids=PROMPT,
        response_ids=ids[first:],
        response_mask=mask[first:],
        response_logprobs=logprobs[first:],
        metrics=AgentLoopMetrics(),
        extra_fields={"tool_rewards": []},
    )
