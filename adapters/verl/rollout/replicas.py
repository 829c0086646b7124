"""This package's entries in verl's registry: an SGLang server, and a vLLM server for runs that send sampling masks.

In other runs with vLLM the server is verl's own, and only vLLM's workers take an extension class.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry

from mismatch_ext.config import MismatchConfig

CLASSES = {
    "sglang": "mismatch_ext.adapters.verl.rollout.sglang_server:MismatchSGLangReplica",
    "vllm": "mismatch_ext.adapters.verl.rollout.vllm_server:MismatchVLLMReplica",
}


def register_replicas(block: MismatchConfig) -> None:
    """Put our servers into verl's registry, instead of verl's own."""
    for engine in ("sglang", *(["vllm"] if block.sampling_mask is not None else [])):
        own = partial(_load, engine, RolloutReplicaRegistry._registry[engine])
        RolloutReplicaRegistry.register(engine, own)


def _load(engine: str, original: Callable[[], type[Any]]) -> type[Any]:
    original()  # first: SGLang needs a variable while it is imported, which verl sets and removes
    module, _, name = CLASSES[engine].partition(":")
    return getattr(import_module(module), name)  # type: ignore[no-any-return]
