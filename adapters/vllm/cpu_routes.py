"""Carry routed experts out of an in-process CPU engine of vLLM 0.31 and later, which vLLM itself does not do. CPU only.

Since 0.31 routes leave the engine through an auxiliary-output connector that only Model Runner V2 feeds;
`patches/vllm/cpu_routes.py` says why a CPU engine does not have V2. The connector needs only one thing of a runner: where each
request's tokens lie in a step. The V1 runner knows that.
"""

from __future__ import annotations

import importlib
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from mismatch_ext.adapters.vllm.engine import is_cpu, runner

from mismatch_ext.errors import RoutingError

if TYPE_CHECKING:
    from vllm import LLM


def attach_cpu_routes(llm: LLM) -> None:
    """Feed vLLM's connector from the V1 runner of a CPU engine, before its first request.

    It does nothing on a GPU, where vLLM feeds the connector, for a vLLM without the connector, and for an engine that records
    no routes.

    Args:
        llm: An engine in this process, built while `cpu_routes_patches()` were applied.

    Raises:
        RoutingError: The engine decodes speculatively, and rows of rejected tokens would not be taken back.
        EngineError: The engine runs in another process.
    """
    config: Any = llm.llm_engine.vllm_config
    aux = getattr(config, "aux_output_config", None)
    if aux is None or not aux.enabled or config.use_v2_model_runner or not is_cpu(llm):
        return
    model_runner = runner(llm)
    if hasattr(model_runner, "mismatch_routes"):
        return
    if config.speculative_config is not None:
        raise RoutingError(
            "the vLLM engine records routing on a CPU and speculates (speculative_config is set), and there routes of rejected "
            "tokens are not taken back; start it without speculation, or on a GPU."
        )
    # Imported by name, because vLLM before 0.31 has no such module.
    worker: Any = importlib.import_module("vllm.distributed.aux_output_connector.worker")
    connector = worker.get_aux_output_connector(model_runner.model, config, model_runner.kv_cache_config)
    model_runner.mismatch_routes = connector
    execute, sample = model_runner.execute_model, model_runner.sample_tokens
    # The step that has been computed but not yet sampled; there is at most one.
    pending: list[Any] = []

    @wraps(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        result = execute(scheduler_output, *args, **kwargs)
        # The state is None after a step without tokens.
        if model_runner.execute_model_state is not None:
            step = connector.prepare_output(_batch(model_runner))
            pending.extend([step] if step is not None else [])
        return result

    @wraps(sample)
    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        if pending:
            step = pending.pop()
            counts = np.array([len(ids) for ids in output.sampled_token_ids])
            step.enqueue_cpu_copy(num_sampled=counts, num_rejected=np.zeros_like(counts))
            output.aux_output_connector_output = step.process_output()
        return output

    model_runner.execute_model, model_runner.sample_tokens = execute_model, sample_tokens


def _batch(model_runner: Any) -> SimpleNamespace:
    """Return what the connector needs to know of a step: requests, where their tokens begin, and how many came before."""
    batch = model_runner.input_batch
    requests = batch.num_reqs
    return SimpleNamespace(
        req_ids=list(batch.req_ids[:requests]),
        query_start_loc_np=model_runner.query_start_loc.np[: requests + 1].copy(),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[:requests].copy(),
    )
