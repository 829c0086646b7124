"""Notes which sections of the config your own loop has used for each step, and names those that it leaves out."""

from __future__ import annotations

from torch import Tensor

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import LoopError
from mismatch_ext.presets import resolve
from mismatch_ext.rollout import Batch

LEAVE_OUT = "or leave the section out of the config"
NOT_MEASURED = "the gap of each batch is measured by run.measure(batch, old=...): call it before the step."
NOT_CORRECTED = (
    "mismatch.correction is on, and run.correct(batch, old) was not called for this batch: multiply the policy loss by its "
    f"weights, {LEAVE_OUT}."
)
NO_PENALTY = (
    "mismatch.kl.reward_path='rewards', and run.penalty(batch, old=..., reference=...) was not called for this batch: "
    f"take it off the rewards, {LEAVE_OUT}."
)
NO_KL_IN_LOSS = (
    "mismatch.kl is on, and no gradient went through a term of run.kl(batch, logprobs=..., reference=...) since the step before: "
    f"add it to the loss of each step, {LEAVE_OUT}."
)
NOT_REPLAYED = (
    "mismatch.routing.mode={mode!r}, and no forward pass of this step was replayed: take its log-probabilities from "
    f"run.score(batch), or run it under run.replaying(batch), {LEAVE_OUT}."
)
NOT_CENTERED = (
    "mismatch.correction.centering is on, and no gradient went through a term of run.center(batch, advantages) since the step "
    f"before: add it to the loss of each step, {LEAVE_OUT}."
)


class Required:
    """What a loop has to do for each batch, and for each step, if the config asks for it."""

    def __init__(self, config: MismatchConfig) -> None:
        self._per_batch = {"measure": NOT_MEASURED}
        if config.correction is not None:
            self._per_batch["correct"] = NOT_CORRECTED
        if config.kl is not None and config.kl.in_rewards:
            self._per_batch["penalty"] = NO_PENALTY

        self._per_step: dict[str, str] = {}
        if config.kl is not None and config.kl.in_loss:
            self._per_step["kl"] = NO_KL_IN_LOSS
        centering = None if config.correction is None else resolve(config.correction).centering
        if centering is not None and not centering.only_measured:
            self._per_step["center"] = NOT_CENTERED
        if config.routing is not None:
            self._per_step["replay"] = NOT_REPLAYED.format(mode=config.routing.mode)

        self._of_step: set[str] = set()
        self._of_batches: dict[object, set[str]] = {}  # by the origin of each batch that this step learns from
        self._step_done = False

    def begin_batch(self, batch: Batch) -> None:
        """Begin to follow a batch, and forget the batches of the step before."""
        if self._step_done:
            self._of_batches, self._step_done = {}, False
        self._of_batches[batch.origin] = set()

    def note(self, what: str, batch: Batch | None = None) -> None:
        """Note that something was used on a batch or on rows of it, or, without a batch, in this step."""
        if batch is None:
            self._of_step.add(what)
        elif batch.origin in self._of_batches:
            self._of_batches[batch.origin].add(what)

    def watch(self, what: str, term: Tensor) -> Tensor:
        """Note that something was used once a gradient reaches its term; return the term itself if no step has to use it."""
        if not term.requires_grad or what not in self._per_step:
            return term
        watched = term * 1.0  # the same bits, whatever is made of the term elsewhere
        watched.register_hook(lambda gradient: self.note(what))
        return watched

    def check_step(self, step: int) -> None:
        """Raise LoopError if the step leaves out something that the config asks for."""
        used = set(self._of_step)
        if self._of_batches:
            used |= set.intersection(*self._of_batches.values())
        for what, message in (self._per_batch | self._per_step).items():
            if what not in used:
                raise LoopError(f"step {step + 1}: {message}")
        self._of_step, self._step_done = set(), True
