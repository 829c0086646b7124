"""Whether recorded routes can be those of this model: swapped layers and shifted rows have valid ids too.

Shapes: R rows, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing.trace import RoutingTrace

# Rows that are compared: enough to tell agreement from chance, and little memory for many layers and experts.
SAMPLE = 256


def expert_overlap(
    recorded: RoutingTrace, native: RoutingTrace, mask: Tensor | None = None, *, shift: int = 0
) -> Tensor:
    """Return how many experts each recorded layer shares with each native one.

    Entry (i, j) is the mean over rows of |recorded_i ∩ native_j| / K: 1 where two layers chose the same experts, about K / E
    where they have nothing to do with each other.

    Args:
        recorded: Routes from elsewhere, R rows.
        native: What the model chose itself for the same tokens, R rows.
        mask: True where `recorded` holds a route `[R]`; None compares all rows.
        shift: Row r of `recorded` is compared with row r + shift of `native`, where there is one.

    Returns:
        Overlaps `[L, L]`, float64, in [0, 1].

    Raises:
        RoutingError: The two are not of the same tokens and model, or no row is left to compare.
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
    # Spread over the batch: the first rows of padded sequences are often the same few tokens.
    kept = kept[torch.linspace(0, len(kept) - 1, min(len(kept), SAMPLE)).long()]
    chosen = [_one_hot(recorded, kept), _one_hot(native, kept + shift)]
    return torch.einsum("rie,rje->ij", *chosen).double() / (len(kept) * recorded.top_k)


def check_plausible(recorded: RoutingTrace, native: RoutingTrace, mask: Tensor | None = None) -> Tensor:
    """Refuse routes that agree with the model's own hardly better than chance in some layer.

    Numerics make a few per cent of choices differ. Another layer's routes agree about K / E of the time, which is chance; those
    of another token agree more often, the more so the more alike tokens are to the model. Hence two limits: half-way between
    chance and full agreement in every layer, and more agreement than with the row before or after.

    Args:
        recorded: Routes from elsewhere, R rows.
        native: What the model chose itself, without replay, for the same tokens.
        mask: True where `recorded` holds a route `[R]`; None compares all rows.

    Returns:
        The share of experts in common per layer `[L]`, float64.

    Raises:
        RoutingError: A layer agrees too little, or a neighbouring row more; names it, the figures, and what it agrees with.
    """
    overlap = expert_overlap(recorded, native, mask)
    chance = recorded.top_k / recorded.num_experts
    limit = (1 + chance) / 2
    own = overlap.diagonal()
    worst = int(own.argmin())
    if own[worst] < limit:
        layers = recorded.layers
        best = int(overlap[worst].argmax())
        other = (
            f"It agrees to {overlap[worst, best]:.0%} with layer {layers[best]}: layers are swapped."
            if best != worst and overlap[worst, best] >= limit
            else "No other layer fits either: are these routes of other tokens (rows shifted or shuffled), or of other weights?"
        )
        raise RoutingError(
            f"layer {layers[worst]} of the routing trace shares {own[worst]:.0%} of its experts with the model's own choice for "
            f"the same tokens; chance is {chance:.0%}, allowed is {limit:.0%} or more. {other}"
        )
    for shift in (1, -1):
        shifted = expert_overlap(recorded, native, mask, shift=shift).diagonal() if recorded.rows > 1 else own
        if shifted.mean() > own.mean():
            raise RoutingError(
                f"the rows of the routing trace share {own.mean():.0%} of their experts with the model's own choice for the "
                f"same tokens, but {shifted.mean():.0%} with that for the token {'after' if shift > 0 else 'before'}: rows are "
                "shifted by one."
            )
    return own


def _one_hot(trace: RoutingTrace, rows: Tensor) -> Tensor:
    """Return the chosen experts of some rows as ones `[R, L, E]`, float32."""
    ids = torch.stack([trace.layer(layer).cpu()[rows] for layer in trace.layers], dim=1)
    return torch.zeros(*ids.shape[:2], trace.num_experts).scatter_(-1, ids, 1.0)
