"""How often two routings of the same tokens choose the same experts, and whether recorded routes can come from this model.

Shapes: R rows, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.names import PREFIX
from mismatch_ext.routing.trace import RoutingTrace
from mismatch_ext.sums import Sums

OTHER_PASSES = "routing/other_passes"
"""Name of the count of forward passes over other tokens than were recorded, which the model routed itself."""

LAYER = "routing/layer_{}_set_mismatch"
"""Name of the share of tokens whose sets of experts differ in a layer; a host's loggers get only the worst layer's share."""

# Rows that are compared for plausibility: enough to tell agreement from chance, with little memory for many layers and experts.
SAMPLE = 256


def of_layer(name: str) -> bool:
    """Tell whether a metric, with or without prefix, is a layer's; such metrics go only to a run's metrics file."""
    return re.fullmatch(LAYER.format(r"\d+"), name.removeprefix(PREFIX)) is not None


def agreement(
    recorded: RoutingTrace, native: RoutingTrace, mask: Tensor | None = None, *, real: Tensor | None = None
) -> Sums:
    """Count where two routings of the same R tokens agree, on the device of the second; raises RoutingError for other models.

    `mask` is True where `recorded` holds a route `[R]`, `real` at tokens that are not padding `[R]`; None means all.
    """
    header = (recorded.layers, recorded.num_experts, recorded.rows, recorded.top_k)
    other = (native.layers, native.num_experts, native.rows, native.top_k)
    if header != other:
        raise RoutingError(
            f"routings of (layers, experts, rows, experts per token) {header} and {other} cannot be compared; give two "
            "recordings of the same tokens in the same model."
        )
    device = native.parts[0].device
    everywhere = torch.ones(recorded.rows, dtype=torch.bool, device=device)
    counted, compared = (
        everywhere if flags is None else flags.reshape(-1).to(device=device, dtype=torch.bool) for flags in (real, mask)
    )
    compared = counted & compared
    ids, native_ids = (_comparable(trace.experts.to(device)) for trace in (recorded, native))
    same_order = _equal_rows(ids, native_ids) & compared[:, None]
    # Only rows with another order need a comparison of their sets.
    moved = compared[:, None] & ~same_order
    differ = torch.zeros_like(moved)
    differ[moved] = (ids[moved].sort(-1).values != native_ids[moved].sort(-1).values).any(-1)
    layers = len(recorded.layers)
    scalars = torch.stack([differ.any(1).sum(), counted.sum(), compared.sum()])
    counts = torch.cat([differ.sum(0), same_order.sum(0), scalars]).cpu().double()
    token_mismatches, total, tokens = counts[2 * layers :]
    return {
        "passes": torch.ones((), dtype=torch.float64),
        "tokens": tokens,
        "native_rows": total - tokens,
        "token_mismatches": token_mismatches,
        "set_mismatches": counts[:layers],
        "order_agreements": counts[layers : 2 * layers],
    }


def no_agreement(layers: Sequence[int]) -> Sums:
    """Return the sums of a rank that has compared nothing."""
    scalars = {name: torch.zeros((), dtype=torch.float64) for name in _SCALARS}
    return scalars | {name: torch.zeros(len(layers), dtype=torch.float64) for name in _PER_LAYER}


_SCALARS = ("passes", "tokens", "native_rows", "token_mismatches")
_PER_LAYER = ("set_mismatches", "order_agreements")


def agreement_metrics(sums: Sums, layers: Sequence[int]) -> dict[str, float]:
    """Return what a run logs of agreement: nothing without a pass, and no mismatch, which would read 0, without a token."""
    passes, tokens, native_rows, token_mismatches = (float(sums[name]) for name in _SCALARS)
    if not passes:
        return {}
    rows, pairs = tokens + native_rows, tokens * len(layers)
    metrics = {
        "routing/compared_tokens": tokens,
        "routing/native_rows_frac": native_rows / rows if rows else 0.0,
    }
    if not pairs:
        return metrics
    differing = sums["set_mismatches"].tolist()
    metrics |= {
        "routing/set_mismatch_frac": sum(differing) / pairs,
        "routing/layer_set_mismatch_max": max(differing) / tokens,
        "routing/token_mismatch_frac": token_mismatches / tokens,
        "routing/order_agreement_frac": float(sums["order_agreements"].sum()) / pairs,
    }
    by_layer = zip(layers, differing, strict=True)
    return metrics | {LAYER.format(layer): count / tokens for layer, count in by_layer}


def _equal_rows(a: Tensor, b: Tensor) -> Tensor:
    """Compare along the last axis; as one machine word if possible: a reduction over few values is 100 times slower."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.shape[-1] * a.element_size())
    if word is None or a.numel() == 0:
        return (a == b).all(-1)
    return (a.contiguous().view(word) == b.contiguous().view(word)).squeeze(-1)


