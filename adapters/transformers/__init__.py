"""transformers models: token scores, dtypes read back, FP16 readiness, vocabulary checks, routing record and replay."""

from mismatch_ext.versions import present

present("transformers")

from mismatch_ext.adapters.transformers.checkpoint import checkpoint_parameters
from mismatch_ext.adapters.transformers.readiness import scan_checkpoint
from mismatch_ext.adapters.transformers.reading import read_trainer
from mismatch_ext.adapters.transformers.routing import (
    MoeLayout,
    Recording,
    Replay,
    moe_layout,
    record_routing,
    replay_routing,
)
from mismatch_ext.adapters.transformers.scoring import score_tokens
from mismatch_ext.adapters.transformers.side import TrainedModel
from mismatch_ext.adapters.transformers.vocabulary import VocabularySurplus, vocabulary_surplus

__all__ = [
    "MoeLayout",
    "Recording",
    "Replay",
    "TrainedModel",
    "VocabularySurplus",
    "checkpoint_parameters",
    "moe_layout",
    "read_trainer",
    "record_routing",
    "replay_routing",
    "scan_checkpoint",
    "score_tokens",
    "vocabulary_surplus",
]
