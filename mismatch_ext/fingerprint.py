"""A cheap digest of a model's weights, to tell whether they changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

SAMPLES = 1 << 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of weights, to tell whether they changed.

    The digest contains each tensor's name, shape and dtype, and two integer sums modulo 2^64, one plain and one weighted by
    position, over the exact bits of its elements: of all elements if there are fewer than 131,072, otherwise of 43,000 to
    88,000 elements at a regular stride. Integer sums do not depend on the order of summation, so equal weights give equal
    digests on all devices. An optimizer step changes nearly all elements of a tensor and cannot be missed, even at a learning
    rate of 1e-6. A change of a few single elements of a large tensor can be missed. For sharded tensors, the digest is that of
    this rank's shards.

    Args:
        named_tensors: Names and tensors, for example `model.named_parameters()`.
    """
    digest = hashlib.blake2b(digest_size=16)
    sums: dict[torch.device, list[Tensor]] = {}
    for name, tensor in named_tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}\n".encode())
        flat = local.detach().reshape(-1)
        # The stride is odd, so that it visits all columns of a matrix whose width is a power of two.
        stride = (flat.numel() // SAMPLES) | 1
        bits = flat[::stride].contiguous().view(_BITS[flat.element_size()]).to(torch.int64)
        weights = 2 * torch.arange(bits.numel(), device=bits.device) + 1  # odd, so that no bit is lost modulo 2^64
        sums.setdefault(flat.device, []).append(torch.stack([bits.sum(), (bits * weights).sum()]))
    for device in sorted(sums, key=str):
        # One transfer per device, not one per tensor.
        digest.update(torch.stack(sums[device]).cpu().numpy().tobytes())
    return digest.hexdigest()
