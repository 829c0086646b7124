"""`attach`: measure a GRPOTrainer that exists, of TRL's class or of yours, and change nothing of its training.

    trainer = GRPOTrainer(...)
    attach(trainer)
    trainer.train()

It wraps methods of this one trainer and of its engine wrapper. After each generation the gap is measured on what TRL is about
to train on; after each weight update both sides score probe tokens. A check that fails warns, and the run goes on.
"""

from __future__ import annotations

from typing import Any

from accelerate import PartialState
from mismatch_ext.adapters.accelerate.deepspeed import forget_order
from mismatch_ext.adapters.accelerate.ranks import AcceleratorRanks
from mismatch_ext.adapters.torch.shards import reshard
from mismatch_ext.adapters.transformers.scoring import evaluating
from mismatch_ext.adapters.transformers.vocabulary import plain_vocabulary
from mismatch_ext.adapters.trl.config import sampling_settings
from mismatch_ext.adapters.trl.engines import engine_of
from mismatch_ext.adapters.trl.generation import CheckedGeneration
from mismatch_ext.adapters.trl.host import TrainerRun
from mismatch_ext.adapters.trl.refusals import TRAINERS, refuse
from mismatch_ext.adapters.trl.scoring import OLD, ROLLOUT, scored_again
from torch import Tensor
from trl import GRPOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.ranks import together
from mismatch_ext.rng import forked_rng


def attach(trainer: GRPOTrainer) -> Attached:
    """Measure this trainer's runs: the gap at each generation, proof of each weight update, alarms, run directory and report.

    Call it after the constructor and before `train`. Parameters, samples and random numbers stay as they are, bit for bit. The
    metrics go to the trainer's own loggers under `mismatch/`, and to the folder `mismatch` in its output directory. An engine
    on a CPU gets its weights through vLLM's reload, because TRL's own update does not suit it.

    Args:
        trainer: A `GRPOTrainer` with `use_vllm=True`, or one of a subclass.

    Returns:
        What measures; `verdict` is the judgment of the last weight update.

    Raises:
        ConfigError: There is no engine, the trainer is no GRPOTrainer, or it is measured already.
        RunDirectoryError: The run directory cannot be written.
    """
    block = MismatchConfig(level="observe")
    refuse(TRAINERS, type(trainer), block)
    if not isinstance(trainer, GRPOTrainer):
        raise ConfigError(
            f"attach({type(trainer).__name__}): allowed is a GRPOTrainer of TRL or of a subclass. Use MismatchRLOOTrainer for "
            "RLOO, or MismatchCallback for other trainers."
        )
    if not trainer.use_vllm:
        raise ConfigError(
            "attach: use_vllm=False, so that one model samples and trains and there is no gap between two. Set use_vllm=True."
        )
    if getattr(trainer.args, "mismatch", None) is not None or "mismatch_attached" in vars(trainer):
        raise ConfigError(
            f"attach: this {type(trainer).__name__} is measured already, by its mismatch block or by attach. Leave out one of "
            "the two."
        )
    attached = Attached(trainer, block)
    vars(trainer)["mismatch_attached"] = attached
    return attached


class Updates(CheckedGeneration):
    """Verifies weight updates, and leaves rollouts to TRL."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does."""
        self.sync_if_asleep()
        return self.plain_generate(*args, **kwargs)


class Attached(TrainerRun):
    """The measurement of one trainer, which `attach` returns; `log` is its run's log, and `verdict` that of the last update."""

    how = ", attached"

    def __init__(self, trainer: Any, block: MismatchConfig) -> None:
        with together(AcceleratorRanks(PartialState())):
            super().__init__(trainer, block, trainer.args.output_dir)
        self.verdicts.at(lambda: self.step)
        self.engine = engine_of(trainer, self.ranks)
        with self.verdicts.checking("sampling"):
            self.sampling = sampling_settings(trainer, trainer.args.generation_kwargs)
        self.log.sampled_with(self.sampling)
        self.audit()
        with self.verdicts.checking("attention"), together(self.ranks):
            self.warn_of_attention(trainer._tokenizer)
        if not self.proves:
            self.verdicts.note("weight_sync", "FSDP1 cannot score probe tokens between two steps; use fsdp_version=2.")
        self.checked = Updates(self, vocabulary=plain_vocabulary(trainer._tokenizer, trainer.accelerator.device))
        self.checked.begin()
        self._plain_score = trainer._generate_and_score_completions
        self._plain_log, self._plain_train, self._plain_evaluate = trainer.log, trainer.train, trainer.evaluate
        trainer._generate_and_score_completions = self._generate_and_score
        trainer.log, trainer.train, trainer.evaluate = self._log, self._train, self._evaluate
        self.alarms.install(trainer)
        self.log.announce()

    def score(self, token_ids: Tensor) -> Tensor:
        """Return the trainer's log-probabilities of probe tokens, at temperature 1; random numbers stay as they are."""
        with forked_rng(self.trainer.accelerator.device):
            return super().score(token_ids)

    # A batch.

    def _generate_and_score(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Generate and score as TRL does, then measure the gap."""
        split = self.split
        output: dict[str, Any] = self._plain_score(*args, **kwargs)
        with self.verdicts.checking("gap"), together(self.ranks):
            if output.get(ROLLOUT) is None:
                raise RecordError(
                    f"{type(self.trainer).__name__} returned no {ROLLOUT} with this batch, so there is no gap to measure."
                )
            old = self._score_batch(output) if output.get(OLD) is None else output[OLD]
            mask = output["completion_mask"] * output.get("tool_mask", 1)
            held = self.evidence_of(output, output[ROLLOUT])
            held.trainer = old
            with self.log.holding(split, held):
                self.log.observe(split, old, output[ROLLOUT], mask.bool())
            if (ratio := output.get("importance_sampling_ratio")) is not None:
                self.log.mask(split, ratio, mask)
        return output

    def _score_batch(self, output: dict[str, Any]) -> Tensor:
        """Return the trainer's log-probabilities `[B, T]` by a pass of our own, where TRL took none."""
        trainer, training = self.trainer, self.trainer.model.training
        # In evaluation mode there are neither dropout nor gradient checkpointing, and no module counts the pass.
        with evaluating(trainer.model):
            logprobs = scored_again(trainer, output, training=training)
        reshard(trainer.accelerator.unwrap_model(trainer.model))  # FSDP2 keeps whole weights for a backward pass
        forget_order(trainer.accelerator)
        return logprobs

    # The run.

    def _log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        self.logged(self._plain_log, logs, *args, **kwargs)

    def _train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self.training(resume_from_checkpoint):
            return self._plain_train(resume_from_checkpoint, *args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self.evaluation(str(kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else "eval"))):
            return self._plain_evaluate(*args, **kwargs)
