"""What the driver looks at in fresh rollouts before anything is learned from them."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from mismatch_ext.adapters.verl.worker.replay import FIELD

from mismatch_ext.errors import RoutingError


def sampled_rows(batch: Any) -> list[int]:
    """Return the rows of a batch that verl has not filled it up with."""
    return [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]


def versions(batch: Any) -> list[tuple[str, int | None, int | None]]:
    """Return each sampled rollout's key, and the versions of the weights at its first and last token; None when unknown.

    verl stamps a weight update with its step, and its servers their answers with the stamp of the weights that they have.
    """
    rows = ((batch.keys[row], batch.tags[row]) for row in sampled_rows(batch))
    return [(key, tag.get("min_global_steps"), tag.get("max_global_steps")) for key, tag in rows]


def check_routes(batch: Any, step: int) -> None:
    """Name the rollouts without routes: of a batch with one of them TransferQueue hands out the routes of none.

    Args:
        batch: verl's keys of the batch.
        step: Step that the rollouts are of.

    Raises:
        RoutingError: There are some.
    """
    client = tq.get_client()

    def lacks_routes(keys: list[str]) -> bool:
        return FIELD not in client.kv_retrieve_meta(keys, batch.partition_id).field_names

    if not lacks_routes(list(batch.keys)):
        return
    keys = [batch.keys[row] for row in sampled_rows(batch)]
    if lost := [key for key in keys if lacks_routes([key])]:
        named = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
        raise RoutingError(
            f"{len(lost)} of {len(keys)} rollouts of step {step} came without routing ({named}), and R3 cannot replay them. The "
            "rollout server records routing, so look at the agent loop: it must pass on `routed_experts` of each answer."
        )
