"""An SGLang server behind HTTP, with the same calls as the engine in the trainer's process."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.sglang.fields import brief
from mismatch_ext.adapters.sglang.transport import Bucket, Transport

from mismatch_ext.errors import EngineError

if TYPE_CHECKING:
    from requests import Session


class HttpTransport(Transport):
    """An SGLang server.

    Weights travel in the bodies of requests, so that the server may run on another machine; a server on the same GPU takes them
    faster through SGLang's own channels. During an update the server is paused: requests that run are aborted, which their
    responses say, and new ones wait and are served with the new weights.

    Args:
        url: The server's address, such as "http://127.0.0.1:30000".
        session: A session of the `requests` library, with headers for an API key for example; None opens one that ignores the
            environment's proxies, certificates and .netrc (`trust_env=False`).
        timeout: Seconds to wait for an answer of the server.
        update_timeout: Seconds to wait for a bucket of weights.
        pause: Pause the server around weight updates. False leaves it to you to drain it: what it serves between two buckets is
            of a mixture of weights.
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
        import requests

        self.url = url.rstrip("/")
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
        response = self._ask("GET", "/server_info", allowed=(404,))
        if response.status_code == 404:
            response = self._ask("GET", "/get_server_info")
        info = self._json(response)
        if not isinstance(info, dict):
            raise EngineError(f"{response.url} answered {brief(info)}; allowed: an object with a version.")
        return info

    def _ask(self, method: str, path: str, *, allowed: Sequence[int] = (), **options: Any) -> Any:
        import requests

        try:
            response = self.session.request(method, self.url + path, **{"timeout": self.timeout, **options})
            # Of a stream, the body is read here and may break off.
            refused = None if response.ok or response.status_code in allowed else response.text
        except requests.RequestException as error:
            raise EngineError(
                f"{self.url}{path} was not reached: {type(error).__name__}: {brief(str(error))}"
            ) from error
        if refused is not None:
            raise EngineError(f"{self.url}{path} answered with status {response.status_code}: {brief(refused)}")
        return response

    def _json(self, response: Any) -> Any:
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{response.url} answered no JSON: {brief(response.text)}") from error

    def _generate(self, request: Mapping[str, Any]) -> Any:
        return self._json(self._ask("POST", "/generate", json=dict(request)))

    def _stream(self, request: Mapping[str, Any]) -> Iterator[Any]:
        import requests

        with self._ask("POST", "/generate", json=dict(request), stream=True) as response:
            try:
                # A line holds a whole response; in the 512 bytes of the default it would be joined anew for each piece.
                for line in response.iter_lines(chunk_size=1 << 20):
                    if not line.startswith(b"data:") or line == b"data: [DONE]":
                        continue
                    chunk = json.loads(line[5:])
                    if isinstance(chunk, dict) and "error" in chunk:
                        raise EngineError(f"{response.url} ended a stream: {brief(chunk['error'])}")
                    yield chunk
            except (requests.RequestException, ValueError, RecursionError) as error:
                raise EngineError(
                    f"{response.url} broke off a stream: {type(error).__name__}: {brief(str(error))}"
                ) from error

    def _verdict(self, path: str, body: dict[str, Any], allowed: Sequence[int] = (400,)) -> tuple[Any, Any] | None:
        response = self._ask("POST", path, json=body, allowed=allowed, timeout=self.update_timeout)
        if response.status_code == 404:
            return None
        answer = self._json(response)
        fields = answer if isinstance(answer, dict) else {}
        return fields.get("success"), fields.get("message", answer)

    @property
    def copies(self) -> int:
        """Copies of a weight update that are in one message: one per tensor-parallel rank."""
        return self.ranks

    def _pause(self) -> None:
        if self.pause:
            # The other modes go on with the tokens of the weights before, and 0.5.18's responses do not say so.
            self._ask("POST", "/pause_generation", json={"mode": "abort"}, timeout=self.update_timeout)

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
        # Pickled plainly, a tensor's bytes are in the message; SGLang's serializer puts handles there, which are good for
        # processes of one family on one machine.
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
        return bool(self._ask("POST", "/flush_cache", allowed=(400,)).ok)
