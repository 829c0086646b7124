"""Agent loops of verl that sample the same answers in every run, whatever the order in which requests arrive."""

from __future__ import annotations

import json
import zlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema

TURNS, TURN_TOKENS = 3, 8
"""Turns of the policy in an answer with tools, and tokens that each may have."""
SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "another",
            "description": "Give another problem.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "integer", "description": "Its number."}},
                "required": ["number"],
            },
        },
    }
)


def seed_of(kwargs: dict[str, Any]) -> int:
    """Return the seed of an answer: of its prompt, its place in the group, and the step."""
    return zlib.crc32(f"{kwargs['raw_prompt']}/{kwargs['session_id']}/{kwargs['global_steps']}".encode())


class SeededSingleTurn(SingleTurnAgentLoop):
    """verl's own single turn, with a seed per prompt, answer of the group and step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # For Qwen models verl encodes a newline and ChatML tokens, which the task's tokenizer does not have.
        super().__init__(*args, **{**kwargs, "hf_model_type": None})

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return await super().run({**sampling_params, "seed": seed_of(kwargs)}, **kwargs)


def another(number: int) -> str:
    """Return a problem of the arithmetic task: what the tool says."""
    return f"{10 + number % 90}+{100 + 7 * number % 800}="


class AlwaysCalls:
    """A parser that finds a call in every answer: no model of this size writes one by itself."""

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def extract_tool_calls(self, response_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self._tokenizer.decode(response_ids, skip_special_tokens=True)
        return text, [FunctionCall(name="another", arguments=json.dumps({"number": sum(response_ids)}))]


class SeededTools(ToolAgentLoop):
    """verl's own loop over tools, three turns of the policy with an answer of the tool between them."""

    def __init__(self, *args: Any, tools: Any = None, **kwargs: Any) -> None:
        tool = FunctionTool(name="another", fn=another, tool_schema=SCHEMA)
        super().__init__(*args, tools=ToolListWrap([tool]), **{**kwargs, "hf_model_type": None})
        self.tool_parser = AlwaysCalls(self.tokenizer)
        self.max_assistant_turns = TURNS

        def tokens_of(messages: list[dict[str, Any]], **_: Any) -> list[int]:
            text = "".join(message["content"] for message in messages)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        # The task's tokenizer cannot encode the messages that verl renders a tool's answer with.
        self.continuous_token_builder._tokenize_tool_group = tokens_of

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        settings = {**sampling_params, "seed": seed_of(kwargs), "max_tokens": TURN_TOKENS}
        return await super().run(settings, **kwargs)
