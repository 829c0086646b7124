"""Which routes a forward pass of a loop runs under: recorded by the engine, or by the trainer's own first pass of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import RoutingError
from mismatch_ext.ranks import Ranks
from mismatch_ext.recorder import PREFIX
from mismatch_ext.routing import align
from mismatch_ext.routing.replaying import REFERENCE, RouteReplay
from mismatch_ext.run.batch import Batch, routes_of
from mismatch_ext.run.sides import LoopTrainer


def check_routes(config: RoutingConfig | None, batch: Batch) -> None:
    """Refuse rollouts without the routes that are to be replayed.

    Raises:
        RoutingError: They have none.
    """
    if config is not None and config.mode == "R3" and batch.routing is None:
        raise RoutingError(
            "mismatch.routing.mode='R3', and these rollouts have no routes; let rollout.generate sample them once the run "
            "has been started."
        )


@contextmanager
def routed(
    replay: RouteReplay | None, trainer: LoopTrainer, batch: Batch, *, version: int, reference: bool = False
) -> Iterator[None]:
    """Run the forward pass of a batch under its routes; under R2 the first one, without gradients, records them.

    Args:
        replay: What replays; None leaves the pass as it is.
        trainer: The trainer.
        batch: The batch.
        version: Steps taken before, for routes that are recorded here.
        reference: Whether it is a pass of the reference policy.

    Raises:
        RoutingError: There are no routes yet, they do not fit, or no pass was over the batch's tokens.
        ReplayError: A pass did not obey them.
    """
    if replay is None or (reference and not replay.config.reference):
        yield
        return
    if batch.routing is None:
        if reference or torch.is_grad_enabled():
            raise RoutingError(
                "mismatch.routing.mode='R2' replays the routes of the old-logprob pass, and there was none of this batch: score "
                "it under torch.no_grad() first."
            )
        with trainer.routing.record_routing(trainer.policy(), version=version) as recording:
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


def replayed(replay: RouteReplay, split: str, ranks: Ranks) -> tuple[dict[str, float], dict[str, float]]:
    """Return what is logged of the passes of a split since the last call, and what is written of each layer; on all ranks."""
    found = {PREFIX + name: value for name, value in replay.take_others(split, ranks).items()}
    agreement = replay.take_agreement(split, ranks)
    if agreement is None:
        return found, {}
    found |= {PREFIX + name: value for name, value in agreement.metrics().items()}
    return found, {PREFIX + name: value for name, value in agreement.layer_metrics().items()}
