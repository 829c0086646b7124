"""`attach`: measure a trainer that exists, of TRL's class or of yours, and change nothing of its training.

    trainer = GRPOTrainer(...)
    attach(trainer)
    trainer.train()

It wraps methods of this one trainer and of its engine wrapper. After each generation the gap is measured on what TRL is about
to train on; after each weight update both sides score probe tokens. A check that fails warns, and the run goes on. The trainer
classes do the same with a config that does not act, such as `mismatch={}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from accelerate import PartialState
from accelerate.utils import is_peft_model
from mismatch_ext.adapters.accelerate.deepspeed import forget_order
from mismatch_ext.adapters.accelerate.ranks import AcceleratorRanks
from mismatch_ext.adapters.torch.shards import reshard
from mismatch_ext.adapters.transformers.scoring import evaluating
from mismatch_ext.adapters.trl.bad_rows import mask_of
from mismatch_ext.adapters.trl.correction import phantom
from mismatch_ext.adapters.trl.generation import CheckedGeneration
from mismatch_ext.adapters.trl.host import Gap, RunCallback, TrainerRun
from mismatch_ext.adapters.trl.lora import check_base, check_tied
from mismatch_ext.adapters.trl.passes import RolloutPass
from mismatch_ext.adapters.trl.refusals import check_device, check_peers, refuse
from mismatch_ext.adapters.trl.scoring import OLD, ROLLOUT, scored_again
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from mismatch_ext.bad_rows import BadRows
from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, RecordError, SeamError, WeightSyncError
from mismatch_ext.ranks import together
from mismatch_ext.rng import forked_rng
from mismatch_ext.rollout import RolloutRecord
from mismatch_ext.versions import PEERS, installed


def attach(trainer: GRPOTrainer | RLOOTrainer) -> Attached:
    """Measure this trainer's runs: the gap at each generation, proof of each weight update, alarms, run directory and report.

    Call it after the constructor and before `train`. Parameters, samples and random numbers stay as they are, bit for bit. The
    metrics go to the trainer's own loggers under `mismatch/`, and to the folder `mismatch` in its output directory. An engine
    on a CPU gets its weights through vLLM's reload, because TRL's own update does not suit it.

    Args:
        trainer: A `GRPOTrainer` or `RLOOTrainer` with `use_vllm=True`, or one of a subclass.

    Returns:
        What measures; `verdict` is the judgment of the last weight update.

    Raises:
        ConfigError: There is no engine, the trainer is of another class, or it is measured already.
        RunDirectoryError: The run directory cannot be written.
    """
    block = MismatchConfig()
    refuse("class", type(trainer), block)
    if not isinstance(trainer, GRPOTrainer | RLOOTrainer):
        raise ConfigError(
            f"attach({type(trainer).__name__}): allowed is a GRPOTrainer or RLOOTrainer of TRL, or one of a subclass. Use "
            "MismatchCallback for other trainers."
        )
    if not trainer.use_vllm:
        raise ConfigError(
            "attach: use_vllm=False, so that one model samples and trains and there is no gap between two. Set use_vllm=True."
        )
    if getattr(trainer, "mm", None) is not None:
        raise ConfigError(
            f"attach: this {type(trainer).__name__} is measured already, by its mismatch config or by attach. Leave out one of "
            "the two."
        )
    attached = Attached(trainer, block)
    vars(trainer)["mm"] = attached
    return attached


class Noted(CheckedGeneration):
    """Verifies weight updates, and keeps what the engine returned; when it generates and with what is left to TRL."""

    lacks_records = False  # whether the engine returned something in this batch that no record can be made of

    def generate(self, prompts: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Generate as TRL does, and keep records of it while there is a batch."""
        self.sync_if_asleep()
        result: tuple[Any, ...] = self.plain_generate(prompts, *args, **kwargs)
        with self._refusing():
            kept = False
            with self.checks.checking("records"):
                self.keep(result)
                kept = True
            # Of several turns, one without records is enough.
            self.lacks_records = self.lacks_records or not kept
        return result

    @contextmanager
    def keeping(self, records: list[RolloutRecord]) -> Iterator[None]:
        """Add to a list what is generated in a block, which all ranks enter."""
        self._kept, self._refused, self.lacks_records = records, None, False
        try:
            yield
        finally:
            self._kept = self._refused = None
        with self.checks.checking("weight_sync"):
            self._check_sent()

    def _check_sent(self) -> None:
        """Refuse a batch that was sampled after the trainer's weights had changed without an update; all ranks do so together."""
        if not self.verifies:
            return
        # A rank whose look at its weights fails must not leave the others waiting.
        with together(self.run.ranks, flags=1) as flags:
            flags.here[0] = self.verifier.moved()
        if flags.anywhere[0]:
            raise WeightSyncError(
                "the trainer's weights have changed since the engine got them, and this batch was sampled without an update. A "
                "checkpoint was loaded (load_best_model_at_end), or a subclass generates without vllm_generation.sync_weights()."
            )


