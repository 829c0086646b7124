"""Replay of recorded routes around a trainer's forward passes, and measurement of some of these passes.

Every pass of the policy is replayed. In a share of the passes, the model's own choice is compared with the recorded routes. The
first pass that has recorded routes is always checked: routes of another layer or token have valid ids too, and only the model can
tell that they are wrong.

Shapes: R rows (tokens of a forward pass, batch-first, padding included), L MoE layers, K experts per token.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor

from mismatch_ext.config import RoutingConfig
from mismatch_ext.ranks import ONE_PROCESS, Ranks, together
from mismatch_ext.routing.agreement import (
    OTHER_PASSES,
    agreement,
    agreement_metrics,
    check_plausible,
    no_agreement,
)
from mismatch_ext.routing.tokens import Others
from mismatch_ext.routing.trace import RoutingTrace
from mismatch_ext.states import from_json, state, to_json
from mismatch_ext.sums import Sums, merged, over_ranks

REFERENCE = "reference"
"""Split of the reference's passes; its own choice says nothing about the gap between engine and trainer."""


class Backend(Protocol):
    """An implementation of replay and recording, for example the module `mismatch_ext.adapters.transformers.routing`."""

    def moe_layout(self, model: Any) -> Any:
        """Return a model's routers: `layers`, absolute decoder indices of the MoE layers; `num_experts` and `top_k` per layer."""

    def replay_routing(
        self, model: Any, trace: RoutingTrace, mask: Tensor | None, *, native: bool, others: Others
    ) -> AbstractContextManager[Any]:
        """Return a context in which passes over the trace's tokens use its routes; it counts `forwards` and `others`.

        With `native=True` it has the trace `native` of what the model itself chose.
        """

    def record_routing(self, model: Any, *, version: int = 0) -> AbstractContextManager[Any]:
        """Return a context in which routes are recorded; it gives an object with the trace of each forward pass, `passes`."""


@state
class Draws:
    """How many draws have been made; with the seed it decides the next one."""

    made: Annotated[int, Field(ge=0)] = 0


class MeasuredPasses:
    """Draws at random what is measured during training; every process and a resumed run draw the same from the host's seed."""

    def __init__(self, config: RoutingConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start the draws again, because a training begins."""
        self._made = 0
        self._made_in_evaluations: Counter[str] = Counter()

    def _draw(self, split: str) -> bool:
        # Ranks may have different numbers of evaluation batches, which must not part their draws in training.
        if split == "train":
            self._made += 1
            number = f"{self._made}"
        else:
            self._made_in_evaluations[split] += 1
            number = f"{split}/{self._made_in_evaluations[split]}"
        return random.Random(f"{self._seed}/{number}").random() < self._config.measured

    def agreement(self, split: str = "train") -> bool:
        """Draw whether the model's own choice is measured in a replayed pass."""
        return self._draw(split)

    def native_gap(self, split: str = "train") -> bool:
        """Draw whether a rollout batch is also scored without replay; never under R2, whose recorded pass is without."""
        return self._draw(split) and self._config.mode == "R3"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the draws as JSON-able data."""
        return to_json(Draws(made=self._made))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; raises RecordError if it is damaged."""
        self._made = from_json(Draws, state, "routing").made


class RouteReplay:
    """Replays routes around a trainer's forward passes, and counts how far they differ from the model's own routes.

    `ranks` refuse routes together; they must run the same passes. Raises ReplayError if the model's routing cannot be replayed,
    and warns if it selects something besides experts.
    """

    def __init__(
        self, config: RoutingConfig, backend: Backend, model: Any, *, seed: int, ranks: Ranks = ONE_PROCESS
    ) -> None:
        self.config, self.backend = config, backend
        self.layout = backend.moe_layout(model)
        if (unreplayed := getattr(self.layout, "unreplayed", None)) is not None:
            warnings.warn(f"mismatch.routing: {unreplayed}", stacklevel=3)
        self.draws = MeasuredPasses(config, seed)
        self.forwards = 0
        self.others: Counter[str] = Counter()
        self._ranks = ranks
        self._agreement: dict[str, Sums] = {}
        self._checked = config.mode == "R2"  # the model's own routes need no such check

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able data; with it, a resumed run measures the same passes."""
        return self.draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict`."""
        self.draws.load_state_dict(state)

    @contextmanager
    def replaying(self, model: Any, trace: RoutingTrace, mask: Tensor, *, real: Tensor, split: str) -> Iterator[None]:
        """Run the forward pass of a micro-batch under recorded routes; the model itself routes passes over other tokens.

        `mask` is True where a row has a recorded route `[R]`, `real` at tokens that are not padding `[R]`. For the split
        `REFERENCE` nothing is measured. Raises RoutingError or ReplayError, in evaluations on this rank alone.
        """
        policy = split != REFERENCE
        checks, drawn = policy and not self._checked, policy and self.draws.agreement(split)
        # Code that extends the host's step may run the model on other tokens too.
        context = self.backend.replay_routing(model, trace, mask, native=checks or drawn, others="native")
        with context as replay:
            yield
        self.forwards += replay.forwards
        self.others[split] += replay.others
        if checks:
            self._check(trace, replay.native, mask, split)
        if drawn:
            # Compare the comparable rows; the other recorded rows count neither as compared nor as rows without a route.
            same = self._checkable(trace, mask)
            new = agreement(trace, replay.native, same, real=real if same is mask else real & (same | ~mask))
            self._agreement[split] = merged(self._agreement[split], new) if split in self._agreement else new

    def _checkable(self, trace: RoutingTrace, mask: Tensor) -> Tensor:
        """Return the recorded rows `[R]` that come from the scoring weights, because other weights choose other experts."""
        return mask

    def _check(self, trace: RoutingTrace, native: RoutingTrace, mask: Tensor, split: str) -> None:
        """Check that routes are plausible for this model, in training until all ranks had some; if one refuses them, all do."""
        mask = self._checkable(trace, mask)
        # Ranks may have different numbers of evaluation batches, which meet no collective.
        ranks = self._ranks if split == "train" else ONE_PROCESS
        with together(ranks, flags=1) as told:
            told.here[0] = not bool(mask.any())
            if not told.here[0]:
                check_plausible(trace, native, mask)
        lacks_routes = told.anywhere[0]
        self._checked = split == "train" and not lacks_routes

    def take_agreement(self, split: str, ranks: Ranks = ONE_PROCESS) -> dict[str, float]:
        """Return `agreement_metrics` of a split since the last call, over all ranks, which all must call this."""
        layers = self.layout.layers
        return agreement_metrics(over_ranks(self._agreement.pop(split, no_agreement(layers)), ranks), layers)

    def take_others(self, split: str, ranks: Ranks = ONE_PROCESS, *, sharing: int = 1) -> dict[str, float]:
        """Return the passes over other tokens since the last call, of all ranks, `sharing` of which run one pass together."""
        mine = self.others.pop(split, 0) + (self.others.pop(REFERENCE, 0) if split == "train" else 0)
        whole = ranks.sum(torch.tensor(float(mine), dtype=torch.float64))
        return {OTHER_PASSES: float(whole) / sharing}
