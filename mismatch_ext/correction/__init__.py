"""Importance corrections: weights and rejection for the gap between rollout policy and trainer policy."""

from mismatch_ext.correction.logged import LOGGED, of_weights, over_ranks
from mismatch_ext.correction.weights import Correction, correct
from mismatch_ext.presets import COMPAT, PRESETS, RULES, ResolvedCorrection, Rule, parse_rules, resolve

__all__ = [
    "COMPAT",
    "LOGGED",
    "PRESETS",
    "RULES",
    "Correction",
    "Rule",
    "ResolvedCorrection",
    "correct",
    "of_weights",
    "over_ranks",
    "parse_rules",
    "resolve",
]
