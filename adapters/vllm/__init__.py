"""vLLM, in the trainer's process: dtypes read back, weights updated and compared, rollouts and routes turned into records."""

from mismatch_ext.adapters.vllm.cpu_routes import attach_cpu_routes
from mismatch_ext.adapters.vllm.engine import read_engine, runner, shutdown
from mismatch_ext.adapters.vllm.probes import score_tokens
from mismatch_ext.adapters.vllm.rollouts import to_records
from mismatch_ext.adapters.vllm.routing import captured_outputs, require_routing, reset_prefix_cache, to_traces
from mismatch_ext.adapters.vllm.side import InProcess, Rollout
from mismatch_ext.adapters.vllm.weights import Sending, compare_tensors, is_comparable, sample_rows, update_weights

from mismatch_ext.rollout import to_provenance

__all__ = [
    "InProcess",
    "Rollout",
    "Sending",
    "attach_cpu_routes",
    "captured_outputs",
    "compare_tensors",
    "is_comparable",
    "read_engine",
    "require_routing",
    "reset_prefix_cache",
    "runner",
    "sample_rows",
    "score_tokens",
    "shutdown",
    "to_provenance",
    "to_records",
    "to_traces",
    "update_weights",
]
