"""Requests to a server, several at once; every failure becomes one line that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import DefaultCookiePolicy
from typing import Any, TypeVar

from mismatch_ext.adapters.answers import NOT_FINITE, words
from mismatch_ext.adapters.sglang.fields import brief
from mismatch_ext.adapters.sglang.http import check_url

from mismatch_ext.errors import ConfigError, EngineError

# Number of requests at once: enough to fill a server's batch, and few enough for its queue.
AT_ONCE = 16
CONNECT_SECONDS = 10.0
# Largest number of characters of the server's own words in a message.
SHOWN = 300
Item = TypeVar("Item")


class Client:
    """Sends the doctor's requests to a server.

    A request is sent again if the server did not accept it: the connection was refused, or the server answered 503. A request
    that was sent but not answered is not repeated, because the server may still be working on it.

    Args:
        url: The server's address, such as "http://127.0.0.1:8000", with or without "/v1".
        timeout: Seconds that the server may be silent within a request.
        key: API key; None sends none.

    Raises:
        ConfigError: `url` is not an address of a server, or the package `requests` is missing.
    """

    def __init__(self, url: str, *, timeout: float = 600.0, key: str | None = None) -> None:
        try:
            import requests
            from requests.adapters import HTTPAdapter
            from urllib3.util import Retry
        except ImportError as error:
            raise ConfigError("--server needs the package requests: `pip install 'mismatch-ext[doctor]'`.") from error
        self.url, self.timeout = url.rstrip("/").removesuffix("/v1"), timeout
        try:
            check_url(self.url)
        except EngineError as error:
            raise ConfigError(f"--server: {error}") from error
        session = requests.Session()
        # The environment's proxies and credentials are not used, so that requests go only to the server that was named.
        session.trust_env = False
        session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        again = Retry(
            total=3, connect=2, read=False, redirect=0, other=0, status=3, status_forcelist=(503,), allowed_methods=None,
            backoff_factor=0.5, raise_on_status=False,
        )  # fmt: skip
        adapter = HTTPAdapter(pool_maxsize=AT_ONCE, max_retries=again)
        for scheme in ("http://", "https://"):
            session.mount(scheme, adapter)
        # If a connection were kept, the server could close it between two requests, and the next one would fail.
        session.headers["Connection"] = "close"
        if key is not None:
            session.headers["Authorization"] = f"Bearer {key}"
        self._session = session

    def get(self, path: str, **query: str) -> dict[str, Any] | None:
        """Return the JSON object at a path; None if the server has no such path, or no JSON object there.

        Raises:
            EngineError: The server is not reached, or does not answer in time.
            ConfigError: The server wants an API key, or redirects.
        """
        answer = self._ask("GET", path, params=query)
        if answer.status_code != 200:
            return None
        try:
            found = answer.json()
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a request.

        Raises:
            EngineError: The server is not reached, is late, fails, or holds weights that are not finite.
            ConfigError: The server refuses the request, wants an API key, or redirects.
        """
        answer = self._ask("POST", path, json=body)
        if answer.status_code != 200:
            raise self._refused(path, answer.status_code, answer.text)
        try:
            return answer.json()
        except ValueError as error:
            raise EngineError(f"--server: {self.url}{path} answered no JSON: {brief(answer.text[:SHOWN])}") from error

    def each(self, work: Callable[[Item], Any], items: Sequence[Item], name: str) -> list[Any]:
        """Call `work` on each item, several at once, with a progress bar, and return the results in the order of the items."""
        from tqdm import tqdm

        with (
            ThreadPoolExecutor(AT_ONCE) as pool,
            tqdm(total=len(items), desc=name, unit="request", disable=None) as bar,
        ):
            futures = [pool.submit(work, item) for item in items]
            try:
                found = []
                for future in futures:
                    found.append(future.result())
                    bar.update()
                return found
            except BaseException:
                # Requests that have not begun are cancelled, because they would only delay the error.
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _ask(self, method: str, path: str, **sent: Any) -> Any:
        from requests import ConnectionError, RequestException, Timeout

        try:
            answer = self._session.request(
                method, self.url + path, timeout=(CONNECT_SECONDS, self.timeout), allow_redirects=False, **sent
            )
        except Timeout as error:
            raise EngineError(
                f"--server: {self.url}{path} did not answer within {self.timeout:g} s; give a larger --server-timeout, or "
                "smaller --responses and --max-tokens, or look whether the server hangs."
            ) from error
        except ConnectionError as error:
            raise EngineError(
                f"--server: {self.url} cannot be reached ({_reason(error)}); is the server up, are host and port right, and did "
                "its log end with an error?"
            ) from error
        except RequestException as error:
            raise EngineError(f"--server: {self.url}{path}: {type(error).__name__}: {brief(str(error))}") from error
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"--server: {self.url} wants an API key (status {answer.status_code}); put it into an environment variable, and "
                "give that one's name by --server-key."
            )
        if 300 <= answer.status_code < 400:
            raise ConfigError(
                f"--server: {self.url}{path} answered with a redirect to {brief(answer.headers.get('Location'))}; give the "
                "address that answers itself."
            )
        return answer

    def _refused(self, path: str, status: int, text: str) -> ConfigError | EngineError:
        said = words(text, SHOWN)
        if NOT_FINITE in said:
            return EngineError(
                f"--server: the log-probabilities of {self.url} are not finite: its weights are garbled, or its dtype "
                "overflows; send the weights again, or restart it."
            )
        if 400 <= status < 500:
            return ConfigError(f"--server: {self.url}{path} refuses a request (status {status}): {said}")
        return EngineError(f"--server: {self.url}{path} failed (status {status}): {said}; its log says why.")


def _reason(error: Exception) -> str:
    """Return the text of the innermost error of a failed connection; the outer errors only wrap it."""
    while error.args and isinstance(inner := getattr(error.args[0], "reason", error.args[0]), Exception):
        error = inner
    return str(error).rpartition(": ")[2][:SHOWN].rstrip("')")
