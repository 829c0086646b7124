"""Read back from live objects, not from arguments, what an in-process vLLM engine really runs with."""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

from mismatch_ext.errors import EngineError
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.precision.dtypes import canonical
from mismatch_ext.versions import require

if TYPE_CHECKING:
    from vllm import LLM

    from mismatch_ext.config import PrecisionConfig


def runner(llm: LLM) -> Any:
    """Return the model runner of an engine that lives in this process.

    Args:
        llm: The engine.

    Raises:
        EngineError: The engine runs in another process, where its weights cannot be read.
    """
    executor = getattr(llm.llm_engine, "model_executor", None)
    worker = getattr(executor, "driver_worker", None)
    if worker is None:
        raise EngineError(
            "the vLLM engine runs in another process, so its weights and dtypes cannot be read back; "
            "start it with VLLM_ENABLE_V1_MULTIPROCESSING=0 or with distributed_executor_backend='external_launcher'."
        )
    return worker.model_runner


def asked_of(precision: PrecisionConfig) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that make an engine compute as the `precision` section says."""
    parts = {
        "quantization": precision.engine_weights,
        "kv_cache_dtype": precision.engine_kv_cache,
        "hf_overrides": None if precision.head is None else {"head_dtype": precision.head},
    }
    # A checkpoint with integer weights names its quantization method itself.
    return {"dtype": precision.dtype} | {name: value for name, value in parts.items() if value is not None}


def is_cpu(llm: LLM) -> bool:
    """Tell whether the engine computes on the CPU."""
    return str(llm.llm_engine.vllm_config.device_config.device_type) == "cpu"


def read_engine(llm: LLM) -> EngineReading:
    """Read the dtypes and modes that the engine really uses.

    Args:
        llm: An engine in this process.

    Returns:
        Dtypes of model, parameters, output head and KV cache, log-probability mode and quantization.
    """
    return reading_of(runner(llm), llm.llm_engine.vllm_config)


def reading_of(model_runner: Any, vllm_config: Any) -> EngineReading:
    """Read what `read_engine` does from a model runner in this process, be it the trainer's process or a server's worker.

    Args:
        model_runner: The runner.
        vllm_config: vLLM's configuration.
    """
    config = vllm_config.model_config
    # A CPU engine packs linear weights and leaves empty parameters behind; those say nothing about a dtype.
    counts: Counter[str] = Counter()
    for parameter in model_runner.model.parameters():
        if parameter.numel():
            counts[_dtype_name(parameter.dtype)] += parameter.numel()
    caches = [cache for cache in getattr(model_runner, "kv_caches", []) if hasattr(cache, "dtype")]
    # The tensor of an fp8 cache is uint8; only the setting says which fp8 format the bytes have.
    asked = str(vllm_config.cache_config.cache_dtype)
    model_dtype = canonical(config.dtype)
    held = _dtype_name(caches[0].dtype) if caches else model_dtype
    only_bytes = held == "uint8" and asked != "auto"
    return EngineReading(
        engine="vllm",
        version=require("vllm"),
        model_dtype=model_dtype,
        parameter_dtypes=dict(counts),
        kv_cache_dtype=asked if only_bytes else held,
        logprobs_mode=str(config.logprobs_mode),
        quantization=quantization_of(model_runner.model, config.quantization),
        head_dtype=head_dtype(model_runner.model, model_dtype),
    )


def head_dtype(model: Any, model_dtype: str) -> str:
    """Return the dtype in which a model's output head multiplies: the model's, unless its logits processor has another.

    Args:
        model: The engine's model.
        model_dtype: The engine's compute dtype.
    """
    found = [getattr(module, "head_dtype", None) for module in model.modules()]
    names = {canonical(dtype) for dtype in found if dtype is not None} - {model_dtype}
    return names.pop() if names else model_dtype


def quantization_of(model: Any, asked: str | None) -> str | None:
    """Return the method by which a model's layers are quantized; None if they are not, even if a method was asked for.

    Some of vLLM's methods do not quantize layers that they have no kernel for, such as all layers of a model without experts.

    Args:
        model: The engine's model.
        asked: Name of the method in vLLM's configuration.
    """
    methods = {type(layer.quant_method).__name__ for layer in model.modules() if getattr(layer, "quant_method", None)}
    # Attention layers have a method of their own, for the scales of the KV cache; it does not count.
    holds = any(not name.startswith("Unquantized") and "KVCache" not in name for name in methods)
    return asked if holds else None


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def shutdown(llm: LLM) -> None:
    """End an in-process engine, so that another can start in the same process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()
