"""An SGLang server over HTTP, with the same calls as the engine in the trainer's process."""

from __future__ import annotations

import base64
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.sglang.answers import (
    ANSWER_BYTES,
    EVENT_STREAM,
    JSON_TYPE,
    REFUSAL_BYTES,
    check_url,
    media_type,
    most_bytes,
    shown,
    strict_json,
)
from mismatch_ext.adapters.sglang.fields import MAX_TOKEN_ID, brief, is_integer, number
from mismatch_ext.adapters.sglang.transport import Bucket, Transport

from mismatch_ext.errors import EngineError, PeerVersionError

if TYPE_CHECKING:
    from mismatch_ext.adapters.sglang.exchange import Exchange
    from requests import Session

VOCABULARY = re.compile(rb"logit_bias must ha(?:s|ve) keys in \[0, ([0-9]{1,9})\]")
"""Text with which SGLang refuses a setting for a token that its model does not have."""


@dataclass(frozen=True)
class Answer:
    """Status and whole body of an answer."""

    url: str
    status: int
    body: bytes
    content_type: str


class HttpTransport(Transport):
    """An SGLang server.

    Weights travel in the bodies of requests, so that the server may run on another machine; a server on the same GPU takes them
    faster through SGLang's own channels. During an update the server is paused: it aborts running requests, and their responses
    say so; new requests wait, and are served with the new weights.

    Answers are bounded in time and size, and are accepted only in the form that was asked for. No redirect is followed, so that
    weights and API key go to the server at `url` only. No compressed body is unpacked, and nothing is unpickled. Weights are
    sent as a pickle, because SGLang's route for weights takes nothing else.

    Args:
        url: The server's address, such as "http://127.0.0.1:30000".
        session: A session of the `requests` library, for example with headers for an API key. It uses the environment's proxies
            unless its `trust_env` is False. None opens a session that ignores the environment's proxies, certificates and
            .netrc. The session's adapter for `url` is replaced by a `BoundedAdapter`, unless it is one already.
        timeout: Seconds from a request to the last byte of its answer; a generation has to end in this time, streamed or not.
        update_timeout: The same for a bucket of weights, and for pausing.
        pause: Pause the server around weight updates. With False you must drain it yourself: between two buckets it would serve
            requests with a mixture of weights.
        vocabulary: Number of tokens that the server's model has. None asks the server: it refuses a setting for a token that no
            model has, and names the number.
        answer_bytes: Largest answer, and largest event of a stream, in bytes. None allows 512 KiB, and for a generation 1 KiB
            more per token of prompt and response, or 17 KiB more with routes.

    Raises:
        EngineError: The address, a timeout or the session's adapter is not allowed.
        PeerVersionError: requests is older than 2.32.
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
        answer_bytes: int | None = None,
    ) -> None:
        import requests

        check_url(url)
        for name, seconds in (("timeout", timeout), ("update_timeout", update_timeout)):
            if not 0 < (number(seconds) or 0) < math.inf:
                raise EngineError(f"{name}={brief(seconds)}; allowed: a number of seconds above 0.")
        if answer_bytes is not None and (not is_integer(answer_bytes) or answer_bytes < 1):
            raise EngineError(f"answer_bytes={brief(answer_bytes)}; allowed: an integer above 0, or None.")
        if vocabulary is not None and (not is_integer(vocabulary) or vocabulary < 1):
            raise EngineError(f"vocabulary={brief(vocabulary)}; allowed: an integer above 0, or None.")
        self.url, self._vocabulary = url.rstrip("/"), None if vocabulary is None else int(vocabulary)
        if session is None:
            session = requests.Session()
            session.trust_env = False
            session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self.session: Any = session
        self._mount()
        self.timeout, self.update_timeout, self.pause = timeout, update_timeout, pause
        self.answer_bytes = None if answer_bytes is None else int(answer_bytes)

    def __str__(self) -> str:
        return f"the SGLang server at {self.url}"

    def _mount(self) -> None:
        from mismatch_ext.adapters.sglang.exchange import BoundedAdapter
        from requests.adapters import HTTPAdapter

        if not hasattr(HTTPAdapter, "get_connection_with_tls_context"):
            raise PeerVersionError(
                "requests is too old to hold a request to a deadline; `pip install 'requests>=2.32'`."
            )
        found = self.session.get_adapter(f"{self.url}/")
        if isinstance(found, BoundedAdapter):
            return
        if type(found) is not HTTPAdapter or found.max_retries.total:
            raise EngineError(
                f"the session's adapter for {self.url} is {brief(found)}, which does not keep to a deadline for the whole "
                "request; allowed: the one of a new session, without retries, or one derived from "
                "mismatch_ext.adapters.sglang.exchange.BoundedAdapter."
            )
        self.session.mount(f"{self.url}/", BoundedAdapter())

    def server_info(self) -> dict[str, Any]:
        """Return the server's report of itself.

        Raises:
            EngineError: The server was not reached or refused; names URL and status.
        """
        answer = self._ask("GET", "/server_info", allowed=(404,))
        if answer.status == 404:
            answer = self._ask("GET", "/get_server_info")
        info = self._json(answer)
        if not isinstance(info, dict):
            raise EngineError(f"{answer.url} answered {brief(info)}; allowed: an object with a version.")
        return info

    def _vocabulary_size(self) -> int:
        settings = {"max_new_tokens": 1, "temperature": 1.0, "top_k": 1, "logit_bias": {str(MAX_TOKEN_ID): 0.0}}
        answer = self._ask("POST", "/generate", allowed=(400,), json={"input_ids": [0], "sampling_params": settings})
        found = VOCABULARY.search(answer.body[:REFUSAL_BYTES])
        if found is None:
            raise EngineError(
                f"{answer.url} does not say how many tokens its model has, and SGLang checks none of a prompt: it answered "
                f"status {answer.status}, {shown(answer.body)}, to a logit_bias of token {MAX_TOKEN_ID}. Give "
                "HttpTransport(..., vocabulary=...)."
            )
        return int(found[1]) + 1

    @contextmanager
    def _exchange(self, url: str, seconds: float, most: int) -> Iterator[Exchange]:
        """Yield an exchange with these limits, and turn an error of requests, urllib3 or http.client into `EngineError`."""
        from mismatch_ext.adapters.sglang.exchange import FAILURES, Exchange

        exchange = Exchange(url, seconds, self.answer_bytes or most)
        try:
            yield exchange
        except FAILURES as error:
            raise EngineError(f"{url} was not reached: {type(error).__name__}: {brief(str(error))}") from error

    def _open(self, method: str, path: str, exchange: Exchange, allowed: Sequence[int], json: Any) -> Any:
        """Send a request and return the response with its body unread; refuse a response that SGLang would not send."""
        with exchange.active():
            response = self.session.request(
                method,
                self.url + path,
                json=json,
                timeout=exchange.seconds,
                stream=True,
                allow_redirects=False,
                headers={"Accept-Encoding": "identity", "Connection": "close"},
            )
        try:
            self._check_head(response, exchange, allowed)
        except BaseException:
            response.close()
            raise
        return response

    def _check_head(self, response: Any, exchange: Exchange, allowed: Sequence[int]) -> None:
        url, headers = exchange.url, response.headers
        if 300 <= response.status_code < 400:
            raise EngineError(
                f"{url} answered with status {response.status_code}, a redirect to {brief(headers.get('Location'))}; redirects "
                "are not followed, for weights and keys would go with them. Give the address that answers itself."
            )
        encoding = headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise EngineError(
                f"{url} answered in Content-Encoding {brief(encoding)}, which was not asked for; allowed: none. Switch "
                "compression off in the server, or in the proxy before it."
            )
        length = headers.get("Content-Length")
        if length is not None and (not re.fullmatch(r"[0-9]{1,18}", length) or "Transfer-Encoding" in headers):
            raise EngineError(f"{url} answered with Content-Length {brief(length)}, which does not tell where it ends.")
        if response.status_code != 200 and response.status_code not in allowed:
            text = next(response.iter_content(REFUSAL_BYTES), b"").decode("utf-8", "replace")
            raise EngineError(f"{url} answered with status {response.status_code}: {brief(text)}")
        if self._is(response, EVENT_STREAM):
            return  # the stream itself says where it ends
        if length is None and headers.get("Transfer-Encoding", "").strip().lower() != "chunked":
            raise EngineError(
                f"{url} answered neither with Content-Length nor in chunks, and so does not tell where it ends."
            )
        if length is not None and int(length) > exchange.most:
            raise exchange.too_long()

    @staticmethod
    def _is(response: Any, kind: re.Pattern[str]) -> bool:
        return kind.fullmatch(media_type(response.headers.get("Content-Type", ""))) is not None

    def _ask(
        self,
        method: str,
        path: str,
        *,
        allowed: Sequence[int] = (),
        json: Any = None,
        seconds: float | None = None,
        most: int = ANSWER_BYTES,
    ) -> Answer:
        url = self.url + path
        with self._exchange(url, seconds or self.timeout, most) as exchange:
            with self._open(method, path, exchange, allowed, json) as response:
                body = bytearray()
                for piece in response.iter_content(1 << 16):
                    body += piece
                    if len(body) > exchange.most:
                        raise exchange.too_long()
                return Answer(url, response.status_code, bytes(body), response.headers.get("Content-Type", ""))

    def _json(self, answer: Answer) -> Any:
        if not JSON_TYPE.fullmatch(media_type(answer.content_type)):
            raise EngineError(
                f"{answer.url} answered no JSON but {brief(answer.content_type or None)}: {shown(answer.body)}; is it "
                "SGLang that listens there?"
            )
        try:
            return strict_json(answer.body)
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{answer.url} answered no JSON: {shown(answer.body)} ({brief(str(error))})") from error

    def _generate(self, request: Mapping[str, Any]) -> Any:
        return self._json(self._ask("POST", "/generate", json=dict(request), most=most_bytes(request)))

    def _stream(self, request: Mapping[str, Any]) -> Iterator[Any]:
        from mismatch_ext.adapters.sglang.exchange import FAILURES

        url = f"{self.url}/generate"
        with self._exchange(url, self.timeout, most_bytes(request)) as exchange:
            with self._open("POST", "/generate", exchange, (), dict(request)) as response:
                if not self._is(response, EVENT_STREAM):
                    found = brief(response.headers.get("Content-Type"))
                    raise EngineError(f"{url} answered no stream but {found}; is it SGLang that listens there?")
                try:
                    # A line holds a whole response. With requests' default of 512 bytes, the line would be joined anew for each
                    # piece.
                    for line in response.iter_lines(chunk_size=1 << 20):
                        exchange.part_ended()
                        if line == b"data: [DONE]":
                            return
                        if not line.startswith(b"data:"):
                            continue
                        chunk = strict_json(line[5:])
                        if isinstance(chunk, dict) and "error" in chunk:
                            raise EngineError(f"{url} ended a stream: {brief(chunk['error'])}")
                        yield chunk
                except (*FAILURES, RecursionError) as error:
                    raise EngineError(
                        f"{url} broke off a stream: {type(error).__name__}: {brief(str(error))}"
                    ) from error
                raise EngineError(f"{url} broke off a stream: it ended without [DONE]")

    def _verdict(self, path: str, body: dict[str, Any], allowed: Sequence[int] = (400,)) -> tuple[Any, Any] | None:
        answer = self._ask("POST", path, json=body, allowed=allowed, seconds=self.update_timeout)
        if answer.status == 404:
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
            self._ask("POST", "/pause_generation", json={"mode": "abort"}, seconds=self.update_timeout)

    def _resume(self) -> None:
        if self.pause:
            self._ask("POST", "/continue_generation", json={})

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
        return self._ask("POST", "/flush_cache", allowed=(400,)).status == 200
