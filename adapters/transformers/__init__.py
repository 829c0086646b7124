"""transformers models: token scores, dtypes read back, FP16 readiness, vocabulary checks."""

from mismatch_ext.adapters.transformers.readiness import scan_checkpoint
from mismatch_ext.adapters.transformers.reading import read_trainer
from mismatch_ext.adapters.transformers.scoring import score_tokens
from mismatch_ext.adapters.transformers.vocabulary import VocabularySurplus, vocabulary_surplus

__all__ = ["VocabularySurplus", "read_trainer", "scan_checkpoint", "score_tokens", "vocabulary_surplus"]
