"""What both engines of this package in verl have in common, FSDP's and Megatron's.

The driver's statistics lead their rate, their checkpoints hold this package's state beside verl's, and verl's registry has them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mismatch_ext.adapters.verl.block import RunMode
from mismatch_ext.adapters.verl.worker.state import read_state, write_state
from verl.utils.device import get_device_name
from verl.workers.engine import EngineRegistry

from mismatch_ext.config import MismatchConfig
from mismatch_ext.lr import LrControl

if TYPE_CHECKING:
    from verl.workers.engine import BaseEngine as _Host
else:
    _Host = object

VENDOR = "mismatch"
E = TypeVar("E", bound="SteeredMixin")


class SteeredMixin(_Host):
    """An engine of verl's, steered by the driver and resumed with what this package keeps of it."""

    run_block: ClassVar[MismatchConfig | None] = None
    run_mode: ClassVar[RunMode] = RunMode()
    _rate: LrControl | None = None

    def _kept(self) -> dict[str, Any] | None:
        """Return the state that lies beside verl's in a checkpoint; None where this engine has none."""
        raise NotImplementedError

    @property
    def _resumes(self) -> bool:
        """Whether the state that `_kept` returned is to be loaded together with verl's."""
        raise NotImplementedError

    def _resume(self, state: Mapping[str, Any], folder: str) -> None:
        """Go on from the state that `_kept` returned; it is empty if the checkpoint has none."""
        raise NotImplementedError

    def optimizer_step(self) -> Any:
        """Step as the parent does, at the rate that the driver's statistics lead.

        Raises:
            ConfigError: The rate was to be led by statistics that nobody gave.
        """
        if self._rate is None:
            return super().optimizer_step()
        with self._rate.applied():
            norm = super().optimizer_step()
        self._rate.note_grad_norm(float(norm))
        return norm

    def mismatch_update_lr(self, *earlier: Mapping[str, float | None], **statistics: float | None) -> dict[str, float]:
        """Take the driver's statistics before an update, the same on all ranks, and return what to log of the rate.

        Args:
            *earlier: Statistics of batches that no step of the rule has counted yet.
            **statistics: Of the batch, as `mismatch_ext.lr.Statistics` names them; none where `mismatch.lr` watches nothing.

        Raises:
            RecordError: The trigger's statistic is missing or not finite.
        """
        if self._rate is None:
            return {}
        for found in (*earlier, statistics):
            self._rate.collect(found)
        return self._rate.lead()

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save as the parent does, and beside it what this package keeps of the engine."""
        if local_path is not None and (state := self._kept()) is not None:
            # First: a checkpoint that verl has finished must not lack our part of it.
            write_state(local_path, state)
        super().save_checkpoint(local_path, *args, **kwargs)

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load as the parent does, and what this package kept of the engine where its schedule is loaded too.

        Raises:
            RecordError: That state is damaged, of another rule, or of another update than the schedule.
            PrecisionError: The scaler's state is damaged.
        """
        super().load_checkpoint(local_path, *args, **kwargs)
        if local_path is not None and self._resumes:
            self._resume(read_state(local_path) or {}, local_path)


def register(engine: type[E], block: MismatchConfig | None, mode: RunMode, *backends: str) -> type[E]:
    """Let verl build an engine with a block in this process, from now on; another run's engine of the same kind is replaced.

    Args:
        engine: Our class.
        block: The run's; None for an engine that does what its parent does.
        mode: The trainer's mode.
        *backends: verl's names of the strategies that the engine is for.

    Returns:
        The class that verl builds.
    """
    of_run = type(engine.__name__, (engine,), {"run_block": block, "run_mode": mode, "__module__": engine.__module__})
    for backend in backends:
        entries = EngineRegistry._engines.setdefault("language_model", {}).setdefault(backend, {})
        for device in {"cuda", get_device_name(), os.environ.get("VERL_ENGINE_DEVICE") or "cuda"}:
            entries[device, VENDOR] = of_run
    os.environ["VERL_ENGINE_VENDOR"] = VENDOR
    return of_run
