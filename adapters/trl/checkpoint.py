"""Checkpoint and resume: what a checkpoint holds beside TRL's own."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.transformers.lr import LrCallback
from mismatch_ext.adapters.trl.generation import CheckedGeneration
from mismatch_ext.adapters.trl.readings import step_of_checkpoint
from mismatch_ext.adapters.trl.replay import ScoreReplay

from mismatch_ext.checkpoint import STATE_FILE, changed_settings, read_state, write_state
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import RunDirectoryError
from mismatch_ext.kl import KlTerm
from mismatch_ext.log import RunLog
from mismatch_ext.ranks import first_error
from mismatch_ext.verdicts import Verdicts

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Host
else:
    _Host = object


class CheckpointMixin(_Host):
    """Overrides the methods of Trainer that begin a training, save it and load it; `MismatchTrainerMixin` sets what is active."""

    _block: MismatchConfig | None
    _verdicts: Verdicts
    _log: RunLog
    _kl: KlTerm | None
    _kl_step: int | None
    _lr: LrCallback | None
    _routing: ScoreReplay | None
    _resumed_step: int
    vllm_generation: CheckedGeneration  # type: ignore[assignment]  # around TRL's own

    @property
    def _output_dir(self) -> str:
        """TRL's output folder; transformers sets one where none is given."""
        assert self.args.output_dir is not None
        return self.args.output_dir

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; the metrics file says how it ended."""
        if self._block is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        with self._verdicts.checking("metrics"):
            resumed = step_of_checkpoint(resume_from_checkpoint, self._output_dir)
            if resumed is not None or not resume_from_checkpoint:
                # Otherwise the parent refuses, and the metrics that are there stay as they are.
                self._log.begin(resumed)
        # Forget what an earlier training of this trainer has left; a checkpoint's state is loaded after this.
        self._log.begin_anew()
        if self._lr is not None:
            self._lr.resume(None)
        if self._kl is not None:
            self._kl.reset()
            self._kl_step = None
        if self._routing is not None:
            self._routing.draws.begin_anew()
        try:
            result = super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            with contextlib.suppress(RunDirectoryError), self._verdicts.checking("metrics"):
                # An error from a full disk must not replace the error in flight.
                self._log.end("failed", first_error(error))
            raise
        finally:
            if self._lr is not None:
                self._lr.release()
        with self._verdicts.checking("metrics"):
            self._log.end("completed")
        return result

    def _told(self, step: int, name: str, message: str) -> None:
        """Warn, and write the warning among the events of the step that is resumed."""
        warnings.warn(message, stacklevel=4)
        self._log.event("warning", name, message, step=step)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self._block is not None and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            with self._verdicts.checking("checkpoint"):
                # First: a checkpoint that the host has finished must not lack our part of it.
                write_state(folder / STATE_FILE, self._state())
        super()._save_checkpoint(model, trial)

    @property
    def _verified(self) -> bool:
        """Whether TRL's engine wrapper is behind ours, which it is not where that failed and the run is observed."""
        return bool(self.use_vllm) and isinstance(self.vllm_generation, CheckedGeneration)

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the host's own, as JSON-able data."""
        assert self._block is not None
        state: dict[str, Any] = {"config": self._block.to_dict(), **self._log.state_dict()}
        if self.use_vllm and self._verified:
            state |= self.vllm_generation.state_dict()
        if self._kl is not None:
            state["kl"] = self._kl.state_dict()
        if self._lr is not None:
            state["lr"] = self._lr.saved_state()
        if self._routing is not None:
            state["routing"] = self._routing.state_dict()
        return state

    def _load_scaler(self, checkpoint: str | None) -> None:
        super()._load_scaler(checkpoint)
        if self._block is None or checkpoint is None:
            return
        with self._verdicts.checking("checkpoint"):
            self._load_ours(checkpoint)

    def _load_ours(self, checkpoint: str) -> None:
        """Take over what a checkpoint holds beside the host's own."""
        self._resumed_step = step_of_checkpoint(checkpoint, self._output_dir) or 0
        state = read_state(Path(checkpoint) / STATE_FILE)
        self._log.load_state_dict(state or {}, step=self._resumed_step)
        if state is not None:
            self._go_on_from(state)
        assert self._block is not None
        precision = self._block.precision
        if self.is_deepspeed_enabled:
            return  # it keeps its own
        if precision is not None and precision.dtype == "float16" and not (Path(checkpoint) / "scaler.pt").is_file():
            self._log.event(
                "warning",
                "loss_scale",
                f"{checkpoint} holds no loss-scaler state; the loss scale starts at {precision.init_scale:g}.",
            )

    def _go_on_from(self, state: dict[str, Any]) -> None:
        """Take over our own state from a checkpoint, except the alarms, and say which settings have changed since."""
        assert self._block is not None
        messages = [changed_settings(state.get("config"), self._block.to_dict())]
        if self.use_vllm and self._verified and state.get("weight_version") is not None:
            messages.append(self.vllm_generation.load_state_dict(state))
        if self._kl is not None and state.get("kl") is not None:
            messages.append(self._kl.load_state_dict(state["kl"]))
        if self._lr is not None:
            self._lr.resume(state.get("lr"))
        if self._routing is not None and state.get("routing") is not None:
            self._routing.load_state_dict(state["routing"])
        for message in filter(None, messages):
            self._told(self._resumed_step, "settings_changed", message)
