"""`Run`: your own training loop as a third host; the loop calls its methods, which carry out the whole `mismatch` config.

    run = Run(block, TrainedModel(model, optimizer, scheduler, reference=reference), rollout, "runs/mine")
    with run.start():
        for prompts in data:
            batch = run.batch(rollout.generate(prompts))
            with torch.no_grad():
                old, ref = run.score(batch), run.reference(batch)
            run.measure(batch, old=old, reference=ref)
            weights = run.correct(batch, old).as_multiplier()
            logprobs = run.score(batch)
            ratio = (logprobs - old).exp()
            term = run.kl(batch, logprobs=logprobs, reference=ref) + run.center(batch, advantages)
            loss = (term - weights * ratio * advantages)[batch.response_mask].mean()
            run.step(loss, max_norm=1.0)
            run.send()
            if run.log(reward=rewards).stop:
                break

The loop is the same whatever the block asks for. If a section is absent, its method changes nothing: its weights are 1, its term
is 0. If a section is present and the loop does not use it, the first step raises an error that names the section.
`sides.py` has the protocols of `TrainedModel` and `rollout`.
"""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.banner import run_info
from mismatch_ext.centering import SAMPLER_BIAS, padded_heads, terms_and_biases
from mismatch_ext.chains.in_run import forks_of_turns
from mismatch_ext.chains.turns import Chat
from mismatch_ext.checkpoint import STATE_FILE, changed_settings, read_state, write_state
from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.correction import Correction, correct, correction_metrics
from mismatch_ext.errors import ConfigError, LoopError, NonFiniteLogprobError, RecordError, RoutingError
from mismatch_ext.events import NOTHING_TRAINED
from mismatch_ext.evidence import ColumnBatch, trainer_settings
from mismatch_ext.kl import KlTerm, kl_sums, kl_terms
from mismatch_ext.log import Logged, RunLog
from mismatch_ext.lr import LrControl, gap_statistics, leading_sums, length_statistics, length_sums
from mismatch_ext.metrics_file import run_folder
from mismatch_ext.names import PREFIX, HostNames
from mismatch_ext.patching import active_patches
from mismatch_ext.precision.audit import AuditReport, SyncReading, audit
from mismatch_ext.precision.grid import EVENT as COARSE_ENGINE
from mismatch_ext.precision.grid import GridWatch
from mismatch_ext.precision.heads import EVENT as ONE_SIDED_HEAD
from mismatch_ext.precision.heads import ChoosesHead, HeadScores, is_one_sided, name_one_sided
from mismatch_ext.precision.readiness import check_readiness
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.presets import resolve
from mismatch_ext.ranks import ONE_PROCESS, Ranks, first_error, number_of_training, together
from mismatch_ext.required import Required
from mismatch_ext.rng import forked_rng
from mismatch_ext.rollout import Batch, RolloutRecord, collate, expect_present, routes_of, unrouted
from mismatch_ext.routing import RoutingTrace, align
from mismatch_ext.routing.agreement import of_layer
from mismatch_ext.routing.replay import REFERENCE, RouteReplay
from mismatch_ext.sides import LoopRollout, LoopTrainer, RecordsHeads
from mismatch_ext.sums import over_ranks
from mismatch_ext.weights import SyncVerdict, WeightVerifier, draw_probes, untrained

HOST = "your own loop"
PACKAGES = ("transformers", "vllm", "sglang")


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """What a step did: whether the optimizer took it, the gradient norm before clipping, and the learning rate it applied."""

    taken: bool
    grad_norm: float
    learning_rate: float


