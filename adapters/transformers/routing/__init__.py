"""Record and replay the expert routing of transformers models."""

from mismatch_ext.adapters.transformers.routing.layout import MoeLayout, Router, moe_layout
from mismatch_ext.adapters.transformers.routing.record import Recording, record_routing
from mismatch_ext.adapters.transformers.routing.replay import Replay, replay_routing

__all__ = [
    "MoeLayout",
    "Recording",
    "Replay",
    "Router",
    "moe_layout",
    "record_routing",
    "replay_routing",
]
