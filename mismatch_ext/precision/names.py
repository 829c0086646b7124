"""Names of the three compute dtypes; this module does not import torch, so that settings can be read without it."""

from __future__ import annotations

NAMES = ("float32", "float16", "bfloat16")
"""Canonical names."""
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""Short names, as in the arguments of trainers and engines."""
ALIASES = {**{name: name for name in NAMES}, **{short: name for name, short in SHORT.items()}}
ALIASES |= {"float": "float32", "half": "float16"}
"""Canonical name of each accepted name."""
MEANT = {**ALIASES, "f32": "float32", "single": "float32", "full": "float32", "32": "float32"}
MEANT |= {"f16": "float16", "16": "float16"}
"""Canonical name that a user probably means, for "Did you mean": also names that are not accepted, as "16" is two dtypes."""


def bare(dtype: object) -> str:
    """Return a dtype's name in lower case, without torch's prefix."""
    return str(dtype).lower().removeprefix("torch.")


def spelled(dtype: object) -> str:
    """Return the canonical name of a dtype that was read from a peer, or its lower-case name if it has none."""
    return ALIASES.get(bare(dtype), bare(dtype))
