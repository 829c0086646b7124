"""A vLLM server as the rollout side: how requests end, whose weights it says it has, and what its settings must be."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from mismatch_ext.adapters.http import Refused
from mismatch_ext.adapters.vllm.http import ALIVE, ServerHttp
from mismatch_ext.adapters.vllm.remote import RemoteEngine
from mismatch_ext.adapters.vllm.server.readback import DIGESTS, METHODS, READ
from mismatch_ext.adapters.vllm.server_checks import ServerCheck, unchecked
from mismatch_ext.adapters.vllm.stamps import FRESH, Stamps
from mismatch_ext.adapters.vllm.weights import Sending

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError, NonFiniteLogprobError
from mismatch_ext.versions import installed

SILENT = "/silent"
Answers = dict[str, Any]


@contextmanager
def answering(answers: Answers) -> Iterator[str]:
    """Answer requests on this machine: a value is the answer, a function makes it of the body, and of SILENT there is none."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            path = self.path.partition("?")[0]
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            found = answers.get(path, (404, "no such path"))
            found = found(body) if callable(found) else found
            if found == SILENT:
                over.wait(30)
                return
            status, found = found if isinstance(found, tuple) else (200, found)
            sent = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = answer

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def _http(url: str, timeout: float = 20.0) -> ServerHttp:
    return ServerHttp(url, requests.Session(), timeout)


class TestRequests:
    def test_credentials_of_the_address_become_the_sessions(self) -> None:
        http = _http("http://user:p%40ss@127.0.0.1:8000")
        assert http.session.auth == ("user", "p@ss") and "user" not in str(http)

    def test_an_engine_that_is_silent_ends_the_run(self) -> None:
        with answering({ALIVE: SILENT, "/v1/completions": SILENT}) as url:
            http = _http(url, 0.2)
            for ask in (lambda: http.get(ALIVE), lambda: http.generate("/v1/completions", {})):
                with pytest.raises(EngineError, match="did not answer .* within 0.2 s; its engine hangs"):
                    ask()

    def test_a_generation_may_take_any_time_while_the_engine_answers(self) -> None:
        asked: list[None] = []
        enough = threading.Event()

        def alive(body: Any) -> Any:
            asked.append(None)
            if len(asked) == 3:
                enough.set()
            return {"weight_version": "v"}

        def generate(body: Any) -> Any:
            return {"choices": body} if enough.wait(30) else SILENT

        with answering({ALIVE: alive, "/v1/completions": generate}) as url:
            http = _http(url, 0.3)
            assert http.generate("/v1/completions", [1, 2]) == {"choices": [1, 2]}
        assert len(asked) >= 3

    def test_what_fails_is_said_in_the_servers_words(self) -> None:
        bad = (400, {"error": {"message": "Out of range float values are not JSON compliant: nan"}})
        with answering({"/bad": bad, "/worse": (500, {"error": {"message": "no weights"}})}) as url:
            http = _http(url)
            with pytest.raises(NonFiniteLogprobError, match="not finite: its weights are corrupted"):
                http.generate("/bad", {})
            with pytest.raises(Refused, match="/worse with status 500: no weights"):
                http.post("/worse")
        with pytest.raises(EngineError, match="cannot be reached .*; did it end"):
            http.get(ALIVE)


class TestStamps:
    def test_only_this_trainers_last_update_is_its_own(self) -> None:
        mine, other = Stamps(), Stamps()
        begun = mine.begin()
        first = mine.end()
        assert mine.contradiction(first) is None
        assert "failed half-way" in str(mine.contradiction(begun))
        assert "was restarted" in str(mine.contradiction(FRESH))
        other.begin()
        assert "another trainer" in str(mine.contradiction(other.end()))
        mine.begin()
        mine.end()
        assert "older update of this trainer" in str(mine.contradiction(first))


