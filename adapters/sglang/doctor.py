"""The engine's side of the doctor: SGLang in this process, started with a run's settings, asked twice about the same tokens."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from mismatch_ext.adapters.sglang.engine import EngineTransport
from mismatch_ext.adapters.sglang.probes import SCORING, token_scores
from mismatch_ext.adapters.sglang.request import generate_request
from mismatch_ext.adapters.sglang.response import to_records, to_traces
from mismatch_ext.adapters.sglang.server import read_server
from mismatch_ext.adapters.sglang.side import ON_CPU

from mismatch_ext.doctor import Sample
from mismatch_ext.errors import ConfigError, EngineError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.provenance import to_provenance
from mismatch_ext.records import SamplingSettings
from mismatch_ext.routing import RoutingShape

SEED = "sampling_seed"
OTHERS = {"max_new_tokens": "--max-tokens", "n": "--responses"}
"""Arguments of SGLang's requests that options of the doctor's own say."""


class SglangEngine:
    """An SGLang engine of this process; its scheduler is a process of its own.

    Args:
        model: Folder of the checkpoint that it serves.
        dtype: Its compute dtype.
        shape: Of the routes that it is to record; None for a model without experts.
        arguments: Of `sglang.Engine`, as the run has them.
        seed: Of all that it draws.

    Attributes:
        reading: What it runs with, as it reports it itself.

    Raises:
        ConfigError: SGLang is not installed, or refuses an argument; says which words it used.
        EngineError: It does not start.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        shape: RoutingShape | None = None,
        arguments: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        try:
            from sglang import Engine
        except ImportError as error:
            raise ConfigError(
                f"--engine sglang: SGLang cannot be imported ({error}); install it beside this package, or give --rollouts."
            ) from error
        asked: dict[str, Any] = {} if torch.cuda.is_available() else dict(ON_CPU)
        asked |= {"dtype": dtype, "random_seed": seed, "log_level": "error"}
        if shape is not None:
            asked["enable_return_routed_experts"] = True
        asked |= arguments or {}
        self._shape = shape
        self._before = {number: signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)}
        others = multiprocessing.active_children()
        try:
            engine = Engine(model_path=model, custom_sigquit_handler=ended, **asked)
            transport = EngineTransport(engine)
            self.reading: EngineReading = read_server(transport.server_info())
        except BaseException as error:
            # Nobody else holds its processes yet.
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
            self._restore()
            said = " ".join(str(error).split())[:400]
            if isinstance(error, (TypeError, ValueError, OSError, AttributeError)):
                raise ConfigError(f"SGLang refuses the settings {asked}: {said}") from error
            if isinstance(error, (RuntimeError, EngineError)):
                raise EngineError(
                    f"SGLang does not start with {asked}: {said}; what its scheduler said is above. If memory is short, give "
                    "--engine-arg mem_fraction_static=0.5, or a smaller max_total_tokens."
                ) from error
            raise
        self._transport = transport
        if threading.current_thread() is threading.main_thread():
            # When SGLang was asked first it took two signals: one that its processes send when they fail, to end this process
            # without a word, and the one to end, which only a server heeds then. What waits in a loop that is stopped fails.
            engine.loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
            engine.loop.add_signal_handler(signal.SIGQUIT, engine.loop.stop)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        responses: int,
        max_tokens: int,
        sampling: Mapping[str, Any],
        seen: Sequence[Sequence[int]] | None = None,
    ) -> Sample:
        """Sample responses as the run does.

        Args:
            prompts: Token ids of each prompt, as the trainer has them.
            responses: How many at least; each prompt gets as many as the others.
            max_tokens: Most tokens of a response.
            sampling: SGLang's `sampling_params`; those that are left out have no effect. Response i of the sample is drawn with
                `sampling_seed` + i, which only a deterministic engine looks at; any other draws all from its `random_seed`.
            seen: Token ids of each prompt as the engine gets them; None for those of the trainer.

        Raises:
            ConfigError: SGLang refuses a sampling argument or a prompt.
            EngineError: SGLang failed, or aborted a request.
            RecordError: What SGLang returned is malformed.
        """
        for name, option in OTHERS.items():
            if name in sampling:
                raise ConfigError(f"--sampling: {name} is what {option} says; leave it out.")
        n = -(-responses // len(prompts))
        asked = [list(prompt) for prompt in (prompts if seen is None else seen) for _ in range(n)]
        seeds = [int(sampling.get(SEED, 0)) + row for row in range(len(asked))]
        # Where the engine saw other prompts, its routes are of other rows than the trainer's.
        shape = self._shape if seen is None else None
        request = generate_request(asked, SamplingSettings(), max_new_tokens=max_tokens, routing=shape is not None)
        request["sampling_params"] = [request["sampling_params"] | sampling | {SEED: seed} for seed in seeds]
        settings = SamplingSettings(temperature=float(sampling.get("temperature", 1.0)))
        found = to_records(
            self._generated(request, sampling),
            prompt_ids=asked,
            provenance=to_provenance(self.reading, sampling=settings, weight_version=0),
            shape=shape,
        )
        if seen is not None:
            owners = [tuple(prompt) for prompt in prompts for _ in range(n)]
            found = [replace(record, prompt_ids=owner) for record, owner in zip(found, owners, strict=True)]
        return Sample.of([record for record in found if record.response_ids])

    def score(self, sample: Sample) -> Sample:
        """Return the same tokens with the engine's log-probabilities of them as part of a prompt: no sampling, temperature 1."""
        whole = [[*prompt, *response] for prompt, response in zip(sample.prompts, sample.responses, strict=True)]
        routing = self._shape is not None
        request = generate_request(whole, SCORING, max_new_tokens=0, prompt_logprobs=True, routing=routing)
        outputs = self._generated(request, {})
        largest = max(map(max, whole))
        logprobs = []
        for row, (output, prompt, ids) in enumerate(zip(outputs, sample.prompts, whole, strict=True)):
            # The first token has no log-probability.
            logprobs.append(tuple(token_scores(output, ids, row, largest)[len(prompt) - 1 :]))
        routes = None
        if self._shape is not None:
            routes = tuple(to_traces(outputs, prompt_ids=whole, shape=self._shape, version=0))
        return replace(sample, logprobs=tuple(logprobs), routes=routes)

    def shutdown(self) -> None:
        """End the engine."""
        engine = self._transport.engine
        try:
            engine.shutdown()
        finally:
            if threading.current_thread() is threading.main_thread():
                engine.loop.remove_signal_handler(signal.SIGQUIT)
            self._restore()

    def _restore(self) -> None:
        # ValueError: another thread than the main one, where nothing was changed.
        with suppress(ValueError):
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _generated(self, request: Mapping[str, Any], sampling: Mapping[str, Any]) -> list[dict[str, Any]]:
        try:
            return self._transport.generate(request)
        except EngineError as error:
            if not isinstance(error.__cause__, (TypeError, ValueError)):
                raise EngineError(
                    f"{' '.join(str(error).split())[:400]}; what SGLang's processes said is above. If memory is short, give "
                    "--engine-arg mem_fraction_static=0.5, or fewer --responses."
                ) from error
            raise ConfigError(
                f"SGLang refuses a request with --sampling {dict(sampling)}: {' '.join(str(error.__cause__).split())[:400]}; "
                "sampling takes SGLang's own names; for what is too long give a larger --engine-arg context_length, shorter "
                "prompts, or a smaller --max-tokens."
            ) from error


def ended(number: int, frame: object) -> None:
    """Handle the signal that SGLang's processes send when they fail: stock SGLang then kills this process, without a word.

    Raises:
        EngineError: Always.
    """
    raise EngineError("a process of SGLang has failed; what it said is above.")
