"""What the routes of a model look like, whichever engine recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import Repr

from mismatch_ext.errors import RoutingError

_short = Repr()
_short.maxlong = 40


@dataclass(frozen=True, kw_only=True)
class RoutingShape:
    """What the routes of a model look like; take it from the model that replays (`moe_layout(model).shape`).

    What an engine sends does not say: SGLang's are bytes, and of vLLM's ids nobody could tell two layers that were swapped.

    Args:
        num_layers: Decoder layers L, dense ones included (`num_hidden_layers`): SGLang has a row of every layer.
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
    """Return the position of the first recorded token of each prompt, given one for all or one for each.

    Raises:
        RoutingError: There are neither one nor as many as prompts.
    """
    starts = [routed_experts_start] * prompts if isinstance(routed_experts_start, int) else routed_experts_start
    if len(starts) != prompts:
        raise RoutingError(
            f"{len(starts)} values of routed_experts_start for {prompts} prompts; allowed: one, or one per prompt."
        )
    return starts
