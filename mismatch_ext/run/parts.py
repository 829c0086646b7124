"""The parts of a run, one per topic: they are built from the block, begun on both sides, saved and ended together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatch_ext.checkpoint import changed_settings
from mismatch_ext.kl import KlTerm
from mismatch_ext.precision.audit import AuditReport
from mismatch_ext.recorder import run_folder
from mismatch_ext.run.log import RunLog
from mismatch_ext.run.loop import Loop
from mismatch_ext.run.routes import Routes
from mismatch_ext.run.start import INTEGRATION, check_block, check_sides, info_of, set_precision, to_warn_of
from mismatch_ext.run.stepping import Stepper
from mismatch_ext.run.used import Used
from mismatch_ext.run.weights import Weights


class Parts:
    """The parts that do the work of a `Run`'s verbs.

    Args:
        loop: The loop.
        output: Folder of the run; `monitor.run_dir` replaces it.

    Attributes:
        log: Writes metrics and events, and watches for alarms.
        used: Notes which sections of the block the loop has used.
        kl: The KL term; None without a `kl` section.
        routes: Runs forward passes under their routes.
        stepper: Steps the optimizer, and controls its learning rate.
        weights: Sends weights to the engine, and verifies the updates.
    """

    def __init__(self, loop: Loop, output: Path) -> None:
        block, verdicts = loop.block, loop.verdicts
        self._loop = loop
        self._report: AuditReport | None = None
        with verdicts.checking("block"):
            check_block(block)
        self.log = RunLog(
            block,
            run_folder(block.monitor, output),
            info=lambda: info_of(loop, str(output), self._report),
            step=lambda: loop.steps,
            names=loop.names,
            ranks=loop.ranks,
            verdicts=verdicts,
            tell=lambda message: warnings.warn(message, stacklevel=5),
        )
        self.used = Used(block, measures=not verdicts.observes)
        kl = block.kl
        self.kl = None if kl is None else KlTerm(kl, kl.coef or 0.0)
        self.routes, self.stepper, self.weights = Routes(loop), Stepper(loop), Weights(loop)

    def begin(self, state: dict[str, Any] | None) -> None:
        """Check and set what the block asks for on both sides, and say what is active.

        Args:
            state: Saved state of the run to resume; None begins a new run.
        """
        loop = self._loop
        with loop.together():
            precision = loop.block.precision
            if precision is not None:
                set_precision(precision, loop.trainer)
            dtype = loop.trainer.reading().compute_dtype
            self._report, warning = check_sides(loop, dtype)
            self.routes.begin()
            self.log.sampled_with(loop.rollout.sampling)
            self.stepper.attach(0 if state is None else state["run"]["step"])
        self.weights.begin(dtype, self.log, resumed=state is not None)
        with loop.together():
            if state is not None:
                self.load_state_dict(state)
            self.log.begin(None if state is None else loop.steps)
        said: list[tuple[str, str]] = []
        with loop.together():
            with loop.verdicts.checking("vocabulary"):
                said = to_warn_of(loop, warning)  # on all ranks, because it runs the model, which may be sharded
            for name, message in said if loop.ranks.rank == 0 else ():
                self._warn(name, message)
            self.log.announce(INTEGRATION, measured="at every run.measure")
        if state is not None:
            changed = changed_settings(state.get("config"), loop.block.to_dict())
            if changed is not None:
                self._warn("settings_changed", changed)
            self.weights.send()

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed run continues, as JSON-able data."""
        if self.kl is not None:
            self.kl.settle()
        state: dict[str, Any] = {"run": {"step": self._loop.steps}, "config": self._loop.block.to_dict()}
        state |= self.log.state_dict() | self.weights.state_dict()
        parts = {"kl": self.kl, "routing": self.routes.replay}
        state |= {name: part.state_dict() for name, part in parts.items() if part is not None}
        return state | self.stepper.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned.

        Raises:
            RecordError: The state is damaged, or belongs to other settings.
        """
        self._loop.steps = int(state["run"]["step"])
        self._loop.pending.take()  # these metrics belong to steps that are undone
        self.log.load_state_dict(state, step=self._loop.steps)
        for name, part in (("kl", self.kl), ("routing", self.routes.replay)):
            if part is not None and state.get(name) is not None:
                part.load_state_dict(state[name])
        self.stepper.load_state_dict(state)
        said = self.weights.load_state_dict(state)
        if said is not None:
            self._warn("weight_sync", said)

    def end(self, status: str, message: str) -> None:
        """End learning-rate control, write how the run ended, and print a summary."""
        self.stepper.detach()
        self.log.end(status, message)

    def end_after(self, error: BaseException) -> None:
        """End the run as failed; if that fails too, the second error becomes a note of `error`, which is still the one raised."""
        try:
            self.end("failed", f"{type(error).__name__}: {error}")
        except Exception as second:  # noqa: BLE001  # whatever it is, the first error matters more
            error.add_note(f"The end of the run was not written: {type(second).__name__}: {second}")

    def _warn(self, name: str, message: str) -> None:
        warnings.warn(message, stacklevel=3)
        self.log.event("warning", name, message)
