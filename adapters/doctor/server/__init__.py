"""A vLLM or SGLang server over HTTP as the doctor's engine; this package need not be installed on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mismatch_ext.adapters.doctor.server.detect import SEEDS, Address, Server, connect

if TYPE_CHECKING:
    from mismatch_ext.adapters.doctor.server.engine import ServedEngine

    from mismatch_ext.routing import RoutingShape

__all__ = ["SEEDS", "Address", "Server", "connect", "engine_of"]


def engine_of(server: Server, shape: RoutingShape | None) -> ServedEngine:
    """Return the engine that asks a server.

    Args:
        server: The server.
        shape: Shape of the routes, which are read if the server sends them; None for a model without experts.
    """
    if server.kind == "sglang":
        from mismatch_ext.adapters.doctor.server.sglang import SglangServer

        return SglangServer(server, shape)
    from mismatch_ext.adapters.doctor.server.vllm import VllmServer

    return VllmServer(server, shape)
