"""`attach`: measure a GRPOTrainer that exists, of TRL's class or of yours, and change nothing of its training.

    trainer = GRPOTrainer(...)
    attach(trainer)
    trainer.train()

It wraps methods of this one trainer and of its engine wrapper. After each generation the gap is measured on what TRL is about
to train on; after each weight update both sides score probe tokens. A check that fails warns, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import PartialState
from mismatch_ext.adapters.accelerate.deepspeed import forget_order
from mismatch_ext.adapters.accelerate.ranks import AcceleratorRanks
from mismatch_ext.adapters.torch.shards import reshard
from mismatch_ext.adapters.transformers.scoring import evaluating
from mismatch_ext.adapters.transformers.vocabulary import plain_vocabulary
from mismatch_ext.adapters.trl.engines import Colocated
from mismatch_ext.adapters.trl.host import TrainerRun, prefixed
from mismatch_ext.adapters.trl.readings import ratio_bias, sampling_settings
from mismatch_ext.adapters.trl.scoring import scored_again
from mismatch_ext.adapters.trl.served import Engine, Served
from mismatch_ext.adapters.vllm.weights import Sending
from torch import Tensor
from trl import GRPOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, RecordError
from mismatch_ext.names import PREFIX
from mismatch_ext.precision.audit import EngineReading
from mismatch_ext.ranks import ONE_PROCESS, together
from mismatch_ext.rng import forked_rng
from mismatch_ext.weights import SyncVerdict, TrainerLook, WeightVerifier

OLD, ROLLOUT = "old_per_token_logps", "sampling_per_token_logps"


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
    attached = Attached(trainer)
    vars(trainer)["mismatch_attached"] = attached
    return attached


class Attached(TrainerRun):
    """The measurement of one trainer, which `attach` returns.

    Attributes:
        log: The run's log.
        engine: The engine, as it is asked for scores.
    """

    how = ", attached"

    def __init__(self, trainer: Any) -> None:
        with together(AcceleratorRanks(PartialState())):
            super().__init__(trainer, MismatchConfig(level="observe"), trainer.args.output_dir)
        self.verdicts.at(lambda: self.step)
        generation = trainer.vllm_generation
        self.engine: Engine = (
            Colocated(generation.llm, sleeps=trainer.args.vllm_enable_sleep_mode)
            if generation.mode == "colocate"
            else Served(generation, self.ranks)
        )
        self._generating = False  # one rank may, while others do not
        self._sending = Sending()
        self.sampling = sampling_settings(trainer, trainer.args.generation_kwargs)
        self.audit()
        self.log.sampled_with(self.sampling)
        self._verifier = self._made_verifier()
        self._plain_sync, self._plain_parameters = generation.sync_weights, generation._iter_named_params
        self._plain_generate, self._plain_score = generation.generate, trainer._generate_and_score_completions
        self._plain_log, self._plain_train, self._plain_evaluate = trainer.log, trainer.train, trainer.evaluate
        generation.sync_weights, generation._iter_named_params = self._sync_weights, self._parameters
        generation.generate, trainer._generate_and_score_completions = self._generate, self._generate_and_score
        trainer.log, trainer.train, trainer.evaluate = self._log, self._train, self._evaluate
        self.alarms.install(trainer)
        self.log.announce()

    @property
    def verdict(self) -> SyncVerdict | None:
        """The judgment of the last weight update; None before the first."""
        return None if self._verifier is None else self._verifier.verdict

    def read_engine(self) -> EngineReading:
        """Return what the engine computes with."""
        return self.engine.reading()

    def ratio_bias(self) -> str | None:
        """Say why the gap is not only numerics."""
        return ratio_bias(self.trainer, self.sampling)

    def extra_metrics(self, split: str, of_training: bool) -> tuple[dict[str, float], dict[str, float]]:
        """Return what was measured since the last log."""
        measured: dict[str, float] = {}
        with self.verdicts.checking("findings"):
            self.verdicts.gather(self.ranks)
        with self.verdicts.checking("metrics"):
            measured = self.log.measured(self.step, split)
        gaps = [gap for gap in self.ranks.gather(self.verdict and self.verdict.gap_mean) if gap is not None]
        if gaps and of_training:
            measured[f"{PREFIX}weight_sync_gap"] = max(gaps)
        if self.grid is not None and of_training:
            with self.verdicts.checking("metrics"):
                measured |= prefixed(self.grid.metrics(self.ranks))
        return measured, {}

    # A weight update.

    def _made_verifier(self) -> WeightVerifier | None:
        fsdp = getattr(self.trainer.accelerator.state, "fsdp_plugin", None)
        if fsdp is not None and fsdp.fsdp_version == 1:
            self.verdicts.note("weight_sync", "FSDP1 cannot score probe tokens between two steps; use fsdp_version=2.")
            return None
        vocabulary = plain_vocabulary(self.trainer._tokenizer, self.trainer.accelerator.device)
        return self.verifier_of(self.engine, vocabulary)

    def score(self, token_ids: Tensor) -> Tensor:
        """Return the trainer's log-probabilities of probe tokens, at temperature 1; random numbers stay as they are."""
        with forked_rng(self.trainer.accelerator.device):
            return super().score(token_ids)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what TRL sends, noting what the engine should then hold."""
        self._sending = Sending()
        return self._sending.through(self._plain_parameters())

    def _sync_weights(self) -> None:
        """Send weights as TRL does, and judge whether the engine computes with them."""
        # Sleeping engines get weights inside of `generate`, which a rank may call by itself.
        ranks = ONE_PROCESS if self._generating else self.ranks
        look: TrainerLook | None = None
        verifier = self._verifier
        # The trainer first: it needs all ranks where it is sharded, and has the device to itself while the engine sleeps.
        if verifier is not None:
            with self.verdicts.checking("weight_sync"):
                with together(ranks):
                    if self.engine.fresh and not verifier.begun and not self.step:
                        verifier.begin()
                    asked = verifier.look()
                look = asked  # on all ranks or none
        with together(ranks):
            self.engine.update(self._plain_sync, self._parameters)
        if verifier is not None and look is not None:
            with self.verdicts.checking("weight_sync"), together(ranks):
                verifier.verify(self._sending.samples, look)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        self._generating = True
        try:
            return self._plain_generate(*args, **kwargs)
        finally:
            self._generating = False

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
        self.logged(lambda logs, _: self._plain_log(logs, *args, **kwargs), logs, None)

    def _train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self.training(resume_from_checkpoint):
            return self._plain_train(resume_from_checkpoint, *args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self.evaluation(str(kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else "eval"))):
            return self._plain_evaluate(*args, **kwargs)
