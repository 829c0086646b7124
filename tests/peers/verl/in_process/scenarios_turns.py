"""Masks and routes of what agent loops make of their turns, by what verl's client was answered; no server is started."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from typing import Any
from unittest import mock

import numpy as np
import torch
from mismatch_ext.adapters.verl.driver.batch_checks import ExpertLoads, unsampled
from mismatch_ext.adapters.verl.rollout.client import MASKS, SAMPLED, SETTINGS, following, versioned
from mismatch_ext.adapters.verl.rollout.digests import Numbers, numbers, proven, with_digests, without_digests
from mismatch_ext.adapters.verl.sampling_mask import IDS, SIZES, UNKNOWN, add_masks, support_of
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, DictConfigWrap
from verl.trainer.ppo.metric_utils import RolloutMoELoadBalanceMetricsAccumulator
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer.continuous_token import GLMContinuousTokenBuilder
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from examples.arithmetic.tokenizer import make_tokenizer
from mismatch_ext.sampling_mask import TokenSupport
from tests.peers.verl.cpu.agent_loop import SeededSingleTurn, SeededTools

PROMPT, ANSWERS, TOOL = [7, 8, 9], ([1, 2], [3, 4], [5]), [0, 6]


def masked() -> dict[str, Any]:
    """Return the masks that an answer of three turns is put into a batch with, or what was said of it, by what was sent."""
    found: dict[str, Any] = {}
    for case in ("nothing", "no masks", "fewer masks", "another client"):
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
            output = await _loop(client if case == "another client" else versioned(client))
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


# Routes

LAYERS, EXPERTS = 3, 16
ENDS = ("<|observation|>", "<|user|>")
"""GLM's models end a turn by one of these; verl trims it off before it adds a tool's answer, which begins with it."""
LOOPS = ("single", "tools", "glm", "resumed", "truncated")
"""verl's own loops, and what happens to them."""


def routed() -> None:
    """Run verl's own loops, and loops that do not keep what the engine was given, and check what the rows' routes prove."""
    for top_k in (4, 1):
        for case in (*LOOPS, "encoded again", "first turn", "other context", "rows missing"):
            row = asyncio.run(_row(case, top_k, 12))
            tokens = len(row["input_ids"])
            assert without_digests(row["routed_experts"]).shape == (tokens, LAYERS, top_k), case
            # A token has eight bytes more than its routes, whatever a template rewrites.
            assert row["routed_experts"].nbytes == (2 * LAYERS * top_k + 8) * tokens
            needed = len(row["prompts"]) + int(row["response_mask"].nonzero()[-1])
            count, other = proven(row["routed_experts"], row["input_ids"])
            if case in LOOPS:
                assert count >= needed, case
            elif case in ("encoded again", "other context"):
                assert other and count < needed, case
            else:  # with one expert for a token, a lost row looks like expert 0
                assert count < needed and not other, case
                # Of routes with too few rows nobody knows which ones are missing.
                assert (count == 0) == (case == "rows missing"), case


