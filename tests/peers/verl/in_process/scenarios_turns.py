"""What verl's agent loops make of their turns, held to what verl's client of the servers was answered; no server is started."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from mismatch_ext.adapters.verl.block import BLOCK_VARIABLE, MODE_VARIABLE, RunMode, encode
from mismatch_ext.adapters.verl.rollout.client import TOLD, following, versioned
from mismatch_ext.adapters.verl.rollout.masks import FIELD as MASKS
from mismatch_ext.adapters.verl.rollout.masks import IDS, SIZES, support_of
from mismatch_ext.adapters.verl.rollout.turns import tell
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from mismatch_ext.config import MismatchConfig
from mismatch_ext.sampling_mask import TokenSupport
from tests.peers.verl.in_process.workers import environment

PROMPT, ANSWERS, TOOL = [7, 8, 9], ([1, 2], [3, 4], [5]), [0, 6]


def told() -> dict[str, str]:
    """Return what was said of an answer of three turns, by what was done to it."""
    found = {}
    for case in ("nothing", "tokenised anew", "dropped", "two versions", "asynchronous", "moved", "another client"):
        mode = RunMode(name="colocate_async" if case == "asynchronous" else "sync").encode()
        with environment(**{MODE_VARIABLE: mode}):
            found[case] = str(asyncio.run(_answered(case))["extra_fields"].get(TOLD, ""))
    return found


def masked() -> dict[str, Any]:
    """Return the masks that an answer of three turns is put into a batch with, or what was said of it, by what was sent."""
    found: dict[str, Any] = {}
    block = MismatchConfig.parse({"sampling_mask": {}})
    assert block is not None
    for case in ("nothing", "no masks", "unknown masks", "fewer masks", "another client"):
        with environment(**{MODE_VARIABLE: RunMode().encode(), BLOCK_VARIABLE: encode(block)}):
            fields = asyncio.run(_answered(case))
        if TOLD in fields["extra_fields"]:
            # Beside an output that has masks, as an agent loop may return several.
            assert (
                not fields[IDS].numel()
                and fields[IDS].dtype == torch.int32
                and len(fields[SIZES]) == len(fields["responses"])
            )
            found[case] = fields["extra_fields"][TOLD]
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
        version: Any = 4 + (later and case in ("two versions", "asynchronous"))
        extra = {name: version for name in ("global_steps", "min_global_steps", "max_global_steps")}
        extra |= _masks_of(case, tokens, later)
        return TokenOutput(token_ids=tokens, log_probs=[-0.5 * token for token in tokens], extra_fields=extra)

    client = object.__new__(LLMServerClient)
    client.config = OmegaConf.create({})
    stock, LLMServerClient.generate = LLMServerClient.generate, answer  # type: ignore[method-assign]
    try:
        with following() as calls:
            output = await _loop(case, client if case == "another client" else versioned(client, turns=True))
            outputs = [output]
            tell(outputs, calls, "uid_0")
    finally:
        LLMServerClient.generate = stock  # type: ignore[method-assign]
    return outputs[0].as_dict()


async def _loop(case: str, client: Any) -> AgentLoopOutput:
    """Ask for the turns, one request id each, as an agent loop may; the faults are those of a loop of one's own."""
    ids, mask, logprobs = [*PROMPT], [0] * len(PROMPT), [0.0] * len(PROMPT)
    for number in range(len(ANSWERS)):
        turn = await client.generate(f"request {number}", prompt_ids=ids, sampling_params={})
        tool = TOOL if number + 1 < len(ANSWERS) else []
        ids = [*ids, *turn.token_ids, *tool]
        mask += [1] * len(turn.token_ids) + [0] * len(tool)
        logprobs += [*turn.log_probs, *[0.0] * len(tool)]
        if case == "tokenised anew" and not number:
            ids[len(PROMPT)] = 11
    if case == "moved":
        logprobs = [0.0, *logprobs[:-1]]
    kept = [place for place in range(len(PROMPT), len(ids)) if case != "dropped" or not 7 <= place < 11]
    return AgentLoopOutput(
        prompt_ids=PROMPT,
        response_ids=[ids[place] for place in kept],
        response_mask=[mask[place] for place in kept],
        response_logprobs=[logprobs[place] for place in kept],
        metrics=AgentLoopMetrics(),
        extra_fields={"tool_rewards": []},
    )
