"""The doctor against servers: recorded answers of real ones, and servers that fail in every way that has a line of its own."""

from __future__ import annotations

import copy
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mismatch_ext.adapters.doctor.asking import ToSample
from mismatch_ext.adapters.doctor.server import Address, Server, connect, engine_of
from mismatch_ext.adapters.doctor.server.client import Client
from mismatch_ext.adapters.doctor.server.vllm import read

from mismatch_ext.doctor import Sample
from mismatch_ext.errors import ConfigError, EngineError, MismatchError, RecordError
from mismatch_ext.routing import RoutingShape

DATA = Path(__file__).parents[1] / "data/doctor_server"
RECORDED = json.loads((DATA / "vllm_0.30.0.json").read_text(encoding="utf-8"))
SHAPE = RoutingShape(num_experts=16, top_k=4, layers=(0, 1, 2, 3), num_layers=4)
NAME = RECORDED["models"]["data"][0]["id"]
Answers = dict[str, Any]
STOCK: Answers = {
    "/v1/models": (200, RECORDED["models"]),
    "/version": (200, {"version": "0.30.0"}),
    "/server_info": (200, RECORDED["info"]),
}


@contextmanager
def listening(answers: Answers) -> Iterator[tuple[str, list[Any]]]:
    """Answer requests as told by path: a status and an object, or what makes them; yield the address and what came."""
    seen: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            path = self.path.partition("?")[0]
            seen.append((path, body, dict(self.headers)))
            found = answers.get(path, (404, {"detail": "Not Found"}))
            status, held = found(body) if callable(found) else found
            raw = held if isinstance(held, bytes) else json.dumps(held).encode()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:9/")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


def listed(*entries: dict[str, Any]) -> Answers:
    return STOCK | {"/v1/models": (200, {"data": list(entries)})}


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_an_adapter_of_vllm_on_the_output_head_is_refused_by_name(tmp_path: Path, key: str) -> None:
    def served(*modules: str) -> Server:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"target_modules": ["q_proj"], key: [*modules]}))
        answers = listed({"id": "tuned", "root": str(tmp_path), "parent": "base", "max_model_len": 64})
        with listening(answers) as (url, _):
            return connect(Address(url=url))

    plain = served("model.layers.0.q_proj")
    assert plain.adapter and not any("lm_head" in note for note in plain.notes(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"the adapter tuned changes the output head \(lm_head\)"):
        served("q_proj", "model.lm_head")


def test_what_a_server_says_of_itself_is_read() -> None:
    with listening(STOCK) as (url, _):
        found = connect(Address(url=f"{url}/v1/"))
    assert (found.version, found.name) == ("0.30.0", NAME)
    assert (found.dtype, found.longest, found.settings["logprobs_mode"]) == ("bfloat16", 256, "processed_logprobs")
    (says,) = found.notes(NAME)
    assert "vLLM 0.30.0" in says and "processed_logprobs" in says
    assert any("--model is /elsewhere" in note for note in found.notes("/elsewhere"))


@pytest.mark.parametrize(
    ("answers", "address", "words"),
    [
        ({}, {}, ["/v1/models lists no model"]),
        ({"/v1/models": STOCK["/v1/models"]}, {}, ["neither /version nor /server_info"]),
        (STOCK, {"model": "nope"}, ["--server-model", "'nope'", NAME]),
        (dict.fromkeys(STOCK, (401, {"error": "Unauthorized"})), {}, ["wants an API key", "--server-key"]),
        (dict.fromkeys(STOCK, (302, {})), {}, ["redirect", "the address that answers itself"]),
    ],
)
def test_what_is_no_server_of_ours_is_one_line(answers: Answers, address: dict[str, str], words: list[str]) -> None:
    with listening(answers) as (url, _), pytest.raises(ConfigError) as caught:
        connect(Address(url=url, **address))
    said = str(caught.value)
    assert all(word in said for word in words) and "\n" not in said, said


def test_a_key_is_sent_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MISMATCH_TEST_KEY", "s3cret")
    with listening(STOCK) as (url, seen):
        found = connect(Address(url=url, key="MISMATCH_TEST_KEY"))
    assert {headers["Authorization"] for _, _, headers in seen} == {"Bearer s3cret"}
    assert "s3cret" not in repr(found)


def test_an_unreachable_server_is_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EngineError, match=rf"--server: .*http://127.0.0.1:{port} cannot be reached .*refused\)"):
        connect(Address(url=f"http://127.0.0.1:{port}"))
    with pytest.raises(ConfigError, match="--server: .*allowed: an address such as"):
        connect(Address(url="localhost:8000"))


def test_a_silent_server_is_late() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(EngineError, match="did not answer /v1/models within 0.2 s; give a larger --server-timeout"):
            connect(Address(url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2))


