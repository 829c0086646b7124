"""What the driver looks at in fresh rollouts before anything is learned from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transfer_queue as tq
from mismatch_ext.adapters.verl.measure import sampled_rows
from mismatch_ext.adapters.verl.replay import FIELD, TOKENS
from mismatch_ext.adapters.verl.rollout.digests import without_digests
from torch import Tensor
from verl.trainer.ppo.metric_utils import RolloutMoELoadBalanceMetricsAccumulator

from mismatch_ext.config import RoutingConfig
from mismatch_ext.errors import RoutingError


def versions(batch: Any) -> list[tuple[str, int | None, int | None]]:
    """Return each sampled rollout's key, and the versions of the weights at its first and last token; None when unknown."""
    rows = ((batch.keys[row], batch.tags[row]) for row in sampled_rows(batch))
    return [(key, tag.get("min_global_steps"), tag.get("max_global_steps")) for key, tag in rows]


def check_routes(batch: Any, step: int) -> None:
    """Refuse and name rollouts without routes: with one of them in a batch, TransferQueue returns no routes for any rollout."""
    if not _lack_routes(list(batch.keys), batch.partition_id):
        return
    keys = [batch.keys[row] for row in sampled_rows(batch)]
    if lost := [key for key in keys if _lack_routes([key], batch.partition_id)]:
        named = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
        raise RoutingError(
            f"{len(lost)} of {len(keys)} rollouts of step {step} came without routing ({named}), and R3 cannot replay them. The "
            "rollout server records routing, so look at the agent loop: it must pass on `routed_experts` of each answer."
        )


def _lack_routes(keys: Sequence[str], partition: str) -> bool:
    return FIELD not in tq.get_client().kv_retrieve_meta(list(keys), partition).field_names


@contextmanager
def without_routes(batch: Any, routing: RoutingConfig | None) -> Iterator[None]:
    """Keep the routes of a batch from a pass that does not replay them: they are most of its bytes."""
    if routing is None:
        yield
        return
    given = batch.fields
    known = given or tq.get_client().kv_retrieve_meta(list(batch.keys), batch.partition_id).field_names
    batch.fields = [name for name in known if name not in (FIELD, TOKENS)]
    try:
        yield
    finally:
        batch.fields = given


class ExpertLoads(RolloutMoELoadBalanceMetricsAccumulator):
    """verl's metrics of the experts' load, which it takes of the routes in the driver."""

    def update(self, routed_experts: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        """Count as verl does."""
        given = None if routed_experts is None else without_digests(routed_experts)
        return bool(super().update(given, *args, **kwargs))
