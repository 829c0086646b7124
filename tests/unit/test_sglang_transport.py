"""The HTTP transport against a server that answers what it is told to, and the weight updates on top of it."""

from __future__ import annotations

import base64
import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.sglang import HttpTransport, checkpoint_parameters, score_tokens, update_weights
from mismatch_ext.adapters.sglang import transport as transports
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mismatch_ext.errors import EngineError, PeerVersionError, ReadinessError, RecordError
from tests.models import tiny_model

OK = {"success": True, "message": "Success"}
INFO = {"version": "0.5.23", "tp_size": 1}


class Server:
    """Answers each path with what is set for it: (status, JSON-able or bytes); keeps what it was sent."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {
            "/server_info": (200, INFO),
            "/begin_weight_update": (200, OK),
            "/update_weights_from_tensor": (200, OK),
            "/end_weight_update": (200, OK),
            "/flush_cache": (200, b"Cache flushed."),
        }
        self.asked: list[tuple[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append((self.path, json.loads(body) if body else None))
                status, content = outer.answers.get(self.path, (404, {"detail": "Not Found"}))
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def paths(self) -> list[str]:
        """Return what was asked after the report."""
        return [path for path, _ in self.asked if path != "/server_info"]


@pytest.fixture
def server() -> Iterator[Server]:
    """Run a server in a thread."""
    found = Server()
    thread = threading.Thread(target=found.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield found
    found.http.shutdown()
    found.http.server_close()


def tensors(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    """Return float32 tensors of ones."""
    return [(f"layer{i}.weight", torch.ones(size)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("version", ["0.5.17", "0.5.24", "1.0", "what", None, 5])
def test_a_version_outside_the_range_is_refused_before_anything_is_sent(server: Server, version: Any) -> None:
    server.answers["/server_info"] = (200, {"version": version})
    transport = HttpTransport(server.url)
    for call in (
        lambda: transport.generate({"input_ids": [1]}),
        lambda: update_weights(transport, tensors(2), dtype="float32"),
    ):
        with pytest.raises(PeerVersionError, match=r"is outside the supported range >=0\.5\.18,<=0\.5\.23"):
            call()
    assert server.paths() == []


def test_an_older_route_of_the_report(server: Server) -> None:
    server.answers |= {"/server_info": (404, {}), "/get_server_info": (200, {"version": "0.5.18"})}
    assert HttpTransport(f"{server.url}/").version == "0.5.18"


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (500, b"out of memory", "answered with status 500: 'out of memory'"),
        (400, {"error": {"message": "token id 99"}}, "answered with status 400: "),
        (200, b"<html>", "answered no JSON: '<html>'"),
        (200, b"[" * 100_000, "answered no JSON"),
        (200, [1], "a response is 1; allowed: an object"),
        (200, b"9" * 5000, "answered no JSON"),
    ],
)
def test_answers_that_are_no_response(server: Server, status: int, content: Any, words: str) -> None:
    server.answers["/generate"] = (status, content)
    with pytest.raises(EngineError) as raised:
        HttpTransport(server.url).generate({"input_ids": [1]})
    assert words in str(raised.value) and server.url in str(raised.value) and len(str(raised.value)) < 500


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/server_info was not reached: ConnectionError"):
        HttpTransport("http://127.0.0.1:9").generate({"input_ids": [1]})


def events(*chunks: Any) -> bytes:
    """Return chunks as SGLang streams them."""
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def test_of_a_stream_the_last_chunk_of_each_response(server: Server) -> None:
    chunks = [{"index": 1, "output_ids": [4]}, {"index": 0, "output_ids": [7]}, {"index": 0, "output_ids": [7, 8]}]
    server.answers["/generate"] = (200, events(*chunks))
    found = HttpTransport(server.url).generate({"input_ids": [[1], [2]], "stream": True})
    assert [one["output_ids"] for one in found] == [[7, 8], [4]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (events({"output_ids": [1]}, {"error": {"message": "aborted"}}), "ended a stream: {'message': 'aborted'}"),
        (b"data: {broken\n\n", "broke off a stream: JSONDecodeError"),
        (events(5), "a response is 5; allowed: an object"),
    ],
)
def test_streams_that_end_badly(server: Server, content: bytes, words: str) -> None:
    server.answers["/generate"] = (200, content)
    with pytest.raises(EngineError) as raised:
        HttpTransport(server.url).generate({"input_ids": [1], "stream": True})
    assert words in str(raised.value)


def test_an_update_is_one_session_and_the_stamp_comes_with_its_last_bucket(server: Server) -> None:
    server.answers["/server_info"] = (200, {**INFO, "tp_size": 2})
    reading = update_weights(
        HttpTransport(server.url), tensors(6, 4, 5), dtype="float16", weight_version=3, bucket_bytes=20
    )
    update = "/update_weights_from_tensor"
    assert server.paths() == ["/begin_weight_update", update, update, "/end_weight_update", "/flush_cache"]
    assert (reading.sent_dtype, reading.received_dtype) == ("float32", "float16")
    bodies = [body for path, body in server.asked if path == update]
    assert [body.get("weight_version") for body in bodies] == [None, "3"]
    # Flushing with an update ends 0.5.18's scheduler while a request runs.
    assert all(body["flush_cache"] is False and len(body["serialized_named_tensors"]) == 2 for body in bodies)
    sent = [pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])) for body in bodies]
    assert [[name for name, _ in bucket] for bucket in sent] == [["layer0.weight", "layer1.weight"], ["layer2.weight"]]
    assert all(torch.equal(t, torch.ones_like(t)) and t.dtype == torch.float16 for bucket in sent for _, t in bucket)


def test_a_version_without_sessions(server: Server) -> None:
    del server.answers["/begin_weight_update"]
    update_weights(HttpTransport(server.url), tensors(2), dtype="bfloat16")
    assert server.paths() == ["/begin_weight_update", "/update_weights_from_tensor", "/flush_cache"]


@pytest.mark.parametrize(
    ("path", "what", "asked"),
    [
        ("/begin_weight_update", "the begin of a weight update", 1),
        # The session is closed, or the next update would be refused.
        ("/update_weights_from_tensor", "the weight update", 3),
        ("/end_weight_update", "the end of the weight update", 3),
    ],
)
def test_an_update_that_is_refused(server: Server, path: str, what: str, asked: int) -> None:
    for answer in ({"success": False, "message": "busy"}, {"message": "busy"}, {"success": "False", "message": "busy"}):
        server.asked.clear()
        server.answers[path] = (400, answer)
        with pytest.raises(EngineError, match=f"refused {what}: 'busy'"):
            update_weights(HttpTransport(server.url), tensors(2), dtype="float32")
        assert len(server.paths()) == asked


def test_a_cache_that_is_not_flushed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "FLUSH_SECONDS", 0.2)
    server.answers["/flush_cache"] = (400, b"Flush cache failed.")
    with pytest.raises(EngineError, match="did not flush its cache .* of the weights before"):
        update_weights(HttpTransport(server.url), tensors(2), dtype="float32")
    assert server.paths().count("/flush_cache") > 1  # tried again


def test_a_weight_that_overflows_is_named_and_the_session_closed(server: Server) -> None:
    bad = [*tensors(3), ("model.norm.weight", torch.tensor([1.0, -65536.0]))]
    with pytest.raises(
        ReadinessError, match=r"model\.norm\.weight: weight 65536 overflows in float16; allowed: .* 65504"
    ):
        update_weights(HttpTransport(server.url), bad, dtype="float16", bucket_bytes=1)
    assert server.paths()[-1] == "/end_weight_update"
    # 65519 rounds to 65504, the largest number of float16.
    update_weights(HttpTransport(server.url), [("a", torch.tensor([65519.0]))], dtype="float16")
    update_weights(HttpTransport(server.url), bad, dtype="bfloat16")


def test_experts_in_one_tensor_are_refused_unless_asked_for(server: Server) -> None:
    fused = [("model.layers.0.mlp.experts.gate_up_proj", torch.ones(2, 4, 4))]
    with pytest.raises(RecordError, match="holds all experts of a layer"):
        update_weights(HttpTransport(server.url), fused, dtype="float32")
    update_weights(HttpTransport(server.url), fused, dtype="float32", fused_experts=True)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_parameters_under_the_names_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    path = tiny_model(kind, tmp_path / kind)
    saved = load_file(path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found = dict(checkpoint_parameters(loaded))
    assert found.keys() == saved.keys() and not any(tensor.requires_grad for tensor in found.values())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in found.items())
    # A model that was not loaded from a checkpoint has the names that it would be saved under.
    built = dict(checkpoint_parameters(AutoModelForCausalLM.from_config(loaded.config)))
    assert {name: tensor.shape for name, tensor in built.items()} == {name: t.shape for name, t in saved.items()}


def scores(*values: Any) -> dict[str, Any]:
    """Return a response with scores of a prompt."""
    return {"meta_info": {"input_token_logprobs": list(values)}}


def test_scores_of_a_prompt(server: Server) -> None:
    # The vocabulary's last id is reported as 0, a value that is not finite as null.
    server.answers["/generate"] = (200, [scores([None, 3, None], [-1.5, 0, None], [None, 4, None])])
    found = score_tokens(HttpTransport(server.url), [[3, 15, 4]])
    assert found.dtype == torch.float64 and found[0, 0] == -1.5 and found[0, 1].isnan()
    sent = server.asked[-1][1]
    assert sent["logprob_start_len"] == 0 and sent["sampling_params"]["max_new_tokens"] == 0
    assert (sent["sampling_params"]["temperature"], sent["sampling_params"]["top_k"]) == (1.0, 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], "0 responses for 1 sequences"),
        ([{}], "found None; allowed: 3 entries"),
        ([scores([None, 3, None], [-1.0, 15, None])], "allowed: 3 entries"),
        (
            [scores([None, 3, None], [-1.0, 9, None], [-1.0, 4, None])],
            r"\[1\]: found \[-1.0, 9, None\]; allowed: the score of",
        ),
        ([scores([None, 3, None], 5, [-1.0, 4, None])], r"\[1\]: found 5"),
    ],
)
def test_scores_of_another_prompt(server: Server, answer: Any, words: str) -> None:
    server.answers["/generate"] = (200, answer)
    with pytest.raises(RecordError, match=words):
        score_tokens(HttpTransport(server.url), [[3, 15, 4]])
