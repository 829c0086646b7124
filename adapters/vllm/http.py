"""Requests to the vLLM server that a run depends on: no request waits forever, and an error says what to do."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.answers import NOT_FINITE, words

from mismatch_ext.errors import EngineError, NonFiniteLogprobError

if TYPE_CHECKING:
    from requests import Session

CONNECT_SECONDS = 10.0
# Most characters of the server's own words in a message.
SHOWN = 400
COMPLETIONS = "/v1/completions"
ALIVE = "/weight_info"
"""The engine itself answers this path, between two steps of a generation; only the process in front of it answers /health."""


class Refused(EngineError):
    """The server answered with an error.

    Args:
        message: The error message.
        status: HTTP status of the answer.
        said: The server's own words.
    """

    def __init__(self, message: str, status: int, said: str) -> None:
        super().__init__(message)
        self.status, self.said = status, said


class ServerHttp:
    """A server at an address.

    A failed request is not sent again, because the server may have begun to carry it out.

    Args:
        url: The address, such as "http://127.0.0.1:8000".
        session: A session of the `requests` library; each request is made by a copy, because threads may ask at the same time.
        timeout: Seconds that the server's engine may be silent.
    """

    def __init__(self, url: str, session: Session, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self._session = session

    def get(self, path: str, **query: str) -> Any:
        """Return what is at a path.

        Raises:
            EngineError: The server cannot be reached, or is silent.
            Refused: It answers with an error.
        """
        return self._ask(self._session_of_request(), "GET", path, self.timeout, params=query)

    def post(self, path: str, body: Any = None) -> Any:
        """Return the answer to a request.

        Raises:
            EngineError: The server cannot be reached, or is silent.
            Refused: It answers with an error.
            NonFiniteLogprobError: A log-probability of the answer is not finite.
        """
        return self._ask(self._session_of_request(), "POST", path, self.timeout, json=body)

    def generate(self, path: str, body: Any) -> Any:
        """Return the answer to a request that may take any time, as long as the engine answers other requests meanwhile.

        Raises:
            EngineError: The server cannot be reached, or its engine has stopped.
            Refused: It answers with an error.
            NonFiniteLogprobError: A log-probability of the answer is not finite.
        """
        import requests

        session = self._session_of_request()
        answers: list[Any] = []
        ended = threading.Event()

        def ask() -> None:
            try:
                answers.append(self._ask(session, "POST", path, None, json=body))
            except Exception as error:  # noqa: BLE001  # raised again in the caller's thread
                answers.append(error)
            ended.set()

        # A daemon, because a thread that waits for a dead server must not keep the process from ending.
        threading.Thread(target=ask, name="mismatch-generate", daemon=True).start()
        while not ended.wait(self.timeout):
            with requests.Session() as other:
                self._ask(other, "GET", ALIVE, self.timeout)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def rpc(self, method: str, **arguments: Any) -> list[dict[str, Any]]:
        """Call a method of each of the server's workers, and return their answers.

        Raises:
            EngineError: The server cannot be reached, or is silent.
            Refused: It has no such method, or the method failed.
        """
        body = {"method": method, "kwargs": arguments, "timeout": self.timeout}
        found: list[dict[str, Any]] = self.post("/collective_rpc", body)["results"]
        return found

    def reset_prefix_cache(self, when: str) -> None:
        """Forget all cached prefixes.

        Args:
            when: Whether it is "before" or "after" a weight update.

        Raises:
            EngineError: vLLM declined.
        """
        if not (self.post("/reset_prefix_cache") or {}).get("success", True):
            raise EngineError(
                f"the vLLM server at {self.url} did not reset its prefix cache {when} a weight update: requests of somebody else "
                "hold blocks of it, whose keys, values and routes are of the weights before. Give the trainer a server of its "
                "own."
            )

    def _session_of_request(self) -> Session:
        """Return a copy with cookies of its own: a session's cookies must not change while another thread reads them."""
        session = copy.copy(self._session)
        session.cookies = self._session.cookies.copy()  # type: ignore[no-untyped-call]
        return session

    def _ask(self, session: Session, method: str, path: str, timeout: float | None, **sent: Any) -> Any:
        from requests import RequestException, Timeout

        try:
            answer = session.request(method, self.url + path, timeout=(CONNECT_SECONDS, timeout), **sent)
        except Timeout as error:
            raise EngineError(
                f"the vLLM server at {self.url} did not answer {path} within {self.timeout:g} s: its engine hangs. Look at its "
                "log and restart it; if it is slow and no more, raise vllm_server_timeout."
            ) from error
        except RequestException as error:
            raise EngineError(
                f"the vLLM server at {self.url} cannot be reached ({type(error).__name__} at {path}); did it end? Its log says "
                "why. Restart it, and resume from the last checkpoint."
            ) from error
        if answer.status_code == 200:
            try:
                return answer.json() if answer.content else None
            except ValueError as error:
                raise EngineError(f"{self.url}{path} answered no JSON; give the address of a vLLM server.") from error
        said = words(answer.text, SHOWN)
        if NOT_FINITE in said:
            raise NonFiniteLogprobError(
                f"log-probabilities of the vLLM server at {self.url} are not finite: its weights are garbled, or its dtype "
                "overflows."
            )
        raise Refused(
            f"the vLLM server at {self.url} answered {path} with status {answer.status_code}: {said}",
            answer.status_code,
            said,
        )


def without_repeating(session: Session) -> Session:
    """Keep a session from sending a failed request again; TRL's session sends updates and generations up to six times."""
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    # It tries again only if a proxy or server has not taken the request.
    again = Retry(
        total=5, connect=5, read=0, other=0, redirect=0, status=3, status_forcelist=(503,), allowed_methods=None,
        backoff_factor=0.5, raise_on_status=False,
    )  # fmt: skip
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=64, max_retries=again))
    # A connection that the server closed between two steps would fail in the middle of the next.
    session.headers["Connection"] = "close"
    return session
