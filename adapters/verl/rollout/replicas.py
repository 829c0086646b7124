"""The entry of verl's registry by which its SGLang servers are checked; vLLM's workers take an extension class instead."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.replica import RolloutReplicaRegistry


def register_replica() -> None:
    """Put our SGLang server in the place of verl's; SGLang is imported when one is started, and twice is harmless."""
    original = RolloutReplicaRegistry._registry["sglang"]
    if original is _load:
        return
    _originals[:] = [original]
    RolloutReplicaRegistry.register("sglang", _load)


def restore_replica() -> None:
    """Put verl's own SGLang server back."""
    if _originals:
        RolloutReplicaRegistry.register("sglang", _originals.pop())


_originals: list[Any] = []


def _load() -> type[Any]:
    _originals[0]()  # first: SGLang needs a variable while it is imported, which verl sets and removes
    from mismatch_ext.adapters.verl.rollout.sglang_server import MismatchSGLangReplica

    return MismatchSGLangReplica
