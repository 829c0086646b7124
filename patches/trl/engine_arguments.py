"""Extra arguments for the engine that TRL starts in its own process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mismatch_ext.patching import Patch


def _probe(original: Any) -> str | None:
    """Say why the name is not what TRL calls to start its engine, or return None; without vLLM it is TRL's stand-in."""
    import trl.generation.vllm_generation as module

    if "LLM(" not in inspect.getsource(module.VLLMGeneration):
        return "VLLMGeneration no longer calls LLM(...)."
    return None if callable(original) else "it cannot be called."


def engine_arguments(arguments: Mapping[str, Any]) -> Patch:
    """Declare the patch that adds arguments to TRL's colocated `LLM(...)` call.

    TRL passes a fixed list without a dtype, so vLLM resolves "auto" without regard to the trainer's own precision: a float32
    checkpoint then runs in bfloat16.

    Args:
        arguments: Keyword arguments of `vllm.LLM`, for example `{"dtype": "float16"}`.
    """
    items = tuple(sorted(arguments.items()))  # plain values, so that the patch's digest tells one dtype from another

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def start_engine(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{**kwargs, **dict(items)})

        return start_engine

    return Patch(
        name="trl/engine_arguments",
        peer="trl",
        supports=">=1.13.0,<=1.16.0",
        target="trl.generation.vllm_generation:LLM",
        binding_only=True,
        make=make,
        probe=_probe,
        upstream="https://github.com/huggingface/trl/pull/6774",
        reason="GRPOTrainer gives the colocated engine no dtype: vLLM then takes the checkpoint's, or bfloat16.",
        not_covered="Server mode, where the engine is started by the user with --dtype.",
        remove_when="TRL's VLLMGeneration accepts engine arguments.",
    )
