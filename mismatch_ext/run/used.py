"""Checks before each optimizer step that the loop used every section of its block that it has to use."""

from __future__ import annotations

from torch import Tensor

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import LoopError
from mismatch_ext.run.batch import Batch

REMOVE = "or leave the section out of the block"


class Used:
    """Notes the verbs that a loop uses, and names those that it leaves out.

    Args:
        block: The block.
        measures: Whether each batch is to be measured.
    """

    def __init__(self, block: MismatchConfig, *, measures: bool) -> None:
        self._of_batch: dict[str, str] = {}
        self._of_step: dict[str, str] = {}
        if measures:
            self._of_batch["measure"] = (
                "the gap of each batch is measured by run.measure(batch, old): call it before the step."
            )
        if block.correction is not None:
            self._of_batch["correct"] = (
                "mismatch.correction is on, and run.correct(batch, old) was not called for this batch: multiply the policy loss "
                f"by its weights, {REMOVE}."
            )
        if block.kl is not None and block.kl.in_rewards:
            self._of_batch["penalty"] = (
                "mismatch.kl.reward_path='rewards', and run.penalty(batch, old, reference) was not called for this batch: take "
                f"it off the rewards, {REMOVE}."
            )
        if block.kl is not None and not (block.kl.in_rewards and block.kl.placement == "reward"):
            self._of_step["kl"] = (
                "mismatch.kl is on, and no gradient went through a term of run.kl(batch, logprobs, reference) since the step "
                f"before: add it to the loss of each step, {REMOVE}."
            )
        if block.routing is not None:
            self._of_step["replay"] = (
                f"mismatch.routing.mode={block.routing.mode!r}, and no forward pass of this step was replayed: take its "
                f"log-probabilities from run.score(batch), or run it under run.replaying(batch), {REMOVE}."
            )
        self._seen: set[str] = set()
        # For each batch that this step learns from, by its origin: the names of the verbs that were used on it.
        self._batches: dict[object, set[str]] = {}
        self._learnt = False

    def batch(self, batch: Batch) -> None:
        """Begin to follow a batch, and forget the batches of the step before."""
        if self._learnt:
            self._batches, self._learnt = {}, False
        self._batches[batch.origin] = set()

    def note(self, what: str, batch: Batch | None = None) -> None:
        """Note that something was used.

        Args:
            what: Its name.
            batch: The batch that it was used on, or rows of that batch; None for something that belongs to the step.
        """
        if batch is None:
            self._seen.add(what)
        else:
            self._batches.get(batch.origin, set()).add(what)

    def watch(self, what: str, term: Tensor) -> Tensor:
        """Note that something was used once a gradient reaches its term; return the term itself if no step has to use it."""
        if not term.requires_grad or what not in self._of_step:
            return term
        watched = term * 1.0  # the same bits, whatever is made of the term elsewhere

        def seen(gradient: Tensor) -> None:
            self.note(what)

        watched.register_hook(seen)
        return watched

    def check_step(self, step: int) -> None:
        """Refuse a step that leaves out something that the block asks for.

        Args:
            step: Number of steps taken before.

        Raises:
            LoopError: Something is missing; the message names it, and what to call.
        """
        seen = self._seen | (set.intersection(*self._batches.values()) if self._batches else set())
        for what, message in (self._of_batch | self._of_step).items():
            if what not in seen:
                raise LoopError(f"step {step + 1}: {message}")
        self._seen, self._learnt = set(), True
