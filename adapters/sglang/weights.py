"""Weight updates of SGLang: checkpoint names, the engine's dtype, buckets and a weight version.

SGLang silently casts the tensors that it receives to its own dtype, and silently drops tensors whose names it does not know, such
as the fused expert weights that transformers keeps. Here tensors are cast before they are sent, a value that overflows is an
error that names its tensor, and names are those of the checkpoint.
"""

from __future__ import annotations

import re

import torch
from mismatch_ext.adapters.sglang.engine import Transport
from torch import Tensor

from mismatch_ext.errors import PrecisionError, RecordError
from mismatch_ext.precision.audit import SyncReading
from mismatch_ext.precision.dtypes import canonical, limits, torch_dtype
from mismatch_ext.weights import NamedTensors, in_parts

BUCKET_BYTES = 1 << 29
FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
KEPT_FLOAT32 = re.compile(r"(^|\.)(e_score_correction_bias|A_log)$")
"""Weights that SGLang keeps in float32 whatever its dtype; for a model that does not keep them so, SGLang rounds them itself."""


def update_weights(
    transport: Transport,
    named_parameters: NamedTensors,
    *,
    dtype: str | torch.dtype,
    weight_version: int | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    fused_experts: bool = False,
) -> SyncReading:
    """Send weights in the engine's dtype, and flush the engine's cache, because the previous weights computed it.

    The engine must be drained: between two buckets it would serve requests with a mixture of weights. `HttpTransport` pauses its
    server during an update. SGLang may accept weights and not compute with them; `Run.send` checks that too.

    Args:
        transport: The engine.
        named_parameters: Checkpoint names and tensors of the whole model, for example those of
            `mismatch_ext.adapters.transformers.checkpoint_parameters(model)`; no tensor may be sharded.
        dtype: The engine's dtype, which `read_server` reports.
        weight_version: Version that responses report from now on, with "-incomplete" behind it until the last bucket has
            arrived; None leaves the previous one.
        bucket_bytes: Bytes that are sent at a time, including the copies for tensor-parallel ranks; a larger tensor has a bucket
            of its own.
        fused_experts: Accept experts that are fused in one tensor, for the few models whose checkpoints hold them so.

    Returns:
        The dtype that the tensors came in, and the dtype that they were sent in.

    Raises:
        PrecisionError: A weight is not finite, or overflows in the engine's dtype; names the tensor. Earlier tensors may have
            been sent: send all of them again.
        RecordError: There are no tensors, one is sharded, or their names are not those of a checkpoint.
        PrecisionError: The engine reports another dtype.
        EngineError: SGLang refused; `Transport.update_weights` says which weights it may then hold.
    """
    target = torch_dtype(dtype)
    if transport.dtype not in ("auto", canonical(target)):
        raise PrecisionError(
            f"weights are to be sent in {canonical(target)}, but {transport} computes in {transport.dtype} and would cast them "
            f"without a word; allowed: dtype={transport.dtype!r}, or a server with --dtype {canonical(target)}."
        )
    sent: set[str] = set()
    # Tensors are cast one by one and not kept in a list, because a sharded trainer gathers one tensor at a time.
    cast = (_cast(name, tensor, target, sent, fused_experts) for name, tensor in named_parameters)
    stamp = None if weight_version is None else str(weight_version)
    transport.update_weights(in_parts(cast, bucket_bytes // transport.copies), weight_version=stamp)
    if not sent:
        raise RecordError("a weight update without tensors; a generator such as named_parameters() can be used once.")
    return SyncReading(sent_dtype=" and ".join(sorted(sent)), received_dtype=canonical(target))


def _cast(name: str, tensor: Tensor, dtype: torch.dtype, sent: set[str], fused_experts: bool) -> tuple[str, Tensor]:
    if FUSED.search(name) and not fused_experts:
        raise RecordError(
            f"{name} holds all experts of a layer, as transformers keeps them; SGLang has no such name, drops it and reports "
            "success. Send mismatch_ext.adapters.transformers.checkpoint_parameters(model), or say fused_experts=True if "
            "the model's checkpoint has this name."
        )
    if hasattr(tensor, "full_tensor"):
        raise RecordError(
            f"{name} is sharded over ranks (a DTensor); allowed: whole tensors. Gathering takes all ranks: call "
            "full_tensor() on every one of them, and send from one."
        )
    whole = tensor.detach()
    sent.add(str(whole.dtype).removeprefix("torch."))
    if not whole.is_floating_point():
        return name, whole
    dtype = torch.float32 if KEPT_FLOAT32.search(name) else dtype
    # Always a copy, because the trainer may change the weights while SGLang still reads them.
    cast = whole.to(dtype, copy=True)
    if not bool(torch.isfinite(cast).all()):
        raise PrecisionError(_not_finite(name, whole, dtype))
    return name, cast


def _not_finite(name: str, tensor: Tensor, dtype: torch.dtype) -> str:
    again = "Tensors before it may have been sent: send all of them again after the repair."
    if not bool(torch.isfinite(tensor).all()):
        count = int((~torch.isfinite(tensor)).sum())
        return f"{name}: {count} of {tensor.numel()} weights are NaN or infinite in the trainer. {again}"
    largest, limit = float(tensor.abs().max()), limits(dtype)
    return (
        f"{name}: weight {largest:.6g} overflows in {canonical(dtype)}; allowed: magnitudes up to {limit.max:g}. Run engine and "
        f"trainer in bfloat16, or check the checkpoint with `mismatch-ext readiness`. {again}"
    )
