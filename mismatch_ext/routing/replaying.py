"""Replay of recorded routes around a trainer's forward passes, and measurement of some of these passes.

Every pass of the policy is replayed. In a share of the passes, the model's own choice is compared with the recorded routes. The
first pass that has recorded routes is always checked: routes of another layer or token have valid ids too, and only the model can
tell that they are wrong.

Shapes: R rows (tokens of a forward pass, batch-first, padding included), L MoE layers, K experts per token.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor

from mismatch_ext.checkpoint import load_random_state, random_state
from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import RoutingError
from mismatch_ext.ranks import ONE_PROCESS, Ranks
from mismatch_ext.routing.agreement import OTHER_PASSES, Agreement, agreement
from mismatch_ext.routing.plausibility import check_plausible
from mismatch_ext.routing.tokens import Others
from mismatch_ext.routing.trace import RoutingTrace

REFERENCE = "reference"
"""Split of the reference's passes; its own choice says nothing about the gap between engine and trainer."""


class Layout(Protocol):
    """The routers of a model: absolute decoder indices of the MoE layers, experts per layer and per token."""

    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...


class Replayed(Protocol):
    """The result of a replaying context: how many passes were replayed, and how many had other tokens."""

    forwards: int

    @property
    def others(self) -> int: ...
    @property
    def native(self) -> RoutingTrace: ...


class Recorded(Protocol):
    """The routes of each pass in a recording context."""

    @property
    def passes(self) -> list[RoutingTrace]: ...


class Backend(Protocol):
    """An implementation of replay and recording, for example the module `mismatch_ext.adapters.transformers.routing`."""

    def moe_layout(self, model: Any) -> Any:
        """Return the model's `Layout`."""

    def replay_routing(
        self, model: Any, trace: RoutingTrace, mask: Tensor | None, *, native: bool, others: Others
    ) -> AbstractContextManager[Replayed]:
        """Return a context in which forward passes over the trace's tokens use the trace's routes."""

    def record_routing(self, model: Any, *, version: int = 0) -> AbstractContextManager[Recorded]:
        """Return a context in which the routes of the model's forward passes are recorded."""


