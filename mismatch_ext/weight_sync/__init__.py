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
from mismatch_ext.weight_sync.decoding import Decoded

__all__ = [
    "CEILING",
    "Decoded",
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