class Attached(TrainerRun):
    """The measurement of one trainer, which changes nothing of its training.

    Args:
        trainer: The trainer, whose constructor has ended.
        block: A config that does not act.
        patches: Descriptions of the patches that its engine was built with.

    Attributes:
        log: The run's log.
        verdict: The judgment of the last weight update.
    """

    def __init__(self, trainer: Any, block: MismatchConfig, patches: Sequence[Mapping[str, Any]] = ()) -> None:
        with together(AcceleratorRanks(PartialState())):
            super().__init__(trainer, block, trainer.args)
        check_device(trainer.accelerator.device.type, block, engine=trainer.use_vllm)
        self.patches = [dict(patch) for patch in patches]
        self.temperature = trainer.temperature
        self._batch: RolloutPass | None = None
        self.checks.at(lambda: self.step)
        self._check_settings()
        trainer.add_callback(RunCallback(self))
        self.begin()
        self._wrap_trainer()
        self.log.announce()

    @property
    def rollouts(self) -> RolloutPass | None:
        """The batch that is generated and scored; None between batches."""
        return self._batch

    def _check_settings(self) -> None:
        """Note the settings under which the numbers would not mean what they say; none of them ends the run."""
        trainer = self.trainer
        with self.checks.checking("versions"):
            stitches = any(getattr(trainer, name, None) for name in ("tools", "rollout_func"))
            server = trainer.args.vllm_mode == "server"
            check_peers(type(trainer), self.block, use_vllm=trainer.use_vllm, server=server, stitches=stitches)
        if trainer.use_vllm and is_peft_model(trainer.model):
            with self.checks.checking("lora"):
                check_base(trainer.model)
                check_tied(trainer.model)
        if self.proves:
            self.proves = False
            with self.checks.checking("weight_sync"):
                self.check_sharding()
                self.proves = True

    def wrapped_engine(self, vocabulary: Tensor) -> Noted:
        """Return the engine behind checks of its weights and rollouts."""
        return Noted(self, vocabulary=vocabulary)

    def _wrap_trainer(self) -> None:
        """Put methods of ours around the trainer's, which they take first."""
        ours: dict[str, Callable[..., Any]] = {
            "log": self.logged,
            "train": self.train,
            "evaluate": self.evaluate,
            "_save_checkpoint": self.save,
        }
        if self.checked is not None:
            ours |= {"_generate": self.generated, "_generate_and_score_completions": self.make_batch}
        gone = [name for name in ours if not hasattr(self.trainer, name)]
        if gone:
            raise SeamError(
                f"trl {installed('trl')}: {type(self.trainer).__name__} has no {' and no '.join(gone)}, which it is measured by; "
                f"install a version that was run (pip install trl=={PEERS['trl'].nearest(installed('trl'))})."
            )
        for name, method in ours.items():
            setattr(self.trainer, name, partial(method, getattr(self.trainer, name)))

    def score(self, token_ids: Tensor) -> Tensor:
        """Return the trainer's log-probabilities of probe tokens, at temperature 1; random numbers stay as they are."""
        with forked_rng(self.trainer.accelerator.device):
            return super().score(token_ids)

    # A batch.

    def make_batch(self, host: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Generate and score as TRL does, then measure the gap."""
        split, batch, checked = self.split, RolloutPass(), self.checked
        assert isinstance(checked, Noted)
        with self.checks.checking("sampling"), together(self.ranks):
            self.follow_sampling()
        self._batch = batch
        try:
            with checked.keeping(batch.records):
                output = host(*args, **kwargs)
        finally:
            self._batch = None
        records = None
        held = self.evidence_of(output, output.get(ROLLOUT))
        bad = BadRows(len(output["completion_ids"]))
        with together(self.ranks), self.checks.checking("records"), self.log.refusing(split, held):
            if not checked.lacks_records:
                records = self.check_records(output, batch, bad)
        with self.checks.checking("gap"):
            gap = self._gap(split, output, records, bad)
            if split == "train" and isinstance(self.trainer, GRPOTrainer):
                self.note(**phantom(self.trainer, output, gap, clips=False, ranks=self.ranks))
        return output

    def _gap(
        self, split: str, output: dict[str, Any], records: Sequence[RolloutRecord | None] | None, bad: BadRows
    ) -> Gap:
        """Count the bad rows of a batch, and measure the gap of the others; if that fails on one rank, it fails on all."""
        with together(self.ranks):
            # First, because ranks that share a model take this pass together.
            old = self._score_batch(output) if output.get(OLD) is None else output[OLD]
            rollout = output.get(ROLLOUT)
            mask = mask_of(output, bad)
            if rollout is None:
                rollout = self._recorded(records, mask)
            bad.add_non_finite("rollout_logprobs", rollout, mask)
            bad.add_non_finite("old_logprobs", old, mask)
            held = self.evidence_of(output, rollout)
            held.trainer = old
            self.log.count_bad_rows(split, bad, held)
            gap = self.measure_gap(output, old, rollout, records, bad, held)
            self.note_weights(output, gap[2])
        return gap

    def _recorded(self, records: Sequence[RolloutRecord | None] | None, mask: Tensor) -> Tensor:
        """Return the engine's log-probabilities `[B, T]` of a trainer that drops them."""
        if records is None:
            raise RecordError(
                f"{type(self.trainer).__name__} returned no {ROLLOUT} with this batch, and there are no records of its rows to "
                "take them from, so there is no gap to measure."
            )
        return self.recorded_logprobs(records, mask)

    def _score_batch(self, output: dict[str, Any]) -> Tensor:
        """Return the trainer's log-probabilities `[B, T]` by a pass of our own, where TRL took none or keeps its sums."""
        trainer, training = self.trainer, self.trainer.model.training
        # In evaluation mode there are neither dropout nor gradient checkpointing, and no module counts the pass.
        with evaluating(trainer.model):
            logprobs = scored_again(trainer, output, training=training)
        reshard(trainer.accelerator.unwrap_model(trainer.model))  # FSDP2 keeps whole weights for a backward pass
        forget_order(trainer.accelerator)
        return logprobs
