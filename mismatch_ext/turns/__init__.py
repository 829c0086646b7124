"""Completions that several calls of an engine have made: the record of each call, joined and held to what is trained on.

A turn is one call: the engine is given the completion so far, with what a tool or an environment has put there, and samples on
from it. What is trained on is one row of tokens, in which every token that counts as the policy's has to be one that a turn
sampled, behind the very tokens that the turn was given.
"""

from mismatch_ext.turns.holding import Calls, Sampled, expect_sampled
from mismatch_ext.turns.joining import Joined, join_turns
from mismatch_ext.turns.masks import masks_of
from mismatch_ext.turns.rows import Trained, any_asked

__all__ = ["Calls", "Joined", "Sampled", "Trained", "any_asked", "expect_sampled", "join_turns", "masks_of"]
