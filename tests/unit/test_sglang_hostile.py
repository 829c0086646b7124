"""The HTTP transport against a server that breaks HTTP: our error, in time and in bounded memory, and nothing sent elsewhere."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from mismatch_ext.adapters.sglang import HttpTransport
from mismatch_ext.adapters.sglang.answers import ANSWER_BYTES, ROUTES_BYTES, TOKEN_BYTES, UNSAID_TOKENS, most_bytes
from mismatch_ext.adapters.sglang.exchange import BoundedAdapter
from requests.adapters import HTTPAdapter

from mismatch_ext.errors import EngineError
from tests.unit.sglang_hostile import GOOD, REDIRECTS, STUCK, TIMEOUT, UNREAD, Server, attempts

ROOT = Path(__file__).parents[2]
MARGIN = 10
"""How many times its deadline an attempt may take: what is due at the deadline waits for a processor."""
MEGABYTES = 64


@pytest.fixture(scope="module")
def attacked() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Run every attack on every call, and return how each ended, and what was asked for at places that redirects named."""
    elsewhere = Server()
    server = Server(elsewhere.port)
    command = [sys.executable, "-m", "tests.unit.sglang_hostile", str(server.port)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    finally:
        server.listener.close()
        elsewhere.listener.close()
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout), [path for path in server.paths if "believed" in path] + elsewhere.paths


def test_every_attack_ends_in_our_error_within_its_deadline(attacked: tuple[dict[str, Any], list[str]]) -> None:
    found = attacked[0]["found"]
    assert len(found) == len(list(attempts())) > 300
    assert [one for one in found if one["ended"] != "EngineError" or one["seconds"] > MARGIN * TIMEOUT] == []
    # The message names where, and its length does not depend on the server.
    assert [one for one in found if "127.0.0.1" not in one["text"] or len(one["text"]) > 600] == []


def test_what_never_ends_is_ended_by_the_deadline(attacked: tuple[dict[str, Any], list[str]]) -> None:
    late = {
        one["attack"] for one in attacked[0]["found"] if f"did not answer in full within {TIMEOUT:g} s" in one["text"]
    }
    assert late >= {*STUCK, UNREAD}


def test_memory_is_bounded_whatever_comes(attacked: tuple[dict[str, Any], list[str]]) -> None:
    assert attacked[0]["grown"] < MEGABYTES
    # Ended by size, before any deadline: what is read whole, one event of a stream, and what comes before headers end.
    found = {(one["attack"], one["call"]) for one in attacked[0]["found"] if "answered with more than" in one["text"]}
    assert {("endless chunks", "info"), ("endless event", "stream"), ("endless 100 Continue", "info")} <= found


def test_nothing_goes_where_a_redirect_points(attacked: tuple[dict[str, Any], list[str]]) -> None:
    found, elsewhere = attacked
    assert elsewhere == []
    texts = [one["text"] for one in found["found"] if one["attack"] in REDIRECTS]
    assert len(texts) == 40 and all("a redirect to" in text and "not followed" in text for text in texts)


@pytest.fixture
def server() -> Iterator[Server]:
    """Run a server that answers everything well."""
    found = Server()
    yield found
    found.listener.close()


