"""Completions that took several calls of the engine: the calls' records, joined and compared with the row that is trained on.

A turn is one call of the engine. The engine is given the completion so far, with the output of tools or an environment, and
samples from there. The trainer trains on one row of tokens. Every token of the row that counts as the policy's must have been
sampled by a turn, after exactly the tokens that the turn was given.
"""

from mismatch_ext.turns.joining import Joined, join_turns
from mismatch_ext.turns.masks import Calls, Sampled, masks_of
from mismatch_ext.turns.rows import Trained, any_asked

__all__ = ["Calls", "Joined", "Sampled", "Trained", "any_asked", "join_turns", "masks_of"]
