"""Every call that this package makes to an SGLang engine, wherever the engine runs, with every answer checked.

SGLang raises no error when it refuses a weight update or a flush of its cache: it returns (False, message), or an object that
says so. Both transports turn a refusal into an error.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mismatch_ext.adapters.sglang.fields import brief, is_integer
from torch import Tensor

from mismatch_ext.errors import EngineError, MismatchError, PeerVersionError, RecordError
from mismatch_ext.precision.names import spelled
from mismatch_ext.versions import PEERS

Bucket = Sequence[tuple[str, Tensor]]
FLUSH_SECONDS = 10.0
"""Seconds in which a flush is tried again, because the scheduler may still hold a request that was already answered."""


class Transport(ABC):
    """An SGLang engine in this process or behind HTTP."""

    mixed: bool = False
    """Whether a failed update may have left a mixture of weights; `generate` refuses until an update succeeds."""
    stale_cache: bool = False
    """Whether the cache may hold what previous weights computed; `generate` refuses until it is flushed."""
    _info: dict[str, Any] | None = None
    _vocabulary: int | None = None

    @property
    def version(self) -> str:
        """Version of SGLang, from the engine's own report.

        Raises:
            PeerVersionError: The version is outside the range that this release supports.
            EngineError: The engine does not answer.
        """
        if self._info is None:
            info = self.server_info()
            version, peer = info.get("version"), PEERS["sglang"]
            if not (isinstance(version, str) and peer.accepts(version)):
                raise PeerVersionError(
                    f"{self}: sglang {brief(version)} is outside the supported range {peer.supports}; install a version in that "
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

    @property
    def copies(self) -> int:
        """Copies of a bucket of weights in one message."""
        return 1

    @property
    def dtype(self) -> str:
        """Compute dtype that the engine reports; "auto" when it reports none."""
        self.version  # noqa: B018
        dtype = (self._info or {}).get("dtype")
        return spelled(dtype) if isinstance(dtype, str) else "auto"

    def generate(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run a request and wait for it.

        Args:
            request: A dict that `generate_request` built. If it asks for a stream, the last chunk of every response is returned.

        Returns:
            The responses, n per prompt; the responses of a prompt are next to each other.

        Raises:
            EngineError: SGLang refused or failed, or was not reached; or an update of its weights was not completed.
            RecordError: A token id is not in the model's vocabulary; names position, id and size. SGLang does not check this:
                its scheduler ends, or it computes with a padding row of the embedding.
        """
        self.version  # noqa: B018 - refuses an engine of another version before the first request
        if self.mixed:
            raise EngineError(
                f"{self} may hold a mixture of weights, because an update failed before its end; send all of them again."
            )
        if self.stale_cache:
            raise EngineError(
                f"{self} did not flush its cache after an update of its weights; call flush_cache() again."
            )
        self._expect_known_tokens(request.get("input_ids"))
        answer = last_chunks(self._stream(request)) if request.get("stream") else self._generate(request)
        responses = answer if isinstance(answer, list) else [answer]
        for response in responses:
            if not isinstance(response, dict):
                raise EngineError(f"{self}: a response is {brief(response)}; allowed: an object.")
        return responses

    def _expect_known_tokens(self, input_ids: Any) -> None:
        prompts = input_ids if input_ids and isinstance(input_ids[0], Sequence) else [input_ids or []]
        if self._vocabulary is None and any(prompts):
            self._vocabulary = self._vocabulary_size()
        size = self._vocabulary
        if size is None:
            return
        for row, prompt in enumerate(prompts):
            if prompt and not 0 <= min(prompt) <= max(prompt) < size:
                place = next(at for at, token in enumerate(prompt) if not 0 <= token < size)
                where = f"input_ids[{row}][{place}]" if prompts is input_ids else f"input_ids[{place}]"
                raise RecordError(
                    f"{where}: token id {prompt[place]} is not in the vocabulary of {self}; allowed: 0 to {size - 1}, its model "
                    f"has {size} tokens. Give the tokens of that model's own tokenizer, or start SGLang with the trainer's model."
                )

    def update_weights(self, buckets: Iterable[Bucket], *, weight_version: str | None = None) -> None:
        """Send weights, and drop what was cached with the previous ones.

        Between two buckets SGLang would serve requests with a mixture of weights, so every client of the server must drain it
        first. Where SGLang's version asks for it (0.5.23), the update is one session of SGLang's. The cache is flushed at the
        end, after a failure too. It is not flushed with the last bucket, because 0.5.18 then ends its scheduler if a request
        still runs.

        Args:
            buckets: Checkpoint names and tensors, a part of the model at a time.
            weight_version: Version that responses report from now on, with "-incomplete" behind it until the last bucket has
                arrived. None leaves the previous version, even if the weights are a mixture. SGLang changes the version only
                when it accepts a bucket: if it refuses the first one halfway, responses still report the previous version.

        Raises:
            EngineError: SGLang refused a bucket or the flush. Its weights may then be a mixture: `generate` refuses until all of
                them were sent. A second failure, while the update was being closed, is a note of this error.
        """
        self.version  # noqa: B018
        with _closing("resuming the server", self._resume):
            self._pause()
            with _closing("flushing its cache", self._flush_after_update):
                session = self._begin()
                with _closing("ending the weight update", self._end_session if session else _nothing):
                    sent = self._send_all(buckets, weight_version)
                # An update without a bucket does not repair a mixture.
                self.mixed = self.mixed and not sent

    def _send_all(self, buckets: Iterable[Bucket], weight_version: str | None) -> bool:
        """Send all buckets; return whether there was at least one."""
        sent = False
        stamp = None if weight_version is None else f"{weight_version}-incomplete"
        for bucket, last in _with_last(buckets):
            self.mixed = self.stale_cache = True
            self._accepted("the weight update", self._send(bucket, weight_version if last else stamp))
            stamp, sent = None, True
        return sent

    def _end_session(self) -> None:
        # SGLang would refuse the next update while a session is open.
        self._accepted("the end of the weight update", self._end())

    def _flush_after_update(self) -> None:
        if self.stale_cache:
            self.flush_cache()

    def _pause(self) -> None:  # noqa: B027 - not every engine can
        """Let no request run until `_resume`, if the engine can be paused."""

    def _resume(self) -> None:  # noqa: B027
        """Let requests run again."""

    def flush_cache(self) -> None:
        """Drop all cached prefixes, and their routes.

        Raises:
            EngineError: SGLang refused for `FLUSH_SECONDS`, because a request is not finished.
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
        self.stale_cache = False

    def _accepted(self, what: str, answer: tuple[Any, Any]) -> None:
        success, message = answer
        if success is not True:
            raise EngineError(
                f"{self} refused {what}: {brief(message)}. Its weights may be a mixture: send all of them again."
            )

    @abstractmethod
    def server_info(self) -> dict[str, Any]:
        """Return the engine's report of itself, for `check_server` and `read_server`."""

    def _vocabulary_size(self) -> int | None:
        """Return the number of tokens that the model has; None if the engine cannot tell."""
        return None

    @abstractmethod
    def _generate(self, request: Mapping[str, Any]) -> Any: ...

    @abstractmethod
    def _stream(self, request: Mapping[str, Any]) -> Iterator[Any]: ...

    @abstractmethod
    def _begin(self) -> bool:
        """Open a session if SGLang's version has sessions; return whether one was opened."""

    @abstractmethod
    def _send(self, bucket: Bucket, weight_version: str | None) -> tuple[Any, Any]: ...

    @abstractmethod
    def _end(self) -> tuple[Any, Any]: ...

    @abstractmethod
    def _flush(self) -> bool: ...


@contextmanager
def _closing(doing: str, close: Callable[[], None]) -> Iterator[None]:
    """Call `close` in any case; if the block failed too, a failure of `close` becomes a note of the block's error."""
    try:
        yield
    except BaseException as error:
        try:
            close()
        except MismatchError as second:
            error.add_note(f"Beside this, {doing} failed: {type(second).__name__}: {brief(str(second))}")
        raise
    close()


def _nothing() -> None:
    pass


def last_chunks(chunks: Iterable[Any]) -> list[Any]:
    """Return the last chunk of every response of a stream, in order; it has all tokens, and only it has the routes."""
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
