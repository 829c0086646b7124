"""`attach`: measure a GRPOTrainer that exists, of TRL's class or of yours, and change nothing of its training.

    trainer = GRPOTrainer(...)
    attach(trainer)
    trainer.train()

It wraps methods of this one trainer and of its engine wrapper. After each generation the gap is measured on what TRL is about
to train on; after each weight update both sides score probe tokens. A check that fails warns, and the run goes on.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.accelerate.deepspeed import forget_order, read_deepspeed
from mismatch_ext.adapters.accelerate.ranks import AcceleratorRanks
from mismatch_ext.adapters.accelerate.sharded import held, same_everywhere
from mismatch_ext.adapters.torch.shards import reshard
from mismatch_ext.adapters.transformers import read_trainer, score_tokens
from mismatch_ext.adapters.transformers.alarms import AlarmCallback
from mismatch_ext.adapters.transformers.header import PACKAGES, of_arguments
from mismatch_ext.adapters.transformers.scoring import evaluating
from mismatch_ext.adapters.transformers.vocabulary import plain_vocabulary
from mismatch_ext.adapters.trl.engines import Colocated, Engine
from mismatch_ext.adapters.trl.readings import ratio_bias, sampling_settings, step_of_checkpoint
from mismatch_ext.adapters.trl.served import Served
from mismatch_ext.adapters.vllm.weights import Sending
from torch import Tensor
from trl import GRPOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, RecordError, RunDirectoryError
from mismatch_ext.log import RunLog, run_folder, run_info
from mismatch_ext.names import PREFIX, TRL
from mismatch_ext.ranks import ONE_PROCESS, first_error, together
from mismatch_ext.rng import forked_rng
from mismatch_ext.verdicts import Verdicts
from mismatch_ext.versions import installed
from mismatch_ext.weights import SyncVerdict, TrainerLook, WeightVerifier, draw_probes, fingerprint

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


class Attached:
    """The measurement of one trainer, which `attach` returns.

    Attributes:
        log: The run's log.
        engine: The engine, as it is asked for scores.
    """

    def __init__(self, trainer: Any) -> None:
        accelerator, generation = trainer.accelerator, trainer.vllm_generation
        self._trainer, self._accelerator = trainer, accelerator
        self._ranks = AcceleratorRanks(accelerator)
        self._verdicts = Verdicts("observe", lambda: int(trainer.state.global_step))
        self._split = "eval/default"
        self._generating = False  # one rank may, while others do not
        self._sending = Sending()
        block = MismatchConfig(level="observe")
        with together(self._ranks):
            self.log = RunLog(
                block,
                run_folder(block.monitor, Path(trainer.args.output_dir)),
                info=self._info,
                step=lambda: int(trainer.state.global_step),
                names=TRL,
                ranks=self._ranks,
                verdicts=self._verdicts,
            )
        self.engine: Engine = (
            Colocated(generation.llm, sleeps=trainer.args.vllm_enable_sleep_mode)
            if generation.mode == "colocate"
            else Served(generation, accelerator)
        )
        self._sampling = sampling_settings(trainer, trainer.args.generation_kwargs)
        self._reading, self._trainer_reading = self.engine.reading(), self._read_trainer()
        self.log.sampled_with(self._sampling)
        self._verifier = self._made_verifier(block)
        if (bias := ratio_bias(trainer, self._sampling)) is not None:
            warnings.warn(bias, stacklevel=3)
            self.log.event("warning", "ratio_bias", bias)
        self._plain_sync, self._plain_parameters = generation.sync_weights, generation._iter_named_params
        self._plain_generate, self._plain_score = generation.generate, trainer._generate_and_score_completions
        self._plain_log, self._plain_train, self._plain_evaluate = trainer.log, trainer.train, trainer.evaluate
        generation.sync_weights, generation._iter_named_params = self._sync_weights, self._parameters
        generation.generate, trainer._generate_and_score_completions = self._generate, self._generate_and_score
        trainer.log, trainer.train, trainer.evaluate = self._log_metrics, self._train, self._evaluate
        trainer.add_callback(AlarmCallback(lambda: self.log))
        self.log.announce()

    @property
    def verdict(self) -> SyncVerdict | None:
        """The judgment of the last weight update; None before the first."""
        return None if self._verifier is None else self._verifier.verdict

    def _made_verifier(self, block: MismatchConfig) -> WeightVerifier | None:
        fsdp = getattr(self._accelerator.state, "fsdp_plugin", None)
        if fsdp is not None and fsdp.fsdp_version == 1:
            self._verdicts.note("weight_sync", "FSDP1 cannot score probe tokens between two steps; use fsdp_version=2.")
            return None
        vocabulary = plain_vocabulary(self._trainer._tokenizer, self._accelerator.device)
        return WeightVerifier(
            self,
            self.engine,
            block.monitor,
            draw_probes(vocabulary, self.engine.longest),
            dtype=self._reading.model_dtype,
            trainer_dtype=self._trainer_reading.compute_dtype,
            event=self.log.event,
        )

    # The trainer's side of the check of weight updates.

    def score(self, tokens: Tensor) -> Tensor:
        """Return the trainer's log-probabilities `[N, T-1]` of probe tokens `[N, T]`, at temperature 1; on all ranks."""
        model = self._accelerator.unwrap_model(self._trainer.model)
        autocast = self._accelerator.autocast if self._accelerator.native_amp else contextlib.nullcontext
        with forked_rng(self._accelerator.device):
            scores = score_tokens(model, tokens, autocast)
        self._forget_pass(model)
        return scores

    def fingerprint(self) -> str:
        """Return a digest of the present weights, the same on every rank."""
        model = self._accelerator.unwrap_model(self._trainer.model)
        return same_everywhere(self._accelerator)(fingerprint(held(model)))

    def _forget_pass(self, model: Any) -> None:
        reshard(model)  # FSDP2 keeps whole weights for a backward pass
        forget_order(self._accelerator)

    # A weight update.

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what TRL sends, noting what the engine should then hold."""
        self._sending = Sending()
        return self._sending.through(self._plain_parameters())

    def _sync_weights(self) -> None:
        """Send weights as TRL does, and judge whether the engine computes with them."""
        # Sleeping engines get weights inside of `generate`, which a rank may call by itself.
        ranks = ONE_PROCESS if self._generating else self._ranks
        look: TrainerLook | None = None
        verifier = self._verifier
        # The trainer first: it needs all ranks where it is sharded, and has the device to itself while the engine sleeps.
        if verifier is not None:
            with self._verdicts.checking("weight_sync"):
                with together(ranks):
                    if self.engine.fresh and not verifier.begun and not self._trainer.state.global_step:
                        verifier.begin()
                    asked = verifier.look()
                look = asked  # on all ranks or none
        self.engine.update(self._plain_sync, self._parameters)
        if verifier is not None and look is not None:
            with self._verdicts.checking("weight_sync"), together(ranks):
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
        split = "train" if self._trainer.model.training else self._split
        output: dict[str, Any] = self._plain_score(*args, **kwargs)
        with self._verdicts.checking("gap"), together(self._ranks):
            if output.get(ROLLOUT) is None:
                raise RecordError(
                    f"{type(self._trainer).__name__} returned no {ROLLOUT} with this batch, so there is no gap to measure."
                )
            old = self._score_batch(output) if output.get(OLD) is None else output[OLD]
            mask = output["completion_mask"] * output.get("tool_mask", 1)
            self.log.observe(split, old, output[ROLLOUT], mask.bool())
            if (ratio := output.get("importance_sampling_ratio")) is not None:
                self.log.mask(split, ratio, mask)
        return output

    def _score_batch(self, output: dict[str, Any]) -> Tensor:
        """Return the trainer's log-probabilities `[B, T]` by a pass of our own, where TRL took none."""
        trainer, args = self._trainer, self._trainer.args
        known = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
        tokens, attention_mask = (
            torch.cat([output[f"prompt_{part}"], output[f"completion_{part}"]], dim=1) for part in ("ids", "mask")
        )
        training = trainer.model.training
        # In evaluation mode there are neither dropout nor gradient checkpointing, and no module counts the pass.
        with torch.no_grad(), evaluating(trainer.model), forked_rng(self._accelerator.device):
            logprobs: Tensor = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                tokens,
                attention_mask,
                output["completion_ids"].size(1),
                batch_size=args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
                **{name: output[name] for name in known if name in output},  # images
            )[0]
        self._forget_pass(self._accelerator.unwrap_model(trainer.model))
        return logprobs

    # The run.

    def _log_metrics(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with what was measured since the last log."""
        trainer = self._trainer
        training = trainer.model.training
        split, prefix = ("train", "") if training else (self._split, "eval_")
        measured: dict[str, float] = {}
        ended = "train_runtime" in logs or (not training and any(name.endswith("_runtime") for name in logs))
        if "loss" in logs or ended:  # the trainer's own, on all ranks; a user's may be on the main process alone
            with self._verdicts.checking("findings"):
                self._verdicts.gather(self._ranks)
            with self._verdicts.checking("metrics"):
                measured = self.log.measured(trainer.state.global_step, split)
            gaps = [gap for gap in self._ranks.gather(self.verdict and self.verdict.gap_mean) if gap is not None]
            if gaps and "loss" in logs:
                measured[f"{PREFIX}weight_sync_gap"] = max(gaps)
        logs.update({prefix + name: value for name, value in measured.items()})
        self._plain_log(logs, *args, **kwargs)
        with self._verdicts.checking("metrics"):
            if training or measured:
                self.log.write(trainer.state.global_step, {k.removeprefix(prefix): v for k, v in logs.items()}, split)

    def _train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; the metrics file says how it ended."""
        with self._verdicts.checking("metrics"):
            self.log.begin(step_of_checkpoint(resume_from_checkpoint, self._trainer.args.output_dir))
            self.log.begin_anew()
        try:
            result = self._plain_train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            with contextlib.suppress(RunDirectoryError):
                self.log.end("failed", first_error(error))
            raise
        with self._verdicts.checking("metrics"):
            self.log.end("completed")
        return result

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as TRL does; the gap on each evaluation set is kept apart."""
        prefix = str(kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else "eval"))
        outer, self._split = self._split, "eval/" + (prefix.removeprefix("eval").removeprefix("_") or "default")
        try:
            with self._verdicts.around("metrics", self.log.evaluation(self._trainer.state.global_step)):
                return self._plain_evaluate(*args, **kwargs)
        finally:
            self._split = outer

    def _read_trainer(self) -> Any:
        accelerator, model = self._accelerator, self._trainer.model
        if self._trainer.is_deepspeed_enabled:
            return read_deepspeed(accelerator, model)
        return read_trainer(model, accelerator.autocast, accelerator.scaler, accelerator.device)

    def _info(self) -> dict[str, Any]:
        return run_info(
            self.log.block,
            TRL,
            host=f"trl {installed('trl')} {type(self._trainer).__name__}, attached",
            **of_arguments(self._trainer.args, self._trainer.model),
            trainer=self._trainer_reading,
            engine=self._reading,
            sampling=self._sampling,
            packages=PACKAGES,
        )
