"""The engine's side of the doctor: SGLang in this process or over HTTP; it samples tokens, then scores them again."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.doctor.asking import ToSample, sequences
from mismatch_ext.adapters.sglang.answers import to_records, to_traces, token_scores
from mismatch_ext.adapters.sglang.engine import EngineTransport
from mismatch_ext.adapters.sglang.probes import SCORING
from mismatch_ext.adapters.sglang.request import generate_request
from mismatch_ext.adapters.sglang.server import read_server
from mismatch_ext.adapters.sglang.side import ON_CPU
from mismatch_ext.adapters.sglang.weights import update_weights
from mismatch_ext.adapters.transformers.checkpoint import checkpoint_parameters

from mismatch_ext.doctor import Sample
from mismatch_ext.errors import ConfigError, EngineError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.rollout import SamplingSettings, to_provenance
from mismatch_ext.routing import RoutingShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = "sampling_seed"
OTHERS = {"max_new_tokens": "--max-tokens", "n": "--responses"}
"""Arguments of SGLang's requests that the doctor sets from options of its own."""
Generate = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Maps a batch, as `generate_request` builds it, to a response for each of its prompts, in their order."""


def sampled(generate: Generate, reading: EngineReading, asked: ToSample, shape: RoutingShape | None = None) -> Sample:
    """Sample responses as a run does.

    Args:
        generate: Sends a batch to the engine.
        reading: Dtypes and modes that the engine runs with.
        asked: Prompts and settings; its `sampling` holds SGLang's `sampling_params`, and the engine fills in those that are left
            out, for example from `preferred_sampling_params`. Response i of the sample is drawn with `sampling_seed` + i, which
            only a deterministic engine uses; any other engine draws all responses from its `random_seed`.
        shape: Shape of the routes that the engine records; None reads no routes.

    Raises:
        ConfigError: A sampling argument sets what an option of the doctor sets.
    """
    sampling, shape = asked.sampling, asked.routed(shape)
    for name, option in OTHERS.items():
        if name in sampling:
            raise ConfigError(f"--sampling: {name} is what {option} says; leave it out.")
    prompts = [prompt for prompt in asked.given for _ in range(asked.of_each)]
    seeds = [int(sampling.get(SEED, 0)) + row for row in range(len(prompts))]
    request = generate_request(prompts, SamplingSettings(), max_new_tokens=asked.max_tokens, routing=shape is not None)
    # The run's requests do the same: the engine fills in the settings that they leave out.
    request["sampling_params"] = [
        {**sampling, "max_new_tokens": asked.max_tokens, "n": 1, SEED: seed} for seed in seeds
    ]
    provenance = to_provenance(reading, sampling=asked.settings, weight_version=0)
    return asked.sampled(to_records(generate(request), prompt_ids=prompts, provenance=provenance, shape=shape))


def scored(generate: Generate, sample: Sample, shape: RoutingShape | None = None) -> Sample:
    """Return the same tokens with the log-probabilities that the engine gives them as part of a prompt, at temperature 1."""
    sequences_ids = sequences(sample)
    request = generate_request(
        sequences_ids, SCORING, max_new_tokens=0, prompt_logprobs=True, routing=shape is not None
    )
    outputs = generate(request)
    largest = max(map(max, sequences_ids))
    logprobs = tuple(
        tuple(token_scores(output, ids, row, largest)[len(prompt) - 1 :])  # the first token has no log-probability
        for row, (output, prompt, ids) in enumerate(zip(outputs, sample.prompts, sequences_ids, strict=True))
    )
    routes = None if shape is None else tuple(to_traces(outputs, prompt_ids=sequences_ids, shape=shape, version=0))
    return replace(sample, logprobs=logprobs, routes=routes)


class SglangEngine:
    """An SGLang engine that this process starts; its scheduler runs in a process of its own.

    Args:
        model: Folder of the checkpoint that the engine serves.
        dtype: The engine's compute dtype.
        shape: Shape of the routes that the engine is to record; None for a model without experts.
        arguments: Arguments of `sglang.Engine`, as the run has them.
        seed: Seed of everything that the engine draws.

    Attributes:
        reading: Dtypes and modes that the engine runs with, from its own report.

    Raises:
        ConfigError: SGLang is not installed, or refuses an argument; quotes what SGLang said.
        EngineError: The engine does not start.
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
        settings: dict[str, Any] = {} if torch.cuda.is_available() else dict(ON_CPU)
        settings |= {"dtype": dtype, "random_seed": seed, "log_level": "error"}
        if shape is not None:
            settings["enable_return_routed_experts"] = True
        settings |= arguments or {}
        self._shape = shape
        self._before = {number: signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGTERM)}
        others = multiprocessing.active_children()
        try:
            engine = Engine(model_path=model, custom_sigquit_handler=ended, **settings)
            self._transport = EngineTransport(engine)
            self.reading: EngineReading = read_server(self._transport.server_info())
        except BaseException as error:
            # No other code knows the engine's processes yet, so they are ended here.
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
            self._restore()
            reason = " ".join(str(error).split())[:400]
            if isinstance(error, (TypeError, ValueError, OSError, AttributeError)):
                raise ConfigError(f"SGLang refuses the settings {settings}: {reason}") from error
            if isinstance(error, (RuntimeError, EngineError)):
                raise EngineError(
                    f"SGLang does not start with {settings}: {reason}; what its scheduler said is above. If memory is short, "
                    "give --engine-arg mem_fraction_static=0.5, or a smaller max_total_tokens."
                ) from error
            raise
        if threading.current_thread() is threading.main_thread():
            # At its first request SGLang took over two signals. Its processes send SIGQUIT when they fail, and its handler would
            # end this process without a word. Its handler of SIGTERM has an effect only in a server. Here SIGQUIT stops the
            # engine's loop instead, so that a call that waits in this loop fails.
            engine.loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
            engine.loop.add_signal_handler(signal.SIGQUIT, engine.loop.stop)

    def sample(self, asked: ToSample) -> Sample:
        """Sample responses as `sampled` does.

        Raises:
            ConfigError: SGLang refuses a sampling argument or a prompt.
            EngineError: SGLang failed, or aborted a request.
            RecordError: A response of SGLang's is malformed.
        """
        return sampled(partial(self._generated, sampling=asked.sampling), self.reading, asked, self._shape)

    def score(self, sample: Sample) -> Sample:
        """Return the same tokens with the log-probabilities that the engine gives them as part of a prompt, at temperature 1."""
        return scored(partial(self._generated, sampling={}), sample, self._shape)

    def update(self, model: PreTrainedModel) -> None:
        """Replace the engine's weights by a model's, in the engine's dtype."""
        update_weights(self._transport, checkpoint_parameters(model), dtype=self.reading.model_dtype)

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
        # ValueError: this is not the main thread, and then no handler was changed.
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
    """Handle the signal that SGLang's processes send when they fail, on which stock SGLang kills this process without a word.

    Raises:
        EngineError: Always.
    """
    raise EngineError("a process of SGLang has failed; what it said is above.")
