"""Methods by which a server's worker reports on itself, called by name over /collective_rpc.

An answer holds only what JSON has: vLLM's engine cannot send anything else back, and after trying it answers no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mismatch_ext.adapters.vllm.engine import reading_of
from mismatch_ext.adapters.vllm.weights import digest_of_rows

from mismatch_ext.versions import installed

READ, DIGESTS = "mismatch_read", "mismatch_digests"


def read(worker: Any) -> dict[str, Any]:
    """Return what a worker computes with: the fields of an `EngineReading`, and this package's version.

    Args:
        worker: vLLM's worker, which calls this as its method.
    """
    runner = worker.model_runner
    return asdict(reading_of(runner, runner.vllm_config)) | {"mismatch": installed("mismatch-ext")}


def digests(worker: Any, wanted: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Return the dtype, the shape and a digest of sampled rows of parameters; a parameter that the worker lacks is left out.

    Args:
        worker: vLLM's worker, which calls this as its method.
        wanted: By parameter name, the number of rows, beyond which vLLM pads the vocabulary, and the step between sampled rows.
    """
    held = dict(worker.model_runner.model.named_parameters())
    entries = {}
    for name, (rows, stride) in wanted.items():
        if name in held and held[name].numel():
            sampled = held[name].detach()[:rows:stride]
            dtype = str(sampled.dtype).removeprefix("torch.")
            entries[name] = {"dtype": dtype, "shape": list(sampled.shape), "sha256": digest_of_rows(sampled)}
    return entries


METHODS: dict[str, Callable[..., Any]] = {READ: read, DIGESTS: digests}
"""The methods above, by the names that they have on a worker."""
