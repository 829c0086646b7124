"""The parts of a run, each a topic of its own: built from the block, begun on both sides, saved and ended together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatch_ext.checkpoint import changed_settings
from mismatch_ext.config import MismatchConfig
from mismatch_ext.host_names import HostNames
from mismatch_ext.kl import KlTerm
from mismatch_ext.precision.audit import AuditReport
from mismatch_ext.ranks import Ranks
from mismatch_ext.recorder import run_folder
from mismatch_ext.run.log import RunLog
from mismatch_ext.run.pending import Pending
from mismatch_ext.run.routes import Routes
from mismatch_ext.run.sides import LoopRollout, LoopTrainer
from mismatch_ext.run.start import INTEGRATION, check_block, check_sides, info_of, set_precision, to_warn_of
from mismatch_ext.run.stepping import Stepper
from mismatch_ext.run.used import Used
from mismatch_ext.run.weights import Weights
from mismatch_ext.verdicts import Verdicts


class Parts:
    """What is behind the verbs of a `Run`, whose arguments these are.

    Attributes:
        steps: Optimizer steps that were finished.
        verdicts: What becomes of checks that fail.
        used: What the loop has used of the block.
        log: What is written, and watched for alarms.
        pending: What was measured since the last log.
        kl: The KL term; None without.
        routes: Forward passes, under their routes.
        stepper: The optimizer, and the control of its rate.
        weights: Weight updates, and their check.
    """

    def __init__(
        self,
        block: MismatchConfig,
        trainer: LoopTrainer,
        rollout: LoopRollout,
        output: Path,
        *,
        names: HostNames,
        seed: int,
        ranks: Ranks,
    ) -> None:
        self._block, self._trainer, self._rollout = block, trainer, rollout
        self._output, self._names, self._seed, self._ranks = output, names, seed, ranks
        self._report: AuditReport | None = None
        self.steps = 0
        self.verdicts = Verdicts(block.level, lambda: self.steps)
        with self.verdicts.checking("block"):
            check_block(block)
        self.log = RunLog(
            block,
            run_folder(block.monitor, output),
            info=self._info,
            step=lambda: self.steps,
            names=names,
            ranks=ranks,
            verdicts=self.verdicts,
            tell=lambda message: warnings.warn(message, stacklevel=5),
        )
        acting = block.acting
        shared: dict[str, Any] = {"verdicts": self.verdicts, "pending": Pending()}
        self.pending: Pending = shared["pending"]
        self.used = Used(acting, measures=not self.verdicts.observes)
        self.kl = None if acting.kl is None else KlTerm(acting.kl, acting.kl.coef or 0.0)
        self.routes = Routes(acting.routing, trainer, step=lambda: self.steps, seed=seed, ranks=ranks)
        self.stepper = Stepper(block.lr, trainer, names=names, ranks=ranks, **shared)
        self.weights = Weights(block, trainer, rollout, step=lambda: self.steps, **shared)

    def _info(self) -> dict[str, Any]:
        given = {"name": str(self._output), "seed": self._seed, "audit": self._report}
        return info_of(self._block, self._trainer, self._rollout, self._names, **given)

    def begin(self, state: dict[str, Any] | None) -> None:
        """Check and set what the block asks for on both sides, and say what is active.

        Args:
            state: What a resumed run goes on with; None begins anew.
        """
        block, trainer, rollout = self._block, self._trainer, self._rollout
        if block.acting.precision is not None:
            set_precision(block.acting.precision, trainer)
        dtype = trainer.reading().compute_dtype
        self._report, warning = check_sides(block, trainer, rollout, dtype, self.verdicts)
        self.routes.begin(rollout)
        self.log.sampled_with(rollout.sampling)
        self.stepper.attach(0 if state is None else state["run"]["step"])
        self.weights.begin(dtype, self.log, resumed=state is not None)
        if state is not None:
            self.load_state_dict(state)
        self.log.begin(None if state is None else self.steps)
        said: list[tuple[str, str]] = []
        with self.verdicts.checking("vocabulary"):
            said = to_warn_of(trainer, rollout, warning)  # on all ranks: a sharded model is run for it
        for name, message in said if self._ranks.rank == 0 else ():
            self._warn(name, message)
        self.log.announce(INTEGRATION, measured="at every run.measure")
        if state is not None:
            changed = changed_settings(state.get("config"), block.to_dict())
            if changed is not None:
                self._warn("settings_changed", changed)
            self.weights.send()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on with, as JSON-able data."""
        if self.kl is not None:
            self.kl.settle()
        state: dict[str, Any] = {"run": {"step": self.steps}, "config": self._block.to_dict()}
        state |= self.log.state_dict() | self.weights.state_dict()
        parts = {"kl": self.kl, "routing": self.routes.replay}
        state |= {name: part.state_dict() for name, part in parts.items() if part is not None}
        return state | self.stepper.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            RecordError: It is damaged, or of other settings.
        """
        self.steps = int(state["run"]["step"])
        self.pending.take()  # of steps that are undone
        self.log.load_state_dict(state, step=self.steps)
        for name, part in (("kl", self.kl), ("routing", self.routes.replay)):
            if part is not None and state.get(name) is not None:
                part.load_state_dict(state[name])
        self.stepper.load_state_dict(state, step=self.steps)
        said = self.weights.load_state_dict(state)
        if said is not None:
            self._warn("weight_sync", said)

    def end(self, status: str, message: str) -> None:
        """Take learning-rate control off, write how the run ended, and print what happened."""
        self.stepper.detach()
        self.log.end(status, message)

    def end_after(self, error: BaseException) -> None:
        """End as failed; what fails of that is noted on the error, which stays the one that is raised."""
        try:
            self.end("failed", f"{type(error).__name__}: {error}")
        except Exception as second:  # noqa: BLE001  # whatever it is, the first one matters
            error.add_note(f"The end of the run was not written: {type(second).__name__}: {second}")

    def _warn(self, name: str, message: str) -> None:
        warnings.warn(message, stacklevel=3)
        self.log.event("warning", name, message)
