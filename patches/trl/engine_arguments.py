"""Extra arguments for the engine that TRL starts in its own process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from mismatch_ext.patching import Patch


def _make(original: Callable[..., Any], arguments: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def start_engine(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, **dict(arguments)})

    return start_engine


ENGINE_ARGUMENTS = Patch(
    name="trl/engine_arguments",
    peer="trl",
    supports=">=1.13.0,<=1.16.0",
    target="trl.generation.vllm_generation:LLM",
    make=_make,
    observed="the engine's dtypes, its routing flag and the number of its log-probabilities are read back before the first step",
    upstream="https://github.com/huggingface/trl/pull/6774",
    reason="GRPOTrainer gives the colocated engine no dtype: vLLM then takes the checkpoint's, or bfloat16.",
    not_covered="Server mode, where the engine is started by the user with --dtype.",
    remove_when="TRL's VLLMGeneration accepts engine arguments.",
)


def engine_arguments(arguments: Mapping[str, Any]) -> Patch:
    """Return the patch that adds keyword arguments of `vllm.LLM`, such as `{"dtype": "float16"}`, to TRL's colocated call."""
    return ENGINE_ARGUMENTS.calling(tuple(sorted(arguments.items())))
