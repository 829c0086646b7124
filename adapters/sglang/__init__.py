"""SGLang, over HTTP or in the trainer's process: requests, rollouts and routes as records, checked servers and weight updates."""

from mismatch_ext.adapters.sglang.engine import EngineTransport
from mismatch_ext.adapters.sglang.http import HttpTransport
from mismatch_ext.adapters.sglang.probes import score_tokens
from mismatch_ext.adapters.sglang.request import generate_request
from mismatch_ext.adapters.sglang.response import parse_response, to_records
from mismatch_ext.adapters.sglang.routes import RoutingShape, decode_routes, to_trace
from mismatch_ext.adapters.sglang.server import ServerVerdict, check_server, read_server, to_provenance
from mismatch_ext.adapters.sglang.server_checks import ServerProblem
from mismatch_ext.adapters.sglang.transport import Transport
from mismatch_ext.adapters.sglang.weights import VerifiedWeights, checkpoint_parameters, update_weights

__all__ = [
    "EngineTransport",
    "HttpTransport",
    "RoutingShape",
    "ServerProblem",
    "ServerVerdict",
    "Transport",
    "VerifiedWeights",
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
    "update_weights",
]
