"""The engine's side of the doctor: SGLang in this process, with a run's settings; it samples tokens, then scores them again."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from mismatch_ext.adapters.sglang.doctor_requests import sampled, scored
from mismatch_ext.adapters.sglang.engine import EngineTransport
from mismatch_ext.adapters.sglang.server import read_server
from mismatch_ext.adapters.sglang.side import ON_CPU

from mismatch_ext.doctor import Sample
from mismatch_ext.doctor.asking import ToSample
from mismatch_ext.errors import ConfigError, EngineError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.routing import RoutingShape


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
            # No other code knows the engine's processes yet, so they are ended here.
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
            # At its first request SGLang took over two signals. Its processes send SIGQUIT when they fail, and its handler would
            # end this process without a word. Its handler of SIGTERM has an effect only in a server. Here SIGQUIT stops the
            # engine's loop instead, so that a call that waits in this loop fails.
            engine.loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])
            engine.loop.add_signal_handler(signal.SIGQUIT, engine.loop.stop)

    def sample(self, asked: ToSample) -> Sample:
        """Sample responses as the run does.

        Args:
            asked: Prompts and settings; its `sampling` holds SGLang's `sampling_params`.

        Raises:
            ConfigError: SGLang refuses a sampling argument or a prompt.
            EngineError: SGLang failed, or aborted a request.
            RecordError: A response of SGLang's is malformed.
        """
        return sampled(partial(self._generated, sampling=asked.sampling), self.reading, asked, self._shape)

    def score(self, sample: Sample) -> Sample:
        """Return the same tokens with the log-probabilities that the engine gives them as part of a prompt, at temperature 1."""
        return scored(partial(self._generated, sampling={}), sample, self._shape)

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
