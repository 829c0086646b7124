"""Check that recorded routes can come from this model, because swapped layers and shifted rows have valid ids too.

Shapes: R rows, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing.trace import RoutingTrace

# Rows that are compared: enough to distinguish agreement from chance, with little memory for many layers and experts.
SAMPLE = 256


def expert_overlap(
    recorded: RoutingTrace, native: RoutingTrace, mask: Tensor | None = None, *, shift: int = 0
) -> Tensor:
    """Return how many experts each recorded layer shares with each native one.

    Entry (i, j) is the mean over rows of |recorded_i ∩ native_j| / K: 1 if the two layers chose the same experts, about K / E
    if they are unrelated.

    Args:
        recorded: Routes from elsewhere, R rows.
        native: Routes that the model itself chose for the same tokens, R rows.
        mask: True where `recorded` holds a route `[R]`; None compares all rows.
        shift: Row r of `recorded` is compared with row r + shift of `native`, if that row exists.

    Returns:
        Overlaps `[L, L]`, float64, in [0, 1].

    Raises:
        RoutingError: The two do not belong to the same tokens and model, or no row is left to compare.
    """
    if (recorded.layers, recorded.num_experts, recorded.rows) != (native.layers, native.num_experts, native.rows):
        raise RoutingError(
            f"routes of {recorded.rows} rows, layers {recorded.layers}, {recorded.num_experts} experts cannot be compared with "
            f"those of {native.rows} rows, layers {native.layers}, {native.num_experts} experts."
        )
    kept = torch.arange(recorded.rows) if mask is None else mask.cpu().nonzero()[:, 0]
    if not len(kept):
        raise RoutingError("no row has a recorded route, so the trace says nothing; was routing recorded at all?")
    kept = kept[(kept + shift >= 0) & (kept + shift < recorded.rows)]
    # Take rows spread over the batch, because the first rows of padded sequences are often the same few tokens.
    kept = kept[torch.linspace(0, len(kept) - 1, min(len(kept), SAMPLE)).long()]
    chosen = [_one_hot(recorded, kept), _one_hot(native, kept + shift)]
    return torch.einsum("rie,rje->ij", *chosen).double() / (len(kept) * recorded.top_k)


def check_plausible(recorded: RoutingTrace, native: RoutingTrace, mask: Tensor | None = None) -> Tensor:
    """Refuse routes that in some layer agree with the model's own routes hardly better than chance.

    Because of numerics, a few per cent of the choices differ. Routes of another layer agree by chance, about K / E of the time.
    Routes of another token agree more often, especially if the tokens are similar to the model. There are therefore two limits:
    in every layer, agreement must be at least half-way between chance and full agreement; in the first layer, the row before or
    after must not agree better.

    Layers are judged in order, and the error names the first wrong one. Up to that layer, the routes below are right, so the
    model's own choice is meaningful, also if the recorded routes are replayed meanwhile. Above a wrong layer it is not.

    Args:
        recorded: Routes from elsewhere, R rows.
        native: Routes that the model itself chose for the same tokens, in a pass without replay or in one that replays
            `recorded`. With replay, a difference that the engine's numerics cause in one layer causes no more in later layers.
        mask: True where `recorded` holds a route `[R]`; None compares all rows.

    Returns:
        The share of experts in common per layer `[L]`, float64.

    Raises:
        RoutingError: A layer agrees too little, or a neighbouring row agrees better. Names the layer, the shares, and the layer
            or row that agrees.
    """
    overlap = expert_overlap(recorded, native, mask)
    own = overlap.diagonal()
    rows = recorded.rows if mask is None else int(mask.sum())
    for shift in (1, -1) if recorded.rows > 1 else ():
        # Only the first layer is compared: in later layers, the model's choice would follow from other tokens' experts.
        shifted = float(expert_overlap(recorded, native, mask, shift=shift)[0, 0])
        if shifted - float(own[0]) > _noise(float(own[0]), shifted, min(rows, SAMPLE) * recorded.top_k):
            raise RoutingError(
                f"layer {recorded.layers[0]} of the routing trace shares {own[0]:.0%} of its experts with the model's own choice "
                f"for the same tokens, but {shifted:.0%} with that for the token {'after' if shift > 0 else 'before'}: rows are "
                "shifted by one."
            )
    chance = recorded.top_k / recorded.num_experts
    limit = (1 + chance) / 2
    for wrong, layer in enumerate(recorded.layers):
        if own[wrong] >= limit:
            continue
        best = int(overlap[:, wrong].argmax())
        other = (
            f"The trace's layer {recorded.layers[best]} shares {overlap[best, wrong]:.0%} with it: layers are swapped."
            if best != wrong and overlap[best, wrong] >= limit
            else "No other layer fits either: are these routes of other tokens (rows shifted or shuffled), or of other weights?"
        )
        raise RoutingError(
            f"layer {layer} of the routing trace shares {own[wrong]:.0%} of its experts with the model's own choice for "
            f"the same tokens; chance is {chance:.0%}, allowed is {limit:.0%} or more. {other}"
        )
    return own


def _noise(one: float, other: float, count: int) -> float:
    """Return three standard errors of the difference of two shares near 1, as in a model that routes all tokens the same way."""
    return float(3 * math.sqrt((2 - one - other) / count))


def _one_hot(trace: RoutingTrace, rows: Tensor) -> Tensor:
    """Return 1 at the chosen experts of some rows, 0 elsewhere `[R, L, E]`, float32."""
    ids = torch.stack([trace.layer(layer).cpu()[rows] for layer in trace.layers], dim=1)
    return torch.zeros(*ids.shape[:2], trace.num_experts).scatter_(-1, ids, 1.0)