class Run:
    """The `mismatch` config in your own training loop.

    Args:
        block: The config: a mapping, a JSON or YAML string, the path of a file, or a `MismatchConfig`; None is an empty one.
        trainer: The model, its optimizer and its schedule.
        rollout: The engine that samples from it, which holds the trainer's weights.
        output: Folder of the run; `monitor.run_dir` takes precedence over it.
        names: Names of the loop's own metrics.
        seed: Seed of the random choice of the passes that are measured.
        ranks: The processes that train together. Each gives its own rollouts; the loop itself must reduce the gradients.

    Attributes:
        steps: Number of finished optimizer steps.

    Raises:
        ConfigError: The config is malformed, or asks for something that your own loop cannot have.
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
        self.block = MismatchConfig.parse(block) or MismatchConfig()
        self.trainer, self.rollout, self.ranks, self.seed = trainer, rollout, ranks, seed
        self.names = HostNames() if names is None else names
        self.steps = 0
        self._checks = Checks(self.block.acts, lambda: self.steps)
        self._pending = _Pending()
        self._required = Required(self.block)
        self._audit: AuditReport | None = None
        with self._together():
            with self._checks.checking("block"):
                check_block(self.block)
            self._log = RunLog(
                self.block,
                run_folder(self.block.monitor, Path(output)),
                info=lambda: self._info(str(output)),
                step=lambda: self.steps,
                names=self.names,
                ranks=ranks,
                checks=self._checks,
                tell=lambda message: warnings.warn(message, stacklevel=5),
            )
        kl = self.block.kl
        self._kl = None if kl is None else KlTerm(kl, kl.coef or 0.0)
        self._rate: LrControl | None = None
        self._replay: RouteReplay | None = None
        self._verifier: WeightVerifier | None = None
        self._grid: GridWatch | None = None
        self._loss_parts: list[float] = []
        self._broken_pass: str | None = None
        self._training = 0  # number of it among the trainings that these ranks have begun
        self._stepped = self._transfer_audited = self._started = self._ended = False

    # Begin.

    def start(self, *, resume: str | Path | None = None) -> Run:
        """Check and set what the config asks for on both sides, and print what is active; used as a context, the run ends with
        it.

        `resume` is a folder that `save` wrote to. Load the trainer's own state first; the engine then gets its weights. Raises
        MismatchError if something that you asked for is not active: the message says what, and what to do.
        """
        if self._started:
            raise LoopError("the run has been started already; build another Run for another training.")
        self._training = number_of_training(self.ranks)
        try:
            with self._together():
                state = None if resume is None else _saved_state(Path(resume))
            self._begin(state)
            self._started = True
            if state is not None:
                if (changed := changed_settings(state.get("config"), self.block.to_dict())) is not None:
                    self._warn("settings_changed", changed)
                self.send()
        except BaseException as error:
            self._ended = self._started
            self._end_after(error)
            raise
        return self

    def _begin(self, state: dict[str, Any] | None) -> None:
        readiness = surplus = attention = one_sided_head = None
        with self._together():
            if self.trainer.device.type == "mps":
                raise ConfigError(
                    "the trainer's device is 'mps', which has no float64; allowed: a CPU or a CUDA device. Move the model there."
                )
            self._set_precision()
            dtype = self.trainer.reading().compute_dtype
            with self._checks.checking("engine"):
                self.rollout.check(self.block, dtype)
            with self._checks.checking("precision"):
                self._audit = self._audited()
            with self._checks.checking("readiness"):
                readiness = check_readiness(self.trainer.named_parameters(), self.block.precision)
            self._begin_replay()
            self._record_heads()
            self._log.sampled_with(self.rollout.sampling)
            self._grid = GridWatch.of(self.trainer.reading(), self.rollout.reading())
            self._control_rate(0 if state is None else state["run"]["step"])
        if self.block.monitor.weight_sync != "off":
            with self._together(), self._checks.checking("weight_sync"):
                self._begin_verifying(dtype, resumed=state is not None)
        with self._together():
            if state is not None:
                self._load(state)
            self._log.begin(None if state is None else self.steps)
        with self._together():
            with self._checks.checking("vocabulary"):  # on all ranks: it runs the model, which may be sharded
                surplus = self.trainer.surplus()
            with self._checks.checking("attention"):
                attention = self.trainer.dropped_attention()
            with self._checks.checking("precision"):
                one_sided_head = self._one_sided_head()
            bias = self.rollout.sampling.ratio_bias(renormalized=self.rollout.reading().renormalizes)
            groups = self.trainer.optimizer.param_groups
            nothing = untrained(parameter for group in groups for parameter in group["params"])
            warnings_by_name = {
                "readiness": readiness,
                "vocabulary": surplus,
                "attention": attention,
                ONE_SIDED_HEAD: one_sided_head,
                "ratio_bias": bias,
                NOTHING_TRAINED: nothing,
            }
            for name, message in warnings_by_name.items():
                if message is not None and self.ranks.rank == 0:
                    self._warn(name, str(message))
            self._log.announce()

    def _set_precision(self) -> None:
        precision = self.block.precision
        if precision is not None:
            scaler = LossScaler.of(precision, self.trainer.device.type) if precision.needs_scaler else None
            self.trainer.compute_in(precision.dtype, scaler)
            if precision.head is not None:
                if not isinstance(self.trainer, ChoosesHead):
                    raise ConfigError(
                        f"mismatch.precision.head: {type(self.trainer).__name__} has no keep_head_in_float32, so that its output "
                        "head cannot be set. Use TrainedModel, or leave out mismatch.precision.head."
                    )
                self.trainer.keep_head_in_float32()

    def _one_sided_head(self) -> str | None:
        """Return a warning, measured on probe tokens, if the head of one side alone computes in float32."""
        trainer, engine, side = self.trainer.reading(), self.rollout.reading(), self.trainer
        if not is_one_sided(trainer, engine) or not isinstance(side, ChoosesHead):
            return None
        tokens = draw_probes(self.trainer.vocabulary(), self.rollout.longest)
        return name_one_sided(trainer, engine, HeadScores.of(side, self.rollout, tokens))

    def _audited(self, transfer: SyncReading | None = None) -> AuditReport | None:
        """Compare the precision that both sides compute in with the config's; None without a `precision` section."""
        if self.block.precision is None:
            return None
        report = audit(self.block.precision, self.trainer.reading(), self.rollout.reading(), transfer)
        report.raise_for_findings()
        return report

    def _begin_replay(self) -> None:
        if (section := self.block.routing) is not None:
            self._replay = RouteReplay(
                section, self.trainer.routing, self.trainer.policy(), seed=self.seed, ranks=self.ranks
            )
            if section.mode == "R3":
                self.rollout.record_routing(self._replay.layout.shape)

    def _record_heads(self) -> None:
        """Let the engine report its most likely tokens, if score centering needs them."""
        section = None if self.block.correction is None else resolve(self.block.correction).centering
        if section is None:
            return
        if not isinstance(self.rollout, RecordsHeads):
            raise ConfigError(
                f"mismatch.correction.centering: {type(self.rollout).__name__} has no record_heads, so that the engine's most "
                "likely tokens are not known. Use mismatch_ext.adapters.vllm.Rollout, or leave out the key."
            )
        self.rollout.record_heads(section.top_k)

    def _begin_verifying(self, trainer_dtype: str, *, resumed: bool) -> None:
        monitor = self.block.monitor_of_updates

        def bad_update(level: str, name: str, message: str) -> None:
            self._log.event(level, name, message)
            if level == "warning" or monitor.weight_sync == "warn":
                warnings.warn(message, stacklevel=6)

        probes = draw_probes(self.trainer.vocabulary(), self.rollout.longest)
        dtype, sides = self.rollout.reading().model_dtype, (self.trainer, self.rollout)
        verifier = WeightVerifier(*sides, monitor, probes, dtype=dtype, trainer_dtype=trainer_dtype, event=bad_update)
        if not resumed:  # else the engine does not hold the trainer's weights yet
            verifier.begin()
        self._verifier = verifier

    def _info(self, name: str) -> dict[str, Any]:
        device = self.trainer.device.type
        parameters = sum(parameter.numel() for _, parameter in self.trainer.named_parameters())
        patches = {patch["name"]: patch for patch in (*self.rollout.patches, *active_patches())}
        return run_info(
            self.block,
            self.names,
            name=name,
            host=HOST,
            model=self.trainer.name,
            model_type=self.trainer.family,
            parameters=parameters,
            device=f"{device} ({platform.processor() or platform.machine()})",
            seed=self.seed,
            trainer=self.trainer.reading(),
            engine=self.rollout.reading(),
            sampling=self.rollout.sampling,
            patches=list(patches.values()),
            audit=self._audit,
            packages=PACKAGES,
        )

    # One batch.

    def batch(self, records: Sequence[RolloutRecord], split: str = "train") -> Batch:
        """Lay rollouts out as tensors; `split` is "train", or "eval/<name>" for rollouts that the model does not learn from.

        A rollout that cannot be trained on is a bad row (`mismatch_ext.bad_rows`): it is counted, and if the config acts, its
        loss weight is 0. Raises RecordError if provenance is missing or mixed, if all rollouts are of other weights than the
        engine's present ones, or if a KL baseline is over copies of one record; RoutingError if no record has routes under R3;
        LoopError if you have not sent the weights since the last step.
        """
        self._expect_started()
        with self._together(split):
            with self._checks.checking("records"):
                if self._verifier is not None and self._verifier.moved():
                    raise LoopError(
                        f"step {self.steps}: the trainer's weights have changed since the engine got them: call run.send() "
                        "before the next rollouts, or set mismatch.monitor.weight_sync='off'."
                    )
            batch = None
            with self._checks.checking("records"), self._log.refusing(split, self._held(records)):
                present = self.rollout.weight_version
                batch = collate(records, self.trainer.device, split, weight_version=present)
            if batch is None:  # it was refused, and the run goes on: take one provenance, and no routes
                alike = [replace(record, provenance=records[0].provenance, routing=None) for record in records]
                batch = collate(alike, self.trainer.device, split)
            with self._checks.checking("records"), self._log.refusing(split, self._held(records)):
                expect_present(batch.provenance, self.rollout.weight_version)
            if self.block.routing is not None and self.block.routing.mode == "R3" and batch.routing is None:
                if not bool(batch.bad.all()):
                    raise RoutingError(
                        "mismatch.routing.mode='R3', and these rollouts have no routes; let rollout.generate sample them once "
                        "the run has been started."
                    )
                batch.routing = self._no_routes(batch)
            self._count_bad_rows(batch)
            copies = len(records) - len({id(record) for record in records})
            if split == "train" and copies and self._kl is not None and self._kl.config.has_baseline:
                raise RecordError(
                    f"{copies} rows are the same rollout as another row, and mismatch.kl.baseline='leave_one_out' would subtract "
                    "their own KL from it. Set mismatch.kl.baseline='none', or give each rollout once."
                )
        if split == "train":
            self._required.begin_batch(batch)
            if self._kl is not None:
                self._kl.begin()
            self._measure_lengths(batch)
        return batch

    def turns(self, conversations: Sequence[Sequence[RolloutRecord]], chat: Chat | None = None) -> None:
        """Note how many conversations fork (`turns/forked_frac`): a turn's prompt begins with none of the turns before it.

        Args:
            conversations: For each conversation, the records of its turns in the order of the calls. Every rank must call.
            chat: The tokenizer with its chat template (`mismatch_ext.adapters.transformers.chat.TokenizerChat`), which tells the
                causes apart; without it only the share is noted.
        """
        forks = forks_of_turns(conversations, chat).over(self.ranks)
        for name, value in forks.metrics().items():
            self._pending.note(PREFIX + name, value, float(forks.conversations))

    def score(self, batch: Batch) -> Tensor:
        """Return the trainer's log-probabilities of a batch's responses `[B, T]`, nats, under its routes.

        Under R2 the first call for a batch without gradients records the batch's routes. If the config acts, bad rows are 0 and
        have no gradient. A row that is not finite without gradients, which is the pass for `old`, is bad from then on.
        """
        with self._under_routes(batch):
            logprobs = self.trainer.logprobs(batch)
        if torch.is_grad_enabled():
            self._note_broken_pass(batch, logprobs.detach())
        else:
            self._find_non_finite(batch, logprobs)
        return self._without_bad_rows(batch, self._required.watch("replay", logprobs))

    def reference(self, batch: Batch) -> Tensor:
        """Return the reference's log-probabilities `[B, T]`, nats; zeros without a `kl` section, as nothing needs them then.

        They are under the batch's routes if `routing.reference` is set. Raises ConfigError if the trainer's side has no
        reference.
        """
        if self._kl is None:
            return torch.zeros_like(batch.rollout_logprobs)
        with self._under_routes(batch, reference=True):
            logprobs = self.trainer.logprobs(batch, reference=True)
        self._find_non_finite(batch, logprobs.detach())
        return self._without_bad_rows(batch, logprobs)

    # Bad rows.

    def _count_bad_rows(self, batch: Batch) -> None:
        """Count the rows of a new batch, and those that have a fault."""
        bad = BadRows(len(batch))
        for row, record in enumerate(batch.records):
            if record.fault is not None:
                bad.add(row, record.fault.reason, f"row {row}: {record.fault.message}")
        held = self._held(batch.records) if len(bad) else None
        self._log.count_bad_rows(batch.split, bad, held)

    def _find_non_finite(self, batch: Batch, logprobs: Tensor) -> None:
        """Call rows bad that have a log-probability of the trainer or its reference which is not finite, and count them."""
        if logprobs.shape != batch.response_mask.shape:
            return  # an error of the batch, which whatever computes with these values names
        later = BadRows(0)  # the batch's rows have been counted already
        later.add_non_finite("old_logprobs", logprobs, batch.good_tokens)
        if len(later):
            batch.bad[list(later.faults)] = True
            self._log.count_bad_rows(batch.split, later, self._held(batch.records, trainer=logprobs))

    def _note_broken_pass(self, batch: Batch, logprobs: Tensor) -> None:
        """Note a log-probability that is not finite in a pass that the model learns from: its gradient cannot be masked."""
        broken = BadRows(len(batch))
        broken.add_non_finite("old_logprobs", logprobs, batch.response_mask)
        if len(broken) and self._broken_pass is None:
            self._broken_pass = broken.firsts()[0].message

    def _without_bad_rows(self, batch: Batch, logprobs: Tensor) -> Tensor:
        """Return log-probabilities that are 0, without a gradient, in bad rows; all of them if the config does not act."""
        if not self.block.acts:
            return logprobs
        # A copy: if a row of the batch turns out to be bad before the backward pass, autograd must not find another mask.
        bad = batch.bad[:, None].clone()
        return logprobs.masked_fill(bad, 0.0)

    def _no_routes(self, batch: Batch) -> list[RoutingTrace]:
        """Return empty routes for a batch in which every row is bad and none has routes."""
        assert self._replay is not None
        shape = self._replay.layout.shape
        return [
            unrouted(record, layers=shape.layers, top_k=shape.top_k, num_experts=shape.num_experts)
            for record in batch.records
        ]

    @contextmanager
    def replaying(self, batch: Batch) -> Iterator[None]:
        """Run the trainer's forward pass of a batch, or of some rows of it, under its routes, if there is a `routing` section.

        A checkpointed backward pass may come after the `with` block. Raises RoutingError if the routes do not fit tokens or
        model, ReplayError if the pass was over other tokens or did not follow the routes.
        """
        learns = torch.is_grad_enabled()
        with self._under_routes(batch):
            yield
        if learns:
            self._required.note("replay")

    @contextmanager
    def _under_routes(self, batch: Batch, *, reference: bool = False) -> Iterator[None]:
        replay, trainer = self._replay, self.trainer
        if replay is None or (reference and not replay.config.reference):
            yield
            return
        if batch.routing is None:
            if reference or torch.is_grad_enabled():
                raise RoutingError(
                    "mismatch.routing.mode='R2' replays the routes of the old-logprob pass, and there was none of this batch: "
                    "score it under torch.no_grad() first."
                )
            with trainer.routing.record_routing(trainer.policy(), version=self.steps) as recording:
                yield
            batch.routing = routes_of(recording.passes, batch)
            return
        trace, recorded = align(batch.routing, batch.attention_mask)
        real = (batch.attention_mask & ~batch.bad[:, None]).flatten()
        split = REFERENCE if reference else batch.split
        before = replay.forwards
        with replay.replaying(trainer.policy(reference=reference), trace, recorded, real=real, split=split):
            yield
        if replay.forwards == before:
            raise RoutingError(
                "no forward pass in this block was over the batch's tokens, so that nothing was replayed; pass batch.tokens and "
                "batch.attention_mask as they are."
            )

    def measure(self, batch: Batch, *, old: Tensor, reference: Tensor | None = None) -> None:
        """Measure the gap to the engine, and the KL divergence from the reference.

        `old` and `reference` are log-probabilities `[B, T]` in nats, of the trainer at sampling time and of the reference; the
        latter only a `kl` section needs. Bad rows are left out, and a row is bad in which `old` is not finite. Raises LoopError
        if the reference is missing.
        """
        self._expect_started()
        measured = False
        with self._together(batch.split):
            self._find_non_finite(batch, old.detach())
            mask = batch.good_tokens
            trainer, engine = old.detach(), batch.rollout_logprobs
            held = self._held(batch.records, trainer=old.detach())
            with self._checks.checking("measure"), self._log.holding(batch.split, held):
                self._log.sums.add_gap(batch.split, old=trainer, rollout=engine, mask=mask)
                self._log.sums.add_cached(batch.split, old=trainer, rollout=engine, mask=mask, records=batch.records)
                measured = True
            if self._replay is not None and batch.routing is not None and self._replay.draws.native_gap(batch.split):
                with torch.no_grad(), forked_rng(self.trainer.device):
                    native = self.trainer.logprobs(batch)
                measurable = mask & native.isfinite()  # it only serves as a comparison
                self._log.sums.add_gap(
                    batch.split, old=native, rollout=batch.rollout_logprobs, mask=measurable, native=True
                )
            if batch.split != "train":
                return
            self._required.note("measure", batch)
            if self._kl is not None:
                if reference is None:
                    raise LoopError(
                        "mismatch.kl is on: give run.measure(batch, old=..., reference=...) the reference's log-probabilities."
                    )
                kl_of_part = kl_sums(logprobs=old, ref_logprobs=reference, mask=mask)
        if self._kl is not None:
            kl_of_batch = over_ranks(kl_of_part, self.ranks)
            for name, value in self._kl.add(kl_of_batch).items():
                self._pending.note(PREFIX + name, value, float(kl_of_batch["kl_tokens"]))
        if self._rate is not None and self._rate.config.trigger in ("mismatch_kl", "f_tau"):
            if not measured:  # tokens that were refused lead nothing, and other ranks wait for this one's sums
                trainer, engine, mask = torch.zeros_like(trainer), torch.zeros_like(engine), torch.zeros_like(mask)
            sums = over_ranks(leading_sums(old=trainer, rollout=engine, mask=mask), self.ranks)
            self._rate.collect(gap_statistics(sums), float(sums["tokens"]))

    def _held(self, records: Sequence[RolloutRecord], trainer: Tensor | None = None) -> ColumnBatch:
        """Return rollouts as a batch that can be kept as evidence."""
        routing = self.block.routing

        def settings() -> dict[str, Any]:
            temperature = self.rollout.sampling.temperature
            replays = routing is not None and routing.mode == "R3"
            return trainer_settings(self.trainer.reading(), host="loop", temperature=temperature, replays=replays)

        return ColumnBatch.of_records(records, trainer=trainer, step=self.steps, settings=settings)

    def correct(self, batch: Batch, old: Tensor, *, advantages: Tensor | None = None) -> Correction:
        """Return the importance weights and the rejection mask for the gap; without a `correction` section the weights are 1.

        If the config acts, the weights of bad rows are 0, and the section's own statistics leave them out.
        `old` are the trainer's log-probabilities at sampling time `[B, T]`, nats; in mode `bypass`, whose ratio is pi/mu,
        those of the current policy (`ppo_clip` then takes `batch.rollout_logprobs` as the old ones). `advantages` are `[B]` or
        `[B, T]`, for `off_policy_threshold`. With `normalize` the batch must be whole.
        """
        self._required.note("correct", batch)
        section = self.block.correction
        self._find_non_finite(batch, old.detach())
        mask = batch.good_tokens if self.block.acts else batch.response_mask
        correction = Correction(weights=mask.float(), mask=mask, sums={})
        if section is None:
            return correction
        with self._together(batch.split):
            settings = resolve(section)
            if settings.normalize and (batch.part or (len(batch) == self.ranks.size == 1)):
                raise LoopError(
                    f"mismatch.correction.normalize with {len(batch)} rows of a batch: weights would be divided by their "
                    "own mean only. Give run.correct whole batches of several responses, or set normalize: false."
                )
            correction = correct(
                old_logprobs=old.detach(),
                rollout_logprobs=batch.rollout_logprobs,
                response_mask=mask,
                config=settings,
                advantages=advantages,
            )
        if batch.split != "train":
            self._log.mask(batch.split, correction.as_multiplier(), mask)
            return correction
        metrics = correction_metrics(over_ranks(correction.sums, self.ranks))
        of_this_rank = correction.metrics
        if settings.normalize and of_this_rank:
            # The weights were divided by the mean of this rank, and are to be divided by that of all.
            mean = "rollout_is_batch_norm_factor"
            correction = replace(correction, weights=correction.weights * (of_this_rank[mean] / metrics[mean]))
        for name, value in metrics.items():
            self._pending.note(PREFIX + name, value)
        self._log.mask(batch.split, correction.as_multiplier(), mask)
        return correction

    def kl(self, batch: Batch, *, logprobs: Tensor, reference: Tensor, old: Tensor | None = None) -> Tensor:
        """Return the KL term `[B, T]` to add to a per-token loss, coefficient included; zeros without a `kl` section.

        It is 0 for bad rows, which a baseline leaves out, too.
        `logprobs` are the current policy's `[B, T]`, nats, with their graph. `old`, of the trainer at sampling time, replaces
        the engine's under `ratio`. Give all responses of a prompt together, because the baseline is over those that are there.
        """
        if self._kl is None:
            return torch.zeros_like(logprobs)
        if self._kl.config.baseline == "leave_one_out" and batch.part and _one_of_each(batch.groups):
            raise LoopError(
                "mismatch.kl.baseline='leave_one_out' subtracts the mean over a prompt's other responses, and this part of a "
                "batch has one response of each prompt: nothing would be subtracted. Cut the batch between prompts, or set "
                "mismatch.kl.baseline='none'."
            )
        logits = None
        if self._kl.config.estimator == "full":
            logits = self._logits(batch), self._logits(batch, reference=True)
        behavior = self._kl.behavior(logprobs, old=old, rollout=batch.rollout_logprobs if old is None else None)
        terms = kl_terms(
            logprobs=logprobs,
            ref_logprobs=reference,
            mask=batch.good_tokens,
            settings=self._kl.config,
            behavior=behavior,
            coef=self._kl.coef,
            groups=batch.groups,
            logits=logits,
            temperature=batch.temperature,
        )
        return self._required.watch("kl", terms.loss)

    def center(self, batch: Batch, advantages: Tensor) -> Tensor:
        """Return the term of score centering `[B, T]` to add to a per-token loss; zeros without `correction.centering`.

        It has the advantages `[B]` or `[B, T]` in it, and is 0 for bad rows. It takes a forward pass of its own, whose logits are
        held once, in the model's dtype, so give it micro-batches. It is exact for the first step that learns from a batch: a
        later one has a ratio to the old policy, whose probabilities of other tokens are not known. Raises RecordError if no row
        has the engine's most likely tokens.
        """
        self._expect_started()
        settings = None if self.block.correction is None else resolve(self.block.correction)
        if settings is None or settings.centering is None or batch.split != "train":
            return torch.zeros_like(batch.rollout_logprobs)
        mask = batch.good_tokens
        with self._together():
            heads = [record.head for record in batch.records]
            if all(head is None for head in heads) and bool(mask.any()):
                raise RecordError(
                    "mismatch.correction.centering, and these rollouts have no head; let rollout.generate sample them once the "
                    "run has been started."
                )
            head_ids, head_logprobs = padded_heads(heads, mask.shape[1], mask.device)
        learns = not settings.centering.only_measured
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns):
            found = terms_and_biases(
                self._logits(batch).flatten(0, 1),
                head_ids=head_ids.flatten(0, 1),
                head_logprobs=head_logprobs.flatten(0, 1),
                temperature=batch.temperature,
                **settings.bounds_of_tokens,
            )
        terms, biases = (values.view(mask.shape).masked_fill(~mask, 0.0) for values in found)
        # A token without likely ones of the engine has no bias that could be measured.
        known = mask & head_logprobs.isfinite().any(-1)
        total, tokens = torch.stack([biases.detach().double().sum(), known.sum().double()]).tolist()
        if tokens:
            self._pending.note(PREFIX + SAMPLER_BIAS, total / tokens, tokens)
        if not learns:
            return torch.zeros_like(batch.rollout_logprobs)
        of_token = advantages if advantages.dim() == 2 else advantages[:, None]
        return self._required.watch("center", terms * of_token)

    def _logits(self, batch: Batch, *, reference: bool = False) -> Tensor:
        with self._under_routes(batch, reference=reference):
            return self.trainer.logits(batch, reference=reference)

    def penalty(self, batch: Batch, *, old: Tensor, reference: Tensor) -> Tensor:
        """Return the amount to subtract from each token's reward `[B, T]`; zeros unless `kl.reward_path` is `rewards`."""
        self._required.note("penalty", batch)
        if self._kl is None or not self._kl.config.in_rewards:
            return torch.zeros_like(old)
        return kl_terms(
            logprobs=old, ref_logprobs=reference, mask=batch.good_tokens, settings=self._kl.config, coef=self._kl.coef
        ).reward

    # A step.

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's loss, scaled in float16; call `step` without a loss after it."""
        self._expect_started()
        scaler = self.trainer.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        self._loss_parts.append(float(loss.detach()))

    def step(self, loss: Tensor | None = None, *, max_norm: float | None = None) -> Stepped:
        """Step optimizer and schedule as loss scaler and rate control say, and clear the gradients.

        Without `loss`, `backward` got it in parts; without `max_norm`, nothing is clipped. Raises LoopError if the loop did
        not use a section of the config, PrecisionError if too many steps in a row overflow, NonFiniteLogprobError if the config
        acts and the trainer's own pass was not finite, which only a loss scaler can skip.
        """
        if loss is not None:
            self.backward(loss)
        with self._together(), self._checks.checking("loop"):
            self._required.check_step(self.steps)
        if self._loss_parts:
            self._pending.note(self.names.loss, sum(self._loss_parts))
            self._loss_parts = []
        stepped = self._step_optimizer(max_norm)
        self._pending.note(self.names.grad_norm, stepped.grad_norm)  # one that is not finite raises its alarm
        self._pending.note(self.names.learning_rate, stepped.learning_rate)
        self.steps, self._stepped = self.steps + 1, True
        return stepped

    def _step_optimizer(self, max_norm: float | None) -> Stepped:
        optimizer, scaler, rate, taken = self.trainer.optimizer, self.trainer.scaler, self._rate, True
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = _grad_norm(optimizer, max_norm)
        self._expect_whole_pass(norm)
        if rate is not None and rate.config.trigger == "grad_norm":
            rate.collect({"grad_norm": norm})
        if self._grid is not None:
            with self._checks.checking("metrics"):
                self._grid.before(self.trainer.named_parameters())
        with nullcontext() if rate is None else rate.applied():
            if scaler is None:
                optimizer.step()
            else:
                overflows = scaler.overflow_steps
                scaler.step(optimizer)
                scaler.update()
                taken = scaler.overflow_steps == overflows
        applied = float(optimizer.param_groups[0]["lr"]) * (1.0 if rate is None else rate.last_multiplier)
        if self._grid is not None:
            with self._checks.checking("metrics"):
                coarse = self._grid.after(self.trainer.named_parameters(), applied)
                if coarse is not None and self.ranks.rank == 0:
                    self._warn(COARSE_ENGINE, coarse)
        if self.trainer.scheduler is not None and taken:
            self.trainer.scheduler.step()
        optimizer.zero_grad()
        return Stepped(taken=taken, grad_norm=norm, learning_rate=applied)

    def _expect_whole_pass(self, grad_norm: float) -> None:
        """Refuse a step whose gradient is not finite because the trainer's log-probabilities were not."""
        broken, self._broken_pass = self._broken_pass, None
        if not self.block.acts or self.trainer.scaler is not None:
            return
        with self._together():
            if broken is not None and not math.isfinite(grad_norm):
                raise NonFiniteLogprobError(
                    f"step {self.steps + 1}: {broken} The gradient of the whole step is not finite, and the weights are as they "
                    "were before it. Save them, look for NaN in the model's activations, and lower the learning rate."
                )

    def _control_rate(self, step: int) -> None:
        """Begin to control the rate; the schedule may have moved already before the run's first step."""
        if self._rate is not None:
            self._rate.close()
        if self.block.lr is not None:
            joining = step or int(getattr(self.trainer.scheduler, "last_epoch", 0) or 0)
            self._rate = LrControl(self.block.lr, self.trainer.optimizer, step=joining)

    def _measure_lengths(self, batch: Batch) -> None:
        """Note a batch's lengths over all ranks, which give all of them one multiplier."""
        good = ~batch.bad
        cut = torch.tensor([record.finish_reason == "length" for record in batch.records])
        unknown = sum(record.finish_reason is None for record in batch.records)
        sums = length_sums(batch.lengths[good], cut[good.to("cpu")]) | {
            "unknown": torch.tensor(float(unknown), dtype=torch.float64)
        }
        sums = over_ranks(sums, self.ranks)
        lengths = length_statistics(sums)
        if float(sums["unknown"]):  # on any rank: all of them must give the rate the same statistics
            lengths.pop("truncated_fraction", None)
        if self._rate is not None and self._rate.config.trigger == "response_length":
            self._rate.collect(lengths)
        for name, logged_as in (("response_length", self.names.length), ("truncated_fraction", "truncated_fraction")):
            if name in lengths:
                self._pending.note(logged_as, lengths[name], lengths["responses"])

    # Weights.

    def send(self) -> SyncVerdict | None:
        """Send the trainer's weights to the engine, and verify that it computes with them.

        Raises WeightSyncError if it does not, LoopError if something other than `step` changed the weights.
        """
        self._expect_started()
        with self._together():
            self._expect_stepped()
            answer = self.rollout.update(self.trainer.checkpoint_parameters())
            if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], SyncReading)):
                raise RecordError(
                    f"{type(self.rollout).__name__}.update returned a {type(answer).__name__}; it must return a SyncReading and "
                    "a mapping of samples for `compare`, which may be empty."
                )
            reading, samples = answer
            if not self._transfer_audited:
                self._transfer_audited = True
                with self._checks.checking("precision"):
                    self._audited(reading)
        return self.sent(samples)

    def sent(self, samples: Mapping[str, Any] | None = None) -> SyncVerdict | None:
        """Verify an update that the loop made itself, of version `rollout.weight_version`; raises as `send`.

        `samples` are values that the engine should hold, for `rollout.compare`.
        """
        if self._verifier is None:
            return None
        verdict: SyncVerdict | None = None
        with self._together():
            self._expect_stepped()
            stepped, self._stepped = self._stepped, False
            with self._checks.checking("weight_sync"):
                verdict = self._verifier.verify(samples, stepped=stepped)
        if verdict is not None:
            self._pending.note(PREFIX + "weight_sync_gap", verdict.gap_mean)
        return verdict

    def _expect_stepped(self) -> None:
        """Refuse weights that something other than `step` has changed."""
        if not self._stepped and self.block.acts and self._verifier is not None and self._verifier.moved():
            raise LoopError(
                f"step {self.steps}: the trainer's weights have changed, and not by run.step(), which applies what the config "
                "asks for; step by it."
            )

    # Logs.

    def log(self, metrics: Mapping[str, Any] | None = None, *, split: str = "train", **more: Any) -> Logged:
        """Write what was measured since the last log, with the loop's own metrics, and return it and whether to stop.

        Metrics are numbers, or tensors, whose mean is logged; the report shows the one named `reward`. `split` is "train" or
        "eval/<name>". Of the result, `metrics` has everything, and `shown` what belongs on a console: the loop's own and
        those of `mismatch.monitor.metrics`.
        """
        self._expect_started()
        with self._together():
            own_metrics = {name: _number(value) for name, value in {**(metrics or {}), **more}.items()}
        self._checks.gather(self.ranks)
        with self._together():  # the main process alone writes
            logged = self._log.measured(self.steps, split)
        if split == "train":
            logged |= self._pending.take(self.ranks)
            parts = [part.metrics() for part in (self.trainer.scaler, self._rate) if part is not None]
            if self._grid is not None:
                parts.append(self._grid.metrics(self.ranks))
            logged |= {PREFIX + name: value for part in parts for name, value in part.items()}
        by_layer: dict[str, float] = {}
        if self._replay is not None:
            routes = self._replay.take_others(split, self.ranks)
            agreement = self._replay.take_agreement(split, self.ranks)
            by_layer = {PREFIX + name: value for name, value in agreement.items() if of_layer(name)}
            logged |= {PREFIX + name: value for name, value in (routes | agreement).items() if not of_layer(name)}
        logged |= own_metrics
        with self._together():
            stop = None
            if split == "train":
                stop = self._log.look(self.steps, logged)
                logged |= self._log.raised()
            self._log.write(self.steps, logged | by_layer, split)
        stop = self._log.decided(stop) if split == "train" else None
        return Logged(metrics=logged, shown=self._log.shown(logged), stop=stop)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON-able data, without that of model, optimizer and schedule."""
        self._expect_started()
        state: dict[str, Any] = {"run": {"step": self.steps}, "config": self.block.to_dict()}
        state |= self._log.state_dict() | {"weight_version": self.rollout.weight_version}
        parts = self._parts | {"weight_sync": self._verifier, "lr": self._rate}
        return state | {name: part.state_dict() for name, part in parts.items() if part is not None}

    @property
    def _parts(self) -> dict[str, Any]:
        """The parts that go on from a checkpoint with nothing else to do, by their keys in it; None if they are off."""
        return {"kl": self._kl, "routing": self._replay, "scaler": self.trainer.scaler}

    def save(self, folder: str | Path) -> Path:
        """Write `state_dict` to a folder, after the loop has saved model, optimizer and schedule there, and return the file.

        Warns if the file cannot be written; the run goes on, and `start(resume=folder)` refuses that folder.
        """
        path, state = Path(folder) / STATE_FILE, self.state_dict()  # on all ranks: it settles the batch's KL
        with self._together():
            if self.ranks.rank == 0:
                write_state(path, state)
        return path

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, as `start(resume=folder)` does from a file; raises RecordError."""
        self._expect_started()
        with self._together():
            self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["run"]["step"])
        self._pending = _Pending()  # those metrics belong to steps that are undone
        self._required = Required(self.block)  # and so do batches of which a verb is missing yet
        self._loss_parts = []
        self._log.load_state_dict(state, step=self.steps)
        for name, part in self._parts.items():
            if part is not None and state.get(name) is not None:
                part.load_state_dict(state[name])
        if self._rate is not None:
            if state.get("lr") is None:
                self._control_rate(self.steps)
            self._rate.load_state_dict(state.get("lr"))
        self._stepped = True  # by the run that saved it
        self.rollout.weight_version = max(self.rollout.weight_version, int(state.get("weight_version") or 0))
        if self._verifier is not None and state.get("weight_sync") is not None:
            begins_anew = self._verifier.load_state_dict(state["weight_sync"])
            if begins_anew is not None:
                self._warn("weight_sync", begins_anew)

    # End.

    def end(self, status: str = "completed", message: str = "") -> None:
        """Remove rate control, write how the run ended ("completed" or "failed", and why), and print what happened."""
        if self._started and not self._ended:
            self._ended = True
            self._end(status, message)

    def __enter__(self) -> Run:
        self._expect_started()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end()
        elif not self._ended:
            self._ended = True
            self._end_after(error)

    def _end(self, status: str, message: str) -> None:
        if self._rate is not None:
            self._rate.close()
        self._log.end(status, message)

    def _end_after(self, error: BaseException) -> None:
        """End the run as failed; if that fails too, the second error becomes a note of the first, which is still raised."""
        try:
            self._end("failed", first_error(error, self._training))
        except Exception as second:  # noqa: BLE001  # whatever it is, the first error matters more
            error.add_note(f"The end of the run was not written: {type(second).__name__}: {second}")

    # Helpers.

    def _together(self, split: str = "train") -> AbstractContextManager[object]:
        """Let an error of one rank end all ranks; in evaluations ranks may have different numbers of batches, and are alone."""
        return together(self.ranks) if split == "train" else nullcontext()

    def _expect_started(self) -> None:
        if not self._started:
            raise LoopError("the run has not been started: `with run.start():` around the loop.")

    def _warn(self, name: str, message: str) -> None:
        warnings.warn(message, stacklevel=4)
        self._log.event("warning", name, message)


