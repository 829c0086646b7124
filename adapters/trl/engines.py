"""The engine behind TRL's `VLLMGeneration`, in this process or a server, and what the checks ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.vllm.engine import is_cpu
from torch import Tensor

from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.weights import Decoded, TensorComparison

if TYPE_CHECKING:
    from vllm import LLM

Weights = Callable[[], Iterable[tuple[str, Tensor]]]


class Engine(Protocol):
    """What `CheckedGeneration` asks of an engine; every rank asks at the same time."""

    fresh: bool
    """Whether it holds the weights that it was started with."""

    @property
    def longest(self) -> int:
        """Most tokens that can be scored at once."""

    def reading(self) -> EngineReading:
        """Return what it computes with."""

    def score(self, tokens: Tensor) -> Tensor:
        """Return prefill's log-probabilities `[N, T-1]`, float64, of tokens `[N, T]` after the first."""

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Sample `count` tokens after each prompt of `[N, P]`, and leave the engine's random numbers as they are."""

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare what the engine holds with the tensors just sent and those sent before."""

    def record_routing(self) -> None:
        """Take the routes of rollouts from here on."""

    def update(self, plain: Callable[[], None], weights: Weights) -> None:
        """Send the trainer's weights: `plain` in TRL's own way, `weights` are what it sends."""

    def captured(self, version: Callable[[], int] | None) -> AbstractContextManager[list[Any]]:
        """Collect vLLM's outputs of what TRL generates in a block; `version` as for `captured_outputs`."""

    def generating(self) -> AbstractContextManager[None]:
        """Make sure that the engine holds the last update while it generates."""


class Colocated(engine.InProcess):
    """An engine in this process.

    Args:
        llm: The engine.
        sleeps: Whether it sleeps between generations. It then has no weights before the first update.
    """

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

    def generating(self) -> AbstractContextManager[None]:
        """Do nothing, because only this trainer uses an engine in this process."""
        return nullcontext()


class Named:
    """An engine whose failures say what the verifier was asking of it.

    Args:
        inner: The engine.
        named: Returns the context around each call; it takes a description of what is being done.
    """

    def __init__(self, inner: Engine, named: Callable[[str], AbstractContextManager[None]]) -> None:
        self._inner, self._named = inner, named

    def score(self, tokens: Tensor) -> Tensor:
        """Return prefill's log-probabilities of tokens."""
        with self._named("scoring probe tokens"):
            return self._inner.score(tokens)

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Sample tokens after prompts."""
        with self._named("decoding after probe tokens"):
            return self._inner.decode(tokens, count)

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare tensors with what it holds."""
        with self._named("reading its weights"):
            return self._inner.compare(sent, before)
