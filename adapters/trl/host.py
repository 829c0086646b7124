"""What every trainer of TRL with a block has: two sides read back and audited, batches measured, a log beside TRL's, and a state.

The trainer holds it as `trainer.mm`. `run.TrlRun` is that of a config that acts, and `attach.Attached` of any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from mismatch_ext.adapters.accelerate.deepspeed import configured, forget_order, read_deepspeed, scale_metrics
from mismatch_ext.adapters.accelerate.ranks import AcceleratorRanks
from mismatch_ext.adapters.accelerate.sharded import ZERO3, held, is_sharded, same_everywhere, zero_stage
from mismatch_ext.adapters.torch.shards import reshard
from mismatch_ext.adapters.transformers import read_trainer, score_tokens, vocabulary_surplus
from mismatch_ext.adapters.transformers.alarms import AlarmCallback, is_of_step
from mismatch_ext.adapters.transformers.attention import dropped_cap, implementation_of
from mismatch_ext.adapters.transformers.head import head_of, in_float32, keep_in_float32, read_head
from mismatch_ext.adapters.transformers.header import PACKAGES, of_arguments
from mismatch_ext.adapters.transformers.lr import LrCallback
from mismatch_ext.adapters.transformers.scoring import active_dropout
from mismatch_ext.adapters.transformers.vocabulary import plain_vocabulary
from mismatch_ext.adapters.trl.bad_rows import judge_records, mask_of
from mismatch_ext.adapters.trl.config import ratio_bias, sampling_settings, step_of_checkpoint
from mismatch_ext.adapters.trl.engines import Served, engine_of
from mismatch_ext.adapters.trl.head import read_fused_head
from mismatch_ext.adapters.trl.passes import RolloutPass
from mismatch_ext.adapters.trl.refusals import check_reference, check_sharding
from mismatch_ext.adapters.trl.turns import forks_of, joined_turns, matched_turns, turn_metrics
from mismatch_ext.adapters.vllm.server_checks import ServerCheck
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer import grpo_trainer

from mismatch_ext.bad_rows import FEW, BadRows
from mismatch_ext.banner import run_info
from mismatch_ext.checkpoint import STATE_FILE, changed_settings, read_state, write_state
from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig
from mismatch_ext.doctor.causes import remedy
from mismatch_ext.errors import ConfigError, PrecisionError, RunDirectoryError
from mismatch_ext.events import NOTHING_TRAINED
from mismatch_ext.evidence import ColumnBatch, trainer_settings
from mismatch_ext.log import RunLog
from mismatch_ext.metrics_file import run_folder
from mismatch_ext.names import PREFIX, TRL
from mismatch_ext.precision.audit import AuditReport, SyncReading, TrainerReading, audit
from mismatch_ext.precision.dtypes import TrainerFixes
from mismatch_ext.precision.grid import EVENT as COARSE_ENGINE
from mismatch_ext.precision.grid import GridWatch
from mismatch_ext.precision.heads import EVENT as ONE_SIDED_HEAD
from mismatch_ext.precision.heads import HeadScores, is_one_sided, name_one_sided
from mismatch_ext.precision.scaler import LossScaler
from mismatch_ext.ranks import first_error, number_of_training, together
from mismatch_ext.rng import forked_rng
from mismatch_ext.rollout import RolloutRecord, SamplingSettings, expect_present
from mismatch_ext.routing.agreement import of_layer
from mismatch_ext.sums import over_ranks
from mismatch_ext.versions import installed
from mismatch_ext.weights import SyncVerdict, WeightVerifier, draw_probes, fingerprint, untrained

if TYPE_CHECKING:
    from mismatch_ext.adapters.trl.generation import CheckedGeneration

FIXES = TrainerFixes(
    autocast_off="Turn mixed precision off (fp16=False, bf16=False)",
    autocast="Set {flag} and no other half dtype in the trainer's arguments; see that no wrapper ends autocast.",
    float16_on_cpu="accelerate ignores fp16=True on a CPU without saying so; use mismatch-ext's trainer, which turns autocast "
    "on, or set accelerator.native_amp=True and a LossScaler('cpu') yourself.",
    flags=(("float16", "fp16=True"), ("bfloat16", "bf16=True")),
    head="Set cast_lm_head_to_fp32 and mismatch.precision.head alike; see that nothing replaces TRL's head",
)
EVAL_SPLIT = "eval/default"
"""Where the metrics of an evaluation without a name of its own go."""
FLAG_OF_HEAD = "cast_lm_head_to_fp32"
"""TRL's option of an output head in float32."""
Gap = tuple[Tensor, Tensor, Tensor]
"""The trainer's log-probabilities at sampling time, the engine's, and the mask of the policy's tokens, `[B, T]` each."""