def _comparable(ids: Tensor) -> Tensor:
    """Return uint16 ids as int16 bits: few devices can sort or index uint16, and equality does not depend on the order."""
    return ids.view(torch.int16) if ids.dtype == torch.uint16 else ids


# Plausibility: swapped layers and shifted rows have valid ids too.


def expert_overlap(
    recorded: RoutingTrace, native: RoutingTrace, mask: Tensor | None = None, *, shift: int = 0
) -> Tensor:
    """Return the share of experts that recorded layer i and native layer j have in common `[L, L]`, float64: mean |i ∩ j| / K.

    Row r of `recorded` is compared with row r + `shift` of `native`. Raises RoutingError if no row is left.
    """
    rows = torch.arange(recorded.rows) if mask is None else mask.cpu().nonzero()[:, 0]
    if not len(rows):
        raise RoutingError("no row has a recorded route, so the trace says nothing; was routing recorded at all?")
    rows = rows[(rows + shift >= 0) & (rows + shift < recorded.rows)]
    # Take rows spread over the batch, because the first rows of padded sequences are often the same few tokens.
    rows = rows[torch.linspace(0, len(rows) - 1, min(len(rows), SAMPLE)).long()]
    chosen = [_one_hot(recorded, rows), _one_hot(native, rows + shift)]
    return torch.einsum("rie,rje->ij", *chosen).double() / (len(rows) * recorded.top_k)


def check_plausible(recorded: RoutingTrace, native: RoutingTrace, mask: Tensor | None = None) -> Tensor:
    """Refuse routes that in some layer agree with the model's own routes hardly better than chance; return the shares `[L]`.

    Numerics change a few per cent of the choices. Routes of another layer agree by chance, about K / E of the time; those of
    another token more often. So agreement must be at least half-way between chance and full agreement in every layer, and in
    the first layer, the row before or after must not agree better. Layers are judged in order: below the first wrong one the
    routes are right, so that the model's own choice is meaningful, even in a pass that replays them.
    """
    overlap = expert_overlap(recorded, native, mask)
    shares = overlap.diagonal()
    rows = recorded.rows if mask is None else int(mask.sum())
    for shift in (1, -1) if recorded.rows > 1 else ():
        # Only the first layer is compared: in later layers, the model's choice would follow from other tokens' experts.
        share, shifted = float(shares[0]), float(expert_overlap(recorded, native, mask, shift=shift)[0, 0])
        # Three standard errors of the difference of two shares near 1, as in a model that routes all tokens the same way.
        if shifted - share > 3 * math.sqrt((2 - share - shifted) / (min(rows, SAMPLE) * recorded.top_k)):
            raise RoutingError(
                f"layer {recorded.layers[0]} of the routing trace shares {share:.0%} of its experts with the model's own choice "
                f"for the same tokens, but {shifted:.0%} with that for the token {'after' if shift > 0 else 'before'}: rows are "
                "shifted by one."
            )
    chance = recorded.top_k / recorded.num_experts
    limit = (1 + chance) / 2
    for wrong, layer in enumerate(recorded.layers):
        if shares[wrong] >= limit:
            continue
        best = int(overlap[:, wrong].argmax())
        cause = (
            f"The trace's layer {recorded.layers[best]} shares {overlap[best, wrong]:.0%} with it: layers are swapped."
            if best != wrong and overlap[best, wrong] >= limit
            else "No other layer fits either: are these routes of other tokens (rows shifted or shuffled), or of other weights?"
        )
        raise RoutingError(
            f"layer {layer} of the routing trace shares {shares[wrong]:.0%} of its experts with the model's own choice for "
            f"the same tokens; chance is {chance:.0%}, allowed is {limit:.0%} or more. {cause}"
        )
    return shares


def _one_hot(trace: RoutingTrace, rows: Tensor) -> Tensor:
    """Return 1 at the chosen experts of some rows, 0 elsewhere `[R, L, E]`, float32."""
    ids = torch.stack([trace.layer(layer).cpu()[rows] for layer in trace.layers], dim=1)
    return torch.zeros(*ids.shape[:2], trace.num_experts).scatter_(-1, ids, 1.0)
