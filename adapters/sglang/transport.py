"""What is asked of an SGLang engine wherever it runs, with every answer checked, and the engine in the trainer's process.

SGLang refuses a weight update by returning (False, message), and a flush of its cache by an object that says so: neither
raises. Both transports turn that into an error.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.sglang.fields import brief, is_integer
from packaging.version import InvalidVersion
from torch import Tensor

from mismatch_ext.errors import EngineError, PeerVersionError
from mismatch_ext.versions import PEERS, in_range

if TYPE_CHECKING:
    from sglang import Engine

Bucket = Sequence[tuple[str, Tensor]]
FLUSH_SECONDS = 10.0
"""How long a flush is tried again: the scheduler may still hold a request that has already been answered."""


class Transport(ABC):
    """What this package needs of an SGLang engine, wherever it runs."""

    _info: dict[str, Any] | None = None

    @property
    def version(self) -> str:
        """Version of SGLang, as it reports it itself.

        Raises:
            PeerVersionError: It is outside the range that this release supports.
            EngineError: The engine does not answer.
        """
        if self._info is None:
            info = self.server_info()
            version, supports = info.get("version"), PEERS["sglang"].supports
            try:
                inside = isinstance(version, str) and in_range(version, supports)
            except InvalidVersion:
                inside = False
            if not inside:
                raise PeerVersionError(
                    f"{self}: sglang {brief(version)} is outside the supported range {supports}; install a version in that "
                    "range, or a release of mismatch-ext that supports it."
                )
            self._info = info
        return str(self._info["version"])

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks, each of which gets a copy of every weight update."""
        self.version  # noqa: B018 - reads the report, and refuses an engine of another version
        ranks = (self._info or {}).get("tp_size", 1)
        if not is_integer(ranks) or ranks < 1:
            raise EngineError(f"{self} reports tp_size {brief(ranks)}; allowed: an integer >= 1.")
        return int(ranks)

    def generate(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run a request and wait for it.

        Args:
            request: What `generate_request` built; of a stream, the last chunk of every response is returned.

        Returns:
            The responses, n per prompt, those of a prompt beside each other.

        Raises:
            EngineError: SGLang refused or failed, or was not reached.
        """
        self.version  # noqa: B018 - refuses an engine of another version before the first request
        answer = last_chunks(self._stream(request)) if request.get("stream") else self._generate(request)
        responses = answer if isinstance(answer, list) else [answer]
        for response in responses:
            if not isinstance(response, dict):
                raise EngineError(f"{self}: a response is {brief(response)}; allowed: an object.")
        return responses

    def update_weights(self, buckets: Iterable[Bucket], *, weight_version: str | None = None) -> None:
        """Send weights, and forget what was cached with those before.

        Where the version asks for it (0.5.23), the update is one session of SGLang's. The cache is flushed at the end and not
        with the last bucket, where 0.5.18 ends its scheduler when a request still runs.

        Args:
            buckets: Checkpoint names and tensors, a part of the model at a time.
            weight_version: Stamp that responses carry from now on; None leaves the one before.

        Raises:
            EngineError: SGLang refused a bucket or the flush. Its weights may then be a mixture: send all of them again.
        """
        self.version  # noqa: B018
        session = self._begin()
        try:
            for bucket, last in _with_last(buckets):
                self._accepted("the weight update", self._send(bucket, weight_version if last else None))
        finally:
            # An open session would refuse the next update.
            if session:
                self._accepted("the end of the weight update", self._end())
        self.flush_cache()

    def flush_cache(self) -> None:
        """Forget all cached prefixes, and the routes with them.

        Raises:
            EngineError: SGLang declined, because a request is not finished.
        """
        deadline = time.monotonic() + FLUSH_SECONDS
        while not self._flush():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self} did not flush its cache within {FLUSH_SECONDS:g} seconds, because requests are waiting or running: "
                    "their prompts' keys, values and routes would be those of the weights before; finish or abort them, then "
                    "flush again."
                )
            time.sleep(0.05)

    def _accepted(self, what: str, answer: tuple[Any, Any]) -> None:
        success, message = answer
        if success is not True:
            raise EngineError(
                f"{self} refused {what}: {brief(message)}. Its weights may be a mixture: send all of them again."
            )

    @abstractmethod
    def server_info(self) -> dict[str, Any]:
        """Return the engine's report of itself, for `check_server` and `read_server`."""

    @abstractmethod
    def _generate(self, request: Mapping[str, Any]) -> Any: ...

    @abstractmethod
    def _stream(self, request: Mapping[str, Any]) -> Iterator[Any]: ...

    @abstractmethod
    def _begin(self) -> bool:
        """Open a session where the version has them; return whether it did."""

    @abstractmethod
    def _send(self, bucket: Bucket, weight_version: str | None) -> tuple[Any, Any]: ...

    @abstractmethod
    def _end(self) -> tuple[Any, Any]: ...

    @abstractmethod
    def _flush(self) -> bool: ...


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
        """Return the engine's report of itself.

        Raises:
            EngineError: The engine failed.
        """
        return dict(self._call("reporting", self.engine.get_server_info))

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
        # Engine.update_weights_from_tensor makes the same request without a stamp.
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(list(bucket)) for _ in range(self.ranks)],
            flush_cache=False,
            weight_version=weight_version,
        )
        manager = self.engine.tokenizer_manager
        return self._call(
            "updating weights",
            lambda: self.engine.loop.run_until_complete(manager.update_weights_from_tensor(request, None)),
        )

    def _end(self) -> tuple[Any, Any]:
        return self._call("updating weights", self.engine.end_weight_update)

    def _flush(self) -> bool:
        return bool(getattr(self._call("flushing its cache", self.engine.flush_cache), "success", False))


def last_chunks(chunks: Iterable[Any]) -> list[Any]:
    """Return the last chunk of every response of a stream, in their order; it has all tokens, and it alone the routes."""
    last: dict[int, Any] = {}
    for chunk in chunks:
        index = chunk.get("index", 0) if isinstance(chunk, dict) else 0
        last[index if isinstance(index, int) else 0] = chunk
    return [last[index] for index in sorted(last)]


def _with_last(buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Yield every bucket, and whether it is the last."""
    waiting: Bucket | None = None
    for bucket in buckets:
        if waiting is not None:
            yield waiting, False
        waiting = bucket
    if waiting is not None:
        yield waiting, True
