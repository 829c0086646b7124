"""Compares two tensors that lie in pieces on several processes, by integer sums and without moving the tensors.

For every tensor that both sides hold, each process adds up the bits of its piece, plainly and weighted by position in the whole
tensor, modulo 2^64. The sums of the pieces add up to those of the whole tensor, however it is cut. If each of k processes holds
the whole tensor, the sums are k times as large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mismatch_ext.weight_sync.checker import TensorComparison

SAMPLED_ROWS = 1024
"""About this many rows of a tensor enter the sums."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 1 << 64

Sums = tuple[int, int, int]
"""Number of elements, the sum of their bits, and that sum weighted by position."""
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of a tensor that a process holds.

    Args:
        values: Its elements, flat, in the order of the whole tensor.
        start: Index of the first element in the whole tensor.
        shape: Shape of the whole tensor.
    """

    values: Tensor
    start: int
    shape: Shape


@torch.no_grad()
def sums_of(piece: Piece, dtype: torch.dtype) -> Sums:
    """Add up the bits of a piece, after rounding to a dtype; about a thousand rows of a matrix enter the sums.

    Args:
        piece: The piece.
        dtype: The engine's dtype.
    """
    if not piece.values.numel():
        return 0, 0, 0
    columns, stride = _layout(piece.shape)
    device = piece.values.device
    end = piece.start + piece.values.numel()
    first, last = -(-piece.start // columns), end // columns  # whole rows
    parts = []
    if first <= last:
        if (head := first * columns - piece.start) and (first - 1) % stride == 0:
            parts.append((piece.values[:head], torch.arange(piece.start, first * columns, device=device)))
        skip = -first % stride
        rows = piece.values[head : head + (last - first) * columns].view(last - first, columns)[skip::stride]
        at = torch.arange(first + skip, max(last, first + skip), stride, device=device)
        parts.append((rows.reshape(-1), (at[:, None] * columns + torch.arange(columns, device=device)).reshape(-1)))
        if end > last * columns and last % stride == 0:
            parts.append(
                (piece.values[last * columns - piece.start :], torch.arange(last * columns, end, device=device))
            )
    elif (piece.start // columns) % stride == 0:  # within a row
        parts.append((piece.values, torch.arange(piece.start, end, device=device)))
    count = plain = weighted = 0
    for values, places in parts:
        cast = values.detach().to(dtype).contiguous()
        bits = cast.view(_BITS[cast.element_size()]).to(torch.int64)
        count += bits.numel()
        plain += int(bits.sum())
        weighted += int((bits * (2 * places + 1)).sum())  # an odd weight loses no bit
    return count, plain % _MODULUS, weighted % _MODULUS


def _layout(shape: Shape) -> tuple[int, int]:
    """Return the number of columns of a tensor, and the step between the rows that enter the sums."""
    if len(shape) < 2:
        return 1, 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return columns, max(1, shape[0] // SAMPLED_ROWS)


def added(found: Iterable[Mapping[str, Sums]]) -> dict[str, Sums]:
    """Add up the sums of several processes, by name."""
    total: dict[str, Sums] = {}
    for sums in found:
        for name, (count, plain, weighted) in sums.items():
            before = total.get(name, (0, 0, 0))
            total[name] = (before[0] + count, (before[1] + plain) % _MODULUS, (before[2] + weighted) % _MODULUS)
    return total


def compare_sums(
    held: Mapping[str, Sums], sent: Mapping[str, Sums], before: Mapping[str, Sums], shapes: Mapping[str, Shape]
) -> list[TensorComparison]:
    """Compare what an engine holds with what was sent to it.

    Args:
        held: Sums over all of the engine's processes.
        sent: Sums over all of the trainer's processes, for the weights that the last update sent.
        before: Sums for the weights that the update before sent.
        shapes: Shapes of the whole tensors.

    Returns:
        One comparison per tensor that both sides hold whole, once or several times; the size of a difference is not known.
    """
    compared = []
    for name in sent:
        if name not in held or name not in shapes:
            continue
        columns, stride = _layout(shapes[name])
        rows = shapes[name][0] if shapes[name] else 1
        elements = -(-rows // stride) * columns
        if not elements or not all(sums[name][0] and sums[name][0] % elements == 0 for sums in (held, sent)):
            continue
        equal = _equal(held[name], sent[name], elements)
        compared.append(
            TensorComparison(
                name=name,
                equal=equal,
                max_abs_diff=0.0 if equal else None,
                matches_previous=_equal(held[name], before[name], elements) if name in before else None,
            )
        )
    return compared


def _equal(one: Sums, other: Sums, elements: int) -> bool:
    """Whether two tensors, each held as often as its count says, are the same."""
    copies, others = one[0] // elements, other[0] // elements
    return all((a * others - b * copies) % _MODULUS == 0 for a, b in zip(one[1:], other[1:], strict=True))
