"""One request and its answer over HTTP, bounded in time and in bytes whatever the server does.

requests and urllib3 limit the time of each single read only: they wait without end for a server that sends a byte now and then,
and they read a body of any length. Here every wait gets what is left of the request's seconds, and every byte that arrives is
counted. The reader under http.client's response counts them, so that the status line, headers, chunk sizes and trailers are
bounded as the body is.
"""

from __future__ import annotations

import contextlib
import functools
import io
import socket
import time
from collections.abc import Iterator
from contextvars import ContextVar
from http.client import HTTPException, HTTPResponse
from typing import Any

from requests import RequestException
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError

from mismatch_ext.errors import EngineError

HEAD_BYTES = 1 << 18
"""Bytes for status line and headers; SGLang's are a few hundred."""
LARGEST_SEND = 1 << 20

FAILURES = (RequestException, HTTPError, HTTPException, OSError, ValueError)
"""Errors that requests, urllib3 and http.client raise when an exchange fails; a malformed chunk raises a plain ValueError."""


class Exchange:
    """The seconds that a request has left, and the bytes that its answer may still have on the wire.

    Args:
        url: The address, for errors.
        seconds: Seconds from now to the last byte of the answer. The time in which the system resolves the host's name is not
            bounded.
        most: Largest number of bytes of the body.
    """

    def __init__(self, url: str, seconds: float, most: int) -> None:
        self.url, self.seconds, self.most = url, seconds, most
        self._end = time.monotonic() + seconds
        self._received = 0

    def seconds_left(self) -> float:
        """Return the seconds that are left, above 0; raise `EngineError` when none are."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.late()
        return left

    def late(self) -> EngineError:
        """Return the error for an answer that did not end in time."""
        return EngineError(
            f"{self.url} did not answer in full within {self.seconds:g} s; a server that is only slow needs a longer "
            "timeout or update_timeout."
        )

    def received(self, count: int) -> None:
        """Count bytes that arrived; raise `EngineError` when they are more than an answer may have."""
        self._received += count
        # The sizes of chunks may take as many bytes as the body; no real server needs more.
        if self._received > HEAD_BYTES + 2 * self.most:
            raise self.too_long()

    def too_long(self) -> EngineError:
        """Return the error for an answer that is longer than the request can need."""
        return EngineError(
            f"{self.url} answered with more than {self.most} bytes, which is more than the request can need; give answer_bytes "
            "if it is not."
        )

    def part_ended(self) -> None:
        """Start the count anew, because a whole event of a stream was received."""
        self._received = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Apply this exchange's limits to the connections of a `BoundedAdapter` that this thread uses meanwhile."""
        token = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(token)


_ACTIVE: ContextVar[Exchange | None] = ContextVar("mismatch_exchange", default=None)


class BoundedAdapter(HTTPAdapter):
    """An adapter of `requests` whose connections keep the limits of the active exchange; without one they are stock."""

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        """Return requests' pool, with connections that keep the limits of the active exchange."""
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        if not issubclass(pool.ConnectionCls, _Bounded):
            pool.ConnectionCls = _bounded(pool.ConnectionCls)
        return pool


@functools.cache
def _bounded(connection: type[Any]) -> type[Any]:
    return type(f"Bounded{connection.__name__}", (_Bounded, connection), {})


class _Response(HTTPResponse):
    """http.client's response over a reader that keeps the limits of the active exchange."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        exchange = _ACTIVE.get()
        if exchange is not None:
            stream: Any = self.fp
            self.fp = io.BufferedReader(_Reader(stream.detach(), sock, exchange))

    def begin(self) -> None:
        """Read status and headers, and mark the connection so that no other request uses it, whatever the server says.

        Otherwise bytes that the server sent after this answer would be read as the next answer, and a request over a connection
        that the server closed meanwhile would fail.
        """
        super().begin()
        if _ACTIVE.get() is not None:
            self.will_close = True


class _Reader(io.RawIOBase):
    def __init__(self, raw: Any, sock: socket.socket, exchange: Exchange) -> None:
        self._raw, self._sock, self._exchange = raw, sock, exchange

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._exchange.seconds_left())
        try:
            count: int | None = self._raw.readinto(buffer)
        except TimeoutError:
            raise self._exchange.late() from None
        self._exchange.received(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Bounded:
    """Mixin of bounded connections; `_bounded` puts it before one of urllib3's connection classes."""

    response_class = _Response
    host: str
    port: int
    sock: Any
    timeout: float

    def connect(self) -> None:
        exchange = _ACTIVE.get()
        if exchange is not None:
            # urllib3 tries the host's addresses one after another, each with the whole timeout; a TLS handshake may follow.
            self.timeout = exchange.seconds_left() / (_addresses(self.host, self.port) + 1)
        super().connect()  # type: ignore[misc]

    def send(self, data: Any) -> None:
        exchange = _ACTIVE.get()
        if exchange is None or not isinstance(data, bytes):
            super().send(data)  # type: ignore[misc]
            return
        if self.sock is None:
            self.connect()
        # With TLS, sendall would start the timeout anew for every record.
        rest = memoryview(data)
        while rest:
            self.sock.settimeout(exchange.seconds_left())
            try:
                rest = rest[self.sock.send(rest[:LARGEST_SEND]) :]
            except TimeoutError:
                raise exchange.late() from None


def _addresses(host: str, port: int) -> int:
    try:
        return len(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)) or 1
    except (OSError, UnicodeError):
        return 1  # connecting then raises the error
