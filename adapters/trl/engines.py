"""The engine behind TRL's `VLLMGeneration` in this process; `served.Served` is a server, with the same methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.vllm.engine import is_cpu
from torch import Tensor

if TYPE_CHECKING:
    from vllm import LLM

Weights = Callable[[], Iterable[tuple[str, Tensor]]]
"""Returns what TRL sends to its engine."""


class Colocated(engine.InProcess):
    """An engine in this process."""

    def __init__(self, llm: LLM, *, sleeps: bool = False) -> None:
        super().__init__(llm)
        self._on_cpu, self._sleeps = is_cpu(llm), sleeps
        self.fresh = not sleeps

    @property
    def longest(self) -> int:
        """Most tokens that can be scored at once."""
        return int(self.llm.llm_engine.model_config.max_model_len) - 1

    def record_routing(self) -> None:
        """Take the routes of rollouts from here on."""
        engine.require_routing(self.llm)
        engine.attach_cpu_routes(self.llm)

    def update(self, plain: Callable[[], None], weights: Weights) -> None:
        """Send the trainer's weights."""
        if self._on_cpu:  # TRL's own way does not suit it
            engine.update_weights(self.llm, weights())
        else:
            plain()
        if self._sleeps:
            # TRL does so when it generates; probes need the cache too. An engine that is awake ignores the second call.
            self.llm.wake_up(tags=["kv_cache"])

    def captured(self, version: Callable[[], int] | None) -> AbstractContextManager[list[Any]]:
        """Collect vLLM's outputs of what TRL generates in a block."""
        return engine.captured_outputs(self.llm, version=version)
