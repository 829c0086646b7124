"""A Megatron router of verl's that was given no routes to replay chooses for itself, without an error."""

import torch
from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction

PEER = "verl"
REPORTED = "not reported"
WORKAROUND = "patch `verl/megatron_closed_topk` with `ReplayGuard` (adapters/verl/megatron.py) refuses the pass"
EXPECTED = "an error"


def seen() -> str:
    """Return what a router does that is to replay and has no routes."""
    router = RouterReplay()
    router.router_replay_action = RouterReplayAction.REPLAY_FORWARD
    _, chosen = router.get_replay_topk(
        torch.tensor([[0.1, 0.7, 0.2]]), 1, default_compute_topk=lambda scores, top_k, **_: scores.topk(top_k)
    )
    return f"expert {chosen.item()}, its own choice"


def with_workaround() -> str:
    """Select with this package's patch in place."""
    from mismatch_ext.adapters.verl.megatron import ReplayGuard
    from mismatch_ext.patches.verl.megatron_replay import CLOSED_TOPK

    from mismatch_ext.patching import applied

    with applied(CLOSED_TOPK.calling(ReplayGuard())):
        return seen()


if __name__ == "__main__":
    from docs.upstream.shown import main

    main(globals())
