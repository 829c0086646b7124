"""Record and replay of routing in megatron-core's own models: it works, and no trainer uses it.

verl's Megatron engine replays by itself, and this package checks that replay (`adapters/verl/megatron`). What is here has its own
tests, and is no part of the package until a trainer needs it.
"""

from tests.peers.megatron.parked.layout import MoeLayout, moe_layout
from tests.peers.megatron.parked.routing import Recording, Replay, record_routing, replay_routing

__all__ = ["MoeLayout", "Recording", "Replay", "moe_layout", "record_routing", "replay_routing"]
