"""megatron-core's RouterReplay replays a row of zeros, which engines send for what they did not record, as half of expert 0."""

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

PEER = "megatron-core"
REPORTED = "not reported"
WORKAROUND = "`RoutingTrace.ingest` (mismatch_ext/routing) refuses such rows before they reach a router"
EXPECTED = 1.0
ROUTES = torch.tensor([[1, 2], [0, 0]])


def seen(ingest=lambda routes: None) -> float:
    """Return the sum of the gates of the second token, which is 1 for two experts after softmax."""
    ingest(ROUTES)
    router = RouterReplay()
    router.set_target_indices(ROUTES)
    router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    gates, _ = topk_routing_with_score_function(torch.randn(2, 4), 2, router_replay=router)
    return float(gates[1].sum())


def with_workaround() -> float:
    """Ingest them first, as every adapter does."""
    from mismatch_ext.routing import RoutingTrace

    return seen(
        lambda routes: RoutingTrace.ingest(
            routes[:, None].numpy(), num_experts=4, layers=(0,), tokens=2, version=0, request="a"
        )
    )


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
