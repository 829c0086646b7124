"""The entry of verl's registry that checks its SGLang servers; vLLM's workers take an extension class instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry


@dataclass(frozen=True)
class CheckedReplica:
    """Loads our SGLang server instead of verl's; SGLang is imported when one is started.

    Args:
        original: verl's own entry.
    """

    original: Callable[[], type[Any]]

    def __call__(self) -> type[Any]:
        """Return the class of the replica."""
        self.original()  # first: SGLang needs a variable while it is imported, which verl sets and removes
        from mismatch_ext.adapters.verl.rollout.sglang_server import MismatchSGLangReplica

        return MismatchSGLangReplica


def register_replica() -> None:
    """Put our SGLang server into verl's registry; twice is harmless."""
    entry = RolloutReplicaRegistry._registry["sglang"]
    if not isinstance(entry, CheckedReplica):
        RolloutReplicaRegistry.register("sglang", CheckedReplica(entry))


def restore_replica() -> None:
    """Put verl's own SGLang server back."""
    entry = RolloutReplicaRegistry._registry["sglang"]
    if isinstance(entry, CheckedReplica):
        RolloutReplicaRegistry.register("sglang", entry.original)
