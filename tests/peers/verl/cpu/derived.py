"""Classes that a user has derived from this package's and verl's, as settings name them; each says that it was there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mismatch_ext.adapters.verl.rollout.vllm_extension import RolloutExtension
from mismatch_ext.adapters.verl.sampling_mask import MaskedLoopManager
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

DERIVED = "VERL_CPU_DERIVED"
"""Environment variable that names the file in which they say so."""


def _say(name: str) -> None:
    if file := os.environ.get(DERIVED):
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(f"{name}\n")


class OwnExtension(RolloutExtension):
    """In vLLM's workers."""

    def mismatch_report(self, features: list[str], acts: bool) -> dict[str, Any]:
        """Report as this package's class does."""
        _say("OwnExtension")  # vLLM makes a base of its worker's class of it
        return super().mismatch_report(features, acts)


class OwnLoopManager(MaskedLoopManager):
    """In the driver."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _say("OwnLoopManager")


class OwnCallback(CheckpointCallback):
    """In the driver, for verl's `trainer.checkpoint_callback_class`."""

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        """Say for which step and of which folder it was called."""
        _say(f"OwnCallback/{global_step}/{Path(checkpoint_dir).name}")
