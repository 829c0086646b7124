"""The SGLang engine in the trainer's process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.sglang.server_checks import ORIGINAL_LOGPROB
from mismatch_ext.adapters.sglang.transport import Bucket, Transport

from mismatch_ext.errors import EngineError

if TYPE_CHECKING:
    from sglang import Engine


class EngineTransport(Transport):
    """An `sglang.Engine` in this process.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Any = engine

    def __str__(self) -> str:
        return "the in-process SGLang engine"

    def server_info(self) -> dict[str, Any]:
        """Return the engine's report of itself, with two facts that SGLang leaves out and this process knows.

        These are the quantisation that a checkpoint brings, and whether log-probabilities are the original ones
        (`SGLANG_RETURN_ORIGINAL_LOGPROB`).

        Raises:
            EngineError: The engine failed.
        """
        info = dict(self._call("reporting", self.engine.get_server_info))
        if info.get("quantization") is None:
            config = getattr(getattr(self.engine, "tokenizer_manager", None), "model_config", None)
            info["quantization"] = getattr(config, "quantization", None)
        # The engine's processes inherited the environment of this process.
        info[ORIGINAL_LOGPROB] = os.environ.get(ORIGINAL_LOGPROB, "false").lower() in ("1", "true")
        return info

    def _vocabulary_size(self) -> int:
        manager = self.engine.tokenizer_manager
        return int(self._call("reporting its vocabulary", lambda: manager.model_config.vocab_size))

    def _call(self, doing: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise EngineError(f"{self} failed while {doing}: {type(error).__name__}: {error}") from error

    def _generate(self, request: Mapping[str, Any]) -> Any:
        return self._call("generating", self.engine.generate, **request)

    def _stream(self, request: Mapping[str, Any]) -> Iterator[Any]:
        chunks = self._generate(request)
        while (chunk := self._call("generating", next, chunks, None)) is not None:
            yield chunk

    def _begin(self) -> bool:
        if not hasattr(self.engine, "begin_weight_update"):
            return False
        self._accepted("the begin of a weight update", self._call("updating weights", self.engine.begin_weight_update))
        return True

    def _send(self, bucket: Bucket, weight_version: str | None) -> tuple[Any, Any]:
        # Engine.update_weights_from_tensor makes the same request, but without a weight version.
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(list(bucket)) for _ in range(self.ranks)],
            flush_cache=False,
            weight_version=weight_version,
        )
        manager = self.engine.tokenizer_manager
        answer: tuple[Any, Any] = self._call(
            "updating weights",
            lambda: self.engine.loop.run_until_complete(manager.update_weights_from_tensor(request, None)),
        )
        return answer

    def _end(self) -> tuple[Any, Any]:
        answer: tuple[Any, Any] = self._call("updating weights", self.engine.end_weight_update)
        return answer

    def _flush(self) -> bool:
        return bool(getattr(self._call("flushing its cache", self.engine.flush_cache), "success", False))
