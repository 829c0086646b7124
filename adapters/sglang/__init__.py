"""SGLang over HTTP or in the trainer's process: requests, responses as records with routes, server checks, weight updates."""

from mismatch_ext.adapters.sglang.answers import decode_routes, parse_response, to_records, to_traces
from mismatch_ext.adapters.sglang.engine import EngineTransport, HttpTransport, Transport
from mismatch_ext.adapters.sglang.probes import score_tokens
from mismatch_ext.adapters.sglang.request import generate_request
from mismatch_ext.adapters.sglang.server import ServerProblem, ServerVerdict, check_server, read_server
from mismatch_ext.adapters.sglang.side import Rollout
from mismatch_ext.adapters.sglang.weights import update_weights

from mismatch_ext.rollout import to_provenance
from mismatch_ext.routing import RoutingShape

__all__ = [
    "EngineTransport",
    "HttpTransport",
    "Rollout",
    "RoutingShape",
    "ServerProblem",
    "ServerVerdict",
    "Transport",
    "check_server",
    "decode_routes",
    "generate_request",
    "parse_response",
    "read_server",
    "score_tokens",
    "to_provenance",
    "to_records",
    "to_traces",
    "update_weights",
]
