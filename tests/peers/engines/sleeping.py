"""What vLLM's sleep of level 2 does on a GPU, done to an engine on a CPU, which sleeps not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from mismatch_ext.adapters import vllm as engine


@contextmanager
def sleepy(loses: str = "") -> Iterator[list[str]]:
    """Let engines sleep: their weights go, and buffers of a name for good; yield what they did, in order."""
    from vllm import LLM
    from vllm.platforms import current_platform

    slept: list[str] = []

    def sleep(llm: Any, level: int = 1) -> None:
        slept.append("asleep")
        inside = engine.runner(llm).model
        with torch.no_grad():
            for parameter in inside.parameters():
                parameter.zero_()
            for name, buffer in inside.named_buffers():
                if loses and loses in name:
                    buffer.zero_()

    def wake_up(llm: Any, tags: list[str] | None = None) -> None:
        slept.extend(tags or ["all"])

    may = mock.patch.object(type(current_platform), "is_sleep_mode_available", lambda *_: True)
    with may, mock.patch.object(LLM, "sleep", sleep), mock.patch.object(LLM, "wake_up", wake_up):
        yield slept


def note_updates(checked: Any, generation: Any, slept: list[str]) -> None:
    """Note each update of an engine of ours; TRL's own, which no CPU engine takes, would also say that it is awake."""
    update = checked.update

    def noted(*args: Any) -> None:
        update(*args)
        slept.append("loaded")
        generation._llm_weights_sleeping = False

    checked.update = noted
