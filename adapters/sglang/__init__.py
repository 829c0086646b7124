"""SGLang over HTTP or in the trainer's process: requests, responses as records with routes, server checks, weight updates."""

from mismatch_ext.adapters.sglang.engine import EngineTransport
from mismatch_ext.adapters.sglang.http import HttpTransport
from mismatch_ext.adapters.sglang.probes import score_tokens
from mismatch_ext.adapters.sglang.request import generate_request
from mismatch_ext.adapters.sglang.response import parse_response, to_records, to_traces
from mismatch_ext.adapters.sglang.routes import decode_routes, to_trace
from mismatch_ext.adapters.sglang.server import ServerVerdict, check_server, read_server
from mismatch_ext.adapters.sglang.server_checks import ServerProblem
from mismatch_ext.adapters.sglang.side import Rollout
from mismatch_ext.adapters.sglang.transport import Transport
from mismatch_ext.adapters.sglang.weights import checkpoint_parameters, update_weights

from mismatch_ext.provenance import to_provenance
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
    "checkpoint_parameters",
    "decode_routes",
    "generate_request",
    "parse_response",
    "read_server",
    "score_tokens",
    "to_provenance",
    "to_records",
    "to_trace",
    "to_traces",
    "update_weights",
]
