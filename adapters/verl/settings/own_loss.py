"""Which blocks need a loss of this package in verl's workers: asked where the loss is built, and where it is checked for."""

from __future__ import annotations

from mismatch_ext.adapters.verl.settings.correction import settings_of

from mismatch_ext.config import MismatchConfig


def needs_own_loss(block: MismatchConfig) -> str | None:
    """Return the first key of a block that verl's own loss cannot do; None if it can do all of them.

    Args:
        block: The block of the run.

    Returns:
        The key, without `mismatch.` before it.
    """
    if block.kl is not None and block.kl.in_loss:
        return "kl"
    settings = None if block.correction is None else settings_of(block.correction)
    if settings is not None and settings.off_policy_threshold is not None:
        return "correction.off_policy_threshold"
    return "correction.mode='bypass'" if settings is not None and settings.mode == "bypass" else None
