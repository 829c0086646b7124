"""An agent loop of verl that samples the same answers in every run, whatever the order in which requests arrive."""

from __future__ import annotations

import zlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class SeededSingleTurn(SingleTurnAgentLoop):
    """verl's own single turn, with a seed per prompt, answer of the group and step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # For Qwen models verl encodes a newline and ChatML tokens, which the task's tokenizer does not have.
        super().__init__(*args, **{**kwargs, "hf_model_type": None})

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        sample = f"{kwargs['raw_prompt']}/{kwargs['session_id']}/{kwargs['global_steps']}"
        return await super().run({**sampling_params, "seed": zlib.crc32(sample.encode())}, **kwargs)
