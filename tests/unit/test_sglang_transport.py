"""The HTTP transport against a server that answers what it is told to, and the weight updates on top of it."""

from __future__ import annotations

import base64
import json
import pickle
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from mismatch_ext.adapters.sglang import (
    HttpTransport,
    Rollout,
    score_tokens,
    update_weights,
)
from mismatch_ext.adapters.sglang import engine as transports
from mismatch_ext.adapters.sglang.probes import decode_tokens
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mismatch_ext.errors import EngineError, PeerVersionError, PrecisionError, RecordError
from mismatch_ext.rollout import SamplingSettings

OK = {"success": True, "message": "Success"}
INFO = {"version": "0.5.23", "tp_size": 1}
PAUSE, RESUME, FLUSH = "/pause_generation", "/continue_generation", "/flush_cache"
BEGIN, UPDATE, END = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"


class Server:
    """Answers each path with what is set for it, (status, JSON-able or bytes) or a list of them; keeps what it was sent.

    But for the question how large the vocabulary is, which it answers as SGLang does.
    """

    vocabulary: tuple[int, Any] = (400, {"error": {"message": "logit_bias must has keys in [0, 15], got 2147483647."}})

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "/server_info": (200, INFO),
            "/pause_generation": (200, {"status": "ok"}),
            "/continue_generation": (200, {"status": "ok"}),
            "/begin_weight_update": (200, OK),
            "/update_weights_from_tensor": (200, OK),
            "/end_weight_update": (200, OK),
            "/flush_cache": (200, b"Cache flushed."),
        }
        self.asked: list[tuple[str, Any]] = []
        self.withheld = 0
        """Bytes of each answer that are announced and not sent."""
        self.headers: dict[str, str] = {}
        self.connections: set[str] = set()
        self.silent = 0.0
        """Seconds before each answer."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(data) if data else None
                answer, withheld = outer.answers.get(self.path, (404, {"detail": "Not Found"})), outer.withheld
                settings = (body or {}).get("sampling_params")
                if isinstance(settings, dict) and settings.get("logit_bias"):
                    answer, withheld = outer.vocabulary, 0
                else:
                    outer.asked.append((self.path, body))
                status, content = answer.pop(0) if isinstance(answer, list) else answer
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                time.sleep(outer.silent)
                outer.connections.add(self.headers["Connection"])
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream" if data[:5] == b"data:" else "application/json")
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) + withheld))
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


@pytest.mark.parametrize("version", ["0.5.11", "what", None])
def test_a_version_outside_the_range_is_refused_before_anything_is_sent(server: Server, version: Any) -> None:
    server.answers["/server_info"] = (200, {"version": version})
    with pytest.raises(PeerVersionError, match=r"is outside the supported range >=0\.5\.12"):
        update_weights(HttpTransport(server.url), tensors(2), dtype="float32")
    assert server.paths() == []


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (400, {"error": {"message": "token id 99"}}, "with status 400: token id 99"),
        (200, b"<html>", "with no JSON but '<html>'"),
    ],
)
def test_answers_that_are_no_response(server: Server, status: int, content: Any, words: str) -> None:
    server.answers["/generate"] = (status, content)
    with pytest.raises(EngineError, match=words):
        HttpTransport(server.url).generate({"input_ids": [1]})


@pytest.mark.parametrize("input_ids", [[3, 16], [[15, 0], [-1]]])
def test_a_token_that_the_model_does_not_have_is_not_sent(server: Server, input_ids: Any) -> None:
    with pytest.raises(RecordError, match=r"^input_ids\[.*is not in the vocabulary .* 0 to 15"):
        HttpTransport(server.url).generate({"input_ids": input_ids})
    assert server.paths() == []


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9 cannot be reached at /server_info"):
        HttpTransport("http://127.0.0.1:9").generate({"input_ids": [1]})


def test_a_server_that_is_silent_for_longer_than_it_may(server: Server) -> None:
    server.silent = 1.0
    with pytest.raises(EngineError, match=r"did not answer /server_info within 0\.1 s; .* needs a longer timeout"):
        HttpTransport(server.url, timeout=0.1).server_info()


@pytest.mark.parametrize("url", ["http://key:secret@127.0.0.1/?a=b", "127.0.0.1:30000"])
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(EngineError, match="allowed: an address such as") as raised:
        HttpTransport(url)
    assert "secret" not in str(raised.value)


def test_an_update_is_one_session_and_the_stamp_comes_with_its_last_bucket(server: Server) -> None:
    server.answers["/server_info"] = (200, {**INFO, "tp_size": 2})
    weights = tensors(6, 4, 5, 8)
    reading = update_weights(HttpTransport(server.url), weights, dtype="float16", weight_version=3, bucket_bytes=40)
    # Half of the 40 bytes for each rank.
    assert server.paths() == [PAUSE, BEGIN, UPDATE, UPDATE, UPDATE, END, FLUSH, RESUME]
    # Requests that run must not go on with the weights before.
    assert next(body for path, body in server.asked if path == PAUSE) == {"mode": "abort"}
    assert (reading.sent_dtype, reading.received_dtype) == ("float32", "float16")
    bodies = [body for path, body in server.asked if path == UPDATE]
    assert [body.get("weight_version") for body in bodies] == ["3-incomplete", None, "3"]
    # Flushing with an update ends 0.5.18's scheduler while a request runs.
    assert all(body["flush_cache"] is False and len(body["serialized_named_tensors"]) == 2 for body in bodies)
    sent = dict(entry for body in bodies for entry in sent_tensors(body))
    assert sent.keys() == dict(weights).keys()
    assert all(torch.equal(tensor, dict(weights)[name].half()) for name, tensor in sent.items())


def test_a_version_without_sessions(server: Server) -> None:
    del server.answers["/begin_weight_update"]
    update_weights(HttpTransport(server.url), tensors(2), dtype="bfloat16")
    assert server.paths() == [PAUSE, BEGIN, UPDATE, FLUSH, RESUME]


def sent_tensors(body: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return what the first rank is sent in a request."""
    return pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))


