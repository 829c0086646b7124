"""Replace the client with which TRL talks to a vLLM server by a subclass of it."""

from __future__ import annotations

from collections.abc import Callable

from mismatch_ext.patching import Patch

Subclass = Callable[[type], type]
"""Gets TRL's class, returns a subclass of it."""

METHODS = ("_get", "_post", "init_communicator", "update_named_params", "_start_weight_update", "_finish_weight_update")


def _make(original: type, subclass: Subclass) -> type:
    return subclass(original)


def _probe(original: type) -> str | None:
    """Say which of the methods that a subclass overrides the class lacks, or return None."""
    missing = [name for name in METHODS if not callable(getattr(original, name, None))]
    return f"it has no {', '.join(missing)}." if missing else None


SERVER_CLIENT = Patch(
    name="trl/server_client",
    peer="trl",
    supports=">=1.16.0,<=1.16.0",
    target="trl.generation.vllm_generation:VLLMClient",
    make=_make,
    probe=_probe,
    observed="each update's name is read back from the server, through the client that TRL was given",
    upstream="https://github.com/huggingface/trl/blob/v1.16.0/trl/generation/vllm_client.py",
    reason=(
        "TRL's client has no timeouts, sends failed updates again, ignores a prefix cache that was not reset, gives updates no "
        "name, drops routes, and reaches a server over NCCL alone."
    ),
    not_covered="The NCCL broadcast itself, which waits without an end where the server dies in the midst of it.",
    remove_when="VLLMGeneration takes a client, and TRL's has timeouts and names its updates.",
)
