"""megatron-core's RouterReplay takes routes that are a row short: the last token reaches no expert, without an error."""

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

PEER = "megatron-core"
REPORTED = "not reported"
WORKAROUND = "patch `verl/megatron_closed_topk` with `ReplayGuard.after` (adapters/verl/megatron.py) refuses it"
EXPECTED = 2.0


def seen(look=lambda router, scores, indices: None) -> float:
    """Return how many experts the last of four tokens reaches, of two, when an engine's routes lack the sampled token's row."""
    router = RouterReplay()
    router.set_target_indices(torch.tensor([[0, 1], [1, 2], [2, 3]]))
    router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    scores = torch.randn(4, 4)
    _, chosen = topk_routing_with_score_function(scores, 2, router_replay=router)
    look(router, scores, router.get_replay_topk(scores, 2)[1])
    return float(chosen[-1].sum())


def with_workaround() -> float:
    """Look at what was selected as this package does around verl's replay."""
    from mismatch_ext.adapters.verl.megatron import ReplayGuard

    return seen(lambda router, scores, indices: ReplayGuard().after(router, scores, 2, indices, lambda: indices))


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
