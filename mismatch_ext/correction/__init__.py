"""Importance corrections: weights and rejection for the gap between rollout policy and trainer policy."""

from mismatch_ext.correction.settings import COMPAT, PRESETS, RULES, Rule, Settings, parse_rules, resolve
from mismatch_ext.correction.weights import Correction, correct

__all__ = ["COMPAT", "PRESETS", "RULES", "Correction", "Rule", "Settings", "correct", "parse_rules", "resolve"]
