"""What stands behind TRL's `VLLMGeneration`: an engine in this process, or a vLLM server; every rank asks it at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import requests
import torch.distributed as dist
from accelerate.utils import broadcast_object_list
from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.http import Silent
from mismatch_ext.adapters.trl.server_client import SILENCE, Check, CheckedClient
from mismatch_ext.adapters.vllm.engine import is_cpu
from mismatch_ext.adapters.vllm.http import ServerHttp
from mismatch_ext.adapters.vllm.remote import RemoteEngine
from mismatch_ext.adapters.vllm.routing import unpacked
from mismatch_ext.adapters.vllm.server_checks import unchecked
from mismatch_ext.adapters.vllm.stamps import is_fresh
from torch import Tensor

from mismatch_ext.errors import EngineError, RoutingError, WeightSyncError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.ranks import Ranks, together
from mismatch_ext.weights import Decoded, TensorComparison

if TYPE_CHECKING:
    from vllm import LLM

Weights = Callable[[], Iterable[tuple[str, Tensor]]]
"""Returns what TRL sends to its engine."""
Answer = TypeVar("Answer")
PROBE_SECONDS = 60.0
"""Longest time that a weight update waits for a server's answers to its probes, all together. A choice."""
UNCOMPILED = {"enforce_eager": True}
"""Arguments of an engine on a CPU, where compiling costs far more at the start than it saves in a short run."""


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