class Worker:
    """Stands where vLLM's worker calls the methods that are read over /collective_rpc."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model_runner = SimpleNamespace(model=model)


def _server(**changed: Any) -> Answers:
    model = {
        "dtype": "torch.float32", "logprobs_mode": "processed_logprobs", "quantization": None, "max_model_len": 64,
        "enable_return_routed_experts": False, "max_logprobs": 20,
    }  # fmt: skip
    config = {
        "model_config": model | {key: changed.pop(key) for key in list(changed) if key in model},
        "cache_config": {"cache_dtype": "auto"}, "parallel_config": {"data_parallel_size": 1},
        "device_config": {"device": "cuda"}, "weight_transfer_config": {"backend": "nccl"},
    }  # fmt: skip
    return {
        "/server_info": {"vllm_config": config | changed},
        "/version": {"version": "0.30.0"},
        "/v1/models": {"data": [{"id": "served"}]},
    }


def _without_plugin(body: Any) -> Any:
    return 500, {"error": {"message": f"'Worker' object has no attribute '{body['method']}'"}}


def _read_back(*dtypes: str, release: str | None = None, head_dtype: str | None = None) -> Any:
    fields: dict[str, Any] = {"engine": "vllm", "version": "0.30.0", "logprobs_mode": "processed_logprobs"}
    fields |= {"quantization": None, "head_dtype": head_dtype}
    of = [fields | {"model_dtype": d, "kv_cache_dtype": d, "parameter_dtypes": {d: 5}} for d in dtypes]
    return lambda body: {"results": [worker | {"mismatch": release or installed("mismatch-ext")} for worker in of]}


def _checked(answers: Answers, block: Any, rpc: Any, device: str = "cuda") -> str:
    with answering(answers | {"/collective_rpc": rpc}) as url:
        try:
            ServerCheck(MismatchConfig.parse(block))(RemoteEngine(_http(url)), device)  # type: ignore[arg-type]
        except EngineError as error:
            return str(error)
    return ""


class TestWhatAServerMustBe:
    def test_a_server_as_asked_passes(self) -> None:
        assert _checked(_server(), {"precision": {"dtype": "float32"}}, _read_back("float32")) == ""
        assert _checked(_server(), {}, _without_plugin) == ""

    def test_every_flag_is_named_at_once(self) -> None:
        answers = _server(dtype="torch.bfloat16", logprobs_mode="raw_logprobs", weight_transfer_config=None)
        block = {"precision": {"dtype": "float16"}, "routing": {"mode": "R3"}}
        said = _checked(answers, block, _without_plugin)
        for flag in ("--weight-transfer-config '{\"backend\": \"nccl\"}'", "--logprobs-mode processed_logprobs",
                     "--dtype float16", "--enable-return-routed-experts"):  # fmt: skip
            assert f"\n  {flag} " in said, said

    @pytest.mark.parametrize(("most", "missing"), [(127, True), (128, False), (-1, False)])
    def test_as_many_likely_tokens_as_centering_asks_for_are_reported(self, most: int, missing: bool) -> None:
        block = {"correction": {"centering": {"top_k": 128}}}
        said = _checked(_server(max_logprobs=most), block, _read_back("float32"))
        assert ("\n  --max-logprobs 128 " in said) == missing, said

    def test_a_head_in_float32_is_read_back_and_its_flag_is_named(self) -> None:
        block = {"precision": {"dtype": "bfloat16", "head": "float32"}}
        server, flag = _server(dtype="torch.bfloat16"), '--hf-overrides \'{"head_dtype": "float32"}\''
        assert _checked(server, block, _read_back("bfloat16", head_dtype="float32")) == ""
        assert flag in _checked(server, block, _read_back("bfloat16", head_dtype="bfloat16"))
        assert flag in _checked(server, block, _without_plugin)

    def test_a_cpu_takes_weights_in_requests_alone(self) -> None:
        said = _checked(_server(), {}, _without_plugin, device="cpu")
        assert '--weight-transfer-config \'{"backend": "mismatch_http"}\'' in said and "must be installed" in said
        assert _checked(_server(weight_transfer_config={"backend": "mismatch_http"}), {}, _read_back("float32")) == ""

    @pytest.mark.parametrize(
        ("block", "rpc", "changed", "words"),
        [
            ({"precision": {"dtype": "float32"}}, _without_plugin, {}, "cannot be read back. Install mismatch-ext where"),
            ({}, _read_back("float32", release="0.0.1"), {}, "mismatch-ext 0.0.1 runs in the vLLM server"),
            ({}, _read_back("float32", "float16"), {}, "workers .* differ in model_dtype: 'float32' and 'float16'"),
            ({}, _read_back("float32"), {"parallel_config": {"data_parallel_size": 2}}, "--data-parallel-size 2"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_checked_is_refused(self, block: Any, rpc: Any, changed: Any, words: str) -> None:
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(_checked(_server(**changed), block, rpc))

    def test_a_frontend_without_a_needed_endpoint_is_named_with_the_one_that_has_it(self) -> None:
        """vLLM's Rust frontend answers 404 with an empty body for a path that it does not have."""
        answers = _server() | {"/weight_info": {"weight_version": "default"}, "/collective_rpc": (404, None)}
        with answering(answers) as url, pytest.raises(EngineError, match="VLLM_USE_RUST_FRONTEND=0"):
            RemoteEngine(_http(url))

    def test_without_the_plugin_it_is_said_what_is_not_checked(self) -> None:
        with answering(_server(dtype="torch.bfloat16") | {"/collective_rpc": _without_plugin}) as url:
            remote = RemoteEngine(_http(url))
            assert remote.reading().model_dtype == "bfloat16" and not remote.reading().parameter_dtypes
            assert remote.compare(_samples(torch.nn.Embedding(3, 2)), {}) == []
            assert "not read back" in str(unchecked(remote))


