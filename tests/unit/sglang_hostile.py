"""A server that breaks HTTP in the ways that a server can, and the client that is held against it, in a process of its own.

A client's address names the attack and the call that it waits for: http://127.0.0.1:PORT/ATTACK.CALL; other calls are answered
well, so that each is reached.
"""

from __future__ import annotations

import functools
import gzip
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.memory import peak

GOOD = b'{"version": "0.5.23", "tp_size": 1, "success": true, "message": "ok"}'
CALLS = {
    "info": "/server_info",
    "generate": "/generate",
    "stream": "/generate",
    "update": "/update_weights_from_tensor",
}
TIMEOUT = 1.0
PATIENCE = 20.0
"""Seconds after which an attack gives up, so that a client that waits for ever ends too."""
PIECE = b"x" * (1 << 16)


class Asked:
    """One request of the client, and the means to answer it."""

    def __init__(self, connection: socket.socket, call: str, body: bytes, elsewhere: int) -> None:
        self.connection, self.call, self.body, self.elsewhere = connection, call, body, elsewhere
        self.kind = "text/event-stream" if call == "stream" else "application/json"

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.sendall(piece)

    def head(self, *lines: str, status: str = "200 OK", kind: str | None = None) -> None:
        every = (f"HTTP/1.1 {status}", f"Content-Type: {kind or self.kind}", *lines)
        self.send("".join(f"{line}\r\n" for line in every).encode(), b"\r\n")

    def whole(self, body: bytes, *lines: str, status: str = "200 OK", kind: str | None = None) -> None:
        self.head(f"Content-Length: {len(body)}", *lines, status=status, kind=kind)
        self.send(body)

    def drip(self, piece: bytes, every: float = 0.05) -> None:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self.send(piece)
            time.sleep(every)

    def flood(self, piece: bytes, most: int = 1 << 30) -> None:
        for _ in range(most // len(piece)):
            self.send(piece)

    def wait(self) -> None:
        self.connection.settimeout(PATIENCE)
        self.connection.recv(1)


Attack = Callable[[Asked], None]


def _then(head: tuple[str, ...], *acts: Callable[[Asked], None]) -> Attack:
    def attack(asked: Asked) -> None:
        asked.head(*head)
        for act in acts:
            act(asked)

    return attack


def _redirect(status: int, other_port: bool) -> Attack:
    def attack(asked: Asked) -> None:
        host = f"http://127.0.0.1:{asked.elsewhere}" if other_port else ""
        asked.whole(GOOD, f"Location: {host}/believed", status=f"{status} Moved")

    return attack


def _content(body: bytes, kind: str | None = None) -> Attack:
    """Answer with a body; in a stream, as an event."""
    return lambda asked: asked.whole(b"data: " + body + b"\n\n" if asked.call == "stream" else body, kind=kind)


def _reset(asked: Asked) -> None:
    asked.head("Content-Length: 1000")
    asked.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


CHUNKED = "Transfer-Encoding: chunked"
LENGTH = "Content-Length: 500000"
STUCK: dict[str, Attack] = {
    "silent": lambda asked: asked.wait(),
    "silent after the headers": _then((LENGTH,), lambda asked: asked.wait()),
    "drips the status line": lambda asked: asked.drip(b"H"),
    "drips a header": lambda asked: (asked.send(b"HTTP/1.1 200 OK\r\nX: "), asked.drip(b"x"))[-1],
    "drips headers": lambda asked: (asked.send(b"HTTP/1.1 200 OK\r\n"), asked.drip(b"X: y\r\n", 0.2))[-1],
    "drips 100 Continue": lambda asked: asked.drip(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "drips the body": _then((LENGTH,), lambda asked: asked.drip(b" ")),
    "drips a body without end": _then((), lambda asked: asked.drip(b" ")),
    "drips chunks": _then((CHUNKED,), lambda asked: asked.drip(b"1\r\n \r\n")),
    "drips the size of a chunk": _then((CHUNKED,), lambda asked: asked.drip(b"0")),
    "drips a trailer": _then((CHUNKED,), lambda asked: (asked.send(b"0\r\n"), asked.drip(b"x"))[-1]),
    "drips events": _then((CHUNKED,), lambda asked: asked.drip(b"a\r\ndata: {}\n\n\r\n")),
    "drips the body of an error": lambda asked: (asked.head(LENGTH, status="500 No"), asked.drip(b" "))[-1],
}
FLOODS: dict[str, Attack] = {
    "endless body": _then((), lambda asked: asked.flood(PIECE)),
    "endless chunks": _then((CHUNKED,), lambda asked: asked.flood(b"10000\r\n" + PIECE + b"\r\n")),
    "endless blank": _then((), lambda asked: asked.flood(b" " * (1 << 16))),
    "endless chunk": _then((CHUNKED,), lambda asked: (asked.send(b"ffffffffff\r\n"), asked.flood(PIECE))[-1]),
    "endless size of a chunk": _then((CHUNKED,), lambda asked: asked.flood(b"0" * (1 << 16))),
    "endless extension of a chunk": _then((CHUNKED,), lambda asked: (asked.send(b"1;"), asked.flood(PIECE))[-1]),
    "endless trailer": _then((CHUNKED,), lambda asked: (asked.send(b"0\r\n"), asked.flood(PIECE))[-1]),
    "endless status line": lambda asked: asked.flood(PIECE),
    "endless header": lambda asked: (asked.send(b"HTTP/1.1 200 OK\r\nX: "), asked.flood(PIECE))[-1],
    "endless headers": lambda asked: (asked.send(b"HTTP/1.1 200 OK\r\n"), asked.flood(b"X: " + b"y" * 60000 + b"\r\n"))[
        -1
    ],
    "endless 100 Continue": lambda asked: asked.flood(b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" * 1000),
    "endless events": _then((), lambda asked: asked.flood(b"data: {}\n\n" * 6000)),
    "endless event": _then((), lambda asked: (asked.send(b"data: "), asked.flood(PIECE))[-1]),
    "endless error": lambda asked: (asked.head(status="500 No"), asked.flood(PIECE))[-1],
    "a terabyte announced": _then((f"Content-Length: {10**12}",), lambda asked: asked.flood(PIECE)),
    "gzip": lambda asked: asked.whole(bomb(), "Content-Encoding: gzip"),
    "gzip of gzip": lambda asked: asked.whole(gzip.compress(bomb()), "Content-Encoding: gzip, gzip"),
    "deflate": lambda asked: asked.whole(bomb(), "Content-Encoding: deflate"),
    "many objects": _content(b"[" + b"[]," * 170_000 + b"0]"),
    "many keys": _content(b"[" + b'{"":{}},' * 65_000 + b"0]"),
}
LIES: dict[str, Attack] = {
    "length too long": _then(("Content-Length: 1000",), lambda asked: asked.send(GOOD)),
    "length too short": _then(("Content-Length: 9",), lambda asked: asked.send(GOOD)),
    "length negative": _then(("Content-Length: -1",), lambda asked: asked.send(GOOD)),
    "length with a sign": _then((f"Content-Length: +{len(GOOD)}",), lambda asked: asked.send(GOOD)),
    "length of another base": _then(("Content-Length: 0x45",), lambda asked: asked.send(GOOD)),
    "two lengths": _then((f"Content-Length: {len(GOOD)}", "Content-Length: 5000"), lambda asked: asked.send(GOOD)),
    "length and chunks": _then(
        (f"Content-Length: {len(GOOD)}", CHUNKED), lambda asked: asked.send(b"45\r\n", GOOD, b"\r\n0\r\n\r\n")
    ),
    "negative chunk": _then((CHUNKED,), lambda asked: asked.send(b"-5\r\n", GOOD)),
    "chunk of no number": _then((CHUNKED,), lambda asked: asked.send(b"all\r\n", GOOD)),
}
CLOSES: dict[str, Attack] = {
    "closes at once": lambda asked: None,
    "closes in the status line": lambda asked: asked.send(b"HTTP/1.1 20"),
    "closes after the status line": lambda asked: asked.send(b"HTTP/1.1 200 OK\r\n"),
    "closes in the headers": lambda asked: asked.send(b"HTTP/1.1 200 OK\r\nContent-Type: appl"),
    "closes after the headers": _then((LENGTH,)),
    "closes in the body": _then((LENGTH,), lambda asked: asked.send(GOOD)),
    "closes after a chunk": _then((CHUNKED,), lambda asked: asked.send(b"45\r\n", GOOD, b"\r\n")),
    "closes in a chunk": _then((CHUNKED,), lambda asked: asked.send(b"ff\r\n", GOOD)),
    "closes in the size of a chunk": _then((CHUNKED,), lambda asked: asked.send(b"4")),
    "resets": _reset,
    "is no HTTP": lambda asked: asked.send(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "no content": lambda asked: asked.head(status="204 No Content"),
    "part of the content": lambda asked: asked.whole(GOOD, status="206 Partial Content"),
    "another protocol": lambda asked: asked.head("Upgrade: x", status="101 Switching Protocols"),
}
NO_JSON: dict[str, Attack] = {
    "a page": lambda asked: asked.whole(b"<html>log in</html>", kind="text/html"),
    "JSON as text": lambda asked: asked.whole(GOOD, kind="text/plain"),
    "JSON of no type": lambda asked: asked.send(
        f"HTTP/1.1 200 OK\r\nContent-Length: {len(GOOD)}\r\n\r\n".encode(), GOOD
    ),
    "nothing": lambda asked: asked.whole(b"data: \n\n" if asked.call == "stream" else b""),
    "null": _content(b"null"),
    "numbers": _content(b"[1, 2]"),
    "NaN": _content(b'{"version": "0.5.23", "success": true, "x": NaN}'),
    "Infinity": _content(b'{"version": "0.5.23", "success": true, "x": -Infinity}'),
    "deep": _content(b"[" * 200_000 + b"]" * 200_000),
    "deep objects": _content(b'{"":' * 100_000 + b"1" + b"}" * 100_000),
    "twice the same key": _content(b'{"success": false, "version": "0.5.1", "version": "0.5.23", "success": true}'),
    "a number of many digits": _content(b'{"success": true, "version": ' + b"9" * 10_000 + b"}"),
    "another encoding": _content(GOOD.decode().encode("utf-16")),
    "no encoding": _content(b'{"success": true, "version": "\xff"}'),
    "more behind it": _content(GOOD + b" {}"),
}
REDIRECTS: dict[str, Attack] = {
    f"{status} to {'another port' if other else 'another path'}": _redirect(status, other)
    for status in (301, 302, 303, 307, 308)
    for other in (False, True)
}
ATTACKS = {**STUCK, **FLOODS, **LIES, **CLOSES, **NO_JSON, **REDIRECTS}
UNREAD = "never reads"


@functools.cache
def bomb() -> bytes:
    """Return 128 MB of blanks, compressed to a thousandth."""
    return gzip.compress(b" " * (1 << 27), 6)


class Server:
    """Answers by attacks; keeps which addresses were asked for."""

    def __init__(self, elsewhere: int = 0) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        # A client that sends must notice soon that nobody reads.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        self.port, self.elsewhere = self.listener.getsockname()[1], elsewhere
        self.paths: list[str] = []
        bomb()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                lines = connection.makefile("rb")
                path = lines.readline().split()[1].decode()
                self.paths.append(path)
                attack, _, call = path[1:].partition("/")[0].partition(".")
                attack = attack.replace("%20", " ")
                length = 0
                while line := lines.readline().strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                attacked = call and path.endswith(CALLS[call])
                if attacked and attack == UNREAD:
                    time.sleep(PATIENCE)
                    return
                asked = Asked(connection, call, lines.read(length), self.elsewhere)
                if attacked:
                    ATTACKS[attack](asked)
                else:
                    asked.whole(GOOD, kind="application/json")
                # What was not read would make the close a reset, which takes away what the client has not read.
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(1)
                while connection.recv(1 << 16):
                    pass
            except (OSError, IndexError, ValueError):
                pass


def attempts() -> Iterator[tuple[str, str]]:
    """Yield every attack with every call that it is one on."""
    events = {"endless events", "drips events"}
    for attack in ATTACKS:
        for call in CALLS:
            if attack not in events or call == "stream":
                yield attack, call
    yield UNREAD, "update"


def attempt(port: int, attack: str, call: str) -> dict[str, object]:
    """Make a call under an attack and return how it ended."""
    import torch
    from mismatch_ext.adapters.sglang import HttpTransport, update_weights

    url = f"http://127.0.0.1:{port}/{attack.replace(' ', '%20')}.{call}"
    transport = HttpTransport(url, timeout=TIMEOUT, update_timeout=TIMEOUT, vocabulary=16)
    request = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, "stream": call == "stream"}
    weights = [("w", torch.zeros(1 << 21 if attack == UNREAD else 1 << 8))]
    start, ended, text = time.monotonic(), "nothing raised", ""
    try:
        if call == "info":
            text = str(transport.version)
        elif call == "update":
            text = str(update_weights(transport, weights, dtype="float32"))
        else:
            text = str(transport.generate(request))[:200]
    except Exception as error:  # noqa: BLE001 - which one it was is what the test asks
        ended, text = type(error).__name__, str(error)
    return {"attack": attack, "call": call, "seconds": time.monotonic() - start, "ended": ended, "text": text}


def main(port: int) -> None:
    """Make every attempt and print how each ended, and by how much memory grew at most."""
    attempt(port, "length too long", "update")
    before = peak()
    every = list(attempts())
    # What a client sends it holds itself.
    waiting = [one for one in every if one[0] in STUCK or one[0] == UNREAD]
    found = [attempt(port, *one) for one in every if one not in waiting]
    grown = peak() - before
    with ThreadPoolExecutor(len(waiting)) as pool:
        found += pool.map(lambda one: attempt(port, *one), waiting)
    print(json.dumps({"found": found, "grown": grown}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
