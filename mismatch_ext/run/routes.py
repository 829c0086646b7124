"""The trainer's forward passes under recorded routes: the engine's (R3), or those of the trainer's own first pass (R2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mismatch_ext.errors import RoutingError
from mismatch_ext.recorder import PREFIX
from mismatch_ext.rng import forked_rng
from mismatch_ext.routing import align
from mismatch_ext.routing.replaying import REFERENCE, RouteReplay
from mismatch_ext.run.batch import Batch, routes_of
from mismatch_ext.run.loop import Loop


class Routes:
    """Runs forward passes of batches under their routes; without a `routing` section every pass chooses its own routes.

    Args:
        loop: The loop.

    Attributes:
        replay: Replays the routes; None without a `routing` section, and before `begin`.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop, self._trainer, self._section = loop, loop.trainer, loop.block.routing
        self.replay: RouteReplay | None = None

    def begin(self) -> None:
        """Prepare the trainer's model, and let the engine record routes if they are replayed (R3)."""
        if self._section is None:
            return
        self.replay = RouteReplay(
            self._section, self._trainer.routing, self._trainer.policy(), seed=self._loop.seed, ranks=self._loop.ranks
        )
        if self._section.mode == "R3":
            self._loop.rollout.record_routing(self.replay.layout.shape)

    def check(self, batch: Batch) -> None:
        """Refuse rollouts that lack the engine's routes under R3.

        Raises:
            RoutingError: The rollouts have no routes.
        """
        if self._section is not None and self._section.mode == "R3" and batch.routing is None:
            raise RoutingError(
                "mismatch.routing.mode='R3', and these rollouts have no routes; let rollout.generate sample them once the run "
                "has been started."
            )

    @contextmanager
    def under(self, batch: Batch, *, reference: bool = False) -> Iterator[None]:
        """Run the forward pass of a batch under its routes; under R2 the first pass, without gradients, records them.

        Args:
            batch: The batch.
            reference: Whether it is a pass of the reference policy.

        Raises:
            RoutingError: There are no routes yet, they do not fit, or no pass was over the batch's tokens.
            ReplayError: A pass did not follow the routes.
        """
        replay, trainer = self.replay, self._trainer
        if replay is None or (reference and not replay.config.reference):
            yield
            return
        if batch.routing is None:
            if reference or torch.is_grad_enabled():
                raise RoutingError(
                    "mismatch.routing.mode='R2' replays the routes of the old-logprob pass, and there was none of this batch: "
                    "score it under torch.no_grad() first."
                )
            with trainer.routing.record_routing(trainer.policy(), version=self._loop.steps) as recording:
                yield
            batch.routing = routes_of(recording.passes, batch)
            return
        trace, recorded = align(batch.routing, batch.attention_mask)
        real, split, before = batch.attention_mask.flatten(), REFERENCE if reference else batch.split, replay.forwards
        with replay.replaying(trainer.policy(reference=reference), trace, recorded, real=real, split=split):
            yield
        if replay.forwards == before:
            raise RoutingError(
                "no forward pass in this block was over the batch's tokens, so that nothing was replayed; pass batch.tokens and "
                "batch.attention_mask as they are."
            )

    def logprobs(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return `trainer.logprobs` under the batch's routes."""
        with self.under(batch, reference=reference):
            return self._trainer.logprobs(batch, reference=reference)

    def logits(self, batch: Batch, *, reference: bool = False) -> Tensor:
        """Return `trainer.logits` under the batch's routes."""
        with self.under(batch, reference=reference):
            return self._trainer.logits(batch, reference=reference)

    def native(self, batch: Batch) -> Tensor | None:
        """Return log-probabilities `[B, T]` under the trainer's own routes; None if the batch is not drawn for this."""
        if self.replay is None or batch.routing is None or not self.replay.draws.native_gap():
            return None
        with torch.no_grad(), forked_rng(self._trainer.device):
            return self._trainer.logprobs(batch)

    def metrics(self, split: str) -> tuple[dict[str, float], dict[str, float]]:
        """Return the metrics to log of a split's passes since the last call, and those of each layer; all ranks must call it."""
        if self.replay is None:
            return {}, {}
        found = {PREFIX + name: value for name, value in self.replay.take_others(split, self._loop.ranks).items()}
        agreement = self.replay.take_agreement(split, self._loop.ranks)
        if agreement is None:
            return found, {}
        found |= {PREFIX + name: value for name, value in agreement.metrics().items()}
        return found, {PREFIX + name: value for name, value in agreement.layer_metrics().items()}
