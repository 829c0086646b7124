"""GRPO's and RLOO's side of a config that acts, as `trainer.mm`: what is built, and one batch from its prompts to its loss.

Order of a rollout: `make_batch` (weights out, engine -> records, in `generation.py`), `generated` (turns joined), `score_rows`
(old policy under its routes), `steps`, `loss`, then `logged`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import is_peft_model
from mismatch_ext.adapters.accelerate.deepspeed import configured, reduce_in_float32
from mismatch_ext.adapters.accelerate.float16 import compute_in_float16
from mismatch_ext.adapters.accelerate.overflow import HeldScale, skips_overflows
from mismatch_ext.adapters.accelerate.sharded import gathered, is_sharded
from mismatch_ext.adapters.transformers.lr import LENGTH, TRUNCATED, LrCallback
from mismatch_ext.adapters.transformers.scoring import logits_width
from mismatch_ext.adapters.trl.bad_rows import has_non_finite, mask_of, take_out
from mismatch_ext.adapters.trl.centering import Centering
from mismatch_ext.adapters.trl.config import sampling_settings
from mismatch_ext.adapters.trl.correction import (
    CorrectionTerm,
    clips_engine_ratio,
    native_options,
    phantom,
)
from mismatch_ext.adapters.trl.engines import UNCOMPILED
from mismatch_ext.adapters.trl.generation import CheckedGeneration
from mismatch_ext.adapters.trl.host import FIXES, Gap, RunCallback, TrainerRun
from mismatch_ext.adapters.trl.kl import KlReward
from mismatch_ext.adapters.trl.lora import Base, check_base, check_head, check_tied
from mismatch_ext.adapters.trl.objective import Objective
from mismatch_ext.adapters.trl.overridden import overridden
from mismatch_ext.adapters.trl.passes import RolloutPass
from mismatch_ext.adapters.trl.refusals import check_device, check_reference
from mismatch_ext.adapters.trl.replay import ScoreReplay
from mismatch_ext.adapters.trl.rows import rows_of_batch
from mismatch_ext.adapters.trl.sampling_mask import EngineMasks, mean_size
from mismatch_ext.adapters.trl.scoring import OLD, ROLLOUT, Scoring, scored_again
from mismatch_ext.adapters.trl.server_client import client_of
from mismatch_ext.adapters.vllm.engine import asked_of
from mismatch_ext.adapters.vllm.routing import FLAG
from mismatch_ext.adapters.vllm.server_checks import ServerCheck
from mismatch_ext.patches.trl.engine_arguments import engine_arguments
from mismatch_ext.patches.trl.fused_head import FUSED_HEAD
from mismatch_ext.patches.trl.server_client import SERVER_CLIENT
from mismatch_ext.patches.vllm.cpu_moe_repack import cpu_moe_repack
from mismatch_ext.patches.vllm.cpu_routes import cpu_routes_patches
from mismatch_ext.patches.vllm.top_logprobs import top_logprobs
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, NonFiniteLogprobError, ReplayError
from mismatch_ext.evidence import ColumnBatch
from mismatch_ext.kl import KlTerm, ragged_bias
from mismatch_ext.lr import gap_statistics, leading_sums, length_statistics, length_sums
from mismatch_ext.patching import Patch, digest_of
from mismatch_ext.precision.audit import HEAD_UNREAD, audit
from mismatch_ext.precision.readiness import EVENT as READINESS
from mismatch_ext.precision.readiness import check_readiness
from mismatch_ext.presets import resolve
from mismatch_ext.ranks import together
from mismatch_ext.rollout import RolloutRecord
from mismatch_ext.sums import Sums, over_ranks

MOST_FAILING = 20
"""Batches in a row that may have a step without finite gradients. A choice: a scale of 2^16 is below 1 after 17 such steps."""


class TrlRun(TrainerRun):
    """The side of a config that acts of a `GRPOTrainer` or `RLOOTrainer`."""

    kl: KlTerm | None
    correction: CorrectionTerm | None = None
    kl_reward: KlReward | None = None  # among TRL's rewards, if a part of the KL is there
    # Whether the trainer's own pass over the batch is not finite in some row of some rank. Such a row's loss weight is 0, and
    # the gradients are NaN all the same wherever its pass with gradients is not finite either.
    _own_pass_fails = False
    _failing = 0  # batches in a row with a step whose gradients were not finite
    _batch_fails = False  # whether this batch is one of them
    readiness: str | None = None  # a warning about the weights, kept until there is a run to log it in
    reads_more: str | None = None  # a warning of what TRL's loss reads beside what is known

    def __init__(self, trainer: Any, block: MismatchConfig, config: Any) -> None:
        super().__init__(trainer, block, config)
        self.kl = None if block.kl is None else KlTerm(block.kl, config.beta)
        self.scoring, self.objective = Scoring(self), Objective(self)
        self.centering = Centering(self, block)

    @property
    def routing(self) -> ScoreReplay | None:
        """What records and replays routes; None without the section."""
        return self.scoring.routing

    @property
    def rollouts(self) -> RolloutPass | None:
        """The batch that is generated and scored; None between batches."""
        return self.scoring.batch

    # Before TRL builds model and engine.

    def construction_patches(self, config: Any) -> list[Patch]:
        """Return the patches that are active while TRL builds its engine."""
        r3 = self.block.routing is not None and self.block.routing.mode == "R3"
        if config.use_vllm and config.vllm_mode == "server":
            # What a server computes in is in its own command, which is checked.
            return [SERVER_CLIENT.calling(client_of(ServerCheck(self.block)))]
        if not config.use_vllm:
            return []
        arguments: dict[str, Any] = {}
        given: Any = config.generation_kwargs  # a mapping, since the configuration has settled
        patches: list[Patch] = []
        if self.block.precision is not None:
            arguments |= asked_of(self.block.precision)
        if r3:
            arguments[FLAG] = True
        if self.block.sampling_mask is not None:
            # The sampled token comes in addition.
            arguments["max_logprobs"] = self.block.sampling_mask.asked(sampling_settings(config, given))
        if self.centering.top_k is not None:
            arguments["max_logprobs"] = self.centering.top_k
        if config.device.type == "cpu":
            arguments |= UNCOMPILED
            patches = cpu_routes_patches() if FLAG in arguments else []
        return [engine_arguments(arguments), *patches] if arguments else []

    def step_patches(self, config: Any) -> list[Patch]:
        """Return the patches that come and go in each step: around scoring passes and weight updates."""
        reads_head = self.block.sampling_mask is not None or self.centering.top_k is not None
        patches = [FUSED_HEAD, *top_logprobs()] if reads_head else []
        here = config.use_vllm and config.vllm_mode == "colocate"
        return [*patches, *(cpu_moe_repack() if here and config.device.type == "cpu" else ())]

    def accelerator_created(self) -> None:
        """Turn on float16, which accelerate leaves off on a CPU, as asked, and check the model, which TRL has loaded."""
        trainer, precision = self.trainer, self.block.precision
        check_device(trainer.accelerator.device.type, self.block, engine=trainer.use_vllm)
        self.check_sharding()
        if precision is not None and precision.dtype == "float16":
            if trainer.is_deepspeed_enabled:
                reduce_in_float32(configured(trainer.accelerator))  # the rest of float16 is DeepSpeed's own
            else:
                compute_in_float16(trainer.accelerator, precision)
        self.check_model()

    def check_precision(self) -> None:
        """Refuse a trainer that does not compute as asked, and scan its weights, before there is an engine."""
        if self.block.precision is None:
            return
        audit(self.block.precision, self.read_trainer(), None, None, FIXES).raise_for_findings()
        # On the device that the model is going to: its weights are still in the host's memory, where a scan is slow.
        accelerator = self.trainer.accelerator
        parameters = gathered(accelerator.unwrap_model(self.trainer.model), accelerator.device)
        self.readiness = check_readiness(parameters, self.block.precision)

    def check_model(self) -> None:
        """Refuse a model that the block does not fit, when TRL has loaded it and not yet started its engine."""
        trainer = self.trainer
        # As TRL decides whether it builds one.
        built = trainer.args.beta != 0.0 and not is_peft_model(trainer.model)
        check_reference(trainer.accelerator, built)
        if trainer.use_vllm and is_peft_model(trainer.model):
            check_base(trainer.model)
            check_tied(trainer.model)
            if self.block.precision is not None and self.block.precision.head is not None:
                check_head(trainer.model)
        if self.block.routing is not None:
            try:
                self.scoring.routing = ScoreReplay(self.block.routing, trainer.model, trainer.args.seed)
            except ReplayError as error:
                raise ReplayError(
                    f"mismatch.routing.mode={self.block.routing.mode!r}: {error} Remove mismatch.routing if the model is not a "
                    "mixture of experts."
                ) from error
        self.check_precision()

    # Once TRL has built both.

    def begin(self) -> None:
        """Put the sections in place, read both sides back, wrap the engine, and say what is active."""
        trainer = self.trainer
        self.held_scale = HeldScale(trainer.accelerator)
        self.temperature = trainer.temperature
        trainer.add_callback(RunCallback(self))
        if self.block.lr is not None:
            self.lr = LrCallback(self.block.lr)
            trainer.add_callback(self.lr)
        if self.block.kl is not None and self.block.kl.in_rewards:
            self._reward_kl()
        if self.block.kl is not None or self.block.correction is not None or isinstance(trainer, RLOOTrainer):
            self.scoring.watch()
        if self.block.correction is not None:
            settings = resolve(self.block.correction)
            if native_options(settings) is None:
                self.correction = CorrectionTerm(settings, self.ranks)
        if self.block.precision is not None and self.block.precision.head is not None:
            self.keep_head_in_float32()
        super().begin()
        self._warn_of_settings()
        self.log.announce()

    def _reward_kl(self) -> None:
        """Put the KL penalty among the reward functions, as TRL does with an environment's own reward."""
        trainer, self.kl_reward = self.trainer, KlReward()
        trainer.reward_funcs = [*trainer.reward_funcs, self.kl_reward]
        trainer.reward_func_names = [*trainer.reward_func_names, "kl"]
        trainer.reward_processing_classes = [*trainer.reward_processing_classes, None]
        trainer.reward_weights = torch.cat([trainer.reward_weights, torch.ones(1)])

    def _warn_of_settings(self) -> None:
        loss_type = getattr(self.trainer, "loss_type", "")
        if self.readiness is not None:
            self.warn(READINESS, self.readiness)
        if self.audit_report is not None and HEAD_UNREAD in self.audit_report.unread:
            self.warn(
                "head",
                "mismatch.precision.head: the trainer's weights are sharded, so that the dtype of its output head was not read "
                "back; TRL's cast_lm_head_to_fp32 is set.",
            )
        if self.reads_more is not None:
            self.warn("trl_loss", self.reads_more)
        if loss_type in ("grpo", "sapo"):
            ragged = ragged_bias(self.block.kl, f"loss_type={loss_type!r}", "loss_type='dapo' or 'dr_grpo'")
            if ragged is not None:
                self.warn("kl_ragged", ragged)

    def wrapped_engine(self, vocabulary: Tensor) -> CheckedGeneration:
        """Return the engine behind checks of its weights and rollouts; it takes part in the run once it begins."""
        routing = self.routing
        return CheckedGeneration(
            self,
            vocabulary=vocabulary,
            patch_digest=digest_of(self.patches),
            layout=routing.layout if routing is not None and routing.config.mode == "R3" else None,
            masks=self._engine_masks(),
            heads=self.centering.of_engine(),
            base=self._base(),
        )

    def _base(self) -> Base | None:
        """Return what keeps a base model that TRL merges adapters into; None where it merges none, or into a copy."""
        # DeepSpeed's stage 3 drops what is merged with the gathered copy, and shards of FSDP's are not looked into.
        model: Any = self.trainer.vllm_generation.model
        if is_sharded(self.trainer.accelerator) or not is_peft_model(model):
            return None
        return Base(model, self.engine.reading().model_dtype)

    def _engine_masks(self) -> EngineMasks | None:
        """Return what makes sampling masks of the engine's answers; None where none are asked for."""
        if self.block.sampling_mask is None:
            return None
        vocabulary = logits_width(self.trainer.accelerator.unwrap_model(self.trainer.model))
        if vocabulary is None:
            raise ConfigError(
                "mismatch.sampling_mask: the model's configuration has no vocab_size: it is not known what its logits are "
                "over; remove mismatch.sampling_mask."
            )
        return EngineMasks(min(self.block.sampling_mask.asked(self.sampling), vocabulary), vocabulary)

    # One rollout batch.

    def make_batch(self, host: Callable[..., dict[str, Any]], inputs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Generate and score a batch as TRL does, and take it through the steps to its loss."""
        batch, trainer = RolloutPass(size=len(inputs)), self.trainer
        keeping = nullcontext() if self.checked is None else self.checked.keeping(batch.records)
        # Of others, TRL returns what its passes come to.
        keeps_passes = self.kl_reward is not None or isinstance(trainer, RLOOTrainer)
        with self.scoring.of_batch(batch, keeps_passes=keeps_passes), keeping:
            self.objective.begin_batch()
            if trainer.use_vllm:
                with together(self.ranks):
                    self.follow_sampling()
            return self.steps(batch, host(inputs, *args, **kwargs))

    def score_rows(self, host: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Score tokens as TRL does, under the routes and over the masks that are known of them."""
        return self.scoring.score(host, model, *args, **kwargs)

    def loss(self, host: Callable[..., Tensor], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss of a micro-batch as TRL does, with the block's terms."""
        with self.scoring.of_loss(inputs) as known:
            return self.centering.added(self.objective.loss, host, model, known, *args, **kwargs)

    def learning_rate(self, host: Callable[..., float], *args: Any, **kwargs: Any) -> float:
        """Return the rate that the last step applied."""
        scheduled = host(*args, **kwargs)
        return scheduled if self.lr is None else scheduled * self.lr.applied

    def rewarded(
        self, host: Callable[..., Tensor], inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Compute rewards as TRL does; a completion that no other reward function scores gets no KL reward either."""
        if self.kl_reward is None:
            return host(inputs, prompts, completions, completion_ids_list, *args, **kwargs)
        self.kl_reward.penalties = self.objective.penalties(completion_ids_list)
        rewards = host(inputs, prompts, completions, completion_ids_list, *args, **kwargs)
        column = next(i for i, function in enumerate(self.trainer.reward_funcs) if function is self.kl_reward)
        others = torch.cat([rewards[:, :column], rewards[:, column + 1 :]], dim=1)
        rewards[others.isnan().all(dim=1), column] = torch.nan
        return rewards

    def steps(self, batch: RolloutPass, output: dict[str, Any]) -> dict[str, Any]:
        """Take a batch that TRL has generated and scored through eight steps to its loss.

        They are rows, proofs, gap, correction, rate, baseline, evidence and note.
        """
        self.scoring.passes = None  # what follows are passes of our own
        held = self.evidence_of(output, output.get(ROLLOUT))
        bad = BadRows(len(output["completion_ids"]))
        records = self._find_rows(batch, output, bad, held)
        old = self._prove_rows(output, records, bad, held)
        gap = self._measure_gap(output, old, records, bad, held)
        figures = self._correct(output, gap)
        self._lead_rate(gap, records, bad)
        self.objective.give_baseline(output, mask_of(output, bad), batch, gap)
        self.log.count_bad_rows(self.split, bad, held)
        self._note_batch(output, gap, figures)
        return output

    def _find_rows(
        self, batch: RolloutPass, output: dict[str, Any], bad: BadRows, held: ColumnBatch
    ) -> list[RolloutRecord | None] | None:
        """Find the rollout of each row, its routes and its masks, and call rows bad that have none; None without an engine."""
        with together(self.ranks), self.log.refusing(self.split, held):
            records = self.check_records(output, batch, bad) if self.trainer.use_vllm else None
            self.centering.keep(batch.table, batch.records)
            self.scoring.settle(output, bad, lambda: self.score_again(output))
        return records

    def _prove_rows(
        self, output: dict[str, Any], records: Sequence[RolloutRecord | None] | None, bad: BadRows, held: ColumnBatch
    ) -> Tensor | None:
        """Return the old log-probabilities `[B, T]`, and let nothing be trained on that is made of rows with faulty numbers.

        Args:
            output: The batch, which gets the engine's log-probabilities where TRL drops them.
            records: The rollout of each row; None without an engine, where a batch may have no old log-probabilities.
            bad: Takes the bad rows.
            held: Takes both sides' log-probabilities.
        """
        mask = mask_of(output, bad)
        with together(self.ranks, flags=1) as told:
            # First, because ranks that share a model take this pass together.
            old = output.get(OLD) if records is None else self.old_logprobs(output)
            if records is not None:
                if ROLLOUT not in output:
                    output[ROLLOUT] = self.recorded_logprobs(records, mask)
                bad.add_non_finite("rollout_logprobs", output[ROLLOUT], mask)
            held.trainer, held.rollout = old, output.get(ROLLOUT, held.rollout)
            told.here[0] = self._judge_own_passes(output, old, mask, bad)
        if self.split == "train":
            self._own_pass_fails, self._batch_fails = told.anywhere[0], False
            # A loss scale has no part in what follows of such a row, however many steps the batch takes.
            self.held_scale.hold(self._own_pass_fails)
        self.scoring.judge(output, bad)
        if len(bad):
            take_out(output, bad.flags(output["completion_ids"].device))
        return old

    def _judge_own_passes(self, output: Mapping[str, Any], old: Tensor | None, mask: Tensor, bad: BadRows) -> bool:
        """Call rows bad that policy or reference have not scored with finite numbers; tell whether a row is of the policy's."""
        scored = [] if old is None else [(old, mask)]
        sums = output.get("old_logps")  # RLOO's `[B]`, which a class of a user's may have scored
        if sums is not None:
            scored.append((sums[:, None], mask.any(1, keepdim=True)))
        for values, of_rows in scored:
            bad.add_non_finite("old_logprobs", values, of_rows)
        reference = output.get("ref_per_token_logps")
        if reference is not None:
            bad.add_non_finite("old_logprobs", reference, mask, "reference")
        return any(has_non_finite(values, of_rows) for values, of_rows in scored)

    def _measure_gap(
        self,
        output: dict[str, Any],
        old: Tensor | None,
        records: Sequence[RolloutRecord | None] | None,
        bad: BadRows,
        held: ColumnBatch,
    ) -> Gap | None:
        """Measure the gap of the rows that are not bad, of some batches under the model's own routes too."""
        if old is None or records is None:
            return None
        native = None
        if self.routing is not None and self.routing.draws.native_gap():
            with overridden(self.scoring, routing=None):
                native = self.score_again(output)
        with together(self.ranks):
            gap = self.measure_gap(output, old, output[ROLLOUT], records, bad, held)
            old, rollout, sampled = gap
            self.log.sums.add_cached(self.split, old=old, rollout=rollout, mask=sampled, records=records)
            if native is not None:
                native = torch.where(sampled, native, 0.0)
                self.log.sums.add_gap(self.split, old=native, rollout=rollout, mask=sampled, native=True)
        return gap

    def _correct(self, output: dict[str, Any], gap: Gap | None) -> dict[str, float]:
        """Weigh a batch, and return the correction's metrics; KL and gap have read `OLD` before, which `bypass` replaces."""
        if gap is None or self.correction is None:
            return {}
        old, _, sampled = gap
        return self.correction.apply(output, old, sampled)

    def _note_batch(self, output: dict[str, Any], gap: Gap | None, figures: dict[str, float]) -> None:
        """Log what was found of a batch: sizes of its masks, its correction, its weights, and what TRL's clip will stop."""
        trainer = self.trainer
        if self.scoring.masking is not None:
            supports = self.scoring.supports_of(output)
            size = mean_size(supports, self.ranks, output["completion_ids"].device)
            figures = figures | {"sampling_mask_size": size}
        if gap is not None:
            self.note_weights(output, gap[2])
            if trainer.model.training and isinstance(trainer, GRPOTrainer):
                settings = None if self.correction is None else self.correction.settings
                clips = clips_engine_ratio(settings, trainer.loss_type)
                figures = figures | phantom(trainer, output, gap, clips, self.ranks)
        self.note(**figures)

    def old_logprobs(self, output: Mapping[str, Any]) -> Tensor:
        """Return the trainer's log-probabilities at sampling time `[B, T]`, as TRL computed them if it did."""
        if OLD in output:
            found: Tensor = output[OLD]
            return found
        batch = self.rollouts
        if batch is not None and batch.scored:
            rows = rows_of_batch(output)
            own = batch.first_pass(lambda scored: scored.model is self.trainer.model and scored.is_of(*rows))
            if own is not None:
                return own.scores[0]  # the host's, which returns their sums only
        return self.score_again(output) if batch is None or batch.policy is None else batch.policy

    def score_again(self, output: Mapping[str, Any]) -> Tensor:
        return scored_again(self.trainer, output, training=self.trainer.model.training)

    # The learning rate.

    def _lead_rate(self, gap: Gap | None, records: Sequence[RolloutRecord | None] | None, bad: BadRows) -> None:
        """Let a fresh batch of completions lead the rate of the step that learns from it; its bad rows do not count."""
        if self.lr is None or self.lr.rate is None or not self.lr.config.watches or not self.trainer.model.training:
            return
        metrics = self.trainer._metrics["train"]
        trigger = self.lr.config.trigger
        if trigger == "response_length":
            if not metrics.get(LENGTH) or not metrics.get(TRUNCATED):
                raise ConfigError(
                    f"mismatch.lr.trigger='response_length': {type(self.trainer).__name__} keeps no {LENGTH!r} and {TRUNCATED!r} "
                    "of its rollouts; give mismatch.lr.period, or another trigger."
                )
            # TRL's values are over all ranks.
            lengths = {"response_length": metrics[LENGTH][-1], "truncated_fraction": metrics[TRUNCATED][-1]}
            if records is not None:
                sums = over_ranks(self._lengths_of_good(records, bad), self.ranks)
                if float(sums["bad"]):
                    lengths = length_statistics(sums)
                else:
                    # By which batches of one step are weighed.
                    lengths["responses"] = float(sums["responses"])
            self.lr.rate.collect(lengths)
        elif trigger in ("mismatch_kl", "f_tau") and gap is not None:
            old, rollout, mask = gap
            sums = over_ranks(leading_sums(old=old, rollout=rollout, mask=mask), self.ranks)
            self.lr.rate.collect(gap_statistics(sums), float(sums["tokens"]))

    def _lengths_of_good(self, records: Sequence[RolloutRecord | None], bad: BadRows) -> Sums:
        """Return the sums of the lengths of completions that are not bad, and the number of bad rows."""
        tokenizer = self.trainer._tokenizer
        ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *getattr(self.trainer, "eos_token_ids", ())}
        good = [record for row, record in enumerate(records) if record is not None and row not in bad.faults]
        lengths = torch.tensor([record.response_mask.sum() for record in good], dtype=torch.float64)
        truncated = torch.tensor([int(record.response_ids[-1]) not in ends for record in good], dtype=torch.bool)
        return {**length_sums(lengths, truncated), "bad": torch.tensor(float(len(bad)), dtype=torch.float64)}

    def grad_norm(self, host: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the gradient norm, and let it lead the rate of the step that is about to be taken.

        The step is skipped if the norm is not finite.

        Raises:
            NonFiniteLogprobError: The norm is not finite, and the step would be taken, or too many batches had such a step. The
                norm is that of all ranks, so that all of them raise.
        """
        norm = host(*args, **kwargs)
        if norm is not None:
            if not math.isfinite(float(norm)):
                self._skip_step(float(norm))
            elif not self._batch_fails:
                self._failing = 0
        if self.lr is not None and self.lr.rate is not None and self.lr.config.trigger == "grad_norm":
            self.lr.rate.collect({"grad_norm": float(norm)})
        return norm

    def _skip_step(self, norm: float) -> None:
        """See to it that a step whose gradients are not finite is skipped; raises as `grad_norm`."""
        advice = "Go back to the last checkpoint and look at the log-probabilities of the batch."
        self._failing += not self._batch_fails
        self._batch_fails = True
        skipped = skips_overflows(self.trainer.accelerator)
        # DeepSpeed has taken its step in the backward pass.
        can_skip = self._own_pass_fails and not self.trainer.is_deepspeed_enabled
        if not (skipped or can_skip):
            raise NonFiniteLogprobError(
                f"the gradient norm of step {self.step + 1} is {norm}: the trainer's own pass is not finite, and the step would "
                f"spoil every weight. {advice}"
            )
        if self._failing >= MOST_FAILING:
            raise NonFiniteLogprobError(
                f"the gradients of {self._failing} batches in a row were not finite, and their steps were skipped. {advice}"
            )
        if not skipped:
            # Without gradients an optimizer leaves weights and moments as they are. The batch's bad rows are counted, and end the
            # run with a checkpoint if they are too many.
            self.trainer.optimizer.zero_grad()

    # Logs, and what a checkpoint holds.

    def training_metrics(self) -> dict[str, float]:
        """Return the metrics of training steps, with what rounding leaves of adapters."""
        metrics = super().training_metrics()
        if self.checked is not None and self.checked.base is not None and self.checked.base.rounding is not None:
            metrics["lora_rounding"] = self.checked.base.rounding
        if self.correction is not None:
            metrics |= self.correction.metrics()
        return metrics | self.centering.metrics()

    def begin_anew(self) -> None:
        """Forget what an earlier training of this trainer has left."""
        super().begin_anew()
        self.objective.begin_anew()
        self.centering.begin_anew()
        if self.correction is not None:
            self.correction.begin_anew()
        self._failing = 0

    def before_step(self) -> None:
        """Refuse a step whose losses did not come through ours."""
        self.objective.expect_losses()
        super().before_step()