class _Pending:
    """The metrics of a training split until they are logged, each a mean or an extreme of what was noted."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, float]]] = {}

    def note(self, name: str, value: float, weight: float = 1.0) -> None:
        """Keep a value of a metric; the weight is the number of things it is a mean over."""
        self._values.setdefault(name, []).append((value, weight))

    def take(self, ranks: Ranks) -> dict[str, float]:
        """Return one value per metric over all ranks, and begin anew; all of them must call it."""
        noted, self._values = self._values, {}
        everywhere: dict[str, list[tuple[float, float]]] = {}
        for of_rank in ranks.gather(noted):
            for name, entries in of_rank.items():
                everywhere.setdefault(name, []).extend(entries)
        return {name: self._merged(name, entries) for name, entries in everywhere.items()}

    @staticmethod
    def _merged(name: str, entries: Sequence[tuple[float, float]]) -> float:
        """Return the extreme for a name in `_max` or `_min`, otherwise the weighted mean."""
        values = [value for value, _ in entries]
        if name.endswith("_max"):
            return max(values)
        if name.endswith("_min"):
            return min(values)
        total = sum(weight for _, weight in entries)
        return sum(value * weight for value, weight in entries) / total if total else sum(values) / len(values)


def check_block(block: MismatchConfig) -> None:
    """Refuse a config that asks for something that your own loop cannot have."""
    if block.sampling_mask is not None:
        raise ConfigError(
            "mismatch.sampling_mask in your own loop, which scores its batches itself: it takes log-probabilities over the "
            "masks with mismatch_ext.support_logprobs (docs/loop.md); remove the section."
        )
    if block.kl is not None and block.kl.coef is None:
        raise ConfigError("mismatch.kl.coef is not given, and your own loop has no coefficient of a host; set it.")


def _saved_state(folder: Path) -> dict[str, Any]:
    path = folder / STATE_FILE
    state = read_state(path)
    if state is None or not isinstance((state.get("run") or {}).get("step"), int):
        raise RecordError(f"{path} holds no state of a run; resume from a folder that run.save wrote to.")
    return state


def _one_of_each(groups: Tensor) -> bool:
    """Whether no two rows `[B]` are of one prompt."""
    return len(groups.unique()) == len(groups)


def _grad_norm(optimizer: Any, max_norm: float | None) -> float:
    """Return the norm of an optimizer's gradients, and clip them if that is asked for."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if max_norm is not None:
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    if not parameters:
        return 0.0
    return float(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]))


def _number(value: Any) -> float:
    return float(value.detach().float().mean()) if isinstance(value, Tensor) else float(value)
