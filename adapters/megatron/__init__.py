"""megatron-core models: record and replay which experts their routers choose."""

from mismatch_ext.versions import require

require("megatron-core")

from mismatch_ext.adapters.megatron.layout import MoeLayout, moe_layout
from mismatch_ext.adapters.megatron.routing import Recording, Replay, record_routing, replay_routing

__all__ = ["MoeLayout", "Recording", "Replay", "moe_layout", "record_routing", "replay_routing"]