class TrainerRun:
    """The block's side of one trainer, from construction to the end of its trainings."""

    kl: Any = None
    routing: Any = None
    engine: Any = None  # what is asked for scores; None where one model samples and trains
    checked: CheckedGeneration | None = None  # None without vLLM
    temperature: float  # that the trainer scores with
    _vocabulary: Tensor | None = None  # ids that are still to be held against the model's vocabulary

    def __init__(self, trainer: Any, block: MismatchConfig, arguments: Any) -> None:
        # A trainer that is not constructed yet has no `args`.
        self.trainer, self.block = trainer, block
        self.checks = Checks(block.acts)
        self.ranks = AcceleratorRanks(PartialState())
        self.log = RunLog(
            block,
            run_folder(block.monitor, Path(arguments.output_dir)),
            info=self.info,
            step=lambda: self.step,
            names=TRL,
            ranks=self.ranks,
            checks=self.checks,
        )
        self._keep_prompts_private(arguments)
        self.alarms = AlarmCallback(lambda: self.log)
        self.lr: LrCallback | None = None
        self.grid: GridWatch | None = None
        self.sampling = SamplingSettings()
        self.readings: dict[str, Any] = {}  # what was read back from each side, by its name
        self.patches: list[dict[str, Any]] = []  # descriptions of those in use
        self.audit_report: AuditReport | None = None
        self.eval_split = EVAL_SPLIT  # each evaluation's metrics are kept apart
        self.proves = block.monitor.weight_sync != "off"  # whether weight updates are verified
        self._sync_audited = self._bias_told = False
        self._unwritten: list[tuple[str, str, str]] = []  # events
        self._checkpoint: str | None = None  # that the training goes on from

    def _keep_prompts_private(self, arguments: Any) -> None:
        """Keep no evidence in a folder that transformers uploads to the Hub: it holds whole prompts and answers."""
        output = Path(arguments.output_dir).resolve()
        if self.log.evidence is None or not arguments.push_to_hub:
            return
        if self.log.run_dir.resolve().is_relative_to(output):
            self.log.evidence = None
            message = (
                f"push_to_hub uploads {output}. Evidence there would hold whole prompts and answers, so none is kept. To keep "
                "it, set mismatch.monitor.run_dir to a folder elsewhere."
            )
            warnings.warn(message, stacklevel=3)
            # A trainer that is not constructed yet cannot say its step.
            self.log.event("warning", "evidence", message, step=0)

    @property
    def scored_sampling(self) -> SamplingSettings:
        """The sampling settings that the trainer's log-probabilities do not follow: a sampling mask follows truncation."""
        return self.sampling if self.block.sampling_mask is None else self.sampling.without_truncation()

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return int(self.trainer.state.global_step)

    @property
    def mode(self) -> str:
        """TRL's name of what runs: "train" or "eval"."""
        return "train" if self.trainer.model.training else "eval"

    @property
    def split(self) -> str:
        """What a batch counts for: "train", or the evaluation that runs."""
        return "train" if self.trainer.model.training else self.eval_split

    @property
    def rollouts(self) -> RolloutPass | None:
        """The batch that is generated and scored; None between batches."""
        raise NotImplementedError

    # What is built, once TRL has built trainer and engine.

    def begin(self) -> None:
        """Read both sides back, and take the place of the engine wrapper's methods."""
        trainer = self.trainer
        with self.checks.checking("sampling"):
            self.sampling = sampling_settings(trainer, trainer.args.generation_kwargs)
        self.log.sampled_with(self.scored_sampling)
        self.alarms.install(trainer)
        with self.checks.checking("reference"):
            check_reference(trainer.accelerator, trainer.ref_model is not None)
        if trainer.use_vllm:
            self.find_engine()
        self.audit()
        with self.checks.checking("attention"), together(self.ranks):
            self.warn_of_attention(trainer._tokenizer)
        if not trainer.use_vllm:
            return
        with together(self.ranks):
            vocabulary = plain_vocabulary(trainer._tokenizer, trainer.accelerator.device)
            self.checked = self.wrapped_engine(vocabulary)
        self.checked.begin()
        self.look_at_vocabulary(vocabulary)
        with self.checks.checking("precision"), together(self.ranks):
            self.warn_of_one_sided_head(vocabulary)

    def wrapped_engine(self, vocabulary: Tensor) -> CheckedGeneration:
        """Return the engine behind checks of its weights and rollouts; `vocabulary` are ids `[V]` that probes may use."""
        raise NotImplementedError

    # Both sides are read back.

    def audit(self, sync: SyncReading | None = None) -> None:
        """Read both sides' dtypes back, and refuse those that are not as asked."""
        trainer = dataclasses.replace(self.read_trainer(), head_dtype=self.read_head())
        self.readings = {"trainer": trainer}
        if self.engine is None:
            return
        self.readings["engine"] = engine = self.engine.reading()
        # Of DeepSpeed's weights, the masters are out of reach.
        if self.grid is None and not self.trainer.is_deepspeed_enabled:
            self.grid = GridWatch.of(trainer, engine)
        if self.block.precision is None:
            return
        self.audit_report = audit(self.block.precision, trainer, engine, sync, FIXES)
        self.audit_report.raise_for_findings()

    def read_trainer(self) -> TrainerReading:
        """Read back what the trainer computes with, from DeepSpeed where it trains."""
        accelerator = self.trainer.accelerator
        if self.trainer.is_deepspeed_enabled:
            return read_deepspeed(accelerator, self.trainer.model)
        return read_trainer(self.trainer.model, accelerator.autocast, accelerator.scaler, accelerator.device)

    def read_head(self) -> str | None:
        """Read back the dtype that the trainer's output head multiplies in; None if its weights are sharded."""
        if not self.prepared:
            return None
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        try:
            if self.asks_for_exact_head and hasattr(grpo_trainer, "add_fused_lm_head"):
                return read_fused_head(model, self.autocast)  # whose products are not those of the model's own head
            return read_head(model, self.autocast)
        except Exception as error:  # whatever a model raises that is given two tokens and nothing else
            if self.block.precision is None or self.block.precision.head is None:
                return None
            raise PrecisionError(
                f"mismatch.precision.head: the trainer's output head cannot be read back: {type(error).__name__}: {error}. "
                "Remove mismatch.precision.head."
            ) from error

    @property
    def asks_for_exact_head(self) -> bool:
        """Whether TRL is to multiply by its output head in float32."""
        return bool(getattr(self.trainer.args, FLAG_OF_HEAD, False))

    def reading_with_head(self) -> TrainerReading:
        """Return the trainer's reading; a head that cannot be read, because its weights are sharded, is as TRL was asked."""
        reading: TrainerReading = self.readings["trainer"]
        if reading.head_dtype is not None:
            return reading
        return dataclasses.replace(reading, head_dtype="float32" if self.asks_for_exact_head else reading.compute_dtype)

    @property
    def compute_dtype(self) -> str:
        """Dtype that the trainer's matrix products come out in, as read back."""
        reading: TrainerReading = self.readings["trainer"]
        return reading.compute_dtype

    def info(self) -> dict[str, Any]:
        """Return the header of the run's metrics file."""
        provenance = {} if self.checked is None else {"provenance": dataclasses.asdict(self.checked.provenance())}
        return provenance | run_info(
            self.block,
            TRL,
            host=f"trl {installed('trl')} {type(self.trainer).__name__}",
            **of_arguments(self.trainer.args, self.trainer.model),
            trainer=self.readings["trainer"],
            engine=self.readings.get("engine"),
            sampling=self.sampling,
            patches=self.patches,
            audit=self.audit_report,
            packages=PACKAGES,
        )

    def warn(self, name: str, message: str, data: dict[str, Any] | None = None) -> None:
        """Warn, and keep the warning in the run's metrics file."""
        warnings.warn(message, stacklevel=3)
        self.log.event("warning", name, message, data)

    def warn_of_attention(self, tokenizer: Any) -> None:
        """Warn if the trainer's attention leaves out a part of the model, measured on probe tokens if the model can run now."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)

        def score() -> Tensor:
            vocabulary = plain_vocabulary(tokenizer, self.trainer.accelerator.device)
            return self.score(draw_probes(vocabulary))

        dropped = dropped_cap(model, score if self.prepared else None)
        if dropped is not None:
            self.warn("attention", str(dropped))

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

    # Evidence.

    def evidence_of(self, output: Mapping[str, Any], rollout: Tensor | None) -> ColumnBatch:
        """Return a batch of TRL's, of which rows can be kept; `rollout` is None while nobody has the engine's scores of it."""
        present = output["completion_mask"]
        return ColumnBatch(
            prompts=output["prompt_ids"],
            prompt_mask=output["prompt_mask"],
            responses=output["completion_ids"],
            response_mask=present,
            rollout=torch.full(present.shape, torch.nan) if rollout is None else rollout,
            mask=present * output.get("tool_mask", 1),
            pictures=output.get("num_images"),
            provenance=None if self.checked is None else self.checked.provenance(),
            step=self.step,
            settings=self.trainer_settings,
        )

    def trainer_settings(self) -> dict[str, Any]:
        """Return how the trainer computes, as the doctor needs it to examine what was kept."""
        trainer, routing = self.trainer, self.block.routing
        return trainer_settings(
            self.reading_with_head(),
            host="trl",
            temperature=float(trainer.temperature),
            replays=routing is not None and routing.mode == "R3",
            attention=implementation_of(trainer.accelerator.unwrap_model(trainer.model)),
        )

    # Weight updates.

    @property
    def prepared(self) -> bool:
        """Whether the model can score before training has begun, and scores as it does from then on."""
        # DeepSpeed casts the model when training begins.
        return not is_sharded(self.trainer.accelerator) and not self.trainer.is_deepspeed_enabled

    @property
    def verdict(self) -> SyncVerdict | None:
        """The judgment of the last weight update; None before the first."""
        return None if self.checked is None else self.checked.verifier.verdict

    def fingerprint(self) -> str:
        """Return a digest of the present weights, the same on every rank, each of which may hold a part of them."""
        accelerator = self.trainer.accelerator
        return same_everywhere(accelerator)(fingerprint(self.held()))

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and what this rank holds of each parameter."""
        return held(self.trainer.accelerator.unwrap_model(self.trainer.model))

    def verifier_of(self, engine: Any, vocabulary: Tensor) -> WeightVerifier:
        """Return what verifies weight updates of an engine, by probes of some token ids `[V]`."""
        return WeightVerifier(
            self,
            engine,
            self.block.monitor_of_updates,
            draw_probes(vocabulary, engine.longest),
            dtype=self.readings["engine"].model_dtype,
            trainer_dtype=self.compute_dtype,
            event=self.of_update,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that the trainer's forward passes run in."""
        accelerator = self.trainer.accelerator
        context: AbstractContextManager[Any] = accelerator.autocast() if accelerator.native_amp else nullcontext()
        return context

    def score(self, token_ids: Tensor) -> Tensor:
        """Return the trainer's log-probabilities of probe tokens, at temperature 1."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        scores = score_tokens(model, token_ids, self.autocast)
        reshard(model)  # a weight update sends shards, and FSDP2 keeps whole weights for a backward pass
        forget_order(self.trainer.accelerator)
        return scores

    def keep_head_in_float32(self) -> None:
        """Let the output heads of policy and reference multiply in float32 in passes that do not go through TRL's own head."""
        for model in (self.trainer.model, self.trainer.ref_model):
            if model is not None:
                keep_in_float32(self.trainer.accelerator.unwrap_model(model))

    def score_by_head(self, token_ids: Tensor, *, exact: bool) -> Tensor:
        """Return the trainer's log-probabilities of probe tokens by a head in float32 if `exact`, else by a plain one."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        with in_float32(head_of(model), exact=exact):
            return self.score(token_ids)

    def warn_of_one_sided_head(self, vocabulary: Tensor) -> None:
        """Warn if the head of one side alone computes in float32, with what it costs on probes of token ids `[V]`."""
        trainer, engine = self.reading_with_head(), self.readings["engine"]
        if not is_one_sided(trainer, engine):
            return
        scores = None
        if self.engine.fresh and self.prepared:
            probes = draw_probes(vocabulary, self.engine.longest)
            with together(self.ranks):  # a rank whose pass fails must not leave the others to ask the engine alone
                plain, exact = (self.score_by_head(probes, exact=is_exact) for is_exact in (False, True))
            scores = HeadScores(plain=plain, exact=exact, engine=self.engine.score(probes))
        self.warn(ONE_SIDED_HEAD, name_one_sided(trainer, engine, scores))

    def sent(self, dtypes: frozenset[str]) -> None:
        """Audit both sides once more at the first weight update, with the dtypes that went over."""
        self.check_vocabulary()  # of a model that could not run before
        if not self._sync_audited:
            self._sync_audited = True
            received = self.readings["engine"].model_dtype
            for dtype in sorted(dtypes):
                self.audit(SyncReading(sent_dtype=dtype, received_dtype=received))

    def of_update(self, level: str, name: str, message: str) -> None:
        """Write what is wrong with a weight update, which every rank with a part in it verifies."""
        if self.trainer.accelerator.is_main_process:
            self.log.event(level, name, message)
        else:
            self._unwritten.append((level, name, message))  # the main process writes it at the next log
        if level == "warning" or self.block.monitor_of_updates.weight_sync == "warn":
            warnings.warn(message, stacklevel=2)

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
            RecordError: All rollouts are of other weights or of other tokens.
        """
        records = batch.records
        if self.checked is None:
            return batch.records_of(output, bad)
        version = self.checked.weight_version
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

    def measure_gap(
        self,
        output: Mapping[str, Any],
        old: Tensor,
        rollout: Tensor,
        records: Sequence[RolloutRecord | None] | None,
        bad: BadRows,
        held: ColumnBatch,
    ) -> Gap:
        """Measure the gap of the rows of a batch that are not bad.

        Args:
            output: The batch.
            old: The trainer's log-probabilities at sampling time `[B, T]`.
            rollout: The engine's `[B, T]`.
            records: The rollout of each row; None where they are not known.
            bad: The bad rows.
            held: The batch as evidence.
        """
        good = mask_of(output, bad).bool()
        old, rollout = torch.where(good, old, 0.0), torch.where(good, rollout, 0.0)
        held.routes = None if records is None else [None if one is None else one.routing for one in records]
        with self.log.holding(self.split, held):
            self.log.sums.add_gap(self.split, old=old, rollout=rollout, mask=good)
        return old, rollout, good

    def note_weights(self, output: Mapping[str, Any], mask: Tensor) -> None:
        """Note what TRL multiplies the loss of a batch's tokens by; `mask` are the policy's, `[B, T]`."""
        if (ratio := output.get("importance_sampling_ratio")) is not None:
            self.log.mask(self.split, ratio, mask)

    # Logs.

    def logged(self, host: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with the mismatch metrics added, and write the same numbers to the run directory."""
        training = self.trainer.model.training
        split, prefix = ("train", "") if training else (self.eval_split, "eval_")
        extra, by_layer = dict[str, float](), dict[str, float]()
        of_step = is_of_step(logs)
        ended = "train_runtime" in logs or (not training and any(name.endswith("_runtime") for name in logs))
        if of_step or ended:
            # The host's own, of a step, an evaluation or the end: a user's may be on the main process alone.
            extra, by_layer = self.extra_metrics(split, training and of_step)
        logs.update({prefix + name: value for name, value in extra.items()})
        host(logs, *args, **kwargs)
        logs.update(self.alarms.left_out)  # `evaluate` returns them, and `metric_for_best_model` may be one
        names = {name.removeprefix(prefix): value for name, value in logs.items()}
        with self.checks.checking("metrics"):
            if training or extra:  # evaluation leaves the model in its mode, and TRL logs the end of training then too
                self.log.write(self.step, names | by_layer, split)
            bias = ratio_bias(self.trainer, self.scored_sampling)
            if extra and bias is not None and not self._bias_told:
                self._bias_told = True
                self.warn("ratio_bias", bias)

    def evaluate(
        self,
        host: Any,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
        **kwargs: Any,
    ) -> Any:
        """Evaluate as TRL does, and keep the gap on this evaluation set apart."""
        split = "eval/" + (metric_key_prefix.removeprefix("eval").removeprefix("_") or "default")
        self.eval_split = split
        with self.checks.around("metrics", self.log.evaluation(self.step)):
            metrics = host(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)
        self.eval_split = EVAL_SPLIT
        return metrics

    def extra_metrics(self, split: str, of_training: bool) -> tuple[dict[str, float], dict[str, float]]:
        """Return what is logged beside TRL's own metrics, and what is written only to the metrics file."""
        extra: dict[str, float] = {}
        by_layer: dict[str, float] = {}
        self.checks.gather(self.ranks)
        with self.checks.checking("metrics"):
            extra = self.log.flush(split, self.step)
        if self.routing is not None:
            logged, by_layer = of_agreement(self.routing.take_agreement(split, self.ranks))
            extra |= logged
        if self.routing is not None and (extra or of_training):
            # How many passes were over other tokens than were recorded.
            extra |= prefixed(self.routing.take_others(split, self.ranks))
        if of_training:
            extra |= prefixed(self.training_metrics() | self.checks.metrics())
        return extra, by_layer

    def training_metrics(self) -> dict[str, float]:
        """Return the metrics of training steps, without their prefix."""
        metrics: dict[str, float] = {}
        if isinstance(self.trainer.accelerator.scaler, LossScaler):
            metrics |= self.trainer.accelerator.scaler.metrics()
        if self.grid is not None:
            metrics |= self.grid.metrics(self.ranks)
        metrics |= self._metrics_of_updates()
        if self.trainer.is_deepspeed_enabled:
            metrics |= scale_metrics(self.trainer.accelerator)
        if self.lr is not None:
            metrics |= self.lr.metrics()
        return metrics

    def _metrics_of_updates(self) -> dict[str, float]:
        if not self.trainer.use_vllm or not self.proves:
            return {}
        # Of several ranks, one may have no verdict: its engine has not answered.
        if self.verdict is None and self.ranks.size == 1:
            return {}
        gap = self._gap_over_ranks(None if self.verdict is None else self.verdict.gap_mean)
        return {} if gap is None else {"weight_sync_gap": gap}

    def _gap_over_ranks(self, gap: float | None) -> float | None:
        """Return the largest gap of the ranks' engines, and write what the check has found on the others."""
        unwritten, self._unwritten = self._unwritten, []
        mine = {"max:gap": -math.inf if gap is None else gap, "unwritten": len(unwritten)}
        whole = over_ranks({name: torch.tensor(value, dtype=torch.float64) for name, value in mine.items()}, self.ranks)
        told = self.ranks.gather(unwritten) if bool(whole["unwritten"]) else []
        for rank, events in enumerate(told):
            for level, name, message in events:
                self.log.event(level, name, f"rank {rank}: {message}")
        largest = float(whole["max:gap"])
        return None if largest == -math.inf else largest

    # A training, and what its checkpoints hold beside TRL's own.

    def train(self, host: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Begin a training's metrics file, train, and write how the training ends: no callback is told that one has failed."""
        number = number_of_training(self.ranks)
        with self.checks.checking("metrics"):
            last = resume_from_checkpoint is True
            self._checkpoint = (
                get_last_checkpoint(str(self.trainer.args.output_dir)) if last else resume_from_checkpoint or None
            )
            resumed = step_of_checkpoint(self._checkpoint)
            if resumed is not None or not resume_from_checkpoint:
                # Otherwise the parent refuses, and the metrics that are there stay as they are.
                self.log.begin(resumed)
        self.begin_anew()
        if rates := active_dropout(self.trainer.model):
            self.warn(
                "dropout",
                f"dropout is active ({', '.join(rates)}) where TRL scores and trains, and the engine has none: the gap holds it, "
                f"at random. To switch it off: {remedy('dropout').trl}.",
            )
        # TRL builds its optimizer from these when training begins.
        if (nothing := untrained(self.trainer.model.parameters())) is not None:
            self.warn(NOTHING_TRAINED, nothing)
        try:
            result = host(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            with contextlib.suppress(RunDirectoryError), self.checks.checking("metrics"):
                # An error from a full disk must not replace the error in flight.
                self.log.end("failed", first_error(error, number))
            raise
        finally:
            if self.lr is not None:
                self.lr.release()
        with self.checks.checking("metrics"):
            self.log.end("completed")
        return result

    @property
    def parts(self) -> dict[str, Any]:
        """What has a state of its own in checkpoints, by name."""
        found = {"kl": self.kl, "lr": self.lr, "routing": self.routing}
        return {name: part for name, part in found.items() if part is not None}

    def begin_anew(self) -> None:
        """Forget what an earlier training of this trainer has left; a checkpoint's state is loaded after this."""
        for part in (self.log, *self.parts.values()):
            part.begin_anew()

    def save(self, host: Any, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Write the run's state into the checkpoint that TRL then writes, which must not lack it when it is finished."""
        # No callback can: `on_save` comes after the checkpoint is finished, and an `ExportableState` is built anew at a resume
        # with `restore_callback_states_from_checkpoint`, from JSON alone and so without the run.
        if self.trainer.args.should_save:
            folder = Path(self.trainer._get_output_dir(trial=trial)) / f"checkpoint-{self.step}"
            with self.checks.checking("checkpoint"):
                write_state(folder / STATE_FILE, self.state())
        host(model, trial, *args, **kwargs)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the host's own, as JSON-able data."""
        engine = {} if self.checked is None else self.checked.state_dict()
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {"config": self.block.to_dict(), **self.log.state_dict(), **parts, **engine}

    def resume(self) -> None:
        """Go on from the checkpoint of this training, if it has one."""
        if self._checkpoint is not None:
            with self.checks.checking("checkpoint"):
                self.load(self._checkpoint)

    def load(self, checkpoint: str) -> None:
        """Take over what a checkpoint holds beside the host's own."""
        state = read_state(Path(checkpoint) / STATE_FILE)
        self.log.load_state_dict(state or {}, step=self.step)
        if state is not None:
            self.go_on_from(state)
        precision = self.block.precision
        if self.trainer.is_deepspeed_enabled:
            return  # it keeps its own
        if precision is not None and precision.dtype == "float16" and not (Path(checkpoint) / "scaler.pt").is_file():
            self.log.event(
                "warning",
                "loss_scale",
                f"{checkpoint} holds no loss-scaler state; the loss scale starts at {precision.init_scale:g}.",
            )

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Take over our own state from a checkpoint, except the alarms, and say which settings have changed since."""
        messages = [changed_settings(state.get("config"), self.block.to_dict())]
        messages += [
            part.load_state_dict(state[name]) for name, part in self.parts.items() if state.get(name) is not None
        ]
        if self.checked is not None and state.get("weight_version") is not None:
            messages.append(self.checked.load_state_dict(state))
        for message in filter(None, messages):
            self.warn("settings_changed", message)

    # Around each optimizer step.

    def before_step(self) -> None:
        """Keep a sample of the weights, where the engine's dtype is coarser."""
        if self.grid is not None:
            self.grid.before(self.held())

    def after_step(self, optimizer: Any) -> None:
        """Count what the step has changed in an engine of a coarser dtype."""
        if self.grid is None:
            return
        rate = max(group["lr"] for group in optimizer.param_groups)
        message = self.grid.after(self.held(), rate)
        if message is not None and self.trainer.accelerator.is_main_process:
            self.warn(COARSE_ENGINE, message)


class RunCallback(TrainerCallback):
    """Calls a run where transformers has loaded a checkpoint, and around each optimizer step."""

    def __init__(self, run: TrainerRun) -> None:
        self._run = run

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Load what the run is resumed from."""
        self._run.resume()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Look at what is about to be stepped."""
        self._run.before_step()

    def on_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        """Look at what was stepped."""
        self._run.after_step(kwargs["optimizer"])


def prefixed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under the names that they are logged by."""
    return {PREFIX + name: value for name, value in metrics.items()}


def of_agreement(agreement: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return what is logged of the agreement of routes, and what is written only to the metrics file."""
    by_layer = {name: value for name, value in agreement.items() if of_layer(name)}
    return prefixed({name: value for name, value in agreement.items() if name not in by_layer}), prefixed(by_layer)
