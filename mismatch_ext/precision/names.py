"""What the three compute dtypes are called; imports no torch, so that settings are read without it."""

from __future__ import annotations

NAMES = ("float32", "float16", "bfloat16")
"""Canonical names."""
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Names in trainers' and engines' arguments."""
ALIASES = {**{name: name for name in NAMES}, **{short: name for name, short in SHORT.items()}}
ALIASES |= {"float": "float32", "half": "float16"}
"""Canonical name of each name that is understood."""
MEANT = {**ALIASES, "f32": "float32", "single": "float32", "full": "float32", "32": "float32"}
MEANT |= {"f16": "float16", "16": "float16"}
"""Canonical name of what somebody who writes it means, for "Did you mean": not understood, because "16" is two dtypes."""


def bare(dtype: object) -> str:
    """Return a dtype's name in lower case, without torch's prefix."""
    return str(dtype).lower().removeprefix("torch.")


def spelled(dtype: object) -> str:
    """Return the canonical name of a dtype read from a peer, or its lower-case name if it has none."""
    return ALIASES.get(bare(dtype), bare(dtype))
