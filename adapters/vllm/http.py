"""Requests to the vLLM server that a run depends on; a generation may take any time while the engine still answers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.http import NOT_FINITE, HttpClient, Refused

from mismatch_ext.errors import EngineError, NonFiniteLogprobError

if TYPE_CHECKING:
    from requests import Response, Session

COMPLETIONS = "/v1/completions"
ALIVE = "/weight_info"
"""The engine itself answers this path, between two steps of a generation; only the process in front of it answers /health."""


class ServerHttp(HttpClient):
    """A vLLM server.

    Args:
        url: The address, such as "http://127.0.0.1:8000".
        session: A session of the `requests` library; it sends no request again that the server may have begun.
        timeout: Seconds that the server's engine may be silent.
    """

    def __init__(self, url: str, session: Session | None, timeout: float) -> None:
        super().__init__(
            url,
            session,
            timeout=timeout,
            name="the vLLM server",
            when_silent="its engine hangs. Look at its log and restart it; if it is only slow, raise vllm_server_timeout.",
            when_down="did it end? Its log says why. Restart it, and resume from the last checkpoint.",
        )

    def ask(self, method: str, path: str, **sent: Any) -> Response:
        """Send a request as `HttpClient.ask` does.

        Raises:
            NonFiniteLogprobError: A log-probability of the answer is not finite.
        """
        try:
            return super().ask(method, path, **sent)
        except Refused as error:
            if NOT_FINITE in error.reply:
                raise NonFiniteLogprobError(
                    f"log-probabilities of {self} are not finite: its weights are corrupted, or its dtype overflows."
                ) from error
            raise

    def get(self, path: str, **query: str) -> Any:
        """Return what is at a path."""
        return self.json("GET", path, params=query)

    def post(self, path: str, body: Any = None, **options: Any) -> Any:
        """Return the answer to a request."""
        return self.json("POST", path, json=body, **options)

    def generate(self, path: str, json: Any = None, *, timeout: float | None = None, **options: Any) -> Any:
        """Return the answer to a request that may take any time, as long as the engine answers other requests meanwhile.

        Args:
            path: Path at the server.
            json: The body.
            timeout: Seconds that it may be silent after all; None for any time.
            options: As for `ask`.

        Raises:
            EngineError: The server cannot be reached, or its engine has stopped.
        """
        answers: list[Any] = []
        ended = threading.Event()

        def generate() -> None:
            try:
                answers.append(self.post(path, json, timeout=float("inf") if timeout is None else timeout, **options))
            except Exception as error:  # noqa: BLE001  # raised again in the caller's thread
                answers.append(error)
            ended.set()

        # A daemon, because a thread that waits for a dead server must not keep the process from ending.
        threading.Thread(target=generate, name="mismatch-generate", daemon=True).start()
        while not ended.wait(self.timeout):
            self.get(ALIVE)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def rpc(self, method: str, seconds: float | None = None, /, **arguments: Any) -> list[dict[str, Any]]:
        """Call a method of each of the server's workers, and return their answers; `seconds` is None for the client's timeout."""
        body = {"method": method, "kwargs": arguments, "timeout": self.timeout if seconds is None else seconds}
        answers: list[dict[str, Any]] = self.post("/collective_rpc", body, timeout=seconds)["results"]
        return answers

    def reset_prefix_cache(self, when: str) -> None:
        """Forget all cached prefixes.

        Args:
            when: Whether it is "before" or "after" a weight update.

        Raises:
            EngineError: vLLM declined.
        """
        if not (self.post("/reset_prefix_cache") or {}).get("success", True):
            raise EngineError(
                f"{self} did not reset its prefix cache {when} a weight update, because other requests hold blocks of it. Their "
                "keys, values and routes are of the previous weights; give the trainer a server of its own."
            )
