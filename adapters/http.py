"""One HTTP client for the servers of vLLM and SGLang, and for the doctor: no request waits forever, an error says what to do."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from reprlib import Repr
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mismatch_ext.errors import EngineError

if TYPE_CHECKING:
    from requests import Response, Session

CONNECT_SECONDS = 10.0
RETRY_SECONDS = 0.5
"""Base of the growing wait between two attempts."""
SHOWN = 300
"""Largest number of characters of a server's own words in a message."""
NOT_FINITE = "Out of range float values"
"""Part of vLLM's answer when a log-probability is NaN or infinite."""

_repr = Repr()
_repr.maxstring = _repr.maxother = 120
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = 4
_repr.maxlevel = 3


def brief(value: object) -> str:
    """Return a short representation of a value that a server sent."""
    text = _repr.repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."


def words(text: str) -> str:
    """Return what a server says in the body of an error: the field with its message, otherwise the beginning of the text."""
    try:
        message: Any = json.loads(text)
    except ValueError:
        message = text
    while isinstance(message, dict):
        message = next((message[key] for key in ("error", "message", "detail") if message.get(key)), str(message))
    return " ".join(str(message).split())[:SHOWN]


class Refused(EngineError):
    """The server answered with an error.

    Args:
        message: The error message.
        status: HTTP status of the answer.
        reply: The server's own words.
    """

    def __init__(self, message: str, status: int, reply: str) -> None:
        super().__init__(message)
        self.status, self.reply = status, reply


class Silent(EngineError):
    """The server did not answer in time."""


class NoJson(EngineError):
    """The server answered, but not with JSON."""


class HttpClient:
    """A server at an address.

    A request that the server did not take is sent again: the connection was refused, or it answered 503. One that it may have
    begun is not. Redirects are not followed, because weights and API keys would go with them.

    Args:
        url: The address, such as "http://127.0.0.1:8000"; a name and password in it become the session's, if that has none.
        session: A session of the `requests` library, of which each request gets a copy, because threads may ask at the same
            time; None opens one that ignores the environment's proxies and credentials.
        timeout: Seconds that the server may be silent within a request.
        name: The server in messages, such as "the vLLM server".
        when_silent, when_down: What to do if it does not answer in time, and if it cannot be reached.

    Raises:
        EngineError: The address is not one of a server.
    """

    def __init__(
        self,
        url: str,
        session: Session | None = None,
        *,
        timeout: float,
        name: str,
        when_silent: str,
        when_down: str,
    ) -> None:
        import requests
        from requests.adapters import HTTPAdapter
        from requests.utils import get_auth_from_url
        from urllib3.util import Retry

        parts, auth = urlsplit(url), get_auth_from_url(url)
        # Without name and password, which errors would print.
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise EngineError(f"url={brief(url)}; allowed: an address such as 'http://127.0.0.1:8000'.")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._name, self._when_silent, self._when_down = f"{name} at {self.url}", when_silent, when_down
        if session is None:
            session = requests.Session()
            session.trust_env = False
        if session.auth is None and any(auth):
            session.auth = auth
        again = Retry(
            total=5, connect=2, read=False, other=0, redirect=0, status=3, status_forcelist=(503,), allowed_methods=None,
            backoff_factor=RETRY_SECONDS, raise_on_status=False,
            respect_retry_after_header=False,  # it may be an hour
        )  # fmt: skip
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(pool_maxsize=64, max_retries=again))
        # A connection that the server closed between two steps would fail in the middle of the next.
        session.headers["Connection"] = "close"
        self.session: Any = session

    def __str__(self) -> str:
        return self._name

    def ask(
        self, method: str, path: str, *, allowed: Sequence[int] = (), timeout: float | None = None, **sent: Any
    ) -> Response:
        """Send a request and return requests' response.

        Args:
            method: "GET" or "POST".
            path: Path at the server.
            allowed: Statuses besides 200 that are answers.
            timeout: Seconds that the server may be silent; None for the client's, infinity for any time.
            **sent: `json` or `params`, as for `requests`.

        Raises:
            EngineError: The server cannot be reached.
            Silent: It does not answer in time.
            Refused: It answers with another status.
        """
        from requests import RequestException, Timeout

        seconds = self.timeout if timeout is None else timeout
        # Cookies of a session must not change while another thread reads them.
        session = copy.copy(self.session)
        session.cookies = self.session.cookies.copy()
        try:
            answer: Response = session.request(
                method,
                self.url + path,
                timeout=(CONNECT_SECONDS, None if seconds == math.inf else seconds),
                allow_redirects=False,
                **sent,
            )
        except Timeout as error:
            raise Silent(f"{self} did not answer {path} within {seconds:g} s; {self._when_silent}") from error
        except RequestException as error:
            raise EngineError(
                f"{self} cannot be reached at {path} ({type(error).__name__}: {_reason(error)}); {self._when_down}"
            ) from error
        if answer.status_code == 200 or answer.status_code in allowed:
            return answer
        reply = words(answer.text)
        if 300 <= answer.status_code < 400:
            reply = f"a redirect to {brief(answer.headers.get('Location'))}; give the address that answers itself"
        raise Refused(f"{self} answered {path} with status {answer.status_code}: {reply}", answer.status_code, reply)

    def json(self, method: str, path: str, **sent: Any) -> Any:
        """Send a request as `ask` does, and return the JSON of its answer; None if the answer is empty."""
        answer = self.ask(method, path, **sent)
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise NoJson(
                f"{self} answered {path} with no JSON but {brief(answer.text)}; is the address right?"
            ) from error


def _reason(error: Exception) -> str:
    """Return the text of the innermost error of a failed connection; the outer errors only wrap it."""
    while error.args and isinstance(inner := getattr(error.args[0], "reason", error.args[0]), Exception):
        error = inner
    return str(error).rpartition(": ")[2][:SHOWN].rstrip("')")
