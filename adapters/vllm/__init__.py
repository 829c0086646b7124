"""vLLM, in the trainer's process: dtypes read back, weights updated and compared, rollouts turned into records."""

from mismatch_ext.adapters.vllm.engine import read_engine, runner, shutdown
from mismatch_ext.adapters.vllm.probes import score_tokens
from mismatch_ext.adapters.vllm.rollouts import to_records
from mismatch_ext.adapters.vllm.weights import compare_tensors, is_comparable, sample_rows, update_weights

__all__ = [
    "compare_tensors",
    "is_comparable",
    "read_engine",
    "runner",
    "sample_rows",
    "score_tokens",
    "shutdown",
    "to_records",
    "update_weights",
]
