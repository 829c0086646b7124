"""The shape of a model's routes, whichever engine recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import Repr

from mismatch_ext.errors import RoutingError

_short = Repr()
_short.maxlong = 40


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """The shape of a model's routes; take it from the model that replays them (`moe_layout(model).shape`).

    An engine's answer does not contain the shape: SGLang sends bytes, and in vLLM's ids two swapped layers would not be noticed.

    Args:
        num_layers: Number of decoder layers L, including dense ones (`num_hidden_layers`); SGLang sends ids for every layer.
        layers: Absolute indices of the MoE layers, ascending.
        num_experts: Experts per layer.
        top_k: Experts per token K.

    Raises:
        RoutingError: A value is out of range.
    """

    num_layers: int
    layers: tuple[int, ...]
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        last = max(self.layers, default=0)
        ascending = list(self.layers) == sorted(set(self.layers)) and bool(self.layers)
        for name, value, ok, allowed in (
            ("num_experts", self.num_experts, 1 <= self.num_experts <= 65536, "1 to 65536"),
            ("top_k", self.top_k, 1 <= self.top_k <= self.num_experts, f"1 to num_experts ({self.num_experts})"),
            ("layers", self.layers, ascending and self.layers[0] >= 0, "ascending decoder indices >= 0, at least one"),
            ("num_layers", self.num_layers, self.num_layers > last, f"more than {last}, the last MoE layer's index"),
        ):
            if not ok:
                raise RoutingError(f"routing shape {name}={_short.repr(value)} is out of range; allowed: {allowed}.")


def starts_of(routed_experts_start: int | Sequence[int], prompts: int) -> Sequence[int]:
    """Return the position of the first recorded token of each prompt, from one position for all prompts or one for each.

    Raises:
        RoutingError: The number of positions is not the number of prompts.
    """
    starts = [routed_experts_start] * prompts if isinstance(routed_experts_start, int) else routed_experts_start
    if len(starts) != prompts:
        raise RoutingError(
            f"{len(starts)} values of routed_experts_start for {prompts} prompts; allowed: one, or one per prompt."
        )
    return starts
