"""Failure, checkpoint and resume in verl's driver: the driver's state in a checkpoint, and what is saved when a run fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mismatch_ext.adapters.verl.driver.weights import RolloutWeights
from mismatch_ext.adapters.verl.driver.whole import resumable
from mismatch_ext.adapters.verl.settings.modes import SYNC
from omegaconf import open_dict

from mismatch_ext.checkpoint import (
    STATE_FILE,
    changed_settings,
    read_state,
    write_state,
)
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import EngineError, MismatchError, RunDirectoryError
from mismatch_ext.kl import KlTerm
from mismatch_ext.routing.replaying import MeasuredPasses
from mismatch_ext.run.log import RunLog
from mismatch_ext.terminal import say
from mismatch_ext.verdicts import Verdicts

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer as _Host
else:
    _Host = object


IN_FLIGHT = (
    "The checkpoint holds the prompts and answers in flight; the batch of the step that failed is not trained on again."
)
"""What a rescued checkpoint of an asynchronous mode holds."""

Note = tuple[str, str, str, dict[str, Any] | None]
"""An event of the step that is resumed: level, name, message, data."""


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
    _updating: bool
    _waiting: list[Mapping[str, float | None]]
    """Statistics of batches that the learning rate's rule has not counted yet."""
    _kept: tuple[Any, dict[str, Any]] = (None, {})
    _resumed: tuple[dict[str, Any], list[Note]] = ({}, [])
    _rescued = False
    _logged_step = 0
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
        state = self._kept[1] if self._rescued else self._state()
        watched = {
            **self._log.state_dict(),
            "weight_sync": None if self._weights is None else self._weights.state_dict(),
            "log": {"written": self._logged_step >= self.global_steps},
        }
        write_state(self._folder(self.global_steps) / STATE_FILE, {**state, **watched})

    def _state(self) -> dict[str, Any]:
        """Return the state that the driver resumes with, except its log's, as JSON-able data."""
        return {
            "config": self._block.to_dict(),
            "kl": None if self._kl is None else self._kl.state_dict(),
            "routing": None if self._draws is None else self._draws.state_dict(),
            "lr": {"waiting": [dict(statistics) for statistics in self._waiting]} if self._waiting else None,
        }

    def _logged(self) -> None:
        """Write the state into this step's checkpoint again, because verl saves before it logs, and logging changes the state."""
        self._logged_step = self.global_steps
        if self._saved_step == self.global_steps:
            self._write_state()

    def _load_checkpoint(self) -> None:
        """Resume as verl does, but from the last checkpoint that is whole, and load the driver's own state too."""
        notes: list[Note] = []
        trainer, folder = self.config.trainer, None
        if trainer.resume_mode == "auto" and trainer.nnodes == 1 and not trainer.del_local_ckpt_after_load:
            with self._verdicts.checking("checkpoint"):
                # Only on one node: on several, the driver's node holds only a part of the files.
                folder, message = resumable(Path(trainer.default_local_dir).absolute())
                if message and self._verdicts.observes:
                    message = f"enforce would not resume as verl does: {message}"
                notes += [("warning", "torn_checkpoint", message, None)] if message else []
        with _resuming_from(self.config, None if self._verdicts.observes else folder):
            super()._load_checkpoint()
            with self._verdicts.checking("checkpoint"):
                self._resume_state(notes)

    def _resume_state(self, notes: list[Note]) -> None:
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
        notes += [("warning", "settings_changed", message, None) for message in said if message]
        if (state.get("log") or {}).get("written") is False:
            message = (
                f"the run was ended between the checkpoint of step {self.global_steps} and that step's log: the step was "
                "trained, and its metrics are lost."
            )
            notes.append(("warning", "lost_log", message, None))
        self._resumed = state, notes
        for note in notes:
            self._event(*note)

    @contextlib.contextmanager
    def _failing_loudly(self) -> Iterator[None]:
        """Save what was trained if a check of this package fails, and write how the run ended."""
        try:
            yield
        except BaseException as error:
            if self._verdicts.observes:
                with self._verdicts.checking("metrics"):
                    self._log.end("failed", f"{type(error).__name__}: {error}", step=self._updated_step)
                raise
            if isinstance(error, Exception) and not isinstance(error, MismatchError):
                error = self._refusal(error) or error
            if isinstance(error, MismatchError):
                self._rescue(error)
            with contextlib.suppress(RunDirectoryError):  # a full disk must not take the place of the error in flight
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

    def _finished_update(self) -> None:
        """Keep the driver's state of this step for a checkpoint: when a later step fails, the driver is at the next batch."""
        self._updated_step, self._updating = self.global_steps, False
        if self._verdicts.observes:
            return  # under `observe` no check of this package fails
        self._kept = (self.train_dataloader.state_dict(), self._state())

    def _rescue(self, error: MismatchError) -> None:
        """Save a checkpoint of the last finished update, unless this run has saved it."""
        step = self._updated_step
        if self._updating:
            error.add_note(
                f"It failed in an update of step {self.global_steps}, or between two of them: the weights are of no step; resume "
                "from the last checkpoint."
            )
            return
        if step == 0:
            return
        if self._saved_step != step:
            failed_in, self.global_steps = self.global_steps, step
            kept, self._rescued = self._kept, True
            try:
                self._pause_rollout()
                with _no_limit(self.config):
                    self._save_checkpoint()
                if self.trainer_mode == SYNC:
                    torch.save(
                        kept[0], self._folder(step) / "data.pt"
                    )  # the prompts of the step that failed are sampled again
                else:
                    error.add_note(IN_FLIGHT)  # also all prompts that were read and not taken for a batch
            except Exception as failure:  # noqa: BLE001 - whatever it is, the first error is the one to raise
                error.add_note(f"The training state of step {step} could not be saved: {failure}")
                return
            finally:
                self.global_steps, self._rescued = failed_in, False
        where = f"The training state of step {step} is in {self._folder(step)}; resume with trainer.resume_mode=auto."
        error.add_note(where)
        say(f"mismatch-ext: {where}")


@contextlib.contextmanager
def _no_limit(config: Any) -> Iterator[None]:
    """Keep older checkpoints while one is rescued, because nobody knows yet whether the new one is any good."""
    given = config.trainer.get("max_actor_ckpt_to_keep"), config.trainer.get("max_critic_ckpt_to_keep")
    with open_dict(config):
        config.trainer.max_actor_ckpt_to_keep = config.trainer.max_critic_ckpt_to_keep = None
    try:
        yield
    finally:
        with open_dict(config):
            config.trainer.max_actor_ckpt_to_keep, config.trainer.max_critic_ckpt_to_keep = given


@contextlib.contextmanager
def _resuming_from(config: Any, folder: Path | None) -> Iterator[None]:
    """Let verl resume a checkpoint that its own file does not name; None leaves the choice to verl."""
    if folder is None:
        yield
        return
    given = config.trainer.resume_mode, config.trainer.get("resume_from_path")
    with open_dict(config):
        config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", str(folder)
    try:
        yield
    finally:
        with open_dict(config):
            config.trainer.resume_mode, config.trainer.resume_from_path = given


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
