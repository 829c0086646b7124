"""Weight updates of a server that samples all the time: requests wait until the update has been named, sent and verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from mismatch_ext.adapters import vllm as engine
from mismatch_ext.adapters.trl.async_grpo.gate import Gate, Held
from mismatch_ext.adapters.vllm.remote import RemoteEngine
from mismatch_ext.adapters.vllm.stamps import Stamps, is_fresh
from torch import Tensor

from mismatch_ext.errors import EngineError, WeightSyncError
from mismatch_ext.weights import WeightVerifier

AGAIN = 0.1
"""Seconds between two pauses while requests are still under way to the server."""


class Transfer(Protocol):
    """What TRL asks of an object that sends weights: its `WeightTransferProtocol`."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...


class CheckedTransfer:
    """Puts TRL's weight transfer, or a user's own, between a gate that holds requests back and a check of what has arrived.

    Args:
        inner: The transfer that is wrapped.
        remote: The server.
        gate: Lets the rollout worker's requests through.
        verifier: Verifies updates; None verifies none.
        step: Returns the number of finished optimizer steps.
        on_sent: Gets the dtypes of the tensors of each update.
        alive: Raises if the rollout worker has failed, because its requests would never come back.
        arrived: Called when an update has been verified, before requests go on.
        over_http: Whether weights travel in the bodies of requests instead of as `inner` sends them.
    """

    def __init__(
        self,
        inner: Transfer,
        remote: RemoteEngine,
        gate: Gate,
        *,
        verifier: WeightVerifier | None,
        step: Callable[[], int],
        on_sent: Callable[[frozenset[str]], None],
        alive: Callable[[], None],
        arrived: Callable[[], None],
        over_http: bool,
    ) -> None:
        self.inner, self.remote, self.gate, self.verifier = inner, remote, gate, verifier
        self.stamps = Stamps()
        self._step, self._on_sent, self._alive, self._arrived = step, on_sent, alive, arrived
        self._over_http = over_http
        self._sending = engine.Sending()

    def init_weight_transfer(self) -> None:
        """Agree with the server on how weights travel, and look at what it holds now.

        Raises:
            EngineError: The server holds parts of two models.
        """
        self.gate.begin()
        fresh = is_fresh(self.remote)
        if self._over_http:
            self.remote.http.post("/init_weight_transfer_engine", {"init_info": {}})
        else:
            self.inner.init_weight_transfer()
        if fresh and self.verifier is not None:
            self.verifier.begin()

    def pause(self) -> None:
        """End what the server is generating, and wait until the rollout worker has all of it.

        Raises:
            EngineError: The server does not hold this trainer's weights, or requests do not come back.
        """
        self.gate.close()
        self.stamps.expect_on(self.remote)
        begun = time.monotonic()
        self.remote.http.post("/pause?mode=abort")
        while self.gate.requests:
            self._alive()
            if time.monotonic() - begun > self.remote.http.timeout:
                raise EngineError(
                    f"{self.gate.requests} requests of the rollout worker did not come back within {self.remote.http.timeout:g} "
                    f"s after the vLLM server at {self.remote.http.url} was paused for a weight update. Look at its log and "
                    "restart it."
                )
            time.sleep(AGAIN)
            # A request that was still on its way came after the pause, and waits in the server's queue.
            self.remote.http.post("/pause?mode=abort")
        self.remote.http.reset_prefix_cache("before")
        if not self._over_http:
            self.inner.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Send weights under a name of this trainer's; if sending fails half-way, the server keeps a name that says so.

        Raises:
            EngineError: The server failed to load them.
        """
        self.remote.weight_version = self.stamps.begin()
        self._sending = engine.Sending()
        weights = self._sending.through(iterator)
        if self._over_http:
            self.remote.http.post("/start_weight_update", {})
            self.remote.send(weights)
            self.remote.http.post("/finish_weight_update", {})
        else:
            self.inner.send_weights(weights)
        self.remote.weight_version = self.stamps.end()

    def resume(self) -> None:
        """Let the server go on, verify that it computes with the new weights, and only then let requests through.

        Raises:
            WeightSyncError: The server does not compute with the new weights, or nothing was sent.
        """
        if self._over_http:
            self.remote.http.post("/resume")
        else:
            self.inner.resume()
        if not self._sending.dtypes:
            raise WeightSyncError(
                f"no weights were sent to the vLLM server at {self.remote.http.url}: {type(self.inner).__name__}.send_weights "
                "has read none of those that it got. Send them all, or leave out weight_transfer."
            )
        self._on_sent(frozenset(self._sending.dtypes))
        if self.verifier is not None:
            self.stamps.expect_on(self.remote)
            self.verifier.verify(self._sending.samples)
        self._arrived()
        self.gate.open(Held(step=self._step(), update=self.stamps.count))

    def destroy(self) -> None:
        """End the transfer as TRL does."""
        self.inner.destroy()