def test_who_drains_the_server_need_not_have_it_paused(server: Server) -> None:
    update_weights(HttpTransport(server.url, pause=False), tensors(2), dtype="bfloat16")
    assert server.paths() == [BEGIN, UPDATE, END, FLUSH]


@pytest.mark.parametrize("answer", [{"success": False, "message": "busy"}, {"message": "busy"}])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        # Nothing was sent, so the cache is good.
        (BEGIN, [PAUSE, BEGIN, RESUME]),
        # The session is closed, or the next update would be refused.
        (UPDATE, [PAUSE, BEGIN, UPDATE, END, FLUSH, RESUME]),
        (END, [PAUSE, BEGIN, UPDATE, END, FLUSH, RESUME]),
    ],
)
def test_an_update_that_is_refused(server: Server, path: str, asked: list[str], answer: dict[str, Any]) -> None:
    server.answers[path] = (400, answer)
    with pytest.raises(EngineError, match="refused the .*'busy'"):
        update_weights(HttpTransport(server.url), tensors(2), dtype="float32")
    assert server.paths() == asked


def test_nothing_is_generated_from_half_an_update(server: Server) -> None:
    server.answers |= {UPDATE: [(200, OK), (400, {"success": False, "message": "busy"})], "/generate": (200, {})}
    transport = HttpTransport(server.url)
    with pytest.raises(EngineError, match="refused the weight update: 'busy'"):
        update_weights(transport, tensors(2, 2, 2), dtype="float32", weight_version=5, bucket_bytes=1)
    # What another client samples now, it can tell by the stamp.
    assert [body.get("weight_version") for path, body in server.asked if path == UPDATE] == ["5-incomplete", None]
    assert server.paths()[-3:] == [END, FLUSH, RESUME]
    with pytest.raises(EngineError, match="may hold a mixture of weights"):
        transport.generate({"input_ids": [1]})
    server.answers[UPDATE] = (200, OK)
    update_weights(transport, tensors(2, 2, 2), dtype="float32", weight_version=6)
    assert transport.generate({"input_ids": [1]}) == [{}]


def test_a_cache_that_is_not_flushed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "FLUSH_SECONDS", 0.2)
    server.answers |= {FLUSH: (400, b"Flush cache failed."), "/generate": (200, {})}
    transport = HttpTransport(server.url)
    with pytest.raises(EngineError, match="did not flush its cache .* of the weights before"):
        update_weights(transport, tensors(2), dtype="float32")
    assert server.paths().count(FLUSH) > 1  # tried again
    with pytest.raises(EngineError, match="did not flush its cache after an update of its weights"):
        transport.generate({"input_ids": [1]})
    server.answers[FLUSH] = (200, b"")
    transport.flush_cache()
    assert transport.generate({"input_ids": [1]}) == [{}]


def test_a_weight_that_overflows_is_named_and_the_session_closed(server: Server) -> None:
    bad = [*tensors(3, 3, 3), ("model.norm.weight", torch.tensor([1.0, -65536.0]))]
    with pytest.raises(PrecisionError, match=r"model\.norm\.weight: weight 65536 overflows in float16"):
        update_weights(HttpTransport(server.url), bad, dtype="float16", bucket_bytes=1)
    assert server.paths()[-3:] == [END, FLUSH, RESUME]
    # 65519 rounds to 65504, the largest number of float16.
    update_weights(HttpTransport(server.url), [("a", torch.tensor([65519.0]))], dtype="float16")


def test_weights_are_sent_in_the_dtype_of_the_server(server: Server) -> None:
    server.answers["/server_info"] = (200, INFO | {"dtype": "half"})
    transport = HttpTransport(server.url)
    with pytest.raises(PrecisionError, match="in bfloat16, but .* computes in float16"):
        update_weights(transport, tensors(2), dtype="bfloat16")
    assert server.paths() == []
    update_weights(transport, tensors(2), dtype="fp16")


