"""Failure, checkpoint and resume in verl's driver: the driver's state in a checkpoint, and how a run has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.verl.driver.weights import RolloutWeights
from mismatch_ext.adapters.verl.settings.modes import SYNC

from mismatch_ext.checkpoint import (
    STATE_FILE,
    changed_settings,
    read_state,
    write_state,
)
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError, MismatchError, RunDirectoryError
from mismatch_ext.kl import KlTerm
from mismatch_ext.log import RunLog
from mismatch_ext.routing.replay import MeasuredPasses
from mismatch_ext.verdicts import Verdicts

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Host
else:
    _Host = object


class SavingMixin(_Host):
    """Overrides the methods of verl's trainer that save and load; the workers' part is in `worker/state.py`."""

    _block: MismatchConfig
    _verdicts: Verdicts
    _kl: KlTerm | None
    _draws: MeasuredPasses | None
    _log: RunLog
    _weights: RolloutWeights | None
    _updated_step: int
    _saved_step: int
    _waiting: list[Mapping[str, float | None]]
    """Statistics of batches that the learning rate's rule has not counted yet."""
    _resumed: dict[str, Any] = {}
    global_steps: int

    if TYPE_CHECKING:

        def _raise_refused(self, what: str, timeout: float = ...) -> None: ...
        def _event(self, level: str, name: str, message: str, data: dict[str, Any] | None = ...) -> None: ...

    def _pause_rollout(self) -> None:
        """Free the memory of rollout servers that share the trainer's devices, as verl does before it saves."""
        if self.trainer_mode != SYNC:
            self.checkpoint_manager.abort_replicas()  # answers are in flight; their clients resume them later
        self.checkpoint_manager.sleep_replicas()

    def _folder(self, step: int) -> Path:
        return Path(self.config.trainer.default_local_dir).absolute() / f"global_step_{step}"

    def _save_checkpoint(self) -> None:
        with self._verdicts.checking("checkpoint"):
            self._write_state()  # first: a checkpoint that verl has finished must not lack our part of it
        super()._save_checkpoint()
        self._saved_step = self.global_steps

    def _write_state(self) -> None:
        """Write the driver's state into the checkpoint of the present step."""
        state = {
            **self._log.state_dict(),
            "config": self._block.to_dict(),
            "kl": None if self._kl is None else self._kl.state_dict(),
            "routing": None if self._draws is None else self._draws.state_dict(),
            "lr": {"waiting": [dict(statistics) for statistics in self._waiting]} if self._waiting else None,
            "weight_sync": None if self._weights is None else self._weights.state_dict(),
        }
        write_state(self._folder(self.global_steps) / STATE_FILE, state)

    def _logged(self) -> None:
        """Write the state into this step's checkpoint again, because verl saves before it logs, and logging changes the state."""
        # A `checkpoint_callback_class` may have moved the folder away, and our file alone would look like a checkpoint.
        if self._saved_step == self.global_steps and self._folder(self.global_steps).is_dir():
            self._write_state()

    def _load_checkpoint(self) -> None:
        """Resume as verl does, and load the driver's own state too."""
        super()._load_checkpoint()
        with self._verdicts.checking("checkpoint"):
            self._resume_state()

    def _resume_state(self) -> None:
        """Load the driver's state from the checkpoint that verl has loaded."""
        self._updated_step = self._saved_step = self.global_steps
        if not self.global_steps:
            return
        folder = self._folder(self.global_steps)
        if self.config.trainer.resume_mode == "resume_path":
            folder = Path(self.config.trainer.resume_from_path).absolute()
        state = read_state(folder / STATE_FILE) or {}
        said = [changed_settings(state.get("config"), self._block.to_dict())]
        if self._kl is not None and state.get("kl") is not None:
            said.append(self._kl.load_state_dict(state["kl"]))
        if self._draws is not None and state.get("routing") is not None:
            self._draws.load_state_dict(state["routing"])
        self._waiting = waiting_of(state, self._block)
        self._log.load_state_dict(state, step=self.global_steps)
        self._resumed = state
        for message in filter(None, said):
            self._event("warning", "settings_changed", message)

    @contextlib.contextmanager
    def _failing_loudly(self) -> Iterator[None]:
        """Write how the run ended; what verl has saved stays."""
        try:
            yield
        except BaseException as error:
            ours = isinstance(error, MismatchError) or self._verdicts.observes
            if isinstance(error, Exception) and not ours:
                error = self._refusal(error) or error
            # Neither a full disk nor a finding may take the place of the error in flight.
            with contextlib.suppress(RunDirectoryError), self._verdicts.checking("metrics"):
                self._log.end("failed", f"{type(error).__name__}: {error}", step=self._updated_step)
            raise error

    def _refusal(self, error: Exception) -> MismatchError | None:
        """Return the refusal of a rollout server if there was one: verl fails for another reason when no rollout is left."""
        try:
            self._raise_refused("rollouts", timeout=10.0)
        except EngineError as refused:
            if "were refused" in str(refused):
                refused.__cause__ = error
                return refused
        except AttributeError:
            pass  # it failed before there were any servers
        return None


def waiting_of(state: Mapping[str, Any], block: MismatchConfig) -> list[Mapping[str, float | None]]:
    """Return the statistics in a checkpoint that no update has taken: of the run's trigger, none of one that leads no more.

    Args:
        state: What the checkpoint holds.
        block: That of the run that goes on.
    """
    saved = ((state.get("config") or {}).get("lr") or {}).get("trigger")
    if block.lr is None or block.lr.trigger != saved:
        return []
    return list((state.get("lr") or {}).get("waiting", ()))