class Served:
    """A vLLM server: the main process asks it, and every rank gets the answer."""

    def __init__(self, generation: Any, ranks: Ranks) -> None:
        self._ranks = ranks
        self._probed_until: float | None = None  # when an update stops waiting for answers; None before the first
        self._client: Any = getattr(generation, "vllm_client", None)
        if isinstance(self._client, CheckedClient):
            self.remote = self._client.remote
        elif self._client is not None:
            # TRL's own, where the config does not act.
            timeout = generation.server_timeout or SILENCE
            self.remote = RemoteEngine(ServerHttp(self._client.base_url, requests.Session(), timeout))
        self.fresh, self.longest = self._everywhere(lambda: (is_fresh(self.remote), self.remote.longest))

    def _everywhere(self, ask: Callable[[], Answer]) -> Answer:
        """Ask on the main process, and return the answer on every rank; raise on every rank where asking failed."""
        box: list[Any] = [None]
        with together(self._ranks):
            if self._ranks.rank == 0:
                box[0] = ask()
        broadcast_object_list(box, from_process=0)
        answer: Answer = box[0]
        return answer

    def _own_part(self, ask: Callable[[], list[Answer]]) -> list[Answer]:
        """Ask on the main process for as many answers for each rank, and return this rank's; every rank raises if that failed."""
        ranks = self._ranks
        parts: list[list[Answer]] | None = None
        with together(ranks):
            if ranks.rank == 0:
                answers = ask()
                size = len(answers) // ranks.size
                parts = [answers[rank * size : (rank + 1) * size] for rank in range(ranks.size)]
        if ranks.size == 1:
            assert parts is not None
            return parts[0]
        # Routes are large: each rank gets its own alone.
        own: list[Any] = [None]
        dist.scatter_object_list(own, parts, src=0)
        return list(own[0])

    def check(self, check: Check, device: str) -> None:
        """Check the server on the main process; `device` is the type of the trainer's."""
        self._everywhere(lambda: check(self.remote, device))

    def unchecked(self) -> str | None:
        """Say what of the server is not checked; None where all is."""
        return self._everywhere(lambda: unchecked(self.remote))

    def reading(self) -> EngineReading:
        """Return what it computes with."""
        return self._everywhere(lambda: self.remote.reading())

    def score(self, tokens: Tensor) -> Tensor:
        """Return prefill's log-probabilities of tokens."""
        self._probe(self._expect_named)
        return self._probe(lambda seconds: self.remote.score(tokens, timeout=seconds))

    def decode(self, tokens: Tensor, count: int) -> Decoded:
        """Sample tokens after prompts."""
        self._probe(self._expect_named)
        return self._probe(lambda seconds: self.remote.decode(tokens, count, timeout=seconds))

    def compare(self, sent: Mapping[str, Any], before: Mapping[str, Any]) -> Sequence[TensorComparison]:
        """Compare tensors just sent, and those before, with what it holds."""
        return self._probe(lambda seconds: self.remote.compare(sent, before, timeout=seconds))

    def _probe(self, ask: Callable[[float | None], Answer]) -> Answer:
        """Ask as `_everywhere` does, with the seconds that the last update may still wait; None before the first update."""

        def bounded() -> Answer:
            if self._probed_until is None:
                return ask(None)
            left = self._probed_until - time.monotonic()
            if left <= 0:
                raise self._late()
            if left >= self.remote.http.timeout:
                return ask(None)
            try:
                return ask(left)
            except Silent as error:
                raise self._late() from error

        return self._everywhere(bounded)

    def _late(self) -> EngineError:
        return EngineError(
            f"{self.remote.http} did not answer the probes within {PROBE_SECONDS:g} s. Give the trainer a server of its own, or "
            "start it with --scheduling-policy priority."
        )

    def record_routing(self) -> None:
        """Take the routes of rollouts from here on."""
        if not self._everywhere(lambda: self.remote.records_routing):
            raise RoutingError("the vLLM server does not record routing; start it with --enable-return-routed-experts.")

    def update(self, plain: Callable[[], None], weights: Weights) -> None:
        """Send the trainer's weights in TRL's own way; only the main process sends."""
        before = None if self._unnamed else self._client.stamps.last
        plain()
        self._probed_until = time.monotonic() + PROBE_SECONDS
        if not self._unnamed and self._client.stamps.last == before:
            raise WeightSyncError(
                f"no weight update was finished on the vLLM server at {self.remote.http.url}: what stands in for "
                "VLLMGeneration.sync_weights or for its client's update_named_params has sent nothing. Remove it."
            )

    @property
    def _unnamed(self) -> bool:
        """Whether this process names no updates: other ranks, and TRL's own client."""
        return not isinstance(self._client, CheckedClient)

    def _expect_own_weights(self) -> None:
        """Refuse to go on, on every rank, where the server does not hold this trainer's last update."""
        self._everywhere(self._expect_named)

    def _expect_named(self, seconds: float | None = None) -> None:
        """Refuse to go on where the server, asked for as many seconds, does not hold this trainer's last update."""
        if not self._unnamed:
            self._client.expect_own_weights(seconds)

    @contextmanager
    def captured(self, version: Callable[[], int] | None) -> Iterator[list[Any]]:
        """Collect what the server answers to TRL's generations, as outputs of vLLM's; each rank gets those of its own prompts."""
        # TRL resets the prefix cache after each update, and the client makes sure of it.
        self._expect_own_weights()
        outputs: list[Any] = []
        if not self._unnamed:
            self._client.choices = []
        try:
            yield outputs
            # TRL has given each rank its part, in their order.
            outputs += self._own_part(
                lambda: [_received(choice) for choice in getattr(self._client, "choices", None) or []]
            )
            self._expect_own_weights()
        finally:
            if not self._unnamed:
                self._client.choices = None


def _received(choice: Mapping[str, Any]) -> SimpleNamespace:
    """Return a choice of an answer as vLLM's output of one completion, with its routes unpacked."""
    completion = SimpleNamespace(
        index=0,
        token_ids=choice["token_ids"],
        finish_reason=choice.get("finish_reason"),
        routed_experts=unpacked(choice.get("routed_experts")),
    )
    return SimpleNamespace(
        request_id=f"choice {choice['index']}", prompt_token_ids=choice.get("prompt_token_ids"), outputs=[completion]
    )


Engine = Colocated | Served


def engine_of(trainer: Any, ranks: Ranks) -> Engine:
    """Return what stands behind a trainer's engine wrapper."""
    generation = trainer.vllm_generation
    if generation.mode == "colocate":
        return Colocated(generation.llm, sleeps=trainer.args.vllm_enable_sleep_mode)
    return Served(generation, ranks)