def test_what_the_server_keeps_in_float32_is_not_rounded(server: Server) -> None:
    third = torch.tensor([1 / 3])
    names = {"model.layers.0.mlp.gate.e_score_correction_bias", "model.layers.0.linear_attn.A_log"}
    others = {"model.layers.0.mlp.A_log_scale", "model.layers.0.mlp.gate.weight"}
    update_weights(HttpTransport(server.url), [(name, third) for name in names | others], dtype="bfloat16")
    [body] = [body for path, body in server.asked if path == UPDATE]
    sent = dict(sent_tensors(body))
    assert {name for name, tensor in sent.items() if tensor.dtype == torch.float32} == names
    assert all(torch.equal(sent[name], third) for name in names)


def test_a_sharded_tensor_is_refused(server: Server) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(RecordError, match="layer0 is sharded over ranks"):
            update_weights(HttpTransport(server.url), [("layer0", sharded)], dtype="float32")
    finally:
        distributed.destroy_process_group()


def test_no_stamp_is_used_for_two_sets_of_weights(server: Server) -> None:
    server.answers["/server_info"] = (200, {**INFO, "dtype": "float32", "kv_cache_dtype": "float32"})
    rollout = Rollout(HttpTransport(server.url), SamplingSettings(), max_new_tokens=1)
    server.answers[END] = (400, {"success": False, "message": "late"})
    with pytest.raises(EngineError, match="late"):
        rollout.update(tensors(2))
    server.answers[END] = (200, OK)
    rollout.update(tensors(2))
    assert rollout.weight_version == 2
    assert [body["weight_version"] for path, body in server.asked if path == UPDATE] == ["1", "2"]


def test_experts_in_one_tensor_are_refused_unless_asked_for(server: Server) -> None:
    fused = [("model.layers.0.mlp.experts.gate_up_proj", torch.ones(2, 4, 4))]
    with pytest.raises(RecordError, match="holds all experts of a layer"):
        update_weights(HttpTransport(server.url), fused, dtype="float32")
    update_weights(HttpTransport(server.url), fused, dtype="float32", fused_experts=True)


def scores(*values: Any) -> dict[str, Any]:
    """Return a response with scores of a prompt."""
    return {"meta_info": {"input_token_logprobs": list(values)}}


def decoded(ids: list[int], *values: Any) -> dict[str, Any]:
    """Return a response that was decoded after a prompt of two tokens."""
    scored = [[value, token, None] for value, token in zip(values, ids, strict=True)]
    meta = {"id": "a", "finish_reason": {"type": "length"}, "prompt_tokens": 2, "completion_tokens": len(ids)}
    return {"output_ids": ids, "meta_info": meta | {"output_token_logprobs": scored}}


def test_tokens_that_are_decoded_after_a_prompt(server: Server) -> None:
    transport = HttpTransport(server.url)
    server.answers["/generate"] = (200, [decoded([5, 6], -0.25, -1.5), decoded([7, 8], -0.5, None)])
    found = decode_tokens(transport, [[3, 15], [4, 2]], 2)
    assert found.tokens.tolist()[0] == [3, 15, 5, 6]
    assert found.logprobs[0].tolist() == [-0.25, -1.5] and bool(found.logprobs[1].isnan().all())
    sent = server.asked[-1][1]["sampling_params"]
    assert (sent["temperature"], sent["top_k"], sent["ignore_eos"], sent["max_new_tokens"]) == (1.0, 1, True, 2)


def test_scores_of_a_prompt(server: Server) -> None:
    # The vocabulary's last id is reported as 0, a value that is not finite as null.
    server.answers["/generate"] = (200, [scores([None, 3, None], [-1.5, 0, None], [None, 4, None])])
    found = score_tokens(HttpTransport(server.url), [[3, 15, 4]])
    assert found[0, 0] == -1.5 and found[0, 1].isnan()
    assert server.asked[-1][1]["sampling_params"]["max_new_tokens"] == 0


FIRST = [None, 3, None]
LAST = [-1.0, 4, None]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], "0 responses for 1 sequences"),
        ([scores(FIRST, [-1.0, 15, None])], "allowed: 3 entries"),
        ([scores(FIRST, [-1.0, 9, None], LAST)], r"\[1\]: found \[-1.0, 9, None\]; allowed: the score of"),
        ([scores(FIRST, 5, LAST)], r"\[1\]: found 5"),
        # 0 stands for the last id of the vocabulary, and 4 is not the largest here.
        ([scores(FIRST, [-1.0, 15, None], [-1.0, 0, None])], r"\[2\]: found \[-1.0, 0, None\]"),
        ([scores(FIRST, [1e30, 15, None], LAST)], r"\[1\]: found 1e\+30; allowed"),
    ],
)
def test_scores_of_another_prompt(server: Server, answer: Any, words: str) -> None:
    server.answers["/generate"] = (200, answer)
    with pytest.raises(RecordError, match=words):
        score_tokens(HttpTransport(server.url), [[3, 15, 4]])
