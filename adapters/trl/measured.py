"""What it takes to measure a trainer's batches: its engine, what the engine returned, and the settings that it samples with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mismatch_ext.adapters.accelerate.deepspeed import configured, forget_order, scale_metrics
from mismatch_ext.adapters.accelerate.sharded import ZERO3, zero_stage
from mismatch_ext.adapters.transformers import vocabulary_surplus
from mismatch_ext.adapters.trl.bad_rows import judge_records
from mismatch_ext.adapters.trl.config import sampling_settings
from mismatch_ext.adapters.trl.engines import Served, engine_of
from mismatch_ext.adapters.trl.host import TrainerRun
from mismatch_ext.adapters.trl.passes import RolloutPass
from mismatch_ext.adapters.trl.refusals import check_sharding
from mismatch_ext.adapters.trl.turns import forks_of, joined_turns, matched_turns, turn_metrics
from mismatch_ext.adapters.vllm.server_checks import ServerCheck
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl.trainer import grpo_trainer

from mismatch_ext.bad_rows import FEW, BadRows
from mismatch_ext.errors import ConfigError
from mismatch_ext.names import PREFIX
from mismatch_ext.ranks import together
from mismatch_ext.rng import forked_rng
from mismatch_ext.rollout import RolloutRecord, expect_present, one_provenance


class MeasuredRun(TrainerRun):
    """A run whose batches are measured: `run.TrlRun` also changes what is trained on, and `attach.Attached` does not."""

    temperature: float  # that the trainer scores with
    _vocabulary: Tensor | None = None  # ids that are still to be held against the model's vocabulary

    @property
    def rollouts(self) -> RolloutPass | None:
        """The batch that is generated and scored; None between batches."""
        raise NotImplementedError

    def check_sharding(self) -> None:
        """Refuse sections and checks that do not work with sharded parameters."""
        fsdp = getattr(self.trainer.accelerator.state, "fsdp_plugin", None)
        check_sharding(
            self.block,
            deepspeed=configured(self.trainer.accelerator) if self.trainer.is_deepspeed_enabled else None,
            fsdp=None if fsdp is None else fsdp.fsdp_version,
        )

    def find_engine(self) -> None:
        """Note what stands behind TRL's wrapper, and warn of what a server cannot be asked."""
        self.engine = found = engine_of(self.trainer, self.ranks)
        if not isinstance(found, Served):
            return
        if not self.checks.acts:  # otherwise its client has checked it
            with self.checks.checking("server"):
                found.check(ServerCheck(self.block), self.trainer.accelerator.device.type)
        unchecked = found.unchecked()
        if unchecked is not None:
            self.warn("server", unchecked)

    def look_at_vocabulary(self, vocabulary: Tensor) -> None:
        """Hold token ids `[V]` of the tokenizer against the model's vocabulary, now or once the model can run."""
        self._vocabulary = vocabulary
        if zero_stage(self.trainer.accelerator) != ZERO3:  # whose model runs when training has begun
            self.check_vocabulary()

    def check_vocabulary(self) -> None:
        """Warn of ids that the model has and the tokenizer has not, once."""
        vocabulary, self._vocabulary = self._vocabulary, None
        if vocabulary is None:
            return
        accelerator = self.trainer.accelerator
        model = accelerator.unwrap_model(self.trainer.model)
        with forked_rng(accelerator.device):
            surplus = vocabulary_surplus(model, len(self.trainer._tokenizer), vocabulary[None, :64], self.autocast)
        forget_order(accelerator)
        if surplus is not None:
            self.warn("vocabulary", str(surplus), vars(surplus))

    def info(self) -> dict[str, Any]:
        """Return the header of the run's metrics file."""
        header = super().info()
        checked = self.checked
        return header if checked is None else header | {"provenance": dataclasses.asdict(checked.provenance())}

    def sent(self, dtypes: frozenset[str]) -> None:
        """Look at the vocabulary of a model that could not run before, and audit both sides once more."""
        self.check_vocabulary()
        super().sent(dtypes)

    # One batch.

    def follow_sampling(self) -> None:
        """Take the settings that TRL's engine wrapper samples with now, which a callback may have changed."""
        trainer, engine = self.trainer, self.trainer.vllm_generation
        if not hasattr(grpo_trainer, "add_fused_lm_head"):
            self.temperature = trainer.temperature  # without this head, which has its own, TRL reads it at each pass
        if {engine.temperature, trainer.temperature} != {self.temperature}:
            raise ConfigError(
                f"the temperature is {engine.temperature} in trainer.vllm_generation and {trainer.temperature} in the trainer, "
                f"which scores with {self.temperature}. Give it in the trainer's arguments, and change it nowhere else."
            )
        found = sampling_settings(engine, trainer.args.generation_kwargs)
        if found == self.sampling:
            return
        self.sampling = found
        self.log.sampled_with(self.scored_sampling)

    def generated(self, host: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does, also with tools or a `rollout_func`, and check what is trained on against each turn's records."""
        batch, trainer = self.rollouts, self.trainer
        if batch is None:
            return host(*args, **kwargs)
        own = getattr(trainer, "rollout_func", None) is not None
        joins = self.checked is not None and (own or getattr(trainer, "tools", None))
        batch.joining = bool(joins)
        output = host(*args, **kwargs)
        batch.joining = False
        if self.checked is not None:
            self.checked.agree()
        batch.prompts = [list(ids) for ids in output[0]]
        batch.generated += zip(*output[:2], strict=False)
        if joins:
            assert self.checked is not None
            present, limit = self.checked.provenance(), trainer.max_completion_length
            with self.checks.checking("records"):
                with together(self.ranks):
                    matched = matched_turns(batch.records, output, own=own, limit=limit)
                    forks = forks_of(matched, trainer._tokenizer, self.checks)
                # Every rank gets here or none. Noted first, because a batch whose turns all fork is refused.
                self.note(**forks.over(self.ranks).metrics())
                with together(self.ranks):
                    part = joined_turns(batch.records, matched, own=own, present=present)
                sums = self.ranks.sum(part)
                self.note(**turn_metrics(sums, routed=self.checked.layout is not None))
        return output

    def note(self, **metrics: float) -> None:
        """Add metrics of a batch to those that TRL logs the mean of."""
        for name, value in metrics.items():
            self.trainer._metrics[self.mode][PREFIX + name].append(value)

    def check_records(self, output: Mapping[str, Any], batch: RolloutPass, bad: BadRows) -> list[RolloutRecord | None]:
        """Return the rollout of each row, and call rows bad whose rollout is faulty, of other weights, or of other tokens.

        Args:
            output: The batch that TRL has made.
            batch: What is known of it.
            bad: Takes the bad rows; one of other tokens has None for its rollout.

        Raises:
            RecordError: All rollouts are of other weights or of other tokens, or they come from different engines.
        """
        records = batch.records
        if self.checked is None:
            return batch.records_of(output, bad)
        version = self.checked.weight_version
        one_engine = [replace(record.provenance, weight_version=version) for record in records]
        if records:
            one_provenance((f"row {row}", origin) for row, origin in enumerate(one_engine))
            present = [record.provenance.weight_version == version for record in records]
            if not any(present) and len(records) >= FEW:
                expect_present(records[0].provenance, version)
        found = batch.records_of(output, bad)
        judge_records(bad, found, version)
        return found

    def recorded_logprobs(self, records: Sequence[RolloutRecord | None], mask: Tensor) -> Tensor:
        """Return the engine's log-probabilities `[B, T]` of a trainer that drops them, padded as its completions are."""
        known = [np.zeros(0) if record is None else record.rollout_logprobs for record in records]
        rows = pad_sequence([torch.tensor(row, dtype=torch.float32) for row in known], batch_first=True)
        return F.pad(rows, (0, mask.shape[1] - rows.shape[1])).to(mask.device)

    # Logs, and what a checkpoint holds.

    def further_metrics(self) -> dict[str, float]:
        """Return metrics of weight updates and of DeepSpeed's scaler."""
        metrics = super().further_metrics()
        if self.trainer.is_deepspeed_enabled:
            metrics |= scale_metrics(self.trainer.accelerator)
        return metrics

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the host's own, as JSON-able data."""
        return super().state() | ({} if self.checked is None else self.checked.state_dict())

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Take over our own state from a checkpoint."""
        super().go_on_from(state)
        if self.checked is not None and state.get("weight_version") is not None:
            self.changed(self.checked.load_state_dict(state))