async def _row(case: str, top_k: int, turns: int, replayed: bool = True) -> dict[str, Any]:
    """Return a row of verl's batch, as its worker makes it of what a loop returns."""
    tokenizer, drawn = make_tokenizer(), torch.Generator().manual_seed(0)
    tokenizer.add_special_tokens({"additional_special_tokens": list(ENDS)})
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    end = tokenizer.convert_tokens_to_ids(ENDS[:1] if case == "glm" else [])

    async def answer(self: Any, request_id: Any, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        tokens = [*torch.randint(3, 10, (4,), generator=drawn).tolist(), *end]
        rows = len(prompt_ids) + len(tokens) - 1 - (case == "rows missing")
        ids = torch.rand((rows, LAYERS, EXPERTS), generator=drawn).argsort(-1)[..., :top_k]
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-1.0] * len(tokens),
            stop_reason="aborted" if case == "resumed" and ids.sum() % 2 else "completed",
            # One expert per token may be expert 0 in every layer.
            routed_experts=(ids * (top_k > 1)).numpy().astype(np.uint8),
            extra_fields={"global_steps": 4},
        )

    client = object.__new__(FullyAsyncLLMServerClient if case == "resumed" else LLMServerClient)
    multi_turn = {
        "max_user_turns": None, "max_assistant_turns": turns, "max_parallel_calls": 1, "format": "hermes",
        "max_tool_response_length": 64, "tool_response_truncate_side": "middle",
    }  # fmt: skip
    length = 10 if case == "truncated" else 400
    rollout = {"prompt_length": 64, "response_length": length, "full_determinism": False, "multi_turn": multi_turn}
    client.config = config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    asked = versioned(client, replayed=replayed)
    slept = asyncio.sleep
    with (
        mock.patch.object(LLMServerClient, "generate", answer),
        mock.patch.object(asyncio, "sleep", lambda _: slept(0)),  # verl waits before it resumes
    ):
        if case == "other context":
            output = await _forgetful(asked)
        else:
            given: dict[str, Any] = {
                "trainer_config": DictConfigWrap(config), "data_config": DictConfigWrap(config.data),
                "server_manager": asked, "tokenizer": tokenizer, "processor": None, "dataset_cls": RLHFDataset,
            }  # fmt: skip
            loop: Any = SeededSingleTurn(**given) if case == "single" else SeededTools(**given)
            loop.max_assistant_turns = turns
            if case == "glm":
                rendered = loop.continuous_token_builder._tokenize_tool_group
                loop.continuous_token_builder = GLMContinuousTokenBuilder(tokenizer)
                loop.continuous_token_builder._tokenize_tool_group = lambda *args, **kwargs: (
                    end + rendered(*args, **kwargs)
                )
            asks = {"raw_prompt": [{"role": "user", "content": "12+34="}], "session_id": 0, "global_steps": 1}
            output = await loop.run({"temperature": 1.0, "top_k": -1}, **asks)
    if case == "encoded again":
        output.response_ids[2] += 1
    if case == "first turn":
        output.routed_experts = output.routed_experts[: len(output.prompt_ids) + 3]
    row = output.as_dict()
    return {**row, "input_ids": torch.cat([row["prompts"], row["responses"]])}


def sampled() -> None:
    """Check which tokens of verl's own loops, and of loops that do not keep what the engine was given, no request has sampled."""
    # The third token of the answer is another; the second turn was asked without the first one's four tokens, and the tool's two.
    expected = {**dict.fromkeys(LOOPS), "encoded again": 0, "other context": 6}
    for case, first in expected.items():
        row = asyncio.run(_row(case, 4, 3, replayed=False))
        extra = json.loads(json.dumps(pickle.loads(pickle.dumps(row["extra_fields"]))))
        given = (row["input_ids"].tolist(), len(row["prompts"]), row["response_mask"].bool().tolist())
        places = unsampled(*given, extra[SAMPLED]).tolist()
        assert (places[0] if places else None) == first, case
        assert extra[SETTINGS] in ([{"temperature": 1.0, "top_k": -1}], [{}])


async def _forgetful(client: Any) -> AgentLoopOutput:
    """Ask for a second turn without the first one's answer, which the row has nevertheless."""
    first = await client.generate("a", prompt_ids=PROMPT, sampling_params={})
    second = await client.generate("b", prompt_ids=[*PROMPT, *TOOL], sampling_params={})
    response = [*first.token_ids, *TOOL, *second.token_ids]
    rows = [first.routed_experts, second.routed_experts[2:]]
    return AgentLoopOutput(
        prompt_ids=PROMPT,
        response_ids=response,
        response_mask=[1] * 4 + [0] * len(TOOL) + [1] * 4,
        routed_experts=np.concatenate(rows),
        metrics=AgentLoopMetrics(),
        extra_fields=first.extra_fields,
    )


def grown() -> None:
    """Check that digests of conversations that grow, and at times begin anew, are those of all their tokens at once."""
    draw = random.Random(0)
    for _ in range(20):
        known, tokens = Numbers(), list[int]()
        for _ in range(6):
            kept = len(tokens) if draw.random() < 0.7 else draw.randrange(len(tokens) + 1)
            tokens = [*tokens[:kept], *(draw.randrange(150_000) for _ in range(draw.randrange(9)))]
            assert known.of(tokens).tolist() == numbers(tokens).tolist()


def loads() -> None:
    """Check that verl's metrics of the experts' load are those of the routes without their digests."""
    ids = torch.rand((12, LAYERS, EXPERTS), generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :4]
    carrying = torch.from_numpy(with_digests(ids, range(12)))
    found = []
    for kind, given in ((RolloutMoELoadBalanceMetricsAccumulator, ids), (ExpertLoads, carrying)):
        counted = kind()
        assert counted.update(given[None], torch.ones(1, 8), EXPERTS)
        found.append(counted.pop_metrics())
    assert found[0] == found[1] and len(found[0]) > 6
