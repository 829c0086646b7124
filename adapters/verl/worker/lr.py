"""The `lr` section in verl: a multiplier on the schedule of an actor's worker.

A step is one of verl's updates. verl's scheduler moves once per update, however many mini-batches and epochs the update has, and
`period` and warm-up count updates too. In `separate_async`, the `parameter_sync_step` local updates between two weight updates
are one step. Every rank gets the driver's statistics, so all multipliers are the same.
"""

from __future__ import annotations

from typing import Any

REQUIRED = "use verl's trainer with this package's trainer_mode"
"""Advice where the driver gave no statistics before an update; the update is refused."""


def warmup_steps(optimizer_config: Any) -> int:
    """Return how many updates of warm-up the schedule of verl's FSDP engine has."""
    if optimizer_config.lr_warmup_steps > 0:
        return int(optimizer_config.lr_warmup_steps)
    return int(optimizer_config.lr_warmup_steps_ratio * optimizer_config.total_training_steps)
