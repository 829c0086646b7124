"""A server in front of a small engine, which takes what docs/loop.md sends."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from safetensors.torch import load

from tests.torch_rollout import TorchRollout


def answer_of(engine: TorchRollout, path: str, body: bytes) -> Any:
    """Return what the engine says to a request."""
    if path == "/weights":
        engine.update(load(body).items())
        return {}
    sent = json.loads(body or b"null")
    if path == "/info":
        return asdict(engine.reading())
    if path == "/score":
        return engine.score(torch.tensor(sent)).tolist()
    if path == "/decode":
        decoded = engine.decode(torch.tensor(sent["prompts"]), sent["count"])
        return {"tokens": decoded.tokens.tolist(), "logprobs": decoded.logprobs.tolist()}
    columns = ("prompt_ids", "response_ids", "rollout_logprobs")
    return [
        {"finish_reason": record.finish_reason, **{name: getattr(record, name).tolist() for name in columns}}
        for record in engine.generate(sent["prompts"])
    ]


@contextmanager
def serving(engine: TorchRollout) -> Iterator[str]:
    """Serve an engine on a free port, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = json.dumps(answer_of(engine, self.path, self.rfile.read(int(self.headers["Content-Length"] or 0))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
