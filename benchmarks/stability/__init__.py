"""Stability with controls: which mismatch keeps a small policy from learning, and what remedies it."""