def test_only_what_was_not_taken_is_sent_again() -> None:
    tries: list[int] = []

    def busy(_: Any) -> tuple[int, Any]:
        tries.append(0)
        return (503, {}) if len(tries) < 3 else (200, {"done": True})

    def broken(_: Any) -> tuple[int, Any]:
        tries.append(0)
        return 500, {"error": {"message": "boom"}}

    with listening({"/busy": busy, "/broken": broken}) as (url, _):
        assert Client(url).post("/busy", {}) == {"done": True} and len(tries) == 3
        tries.clear()
        with pytest.raises(EngineError, match="failed .status 500.: boom"):
            Client(url).post("/broken", {})
        assert len(tries) == 1


def engine(url: str, shape: RoutingShape | None = SHAPE) -> Any:
    return engine_of(connect(Address(url=url)), shape)


def completing(answer: Callable[[Any], tuple[int, Any]]) -> Answers:
    return STOCK | {"/v1/completions": answer}


def test_sampled_tokens_come_with_their_logprobs_and_routes() -> None:
    with listening(completing(lambda _: (200, RECORDED["sample"]))) as (url, seen):
        sample = engine(url).sample(
            ToSample(
                prompts=[(3, 4, 5, 6), (3, 4, 5, 6)], responses=3, max_tokens=5, sampling={"seed": 7, "top_p": 0.9}
            )
        )
    bodies = [body for path, body, _ in seen if path == "/v1/completions"]
    assert sorted(body["seed"] for body in bodies) == [7, 9], "responses of two prompts would draw with the same noise"
    assert all(body["n"] == 2 and body["top_p"] == 0.9 and body["model"] == NAME for body in bodies)
    assert sample.responses[0] == (12, 6, 12, 6, 12)
    assert sample.logprobs[0][1] == -2.538452386856079
    assert sample.routes is not None and [trace.rows for trace in sample.routes] == [8] * 4


def test_scored_tokens_are_those_of_the_response() -> None:
    def scored(body: Any) -> tuple[int, Any]:
        assert body["prompt"] == [[3, 4, 5, 6], [7, 8, 9, 3, 4]] and body["temperature"] == 0.0
        return 200, RECORDED["score"]

    tokens = {"prompts": ((3, 4), (7, 8, 9)), "responses": ((5, 6), (3, 4))}
    asked = Sample(**tokens, masks=((True,) * 2,) * 2, logprobs=((0.0, 0.0),) * 2)
    with listening(completing(scored)) as (url, _):
        again = engine(url).score(asked)
    assert again.logprobs == ((-4.012019157409668, -4.436703205108643), (-4.026644229888916, -3.639868974685669))
    assert again.routes is not None and [trace.rows for trace in again.routes] == [4, 5]


def changed(**fields: Any) -> Any:
    found = copy.deepcopy(RECORDED["sample"])
    found["choices"][1] |= fields
    return found


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (changed(token_ids=None), RecordError, "vLLM sends since 0.10.2"),
        (changed(finish_reason="abort"), EngineError, "Ask it between two steps"),
        (changed(prompt_token_ids=[1, 3, 4, 5, 6]), RecordError, "saw a prompt of 5 tokens instead of the 4"),
        (changed(logprobs={"token_logprobs": [0.0]}), RecordError, "one for each of 5 tokens"),
        (changed(routed_experts="bm8="), RecordError, "a .npy file in base64"),
    ],
)
def test_a_malformed_answer_names_the_field(answer: Any, error: type[MismatchError], words: str) -> None:
    with pytest.raises(error) as caught:
        read(answer, [[3, 4, 5, 6]], 2)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("status", "held", "error", "words"),
    [
        (400, RECORDED["toolong"], ConfigError, ["maximum context length", "smaller --max-tokens"]),
        (
            400,
            {"error": {"message": "Out of range float values are not JSON compliant: nan"}},
            EngineError,
            ["corrupted"],
        ),
        (200, b"<html>", EngineError, ["with no JSON"]),
    ],
)
def test_a_refusal_says_what_to_do(status: int, held: Any, error: type[MismatchError], words: list[str]) -> None:
    with listening(completing(lambda _: (status, held))) as (url, _), pytest.raises(error) as caught:
        engine(url).sample(ToSample(prompts=[(3, 4, 5, 6)], responses=2, max_tokens=5, sampling={}))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), str(caught.value)


def told() -> Server:
    with listening(STOCK) as (url, _):
        return connect(Address(url=url))


def test_requests_that_would_be_refused_or_misread_are_refused_before_the_model_is_loaded() -> None:
    server = told()
    server.ensure_fits([[1] * 100], 155, {"top_p": 0.9, "seed": 0})
    with pytest.raises(ConfigError, match="--prompts: the longest prompt has 100 tokens"):
        server.ensure_fits([[1] * 100], 156, {})
    with pytest.raises(ConfigError, match="--sampling: min_tokns is no setting .* Did you mean 'min_tokens'"):
        server.ensure_fits([[1]], 5, {"min_tokns": 3})
