"""The `mismatch:` block on its way from verl's driver into every Ray worker and rollout server."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass

from mismatch_ext.config import MismatchConfig

BLOCK_VARIABLE = "MISMATCH_EXT_BLOCK"
"""Environment variable that holds the block as JSON; Ray hands it to all processes of a run, as it does verl's settings."""

MODE_VARIABLE = "MISMATCH_EXT_MODE"
"""Environment variable that holds the trainer's mode as JSON if it is not the default: verl does not tell workers the mode."""


@dataclass(frozen=True, kw_only=True)
class RunMode:
    """How verl's trainer takes turns with its rollout servers.

    Args:
        name: "sync", "colocate_async" or "separate_async".
        updates: Local updates of the actor between two weight updates, verl's `parameter_sync_step`.
    """

    name: str = "sync"
    updates: int = 1

    @property
    def asynchronous(self) -> bool:
        """Whether rollouts of a batch may be of older weights than the servers have."""
        return self.name != "sync"

    def encode(self) -> str:
        """Return the mode as `active_mode` reads it."""
        return json.dumps(asdict(self))


def active_mode() -> RunMode:
    """Return the mode of the run that this process belongs to."""
    text = os.environ.get(MODE_VARIABLE)
    return RunMode(**json.loads(text)) if text else RunMode()


def active_block() -> MismatchConfig | None:
    """Return the block of the run that this process belongs to, or None when there is none.

    Raises:
        ConfigError: The variable was set by hand, and holds no block.
    """
    text = os.environ.get(BLOCK_VARIABLE)
    return MismatchConfig.parse(text, f"the variable {BLOCK_VARIABLE}") if text else None


def encode(block: MismatchConfig) -> str:
    """Return the block as `active_block` reads it."""
    return json.dumps(block.to_dict(), sort_keys=True)


def digest(block: MismatchConfig | None) -> str:
    """Return a short digest of a block, by which processes compare theirs; "none" when there is none."""
    return "none" if block is None else hashlib.sha256(encode(block).encode()).hexdigest()[:16]