def _samples(embedding: torch.nn.Embedding) -> Any:
    sending = Sending()
    sending.note("embed_tokens.weight", embedding.weight)
    return sending.samples


class TestComparison:
    def test_a_tensor_of_another_version_is_told_from_one_that_is_neither(self) -> None:
        """The worker's own method, of a model with a padded vocabulary in half the trainer's dtype."""
        model = torch.nn.Module()
        model.embed_tokens = torch.nn.Embedding(8, 2, dtype=torch.bfloat16)
        sent, older, other = (torch.nn.Embedding(5, 2) for _ in range(3))
        worker = Worker(model)
        methods = {DIGESTS: METHODS[DIGESTS], READ: lambda worker: {"mismatch": "0"}}

        def rpc(body: Any) -> Any:
            return {"results": [methods[body["method"]](worker, **body["kwargs"])]}

        with answering(_server() | {"/collective_rpc": rpc}) as url:
            remote = RemoteEngine(_http(url))
            for held, expected in ((sent, (True, False)), (older, (False, True)), (other, (False, False))):
                with torch.no_grad():
                    model.embed_tokens.weight[:5] = held.weight
                (found,) = remote.compare(_samples(sent), _samples(older))
                assert (found.equal, found.matches_previous) == expected


class TestSending:
    def test_bytes_arrive_as_they_were(self) -> None:
        received: list[Any] = []
        answers = _server(weight_transfer_config={"backend": "mismatch_http"})
        answers |= {
            "/collective_rpc": _read_back("float32"),
            "/update_weights": lambda body: received.append(body) or {},
        }
        values = torch.tensor([[1.5, -0.0], [3.0, 1e-7]], dtype=torch.bfloat16).t()
        with answering(answers) as url:
            RemoteEngine(_http(url)).send([("w", values)])
        (info,) = (body["update_info"] for body in received)
        assert (info["names"], info["dtypes"], info["shapes"]) == (["w"], ["bfloat16"], [[2, 2]])
        assert base64.b64decode(info["data"][0]) == values.contiguous().view(torch.uint8).numpy().tobytes()
