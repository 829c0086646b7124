"""This package's entries in verl's registry: an SGLang server, and a vLLM server for runs that send sampling masks.

In other runs with vLLM the server is verl's own, and only vLLM's workers take an extension class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry

from mismatch_ext.config import MismatchConfig

CLASSES = {
    "sglang": "mismatch_ext.adapters.verl.rollout.sglang_server:MismatchSGLangReplica",
    "vllm": "mismatch_ext.adapters.verl.rollout.vllm_server:MismatchVLLMReplica",
}


@dataclass(frozen=True)
class CheckedReplica:
    """Loads our server instead of verl's; the engine is imported when one is started.

    Args:
        engine: "sglang" or "vllm".
        original: verl's own entry.
    """

    engine: str
    original: Callable[[], type[Any]]

    def __call__(self) -> type[Any]:
        """Return the class of the replica."""
        self.original()  # first: SGLang needs a variable while it is imported, which verl sets and removes
        module, _, name = CLASSES[self.engine].partition(":")
        found: type[Any] = getattr(import_module(module), name)
        return found


def register_replicas(block: MismatchConfig) -> None:
    """Put our servers into verl's registry; twice is harmless.

    Args:
        block: The run's.
    """
    for engine in ("sglang", *(["vllm"] if block.acting.sampling_mask is not None else [])):
        entry = RolloutReplicaRegistry._registry[engine]
        if not isinstance(entry, CheckedReplica):
            RolloutReplicaRegistry.register(engine, CheckedReplica(engine, entry))


def restore_replicas() -> None:
    """Put verl's own servers back."""
    for engine in CLASSES:
        entry = RolloutReplicaRegistry._registry[engine]
        if isinstance(entry, CheckedReplica):
            RolloutReplicaRegistry.register(engine, entry.original)
