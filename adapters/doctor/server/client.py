"""The doctor's requests to a server, several at once; every failure becomes one line that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mismatch_ext.adapters.http import NOT_FINITE, HttpClient, NoJson, Refused

from mismatch_ext.errors import ConfigError, EngineError

# Number of requests at once: enough to fill a server's batch, and few enough for its queue.
AT_ONCE = 16
Item = TypeVar("Item")


class Client(HttpClient):
    """Sends the doctor's requests to a server.

    Args:
        url: The server's address, such as "http://127.0.0.1:8000", with or without "/v1".
        timeout: Seconds that the server may be silent within a request.
        key: API key; None sends none.

    Raises:
        ConfigError: `url` is not an address of a server, or the package `requests` is missing.
    """

    def __init__(self, url: str, *, timeout: float = 600.0, key: str | None = None) -> None:
        try:
            super().__init__(
                url.rstrip("/").removesuffix("/v1"),
                timeout=timeout,
                name="--server: the server",
                when_silent="give a larger --server-timeout, smaller --responses or --max-tokens, or look whether it hangs.",
                when_down="is the server up, are host and port right, and did its log end with an error?",
            )
        except ImportError as error:
            raise ConfigError("--server needs the package requests: `pip install requests`.") from error
        except EngineError as error:
            raise ConfigError(f"--server: {error}") from error
        if key is not None:
            self.session.headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str, **query: str) -> dict[str, Any] | None:
        """Return the JSON object at a path; None if the server has no such path, or no JSON object there."""
        try:
            answer = self.json("GET", path, params=query)
        except Refused as error:
            if error.status in (401, 403) or 300 <= error.status < 400:
                raise self._refused(path, error) from error
            return None
        except NoJson:
            return None
        return answer if isinstance(answer, dict) else None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a request.

        Raises:
            EngineError: The server is not reached, is late, fails, or holds weights that are not finite.
            ConfigError: The server refuses the request, wants an API key, or redirects.
        """
        try:
            return self.json("POST", path, json=body)
        except Refused as error:
            raise self._refused(path, error) from error

    def each(self, work: Callable[[Item], Any], items: Sequence[Item], name: str) -> list[Any]:
        """Call `work` on each item, several at once, with a progress bar, and return the results in the order of the items."""
        from tqdm import tqdm

        with (
            ThreadPoolExecutor(AT_ONCE) as pool,
            tqdm(total=len(items), desc=name, unit="request", disable=None) as bar,
        ):
            futures = [pool.submit(work, item) for item in items]
            try:
                results = []
                for future in futures:
                    results.append(future.result())
                    bar.update()
                return results
            except BaseException:
                # Requests that have not begun are cancelled, because they would only delay the error.
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _refused(self, path: str, error: Refused) -> ConfigError | EngineError:
        if error.status in (401, 403):
            return ConfigError(
                f"--server: {self.url} wants an API key (status {error.status}); put it into an environment variable, and give "
                "that one's name by --server-key."
            )
        if NOT_FINITE in error.reply:
            return EngineError(
                f"--server: the log-probabilities of {self.url} are not finite: its weights are corrupted, or its dtype "
                "overflows; send the weights again, or restart it."
            )
        if error.status < 500:
            return ConfigError(f"--server: {self.url}{path} refuses a request (status {error.status}): {error.reply}")
        return EngineError(
            f"--server: {self.url}{path} failed (status {error.status}): {error.reply}; its log says why."
        )
