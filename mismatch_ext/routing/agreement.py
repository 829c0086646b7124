"""How often two routings of the same tokens choose the same experts.

Shapes: R rows, L MoE layers, K experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.routing.trace import RoutingTrace

ROUTING_MEASURES: dict[str, str] = {
    "routing/compared_tokens": "tokens whose recorded and native routing were compared",
    "routing/native_rows_frac": "share of tokens without a recorded route, which the model routes natively",
    "routing/set_mismatch_frac": "share of (token, layer) pairs whose sets of experts differ",
    "routing/layer_set_mismatch_max": "share of tokens whose sets of experts differ, in the worst layer",
    "routing/token_mismatch_frac": "share of tokens whose set of experts differs in any layer",
    "routing/order_agreement_frac": "share of (token, layer) pairs with equal experts in equal slots",
}
"""Names and meanings of what `Agreement.metrics` returns."""

OTHER_PASSES = "routing/other_passes"
"""Name of the count of forward passes over other tokens than were recorded, which the model routed itself."""

LAYER = "routing/layer_{}_set_mismatch"
"""Name of the share of tokens whose sets of experts differ in a layer; a host's loggers get only the worst layer's share."""


def of_layer(name: str) -> bool:
    """Tell whether a metric, with or without prefix, is a layer's; such metrics go only to a run's metrics file."""
    return re.search(LAYER.format(r"\d+") + "$", name) is not None


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Counts of agreement, additive over batches and ranks.

    Args:
        layers: Absolute indices of the MoE layers.
        tokens: Number of compared tokens.
        set_mismatches: Per layer, number of tokens whose sets of experts differ.
        order_agreements: Per layer, number of tokens with equal experts in equal slots.
        token_mismatches: Number of tokens whose sets differ in any layer.
        native_rows: Number of tokens that were left out because they had no recorded route. Padding counts too, unless
            `agreement` was told which rows are real.
    """

    layers: tuple[int, ...]
    tokens: int
    set_mismatches: tuple[int, ...]
    order_agreements: tuple[int, ...]
    token_mismatches: int
    native_rows: int = 0

    def merge(self, other: Agreement) -> Agreement:
        """Return the sums of the counts of both.

        Raises:
            RoutingError: The two have different layers.
        """
        if self.layers != other.layers:
            raise RoutingError(
                f"agreement of layers {self.layers} cannot be merged with that of layers {other.layers}."
            )
        return Agreement(
            layers=self.layers,
            tokens=self.tokens + other.tokens,
            set_mismatches=tuple(a + b for a, b in zip(self.set_mismatches, other.set_mismatches, strict=True)),
            order_agreements=tuple(a + b for a, b in zip(self.order_agreements, other.order_agreements, strict=True)),
            token_mismatches=self.token_mismatches + other.token_mismatches,
            native_rows=self.native_rows + other.native_rows,
        )

    def metrics(self) -> dict[str, float]:
        """Return the scalars that a run logs, with the names and meanings of `ROUTING_MEASURES`.

        If no token was compared, only the first two are returned, because a mismatch of 0 would look like agreement.
        """
        rows = self.tokens + self.native_rows
        scalars = {
            "routing/compared_tokens": float(self.tokens),
            "routing/native_rows_frac": self.native_rows / rows if rows else 0.0,
        }
        pairs = self.tokens * len(self.layers)
        if pairs:
            scalars |= {
                "routing/set_mismatch_frac": sum(self.set_mismatches) / pairs,
                "routing/layer_set_mismatch_max": max(self.set_mismatches) / self.tokens,
                "routing/token_mismatch_frac": self.token_mismatches / self.tokens,
                "routing/order_agreement_frac": sum(self.order_agreements) / pairs,
            }
        return scalars

    def layer_metrics(self) -> dict[str, float]:
        """Return `by_layer` under the names in a run's metrics file."""
        return {LAYER.format(layer): share for layer, share in self.by_layer().items()}

    def by_layer(self) -> dict[int, float]:
        """Return the share of tokens whose sets of experts differ, by layer; empty if no token was compared."""
        if not self.tokens:
            return {}
        return {layer: count / self.tokens for layer, count in zip(self.layers, self.set_mismatches, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as JSON-able data."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Agreement:
        """Return the counts of a state from `state_dict`."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in state.items()}
        return cls(**values)


def agreement(
    recorded: RoutingTrace, native: RoutingTrace, mask: Tensor | None = None, *, real: Tensor | None = None
) -> Agreement:
    """Compare two routings of the same tokens, on the device of the second.

    Args:
        recorded: One routing, R rows.
        native: The other, R rows.
        mask: True where `recorded` holds a route `[R]`; None compares all rows.
        real: True at tokens that are not padding `[R]`; padding is neither compared nor counted. None counts all rows.

    Raises:
        RoutingError: The two do not belong to the same tokens and model, or a mask has another length.
    """
    header = (recorded.layers, recorded.num_experts, recorded.rows, recorded.top_k)
    other = (native.layers, native.num_experts, native.rows, native.top_k)
    if header != other:
        raise RoutingError(
            f"routings of (layers, experts, rows, experts per token) {header} and {other} cannot be compared; give two "
            "recordings of the same tokens in the same model."
        )
    device = native.parts[0].device
    counted = _flags("real", real, recorded.rows, device)
    kept = counted & _flags("mask", mask, recorded.rows, device)
    a, b = (_comparable(trace.experts.to(device)) for trace in (recorded, native))
    equal_slots = _equal_rows(a, b) & kept[:, None]
    # Only rows with another order need a comparison of their sets.
    moved = kept[:, None] & ~equal_slots
    differ = torch.zeros_like(moved)
    differ[moved] = (a[moved].sort(-1).values != b[moved].sort(-1).values).any(-1)
    counts = torch.cat(
        [differ.sum(0), equal_slots.sum(0), differ.any(1).sum()[None], counted.sum()[None], kept.sum()[None]]
    ).tolist()
    layers = len(recorded.layers)
    any_layer, total, compared = counts[2 * layers :]
    return Agreement(
        layers=recorded.layers,
        tokens=compared,
        set_mismatches=tuple(counts[:layers]),
        order_agreements=tuple(counts[layers : 2 * layers]),
        token_mismatches=any_layer,
        native_rows=total - compared,
    )


def _flags(name: str, flags: Tensor | None, rows: int, device: torch.device) -> Tensor:
    if flags is None:
        return torch.ones(rows, dtype=torch.bool, device=device)
    if flags.numel() != rows:
        raise RoutingError(f"{name} has {flags.numel()} values for {rows} rows of routing; allowed: one per row.")
    return flags.reshape(-1).to(device=device, dtype=torch.bool)


def _equal_rows(a: Tensor, b: Tensor) -> Tensor:
    """Compare along the last axis; as one machine word if its size allows, because a reduction over few values is slow."""
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.shape[-1] * a.element_size())
    if word is None or a.numel() == 0:
        return (a == b).all(-1)
    return (a.contiguous().view(word) == b.contiguous().view(word)).squeeze(-1)


def _comparable(ids: Tensor) -> Tensor:
    """Return uint16 ids as int16 bits: few devices can sort or index uint16, and equality does not depend on the order."""
    return ids.view(torch.int16) if ids.dtype == torch.uint16 else ids
