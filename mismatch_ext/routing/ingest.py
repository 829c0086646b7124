"""Strict checks of the routes that an engine recorded, before anything uses them.

Shapes: R rows, L MoE layers, K experts per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mismatch_ext.errors import RoutingError

Ids = NDArray[np.integer[Any]]
ZERO_ROWS = 64
"""With one expert per token, a layer of this many rows must not be all zeros.

If a working router gives expert 0 a share p of all tokens, all rows are 0 with probability p^rows: 0.75^64 = 1e-8, and 1e-19 if
two experts have equal shares. A shorter sequence may well go to expert 0 entirely, so its zeros prove nothing.
"""


BLOCK = 65_536
"""Rows whose ids are compared with one another at a time."""


def storage_dtype(num_experts: int) -> torch.dtype:
    """Return the narrowest dtype that holds the expert ids: uint8 up to 256 experts, uint16 beyond."""
    return torch.uint8 if num_experts <= 256 else torch.uint16


def checked(
    array: Any,
    num_experts: int,
    layers: tuple[int, ...],
    tokens: int,
    where: str,
    top_k: int | None,
    start: int,
    last_row: bool | None,
) -> Tensor:
    """Return a copy of the expert ids `[R, L, K]` in the storage dtype; arguments and errors as in `RoutingTrace.ingest`."""
    ids = _integers(array, where)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0:
        raise RoutingError(
            f"{where}: layers {layers} are not ascending absolute decoder indices; give the model's MoE layers in order."
        )
    if not 0 <= start <= tokens:
        raise RoutingError(f"{where}: start={start} is outside the sequence; allowed: 0 to {tokens}.")
    _check_rows(len(ids), tokens - start, last_row, where)
    ids = _moe_layers(ids, layers, where)
    if not 1 <= ids.shape[2] <= num_experts or top_k not in (None, ids.shape[2]):
        raise RoutingError(
            f"{where}: routing has {ids.shape[2]} experts per token; allowed: {top_k or f'1 to {num_experts}'}."
        )
    # Always copy, because the engine may reuse its buffer.
    narrow: Ids = np.array(ids, dtype=np.uint8 if num_experts <= 256 else np.uint16, order="C")
    check_ids(ids, narrow, num_experts, layers, where)
    return torch.from_numpy(narrow)


def check_ids(ids: Ids, narrow: Ids, num_experts: int, layers: tuple[int, ...], where: str) -> None:
    """Refuse ids `[R, L, K]` that no router chooses.

    Args:
        ids: Expert ids, integers.
        narrow: The same in the storage dtype, contiguous; ids out of range come out as others.
        num_experts: Experts per layer.
        layers: Absolute indices of the MoE layers.
        where: What to call the routes in messages.

    Raises:
        RoutingError: Ids out of range, duplicate ids, or an all-zero layer (for K = 1 only from 64 rows on).
    """
    _check_range(ids, narrow, num_experts, layers, where)
    if narrow.shape[2] > 1:
        _check_distinct(narrow, layers, where)
    elif num_experts > 1 and len(narrow) >= ZERO_ROWS:
        _check_captured(narrow, layers, where)


def _integers(array: Any, where: str) -> Ids:
    if array is None:
        raise RoutingError(f"{where}: there is no routing; was the engine told to record it?")
    shape, kind = getattr(array, "shape", None), getattr(array, "dtype", type(array).__name__)
    if isinstance(array, Tensor):
        array = np.empty(0) if array.is_floating_point() else array.detach().cpu().numpy()
    try:
        ids = np.asarray(array)
    except ValueError:  # lists of unequal lengths
        ids = np.empty(0)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise RoutingError(
            f"{where}: routing is {kind} of shape {tuple(ids.shape if shape is None else shape)}; allowed: integers "
            "[rows, layers, experts per token]."
        )
    return ids


def _check_rows(rows: int, tokens: int, last_row: bool | None, where: str) -> None:
    engine, full = max(tokens - 1, 0), tokens
    allowed = {None: (engine, full), False: (engine,), True: (full,)}[last_row]
    if rows in allowed:
        return
    kind = f"{rows - allowed[-1]} surplus" if rows > allowed[-1] else f"{allowed[0] - rows} missing"
    meaning = {engine: "the engine has no row for the last sampled token", full: "a full forward pass"}
    wanted = " or ".join(f"{count} ({meaning[count]})" for count in allowed)
    raise RoutingError(f"{where}: routing has {rows} rows for {tokens} tokens, {kind}; allowed: {wanted}.")


def _moe_layers(ids: Ids, layers: tuple[int, ...], where: str) -> Ids:
    """Drop the dense layers if the engine sent all decoder layers; it leaves the ids of dense layers at 0."""
    if ids.shape[1] == len(layers):
        return ids
    if ids.shape[1] <= layers[-1]:
        raise RoutingError(
            f"{where}: routing has {ids.shape[1]} layers, but the model has MoE layers {layers}; was it recorded in another "
            "model?"
        )
    for layer in sorted(set(range(ids.shape[1])) - set(layers)):
        if ids[:, layer].any():
            raise RoutingError(
                f"{where}, layer {layer}: the engine recorded routes here, but the model's MoE layers are {layers}; was it "
                "recorded in another model, or are the layers in another order?"
            )
    return ids[:, list(layers)]


def _check_range(ids: Ids, narrow: Ids, num_experts: int, layers: tuple[int, ...], where: str) -> None:
    if not ids.size:
        return
    # All bits together tell whether narrowing has kept the ids; on a part of wider rows this takes a quarter of min and max.
    is_kept = 0 <= int(np.bitwise_or.reduce(ids, axis=None)) <= np.iinfo(narrow.dtype).max
    if is_kept and int(narrow.max()) < num_experts:
        return
    bad = (ids < 0) | (ids >= num_experts)
    # Look up only the first one: a list of all would take 24 bytes for each.
    row, index, slot = (int(x) for x in np.unravel_index(int(bad.argmax()), bad.shape))
    raise RoutingError(
        f"{where}, row {row}, layer {layers[index]}: expert id {int(ids[row, index, slot])} is out of range; allowed: 0 to "
        f"{num_experts - 1}."
    )


def _check_distinct(narrow: Ids, layers: tuple[int, ...], where: str) -> None:
    """Refuse a row that names an expert twice; if a whole layer is zero, say that it was not captured."""
    rows = narrow.reshape(-1, narrow.shape[2])
    # Comparing whole slots is ten times faster than sorting rows of a few ids, and a block of them stays in a core's cache.
    if not any(_repeats(rows[first : first + BLOCK]) for first in range(0, len(rows), BLOCK)):
        return
    _check_captured(narrow, layers, where)
    ordered = np.sort(rows, axis=1)
    row, index = divmod(int((ordered[:, 1:] == ordered[:, :-1]).any(1).argmax()), len(layers))
    raise RoutingError(
        f"{where}, row {row}, layer {layers[index]}: duplicate expert ids {narrow[row, index].tolist()}; a router picks distinct "
        "experts, so this row was not recorded or was overwritten."
    )


def _repeats(rows: Ids) -> bool:
    """Tell whether a row names an expert twice."""
    slots = np.ascontiguousarray(rows.T)
    return any(bool((slots[apart:] == slots[:-apart]).any()) for apart in range(1, len(slots)))


def _check_captured(narrow: Ids, layers: tuple[int, ...], where: str) -> None:
    for index, layer in enumerate(layers):
        if not narrow[:, index].any():
            raise RoutingError(
                f"{where}, layer {layer}: all expert ids are zero, so the engine did not capture this layer; look for a fused "
                "kernel that bypasses its router, or another version of the engine."
            )
