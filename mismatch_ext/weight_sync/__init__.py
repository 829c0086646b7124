"""After each weight update: does the engine compute with the trainer's weights? `verifier.WeightVerifier` asks both sides."""

from mismatch_ext.weight_sync.checker import (
    CEILING,
    FACTOR,
    FLOOR,
    HISTORY,
    MOVEMENT_FLOOR,
    STATE_VERSION,
    Status,
    SyncObservation,
    SyncVerdict,
    TensorComparison,
    WeightSyncChecker,
)

__all__ = [
    "CEILING",
    "FACTOR",
    "FLOOR",
    "HISTORY",
    "MOVEMENT_FLOOR",
    "STATE_VERSION",
    "Status",
    "SyncObservation",
    "SyncVerdict",
    "TensorComparison",
    "WeightSyncChecker",
]
