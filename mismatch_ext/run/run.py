"""A run of your own training loop: the verbs that the loop calls carry out the whole `mismatch:` block on both sides.

    run = Run(block, TrainedModel(model, optimizer, scheduler, reference=reference), rollout, "runs/mine")
    with run.start():
        for prompts in data:
            batch = run.batch(rollout.generate(prompts))
            with torch.no_grad():
                old, ref = run.score(batch), run.reference(batch)
            run.measure(batch, old, ref)
            weights = run.correct(batch, old).as_multiplier()
            logprobs = run.score(batch)
            ratio = (logprobs - old).exp()
            loss = (run.kl(batch, logprobs, ref) - weights * ratio * advantages)[batch.response_mask].mean()
            run.step(loss, max_norm=1.0)
            run.send()
            if run.log(reward=rewards).stop:
                break

The loop is the same whatever the block asks for. If a section is absent, its verb changes nothing: its weights are 1, its term is
0. If a section is present and the loop does not use it, the first step raises an error that names the section.
`parts.py` has the parts behind the verbs, and `sides.py` has the protocols that both sides implement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.checkpoint import STATE_FILE, write_state
from mismatch_ext.config import MismatchConfig
from mismatch_ext.correction import Correction, correct, over_ranks, resolve
from mismatch_ext.errors import LoopError, RecordError
from mismatch_ext.host_names import HostNames
from mismatch_ext.provenance import expect_present
from mismatch_ext.ranks import ONE_PROCESS, Ranks
from mismatch_ext.recorder import PREFIX
from mismatch_ext.records import RolloutRecord
from mismatch_ext.run.batch import Batch, lay_out
from mismatch_ext.run.log import Logged
from mismatch_ext.run.loop import Loop
from mismatch_ext.run.parts import Parts
from mismatch_ext.run.pending import findings_of_ranks, means_of_ranks, number
from mismatch_ext.run.sides import LoopRollout, LoopTrainer
from mismatch_ext.run.start import saved_state
from mismatch_ext.run.stepping import Stepped
from mismatch_ext.weight_sync import SyncVerdict


class Run:
    """The `mismatch:` block in your own training loop.

    Args:
        block: The block: a mapping, a JSON or YAML string, the path of a file, or a `MismatchConfig`; None is an empty one.
        trainer: The model, its optimizer and its schedule.
        rollout: The engine that samples from it, which holds the trainer's weights.
        output: Folder of the run; `monitor.run_dir` takes precedence over it.
        names: Names of the loop's own metrics.
        seed: Seed of the random choice of the passes that are measured.
        ranks: The processes that train together. Each gives its own rollouts; the loop itself must reduce the gradients.

    Raises:
        ConfigError: The block is malformed, or asks for something that your own loop cannot have.
        RunDirectoryError: The folder cannot be written.
    """

    def __init__(
        self,
        block: MismatchConfig | Mapping[str, Any] | str | Path | None,
        trainer: LoopTrainer,
        rollout: LoopRollout,
        output: str | Path,
        *,
        names: HostNames | None = None,
        seed: int = 0,
        ranks: Ranks = ONE_PROCESS,
    ) -> None:
        self.block = (MismatchConfig.parse(block) or MismatchConfig()).acting
        self.trainer, self.rollout = trainer, rollout
        names = HostNames() if names is None else names
        self._loop = Loop(block=self.block, trainer=trainer, rollout=rollout, names=names, seed=seed, ranks=ranks)
        with self._loop.together():
            self._parts = Parts(self._loop, Path(output))
        self._started = self._ended = False

    @property
    def steps(self) -> int:
        """Number of finished optimizer steps."""
        return self._loop.steps

    # Begin.

    def start(self, *, resume: str | Path | None = None) -> Run:
        """Check and set what the block asks for on both sides, and say what is active.

        Args:
            resume: Folder that `save` wrote to; the trainer's own state is loaded already. The engine then gets the weights.

        Returns:
            The run, as a context that ends it.

        Raises:
            MismatchError: Something that was asked for is not active; the message says what, and what to do.
        """
        if self._started:
            raise LoopError("the run has been started already; build another Run for another training.")
        try:
            with self._loop.together():
                state = None if resume is None else saved_state(Path(resume))
            self._parts.begin(state)
        except BaseException as error:
            self._parts.end_after(error)
            raise
        self._started = True
        return self

    # One batch.

    def batch(self, records: Sequence[RolloutRecord], split: str = "train") -> Batch:
        """Lay rollouts out as tensors, after checking where they come from.

        Args:
            records: The records that `rollout.generate` returned; or records from elsewhere, with their provenance.
            split: "train", or "eval/<name>" for rollouts that the model does not learn from.

        Raises:
            ProvenanceError: The records' provenance is missing, mixed, or names other weights than the engine has now.
            RecordError: The records are malformed, or a KL baseline is over copies of one of them.
            LoopError: The trainer's weights have changed since they were last sent to the engine.
        """
        self._begun()
        with self._loop.together(split):
            self._parts.weights.check_sent()
            batch = lay_out(records, self.trainer.device, split, self._loop.verdicts)
            with self._loop.verdicts.checking("records"):
                expect_present(batch.provenance, self.rollout.weight_version)
            self._parts.routes.check(batch)
            copies = len(records) - len({id(record) for record in records})
            if split == "train" and copies and self._parts.kl is not None and self._parts.kl.config.has_baseline:
                raise RecordError(
                    f"{copies} rows are the same rollout as another row, and mismatch.kl.baseline='leave_one_out' would subtract "
                    "their own KL from it. Set mismatch.kl.baseline='none', or give each rollout once."
                )
        if split == "train":
            self._parts.used.batch(batch)
            if self._parts.kl is not None:
                self._parts.kl.settle()
                self._parts.kl.begin()
            self._parts.stepper.lead_by_lengths(batch)
        return batch

    def score(self, batch: Batch) -> Tensor:
        """Return the trainer's log-probabilities of a batch's responses `[B, T]`, in nats, under its routes.

        Call it with gradients for the loss. Under R2 the first call for a batch without gradients records the batch's routes.
        """
        return self._parts.used.watch("replay", self._parts.routes.logprobs(batch))

    def reference(self, batch: Batch) -> Tensor:
        """Return the reference's log-probabilities `[B, T]`, in nats, under the batch's routes if the block says so.

        Without a `kl` section nothing needs them, and the result is zeros.

        Raises:
            ConfigError: The trainer's side has no reference.
        """
        if self._parts.kl is None:
            return torch.zeros_like(batch.rollout_logprobs)
        return self._parts.routes.logprobs(batch, reference=True)

    @contextmanager
    def replaying(self, batch: Batch) -> Iterator[None]:
        """Run the trainer's forward pass of a batch, or of some rows of it, under its routes.

        A checkpointed backward pass may come after the `with` block. Without a `routing` section this does nothing.

        Raises:
            RoutingError: The routes do not fit their tokens, or are not this model's.
            ReplayError: The forward pass was over other tokens, or did not follow the routes.
        """
        learns = torch.is_grad_enabled()
        with self._parts.routes.under(batch):
            yield
        if learns:
            self._parts.used.note("replay")

    def measure(self, batch: Batch, old: Tensor, reference: Tensor | None = None) -> None:
        """Measure the gap to the engine, and the KL divergence from the reference.

        Args:
            batch: The rollouts.
            old: The trainer's log-probabilities when they were sampled `[B, T]`, nats.
            reference: The reference's `[B, T]`, for the `kl` section.

        Raises:
            NonFiniteLogprobError: A log-probability of a sampled token is not finite.
            LoopError: There is a `kl` section, and no reference is given.
        """
        self._begun()
        mask, measured = batch.response_mask, False
        gap = (old.detach(), batch.rollout_logprobs, mask)
        with self._loop.together(batch.split):
            with self._loop.verdicts.checking("measure"):
                self._parts.log.observe(batch.split, *gap)
                measured = True
            native = self._parts.routes.native(batch)
            if native is not None:
                self._parts.log.observe(batch.split, native, *gap[1:], native=True)
            if batch.split != "train":
                return
            self._parts.used.note("measure", batch)
            if self._parts.kl is not None:
                if reference is None:
                    raise LoopError(
                        "mismatch.kl is on: give run.measure(batch, old, reference) the reference's log-probabilities."
                    )
                sums = self._parts.kl.sums(old.detach(), reference, mask)
        if self._parts.kl is not None:
            found = self._loop.ranks.sum(sums).tolist()
            for name, value in self._parts.kl.collect(found).items():
                self._loop.pending.note(PREFIX + name, value, found[-1])
        self._parts.stepper.lead_by_gap(*(gap if measured else (torch.zeros_like(values) for values in gap)))

    def correct(self, batch: Batch, old: Tensor, *, advantages: Tensor | None = None) -> Correction:
        """Return the importance weights and the rejection mask for the gap; without a `correction` section the weights are 1.

        Args:
            batch: The rollouts; with `normalize` a whole batch, whose weights are divided by their mean over all ranks.
            old: The trainer's log-probabilities when they were sampled `[B, T]`, nats. In mode `bypass`, whose ratio is pi/mu,
                give the current policy's instead; the loss `ppo_clip` then takes `batch.rollout_logprobs` as the old ones.
            advantages: `[B]` or `[B, T]`, for `off_policy_threshold`.
        """
        self._parts.used.note("correct", batch)
        mask, section = batch.response_mask, self.block.correction
        found = Correction(weights=mask.float(), mask=mask, metrics={})
        if section is None:
            return found
        with self._loop.together():
            settings = resolve(section)
            if settings.normalize and (batch.part or (len(batch) == self._loop.ranks.size == 1)):
                raise LoopError(
                    f"mismatch.correction.normalize with {len(batch)} rows of a batch: weights would be divided by their "
                    "own mean only. Give run.correct whole batches of several responses, or set normalize: false."
                )
            if bool(mask.any()):
                found = correct(batch.rollout_logprobs, old.detach(), mask, settings, advantages=advantages)
        figures = over_ranks(found.metrics, mask, settings, self._loop.ranks)  # on a rank without tokens too
        if settings.normalize and found.metrics:
            mean = "rollout_is_batch_norm_factor"  # of this rank, which the weights were divided by, and of all
            found = replace(found, weights=found.weights * (found.metrics[mean] / figures[mean]))
        for name, value in figures.items() if batch.split == "train" else ():
            self._loop.pending.note(PREFIX + name, value)
        return found

    def kl(self, batch: Batch, logprobs: Tensor, reference: Tensor, *, old: Tensor | None = None) -> Tensor:
        """Return the KL term `[B, T]` to be added to a per-token loss, coefficient included; zeros without a `kl` section.

        Args:
            batch: The rollouts. A micro-batch should hold all responses of a prompt, otherwise the baseline is over fewer.
            logprobs: The current policy's log-probabilities `[B, T]`, nats, with their autograd graph.
            reference: The reference's log-probabilities `[B, T]`, nats.
            old: The trainer's log-probabilities when the batch was sampled; under `ratio` they replace the engine's.
        """
        if self._parts.kl is None:
            return torch.zeros_like(logprobs)
        term = self._parts.kl.loss(
            logprobs,
            reference,
            batch.response_mask,
            rollout_logprobs=batch.rollout_logprobs if old is None else None,
            old_logprobs=old,
            groups=batch.groups,
            logits=lambda: (self._parts.routes.logits(batch), self._parts.routes.logits(batch, reference=True)),
            temperature=batch.temperature,
        )
        return self._parts.used.watch("kl", term)

    def penalty(self, batch: Batch, old: Tensor, reference: Tensor) -> Tensor:
        """Return the amount to subtract from each token's reward `[B, T]`; zeros unless `kl.reward_path` is `rewards`."""
        self._parts.used.note("penalty", batch)
        if self._parts.kl is None or not self._parts.kl.config.in_rewards:
            return torch.zeros_like(old)
        return self._parts.kl.penalty(old, reference, batch.response_mask)

    # A step.

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's loss, scaled in float16; call `step` without a loss after it."""
        self._begun()
        self._parts.stepper.backward(loss)

    def step(self, loss: Tensor | None = None, *, max_norm: float | None = None) -> Stepped:
        """Step the optimizer as the loss scaler and the learning-rate control say, step the schedule, and clear the gradients.

        Args:
            loss: The loss; None if `backward` already got it in parts.
            max_norm: Norm that gradients are clipped to; None does not clip.

        Raises:
            LoopError: The loop did not use a section that the block asks for.
            LossScaleError: More steps in a row overflow than the loss scaler tolerates.
        """
        if loss is not None:
            self.backward(loss)
        with self._loop.together():
            self._parts.used.check_step(self.steps)
        done = self._parts.stepper.step(max_norm)
        self._loop.steps, self._parts.weights.stepped = self.steps + 1, True
        return done

    # Weights.

    def send(self) -> SyncVerdict | None:
        """Send the trainer's weights to the engine, and verify that it computes with them.

        Raises:
            WeightSyncError: The engine does not compute with them.
            LoopError: Something other than `step`, which applies the block's sections, changed the weights.
        """
        self._begun()
        return self._parts.weights.send()

    def sent(self, samples: Mapping[str, Any] | None = None) -> SyncVerdict | None:
        """Verify an update that the loop made itself; its version is `rollout.weight_version`.

        Args:
            samples: Values that the engine should hold, for `rollout.compare`.

        Raises:
            WeightSyncError, LoopError: As `send`.
        """
        return self._parts.weights.sent(samples)

    # Logs.

    def log(self, metrics: Mapping[str, Any] | None = None, *, split: str = "train", **more: Any) -> Logged:
        """Write what was measured since the last log, with the loop's own metrics, and watch for alarms.

        Args:
            metrics: Numbers, or tensors, whose mean is logged; the report shows the one named `reward`.
            split: "train" or "eval/<name>".
            **more: More metrics, by keyword.

        Returns:
            All metrics of this log, and whether the run should stop.
        """
        self._begun()
        with self._loop.together():
            own = {name: number(value) for name, value in {**(metrics or {}), **more}.items()}
        findings_of_ranks(self._loop.verdicts, self._loop.ranks)
        with self._loop.together():  # the main process alone writes
            found = self._parts.log.measured(self.steps, split)
        if split == "train":
            found |= self._loop.pending.take()
            found |= means_of_ranks(found, (self._loop.names.loss, PREFIX + "weight_sync_gap"), self._loop.ranks)
            found |= self._parts.stepper.metrics()
        of_routes, by_layer = self._parts.routes.metrics(split)
        found |= of_routes | own
        with self._loop.together():
            self._parts.log.write(self.steps, found | by_layer, split)
            stop = self._parts.log.look(self.steps, found) if split == "train" else None
        return Logged(metrics=found, stop=self._parts.log.decided(stop) if split == "train" else None)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON-able data, without that of model, optimizer and schedule."""
        self._begun()
        return self._parts.state_dict()

    def save(self, folder: str | Path) -> Path:
        """Write `state_dict` to a folder; call it after the loop has saved model, optimizer and schedule there.

        Returns:
            The file. If the process is killed, the file holds either the previous state or this one.
        """
        path, state = Path(folder) / STATE_FILE, self.state_dict()  # on all ranks: it settles the batch's KL
        with self._loop.together():
            if self._loop.ranks.rank == 0:
                write_state(path, state)
        return path

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; `start(resume=folder)` does the same from a file.

        Raises:
            RecordError: The state is damaged, or was saved with other settings.
        """
        self._begun()
        with self._loop.together():
            self._parts.load_state_dict(state)

    # End.

    def end(self, status: str = "completed", message: str = "") -> None:
        """Remove learning-rate control, write how the run ended, and print what happened.

        Args:
            status: "completed" or "failed".
            message: Why the run ended so.
        """
        if self._ended or not self._started:
            return
        self._ended = True
        self._parts.end(status, message)

    def __enter__(self) -> Run:
        self._begun()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end()
        elif not self._ended:
            self._ended = True
            self._parts.end_after(error)

    def _begun(self) -> None:
        if not self._started:
            raise LoopError("the run has not been started: `with run.start():` around the loop.")
