"""An SGLang engine in this process or behind HTTP: every call that this package makes to it, with every answer checked.

SGLang raises no error when it refuses a weight update or a flush of its cache: it returns (False, message), or an object that
says so. Both transports turn a refusal into an error.
"""

from __future__ import annotations

import base64
import os
import pickle
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.http import HttpClient, brief
from mismatch_ext.adapters.sglang.answers import MAX_TOKEN_ID
from torch import Tensor

from mismatch_ext.errors import EngineError, MismatchError, PeerVersionError, RecordError
from mismatch_ext.precision.dtypes import spelled
from mismatch_ext.versions import PEERS, warn_untested

if TYPE_CHECKING:
    from requests import Session
    from sglang import Engine

Bucket = Sequence[tuple[str, Tensor]]
FLUSH_SECONDS = 10.0
"""Seconds in which a flush is tried again, because the scheduler may still hold a request that was already answered."""
ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
VOCABULARY = re.compile(r"logit_bias must ha(?:s|ve) keys in \[0, ([0-9]{1,9})\]")
"""Text with which SGLang refuses a setting for a token that its model does not have."""


class Transport(ABC):
    """An SGLang engine in this process or behind HTTP."""

    mixed: bool = False
    """Whether a failed update may have left a mixture of weights; `generate` refuses until an update succeeds."""
    stale_cache: bool = False
    """Whether the cache may hold what previous weights computed; `generate` refuses until it is flushed."""
    copies: int = 1
    """Copies of a bucket of weights in one message."""
    _info: dict[str, Any] | None = None
    _vocabulary: int | None = None

    def report(self) -> dict[str, Any]:
        """Return the engine's report of itself as of the first call.

        Raises:
            PeerVersionError: The version is outside the range that this release supports.
            EngineError: The engine does not answer.
        """
        if self._info is None:
            info, peer = self.server_info(), PEERS["sglang"]
            version = info.get("version")
            if not (isinstance(version, str) and peer.accepts(version)):
                raise PeerVersionError(
                    f"{self}: sglang {brief(version)} is outside the supported range {peer.supports}; install a version in that "
                    "range, or a release of mismatch-ext that supports it."
                )
            if not peer.tested(version):
                warn_untested({"sglang": version}, "its answers are checked, one by one")
            self._info = info
        return self._info

    @property
    def version(self) -> str:
        """Version of SGLang, from the engine's own report."""
        return str(self.report()["version"])

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks, each of which gets a copy of every weight update."""
        return int(self.report().get("tp_size", 1))

    @property
    def dtype(self) -> str:
        """Compute dtype that the engine reports; "auto" when it reports none."""
        return spelled(str(self.report().get("dtype", "auto")))

    def generate(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run a request that `generate_request` built and wait for it.

        Returns:
            The responses, n per prompt; the responses of a prompt are next to each other.

        Raises:
            EngineError: SGLang refused or failed, or was not reached; or an update of its weights was not completed.
            RecordError: A token id is not in the model's vocabulary; names position, id and size. SGLang does not check this:
                its scheduler ends, or it computes with a padding row of the embedding.
        """
        self.report()  # refuses an engine of another version before the first request
        if self.mixed:
            raise EngineError(
                f"{self} may hold a mixture of weights, because an update failed before its end; send all of them again."
            )
        if self.stale_cache:
            raise EngineError(
                f"{self} did not flush its cache after an update of its weights; call flush_cache() again."
            )
        self._expect_known_tokens(request["input_ids"])
        answer = self._generate(request)
        return answer if isinstance(answer, list) else [answer]

    def _expect_known_tokens(self, input_ids: Any) -> None:
        if self._vocabulary is None:
            self._vocabulary = self._vocabulary_size()
        size = self._vocabulary
        batched = isinstance(input_ids[0], Sequence)
        for row, prompt in enumerate(input_ids if batched else [input_ids]):
            for place, token in enumerate(prompt):
                if not 0 <= token < size:
                    where = f"input_ids[{row}][{place}]" if batched else f"input_ids[{place}]"
                    raise RecordError(
                        f"{where}: token id {token} is not in the vocabulary of {self}; allowed: 0 to {size - 1}, its model has "
                        f"{size} tokens. Give the tokens of that model's own tokenizer, or start SGLang with the trainer's model."
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
        self.report()
        with _closing("resuming the server", self._resume):
            self._pause()
            with _closing("flushing its cache", self._flush_after_update):
                session = self._begin()
                with _closing("ending the weight update", self._end_session if session else lambda: None):
                    sent = self._send_all(buckets, weight_version)
                # An update without a bucket does not repair a mixture.
                self.mixed = self.mixed and not sent

    def _send_all(self, buckets: Iterable[Bucket], weight_version: str | None) -> bool:
        """Send all buckets; return whether there was at least one."""
        sent = False
        stamp = None if weight_version is None else f"{weight_version}-incomplete"
        for bucket, last in _with_last(buckets):
            self.mixed = self.stale_cache = True
            self._expect_accepted("the weight update", self._send(bucket, weight_version if last else stamp))
            stamp, sent = None, True
        return sent

    def _end_session(self) -> None:
        # SGLang would refuse the next update while a session is open.
        self._expect_accepted("the end of the weight update", self._end())

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

    def _expect_accepted(self, what: str, answer: tuple[Any, Any]) -> None:
        success, message = answer
        if success is not True:
            raise EngineError(
                f"{self} refused {what}: {brief(message)}. Its weights may be a mixture: send all of them again."
            )

    @abstractmethod
    def server_info(self) -> dict[str, Any]:
        """Return the engine's report of itself, for `check_server` and `read_server`."""

    @abstractmethod
    def _vocabulary_size(self) -> int: ...

    @abstractmethod
    def _generate(self, request: Mapping[str, Any]) -> Any: ...

    @abstractmethod
    def _begin(self) -> bool:
        """Open a session if SGLang's version has sessions; return whether one was opened."""

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
        """Return the engine's report of itself, with two facts that SGLang leaves out and this process knows.

        These are the quantization that a checkpoint brings, and whether log-probabilities are the original ones.
        """
        info = dict(self._call("reporting", self.engine.get_server_info))
        if info.get("quantization") is None:
            config = getattr(getattr(self.engine, "tokenizer_manager", None), "model_config", None)
            info["quantization"] = getattr(config, "quantization", None)
        # The engine's processes inherited the environment of this process.
        info[ORIGINAL_LOGPROB] = os.environ.get(ORIGINAL_LOGPROB, "false").lower() in ("1", "true")
        return info

    def _vocabulary_size(self) -> int:
        return int(self.engine.tokenizer_manager.model_config.vocab_size)

    def _call(self, doing: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise EngineError(f"{self} failed while {doing}: {type(error).__name__}: {error}") from error

    def _generate(self, request: Mapping[str, Any]) -> Any:
        return self._call("generating", self.engine.generate, **request)

    def _begin(self) -> bool:
        if not hasattr(self.engine, "begin_weight_update"):
            return False
        answer = self._call("updating weights", self.engine.begin_weight_update)
        self._expect_accepted("the begin of a weight update", answer)
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


class HttpTransport(Transport):
    """An SGLang server.

    Weights travel in the bodies of requests, so that the server may run on another machine; a server on the same GPU takes them
    faster through SGLang's own channels. During an update the server is paused: it aborts running requests, and their responses
    say so; new requests wait, and are served with the new weights. Weights are sent as a pickle, because SGLang's route for
    weights takes nothing else; nothing is unpickled on this side.

    Args:
        url: The server's address, such as "http://127.0.0.1:30000".
        session: A session of the `requests` library, for example with headers for an API key; None opens one that ignores the
            environment's proxies and credentials.
        timeout: Seconds that the server may be silent within a request. A generation has to end in this time, because its answer
            comes in one piece.
        update_timeout: The same for a bucket of weights, and for pausing.
        pause: Pause the server around weight updates. With False you must drain it yourself: between two buckets it would serve
            requests with a mixture of weights.

    Raises:
        EngineError: The address is not one of a server.
    """

    def __init__(
        self,
        url: str,
        session: Session | None = None,
        *,
        timeout: float = 600.0,
        update_timeout: float = 600.0,
        pause: bool = True,
    ) -> None:
        self.http = HttpClient(
            url,
            session,
            timeout=timeout,
            name="the SGLang server",
            when_silent="a server that is only slow needs a longer timeout or update_timeout.",
            when_down="is it up, and are host and port right? If it ended, its log says why.",
        )
        self.update_timeout, self.pause = update_timeout, pause

    def __str__(self) -> str:
        return str(self.http)

    @property
    def copies(self) -> int:  # type: ignore[override]
        """Copies of a bucket of weights in one message: one per tensor-parallel rank."""
        return self.ranks

    def server_info(self) -> dict[str, Any]:
        """Return the server's report of itself."""
        answer = self.http.ask("GET", "/server_info", allowed=(404,))
        path = "/server_info" if answer.status_code == 200 else "/get_server_info"
        info = self.http.json("GET", path)
        if not isinstance(info, dict):
            raise EngineError(f"{self} answered {path} with {brief(info)}; allowed: an object with a version.")
        return info

    def _vocabulary_size(self) -> int:
        # SGLang checks no token of a prompt, but those of a logit_bias, and then names the number of tokens.
        settings = {"max_new_tokens": 1, "temperature": 1.0, "top_k": 1, "logit_bias": {str(MAX_TOKEN_ID): 0.0}}
        answer = self.http.ask(
            "POST", "/generate", allowed=(400,), json={"input_ids": [0], "sampling_params": settings}
        )
        limit = VOCABULARY.search(answer.text)
        if limit is None:
            raise EngineError(
                f"{self} does not say how many tokens its model has: it answered status {answer.status_code}, "
                f"{brief(answer.text)}, to a logit_bias of token {MAX_TOKEN_ID}. Use a supported version of SGLang."
            )
        return int(limit[1]) + 1

    def _generate(self, request: Mapping[str, Any]) -> Any:
        return self.http.json("POST", "/generate", json=dict(request))

    def _update(self, path: str, body: dict[str, Any], allowed: Sequence[int] = (400,)) -> tuple[Any, Any] | None:
        """Return whether a step of an update was accepted, and the server's words; None if it has no such step."""
        answer = self.http.ask("POST", path, json=body, allowed=allowed, timeout=self.update_timeout)
        if answer.status_code == 404:
            return None
        try:
            verdict = answer.json()
        except ValueError:
            verdict = answer.text
        fields = verdict if isinstance(verdict, dict) else {}
        return fields.get("success"), fields.get("message", verdict)

    def _pause(self) -> None:
        if self.pause:
            # In the other modes, responses keep the tokens that the previous weights sampled, and 0.5.18 does not report this.
            self.http.ask("POST", "/pause_generation", json={"mode": "abort"}, timeout=self.update_timeout)

    def _resume(self) -> None:
        if self.pause:
            self.http.ask("POST", "/continue_generation", json={})

    def _begin(self) -> bool:
        answer = self._update("/begin_weight_update", {}, allowed=(400, 404))  # 0.5.18 has no such route
        if answer is not None:
            self._expect_accepted("the begin of a weight update", answer)
        return answer is not None

    def _send(self, bucket: Bucket, weight_version: str | None) -> tuple[Any, Any]:
        # The route takes only pickles. A plain pickle holds the tensor's bytes. SGLang's serializer writes handles instead,
        # which work only between related processes on one machine.
        message = pickle.dumps([(name, tensor.detach().cpu()) for name, tensor in bucket], protocol=4)
        body: dict[str, Any] = {
            "serialized_named_tensors": [base64.b64encode(message).decode()] * self.ranks,
            "flush_cache": False,
        }
        if weight_version is not None:
            body["weight_version"] = weight_version
        return self._update("/update_weights_from_tensor", body) or (False, "no such route")

    def _end(self) -> tuple[Any, Any]:
        return self._update("/end_weight_update", {}) or (False, "no such route")

    def _flush(self) -> bool:
        return self.http.ask("POST", "/flush_cache", allowed=(400,)).status_code == 200


@contextmanager
def _closing(doing: str, close: Callable[[], None]) -> Iterator[None]:
    """Call `close` in any case; if the block failed too, a failure of `close` becomes a note of the block's error."""
    try:
        yield
    except BaseException as error:
        try:
            close()
        except MismatchError as second:
            error.add_note(f"In addition, {doing} failed: {type(second).__name__}: {brief(str(second))}")
        raise
    close()


def _with_last(buckets: Iterable[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Yield every bucket, and whether it is the last."""
    waiting: Bucket | None = None
    for bucket in buckets:
        if waiting is not None:
            yield waiting, False
        waiting = bucket
    if waiting is not None:
        yield waiting, True
