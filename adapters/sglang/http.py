"""An SGLang server over HTTP, with the same calls as the engine in the trainer's process."""

from __future__ import annotations

import base64
import json
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mismatch_ext.adapters.sglang.fields import MAX_TOKEN_ID, brief, is_integer, number
from mismatch_ext.adapters.sglang.transport import Bucket, Transport

from mismatch_ext.errors import EngineError

if TYPE_CHECKING:
    from requests import Session

CONNECT_SECONDS = 10.0
VOCABULARY = re.compile(r"logit_bias must ha(?:s|ve) keys in \[0, ([0-9]{1,9})\]")
"""Text with which SGLang refuses a setting for a token that its model does not have."""


class HttpTransport(Transport):
    """An SGLang server.

    Weights travel in the bodies of requests, so that the server may run on another machine; a server on the same GPU takes them
    faster through SGLang's own channels. During an update the server is paused: it aborts running requests, and their responses
    say so; new requests wait, and are served with the new weights.

    No redirect is followed, so that weights and API key go to the server at `url` only. Weights are sent as a pickle, because
    SGLang's route for weights takes nothing else; nothing is unpickled on this side.

    Args:
        url: The server's address, such as "http://127.0.0.1:30000".
        session: A session of the `requests` library, for example with headers for an API key. It uses the environment's proxies
            unless its `trust_env` is False. None opens a session that ignores the environment's proxies, certificates and
            .netrc.
        timeout: Seconds that the server may be silent within a request. A generation that is not streamed has to end in this
            time, because its answer comes at once.
        update_timeout: The same for a bucket of weights, and for pausing.
        pause: Pause the server around weight updates. With False you must drain it yourself: between two buckets it would serve
            requests with a mixture of weights.
        vocabulary: Number of tokens that the server's model has. None asks the server: it refuses a setting for a token that no
            model has, and names the number.

    Raises:
        EngineError: The address, a timeout or the vocabulary is not allowed.
    """

    def __init__(
        self,
        url: str,
        session: Session | None = None,
        *,
        timeout: float = 600.0,
        update_timeout: float = 600.0,
        pause: bool = True,
        vocabulary: int | None = None,
    ) -> None:
        import requests

        check_url(url)
        for name, seconds in (("timeout", timeout), ("update_timeout", update_timeout)):
            if not 0 < (number(seconds) or 0) < math.inf:
                raise EngineError(f"{name}={brief(seconds)}; allowed: a number of seconds above 0.")
        if vocabulary is not None and (not is_integer(vocabulary) or vocabulary < 1):
            raise EngineError(f"vocabulary={brief(vocabulary)}; allowed: an integer above 0, or None.")
        self.url, self._vocabulary = url.rstrip("/"), None if vocabulary is None else int(vocabulary)
        if session is None:
            session = requests.Session()
            session.trust_env = False
        self.session: Any = session
        self.timeout, self.update_timeout, self.pause = timeout, update_timeout, pause

    def __str__(self) -> str:
        return f"the SGLang server at {self.url}"

    def server_info(self) -> dict[str, Any]:
        """Return the server's report of itself.

        Raises:
            EngineError: The server was not reached or refused; names URL and status.
        """
        answer = self._ask("GET", "/server_info", allowed=(404,))
        if answer.status_code == 404:
            answer = self._ask("GET", "/get_server_info")
        info = self._json(answer)
        if not isinstance(info, dict):
            raise EngineError(f"{answer.url} answered {brief(info)}; allowed: an object with a version.")
        return info

    def _vocabulary_size(self) -> int:
        settings = {"max_new_tokens": 1, "temperature": 1.0, "top_k": 1, "logit_bias": {str(MAX_TOKEN_ID): 0.0}}
        answer = self._ask("POST", "/generate", allowed=(400,), body={"input_ids": [0], "sampling_params": settings})
        found = VOCABULARY.search(answer.text)
        if found is None:
            raise EngineError(
                f"{answer.url} does not say how many tokens its model has, and SGLang checks none of a prompt: it answered "
                f"status {answer.status_code}, {brief(answer.text)}, to a logit_bias of token {MAX_TOKEN_ID}. Give "
                "HttpTransport(..., vocabulary=...)."
            )
        return int(found[1]) + 1

    def _ask(
        self,
        method: str,
        path: str,
        *,
        allowed: Sequence[int] = (),
        body: Any = None,
        seconds: float | None = None,
        stream: bool = False,
    ) -> Any:
        """Send a request and return requests' response; one with a status that is neither 200 nor allowed is an error."""
        from requests import RequestException, Timeout

        url, seconds = self.url + path, seconds or self.timeout
        try:
            answer = self.session.request(
                method,
                url,
                json=body,
                timeout=(CONNECT_SECONDS, seconds),
                allow_redirects=False,
                stream=stream,
                # A connection that the server closed between two steps would fail in the middle of the next.
                headers={"Connection": "close"},
            )
            said = "" if answer.status_code == 200 else answer.text
        except Timeout as error:
            raise EngineError(
                f"{url} was silent for {seconds:g} s ({type(error).__name__}); a server that is only slow needs a longer timeout "
                "or update_timeout."
            ) from error
        except RequestException as error:
            raise EngineError(f"{url} was not reached: {type(error).__name__}: {brief(str(error))}") from error
        if 300 <= answer.status_code < 400:
            raise EngineError(
                f"{url} answered with status {answer.status_code}, a redirect to {brief(answer.headers.get('Location'))}; "
                "redirects are not followed, for weights and keys would go with them. Give the address that answers itself."
            )
        if answer.status_code != 200 and answer.status_code not in allowed:
            raise EngineError(f"{url} answered with status {answer.status_code}: {brief(said)}")
        return answer

    def _json(self, answer: Any) -> Any:
        try:
            return answer.json()
        except ValueError as error:
            raise EngineError(
                f"{answer.url} answered no JSON but {brief(answer.text)}; is it SGLang that listens there?"
            ) from error

    def _generate(self, request: Mapping[str, Any]) -> Any:
        return self._json(self._ask("POST", "/generate", body=dict(request)))

    def _stream(self, request: Mapping[str, Any]) -> Iterator[Any]:
        from requests import RequestException

        with self._ask("POST", "/generate", body=dict(request), stream=True) as response:
            try:
                # A line holds a whole response; with requests' 512 bytes it would be joined anew for each piece.
                for line in response.iter_lines(chunk_size=1 << 20):
                    if line == b"data: [DONE]":
                        return
                    if not line.startswith(b"data:"):
                        continue
                    chunk = json.loads(line[5:])
                    if isinstance(chunk, dict) and "error" in chunk:
                        raise EngineError(f"{response.url} ended a stream: {brief(chunk['error'])}")
                    yield chunk
            except (RequestException, ValueError) as error:
                raise EngineError(
                    f"{response.url} broke off a stream: {type(error).__name__}: {brief(str(error))}"
                ) from error
            raise EngineError(f"{response.url} broke off a stream: it ended without [DONE]")

    def _verdict(self, path: str, body: dict[str, Any], allowed: Sequence[int] = (400,)) -> tuple[Any, Any] | None:
        answer = self._ask("POST", path, body=body, allowed=allowed, seconds=self.update_timeout)
        if answer.status_code == 404:
            return None
        found = self._json(answer)
        fields = found if isinstance(found, dict) else {}
        return fields.get("success"), fields.get("message", found)

    @property
    def copies(self) -> int:
        """Copies of a bucket of weights in one message: one per tensor-parallel rank."""
        return self.ranks

    def _pause(self) -> None:
        if self.pause:
            # In the other modes, responses keep the tokens that the previous weights sampled, and 0.5.18 does not report this.
            self._ask("POST", "/pause_generation", body={"mode": "abort"}, seconds=self.update_timeout)

    def _resume(self) -> None:
        if self.pause:
            self._ask("POST", "/continue_generation", body={})

    def _begin(self) -> bool:
        # 0.5.18 has no such route.
        answer = self._verdict("/begin_weight_update", {}, allowed=(400, 404))
        if answer is not None:
            self._accepted("the begin of a weight update", answer)
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
        return self._verdict("/update_weights_from_tensor", body) or (False, "no such route")

    def _end(self) -> tuple[Any, Any]:
        return self._verdict("/end_weight_update", {}) or (False, "no such route")

    def _flush(self) -> bool:
        return bool(self._ask("POST", "/flush_cache", allowed=(400,)).status_code == 200)


def check_url(url: Any) -> None:
    """Raise `EngineError` if `url` is not the address of a server, or if it contains a name or password."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
        secret = "@" in parts.netloc
    except (ValueError, TypeError, AttributeError):
        right, secret = False, False
    if secret:
        raise EngineError("url holds a name or password, which errors would print; give them as the session's auth.")
    if not right:
        raise EngineError(f"url={brief(url)}; allowed: an address such as 'http://127.0.0.1:30000'.")