def test_a_connection_serves_one_request() -> None:
    """Bytes that a server sent beyond an answer are not read as the next one, even if it keeps the connection open."""
    asked: list[int] = []

    def serve(connection: socket.socket, number: int) -> None:
        with connection, connection.makefile("rb") as lines:
            while line := lines.readline():
                if line == b"\r\n":
                    asked.append(number)
                    connection.sendall(
                        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 69\r\n\r\n" + GOOD
                    )

    def accept() -> None:
        for number in range(3):
            threading.Thread(target=serve, args=(listener.accept()[0], number), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        transport = HttpTransport(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=5)
        for _ in range(3):
            assert transport.server_info() == json.loads(GOOD)
    assert asked == [0, 1, 2]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://key:secret@127.0.0.1:1", "url holds a name or password"),
        ("127.0.0.1:30000", "allowed: an address such as"),
        ("ftp://127.0.0.1", "allowed: an address such as"),
        ("http://", "allowed: an address such as"),
        ("http://127.0.0.1/?a=b", "allowed: an address such as"),
        (None, "allowed: an address such as"),
    ],
)
def test_addresses_that_are_refused(url: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words) as raised:
        HttpTransport(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("option", ["timeout", "update_timeout", "answer_bytes", "vocabulary"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "5", True])
def test_limits_that_are_none(option: str, value: Any) -> None:
    with pytest.raises(EngineError, match=f"{option}="):
        HttpTransport("http://127.0.0.1:1", **{option: value})


def test_a_session_of_ones_own_keeps_to_the_deadline_and_is_stock_elsewhere() -> None:
    own = requests.Session()
    url = "http://127.0.0.1:1"
    HttpTransport(url, own)
    assert isinstance(own.get_adapter(f"{url}/generate"), BoundedAdapter)
    assert type(own.get_adapter("http://127.0.0.1:2/")) is HTTPAdapter
    kept = own.get_adapter(f"{url}/generate")
    HttpTransport(url, own)
    assert own.get_adapter(f"{url}/generate") is kept

    class Other(HTTPAdapter):
        pass

    for adapter in (Other(), HTTPAdapter(max_retries=2)):
        session = requests.Session()
        session.mount("http://", adapter)
        with pytest.raises(EngineError, match="does not keep to a deadline"):
            HttpTransport(url, session)


def test_outside_of_an_exchange_the_connections_are_stock(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}/x.info"
    own = requests.Session()
    HttpTransport(url, own)
    assert own.get(f"{url}/server_info_of_mine", timeout=5).json() == json.loads(GOOD)


def test_how_long_an_answer_may_be() -> None:
    request = {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 5, "n": 3}}
    tokens = 3 * (2 + 5) + 3 * (1 + 5)
    assert most_bytes(request) == ANSWER_BYTES + TOKEN_BYTES * tokens
    routed = most_bytes({**request, "return_routed_experts": True})
    assert routed - most_bytes(request) == ROUTES_BYTES * tokens
    # DeepSeek-V3's routes, 58 layers of 8 experts in 32 bits and base64, fit four times over.
    assert 4 * 58 * 8 * 4 * 4 / 3 < ROUTES_BYTES
    assert most_bytes({"input_ids": [1, 2]}) == ANSWER_BYTES + TOKEN_BYTES * (2 + UNSAID_TOKENS)
    each = {"input_ids": [[1], [2]], "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 7}]}
    assert most_bytes(each) == ANSWER_BYTES + TOKEN_BYTES * (1 + 1 + 1 + 7)


def test_the_limit_of_an_answer_can_be_set(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}"
    with pytest.raises(
        EngineError, match="more than 10 bytes, which is more than the request can need; give answer_bytes"
    ):
        HttpTransport(url, answer_bytes=10).server_info()
    assert HttpTransport(url, answer_bytes=len(GOOD)).server_info() == json.loads(GOOD)


def test_nothing_is_ever_unpickled() -> None:
    """SGLang takes weights as pickles alone, which is why one is written; nothing of ours reads one, nor what may hold one.

    But for a benchmark, which times what Ray does with an answer of a worker, on bytes that it has just written.
    """
    reads = []
    for folder in ("mismatch_ext", "adapters", "patches", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
                    unsafe = name == "torch.load" and given.get("weights_only") != "True"
                    unsafe |= given.get("allow_pickle", "False") != "False"
                    unsafe |= name.rpartition(".")[0] in ("pickle", "cloudpickle", "dill") and "dump" not in name
                    if unsafe and path.name != "bench_verl_scale.py":
                        reads.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
    assert reads == []