class MeasuredPasses:
    """Draws at random what is measured during training; every process and a resumed run draw the same.

    Args:
        config: The `routing` section.
        seed: The host's own training seed; the same on every rank.
    """

    def __init__(self, config: RoutingConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start the draws again, because a training begins."""
        self._random = random.Random(self._seed)

    def agreement(self) -> bool:
        """Draw whether the model's own choice is measured in a replayed pass."""
        return self._random.random() < self._config.measured

    def native_gap(self) -> bool:
        """Draw whether a rollout batch is also scored without replay; never under R2, whose recorded pass is without."""
        return self._random.random() < self._config.measured and self._config.mode == "R3"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the draws as JSON-able data."""
        return {"random": random_state(self._random)}

    def load_state_dict(self, state: Mapping[str, Any], rank: int = 0) -> None:
        """Go on from what `state_dict` returned.

        Args:
            state: The state. For verl's engines, releases up to 0.1 kept a list of the draws of all ranks.
            rank: This rank, whose entry of such a list is taken. If the list has no such entry, the draws stay as they are.

        Raises:
            RecordError: The state is damaged.
        """
        found = state.get("random")
        if isinstance(found, list):
            if rank < len(found):
                load_random_state(self._random, found[rank])
        else:
            load_random_state(self._random, found)


class RouteReplay:
    """Replays routes around a trainer's forward passes, and counts how far they differ from the model's own routes.

    Args:
        config: The `routing` section.
        backend: The implementation of replay and recording.
        model: The trainer's model.
        seed: The host's own training seed; the same on every rank.
        ranks: The processes that must refuse routes together, if otherwise a rank would wait for another without end. All of
            them must then run the same passes.

    Attributes:
        layout: The model's routers.
        draws: The draws that decide which passes are measured.
        forwards: Number of forward passes that were replayed.
        others: By split, number of forward passes over other tokens than those of the routes; the model itself routed these.

    Warns:
        UserWarning: The model selects something besides experts, which is not replayed.

    Raises:
        ReplayError: The model's routing cannot be replayed.
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
        self._agreement: dict[str, Agreement] = {}
        self._checked = config.mode == "R2"  # the model's own routes need no such check

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able data; with it, a resumed run measures the same passes."""
        return self.draws.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], rank: int = 0) -> None:
        """Go on from a state of `state_dict`; see `MeasuredPasses.load_state_dict` for arguments and errors."""
        self.draws.load_state_dict(state, rank)

    @contextmanager
    def replaying(self, model: Any, trace: RoutingTrace, mask: Tensor, *, real: Tensor, split: str) -> Iterator[None]:
        """Run the forward pass of a micro-batch under recorded routes; the model itself routes passes over other tokens.

        Args:
            model: The policy's model, possibly wrapped, or the reference's.
            trace: Routes, R rows.
            mask: True where a row has a recorded route `[R]`, bool; the model itself routes the other rows.
            real: True at tokens that are not padding `[R]`, bool.
            split: The pass counts for this split: "train", "eval/<name>", or `REFERENCE`, for which nothing is measured.

        Raises:
            RoutingError: Routes do not fit their tokens, or cannot come from this model.
            ReplayError: The forward pass did not follow the routes.
        """
        policy = split != REFERENCE
        checks, drawn = policy and not self._checked, policy and self.draws.agreement()
        # Code that extends the host's step may run the model on other tokens too.
        context = self.backend.replay_routing(model, trace, mask, native=checks or drawn, others="native")
        with context as replay:
            yield
        self.forwards += replay.forwards
        self.others[split] += replay.others
        if checks:
            self._check(trace, replay.native, mask)
        if drawn:
            self._count(split, self._agreement_of(trace, replay.native, mask, real))

    def _agreement_of(self, trace: RoutingTrace, native: RoutingTrace, mask: Tensor, real: Tensor) -> Agreement:
        """Compare the comparable rows; the other recorded rows count neither as compared nor as rows without a route."""
        same = self._checkable(trace, mask)
        return agreement(trace, native, same, real=real if same is mask else real & (same | ~mask))

    def _checkable(self, trace: RoutingTrace, mask: Tensor) -> Tensor:
        """Return the recorded rows `[R]` that come from the scoring weights, because other weights choose other experts."""
        return mask

    def _check(self, trace: RoutingTrace, native: RoutingTrace, mask: Tensor) -> None:
        """Check once that routes are plausible for this model; if one rank refuses them, all ranks do."""
        mask = self._checkable(trace, mask)
        error, some = None, bool(mask.any())
        try:
            if some:
                check_plausible(trace, native, mask)
        except RoutingError as failure:
            error = failure
        told = self._ranks.gather([None if error is None else str(error), some])
        if error is not None:
            raise error
        for rank, (message, _) in enumerate(told):
            if message is not None:
                raise RoutingError(f"rank {rank}: {message}")
        self._checked = all(known for _, known in told)

    def _count(self, split: str, new: Agreement) -> None:
        self._agreement[split] = self._agreement[split].merge(new) if split in self._agreement else new

    def take_agreement(self, split: str, ranks: Ranks = ONE_PROCESS) -> Agreement | None:
        """Return the agreement that was measured in a split since the last call, over all ranks; None if none was measured.

        Args:
            split: As for `replaying`.
            ranks: The processes that train together; all of them must call this.
        """
        mine = self._agreement.pop(split, None)
        states = [state for state in ranks.gather(None if mine is None else mine.state_dict()) if state is not None]
        return functools.reduce(Agreement.merge, map(Agreement.from_state, states)) if states else None

    def take_others(self, split: str, ranks: Ranks = ONE_PROCESS, *, sharing: int = 1) -> dict[str, float]:
        """Return the number of passes over other tokens since the last call, over all ranks, by its metric name.

        Args:
            split: As for `replaying`; the reference's passes count for "train".
            ranks: The processes that train together; all of them must call this.
            sharing: Number of ranks that run one pass together, each on a part of its rows.
        """
        mine = self.others.pop(split, 0) + (self.others.pop(REFERENCE, 0) if split == "train" else 0)
        return {OTHER_PASSES: sum(ranks.gather(mine)) / sharing}
