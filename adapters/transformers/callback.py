"""Learning-rate control and monitoring for a trainer whose class cannot be changed, by one callback that reads its logs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from mismatch_ext.adapters.accelerate.ranks import AcceleratorRanks
from mismatch_ext.adapters.transformers import read_trainer
from mismatch_ext.adapters.transformers.alarms import AlarmCallback
from mismatch_ext.adapters.transformers.header import PACKAGES, of_arguments
from mismatch_ext.adapters.transformers.lr import LENGTH, TRUNCATED, LrCallback, check_optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from mismatch_ext.alarms import AlarmState, rules_of
from mismatch_ext.banner import alarm_lines, run_info, section_lines
from mismatch_ext.checkpoint import changed_settings
from mismatch_ext.checks import Checks
from mismatch_ext.config import MismatchConfig, Trigger
from mismatch_ext.errors import ConfigError
from mismatch_ext.log import RunLog
from mismatch_ext.lr import LrControl
from mismatch_ext.metrics_file import ensure_writable, run_folder
from mismatch_ext.names import PREFIX, TRL
from mismatch_ext.states import to_json
from mismatch_ext.terminal import say_in_run
from mismatch_ext.versions import installed

logger = logging.getLogger(__name__)

NEEDS_A_TRAINER = ("precision", "correction", "kl", "routing", "sampling_mask")


class MismatchCallback(TrainerCallback, ExportableState):
    """The `lr` and `monitor` sections for any unchanged trainer of TRL or transformers.

        trainer = GRPOTrainer(..., callbacks=[MismatchCallback({"lr": {}, "monitor": {}})])

    It sees only what the trainer logs, after each step. So a surge of response lengths counts from the next step on. Its state
    is saved in the trainer's checkpoints, and resumed from them. The applied rate and the multiplier are in the trainer's history
    and in `metrics-*.jsonl`. W&B and TensorBoard are called before this callback: they get the schedule's own `learning_rate`.

    Args:
        mismatch: The block as a mapping, a JSON or YAML string, or the path of a JSON or YAML file.

    Raises:
        ConfigError: The block is malformed, or asks for something that needs a trainer class.
    """

    def __init__(self, mismatch: MismatchConfig | Mapping[str, Any] | str | Path) -> None:
        self.block = MismatchConfig.parse(mismatch) or MismatchConfig()
        self._checks = Checks(self.block.acts)
        for name in NEEDS_A_TRAINER:
            if getattr(self.block, name) is not None:
                raise ConfigError(
                    f"mismatch.{name} with MismatchCallback: a callback reaches neither loss nor engine; allowed: lr, "
                    "monitor. Remove it, or use MismatchGRPOTrainer."
                )
        self._lr = self._control()
        self._rules = rules_of(self.block.monitor, TRL)
        self._log: RunLog | None = None
        self._alarms = AlarmCallback(self._opened)
        self._logged = False

    def _control(self) -> LrCallback | None:
        lr = self.block.lr
        if lr is None:
            return None
        if lr.trigger in ("mismatch_kl", "f_tau"):
            raise ConfigError(
                f"mismatch.lr.trigger={lr.trigger!r} with MismatchCallback: the trainer does not log it; allowed: "
                "response_length, grad_norm. Use MismatchGRPOTrainer for the others."
            )
        return LrCallback(lr)

    def state(self) -> dict[str, Any]:
        """Return what transformers saves in a checkpoint's `trainer_state.json`."""
        lr = None if self._lr is None else self._lr.state_dict()
        alarms = AlarmState() if self._log is None else self._log.alarms
        saved = {"lr": lr, "monitor": to_json(alarms)}
        return {"args": {"mismatch": self.block.to_dict()}, "attributes": {"saved": saved}}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check what the trainer's arguments tell, before TRL starts its engine.

        Raises:
            ConfigError, RunDirectoryError: As in `on_train_begin`.
        """
        self._checks.at(lambda: state.global_step)
        with self._checks.checking("settings"):
            self._check_alone(state)
            # A fraction counts steps of a training, whose number is not known yet.
            self._check(args, args.logging_steps if args.logging_steps >= 1 else 1)
        if state.is_world_process_zero:
            ensure_writable(self._run_dir(args))

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Check what can be done with this trainer, resume, and say what is active.

        Raises:
            ConfigError: The callback could not see what it needs.
        """
        self._checks.at(lambda: state.global_step)
        with self._checks.checking("settings"):
            self._check_alone(state)
            self._check(args, state.logging_steps)
        # When transformers saves, it expects an entry, which a checkpoint from before this callback does not have. In a new
        # training the entry holds this callback's state when the trainer last asked for it, perhaps in a training that failed.
        entries: Any = state.stateful_callbacks
        entry = entries.setdefault(type(self).__name__, {})
        self._logged = False
        saved: dict[str, Any] = {}
        with self._checks.checking("checkpoint"):
            saved = entry.get("attributes", {}).get("saved", {}) if state.global_step else {}
        with self._checks.checking("metrics"):
            self._open(args, state, model)
        with self._checks.checking("checkpoint"):
            self._resume(entry, saved, state)
        if self._log is not None:
            self._alarms.on_train_begin(args, state, control)
        if self._lr is not None:
            self._lr.load_state_dict(saved.get("lr"))
            self._lr.on_train_begin(args, state, control, **kwargs)
        if state.is_world_process_zero:
            done = "is active" if self._checks.acts else "measures, and changes nothing,"
            lines = [f"mismatch-ext {installed('mismatch-ext')} {done} by callback"]
            lines += section_lines(self.block)
            say_in_run("\n".join([*lines, *alarm_lines(self._rules, self._run_dir(args))]))

    def _open(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Open the metrics file of a training."""
        self._log = None
        self._log = RunLog(
            self.block,
            self._run_dir(args),
            info=lambda: self._info(args, model),
            step=lambda: state.global_step,
            names=TRL,
            ranks=AcceleratorRanks(PartialState()),
            checks=self._checks,
        )
        self._log.begin(state.global_step or None)

    def _opened(self) -> RunLog:
        assert self._log is not None
        return self._log

    def _resume(self, entry: Any, saved: Any, state: TrainerState) -> None:
        """Go on from what a checkpoint holds, and say which settings have changed since."""
        log = self._log
        if not state.global_step or log is None:
            return
        log.load_state_dict({"monitor": saved.get("monitor")}, step=state.global_step)
        changed = changed_settings(entry.get("args", {}).get("mismatch"), self.block.to_dict())
        if changed is not None:
            logger.warning(changed)
            log.event("warning", "settings_changed", changed)

    def _run_dir(self, args: TrainingArguments) -> Path:
        return run_folder(self.block.monitor, Path(str(args.output_dir)))

    def _check_alone(self, state: TrainerState) -> None:
        entries: Any = state.stateful_callbacks  # a dict, unlike transformers' annotation of it
        entry = entries.get(type(self).__name__)
        if isinstance(entry, list):
            raise ConfigError(f"{len(entry)} MismatchCallbacks on one trainer: give one, with both sections.")

    def _check(self, args: TrainingArguments, logging_steps: float) -> None:
        """Refuse arguments with which the callback could not see or control what it needs."""
        if getattr(args, "mismatch", None) is not None:
            raise ConfigError(
                "MismatchCallback on a trainer that has a mismatch block already; leave out the callback."
            )
        lr = self.block.lr
        if lr is None:
            return
        if getattr(args, "deepspeed_plugin", None) is not None:
            raise ConfigError(
                "mismatch.lr with MismatchCallback and DeepSpeed, which nobody has run. Use MismatchGRPOTrainer, DDP or FSDP2."
            )
        check_optimizer(args)
        strategy = getattr(args.logging_strategy, "value", args.logging_strategy)
        if lr.watches and (strategy != "steps" or logging_steps != 1):
            restored = ", which the checkpoint keeps" if logging_steps != args.logging_steps else ""
            raise ConfigError(
                f"mismatch.lr with MismatchCallback watches {lr.trigger} in the trainer's logs, but logging_strategy="
                f"{strategy!r}, logging_steps={logging_steps}{restored}; set logging_steps=1, give mismatch.lr.period, or use "
                "MismatchGRPOTrainer."
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the statistics of a training log, write it to the run directory, and raise its alarms.

        Raises:
            ConfigError: The trainer does not log the statistic that controls the learning rate.
        """
        if not logs or "loss" not in logs or self._log is None:
            return
        self._lead(state, logs)
        with self._checks.checking("metrics"):
            logs |= {PREFIX + name: value for name, value in self._checks.metrics().items()}
        self._alarms.on_log(args, state, control, logs)
        with self._checks.checking("metrics"):
            self._log.write(state.global_step, logs | self._alarms.left_out)

    def _lead(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Log the rate that was applied, and let what was logged decide the next rate."""
        if self._lr is None or self._lr.rate is None:
            return
        applied = {PREFIX + name: value for name, value in self._lr.metrics().items()}
        if "learning_rate" in logs:
            applied["learning_rate"] = logs["learning_rate"] * self._lr.applied
        logs |= applied
        if state.log_history:
            state.log_history[-1] |= applied
        if self._lr.config.watches:
            self._steer(self._lr.config.trigger, self._lr.rate, logs)

    def _steer(self, trigger: Trigger, rate: LrControl, logs: Mapping[str, Any]) -> None:
        key = LENGTH if trigger == "response_length" else "grad_norm"
        if logs.get(key) is None:
            if self._logged:
                return  # several optimizer steps on one generation: TRL logs lengths with the first
            raise ConfigError(
                f"mismatch.lr.trigger={trigger!r}: the trainer's log has no {key!r}, only "
                f"{', '.join(sorted(logs))}; give mismatch.lr.period, or use a trainer that logs it."
            )
        self._logged = True
        if key == "grad_norm":
            rate.collect({"grad_norm": float(logs[key])})
        else:
            rate.collect({"response_length": logs[LENGTH], "truncated_fraction": logs.get(TRUNCATED)})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note that a checkpoint was saved."""
        self._alarms.on_save(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ask for the checkpoint of a stop if it is not saved yet."""
        self._alarms.on_epoch_end(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the control off, write how training ended, and print what happened."""
        if self._lr is not None:
            self._lr.release()
        if self._log is None:
            return
        with self._checks.checking("metrics"):
            self._log.end("completed")

    def _info(self, args: TrainingArguments, model: Any) -> dict[str, Any]:
        def autocast() -> AbstractContextManager[Any]:
            # accelerate leaves float16 off on a CPU.
            half = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 and device.type != "cpu" else None
            return nullcontext() if half is None else torch.autocast(device.type, dtype=half)

        device = args.device
        return run_info(
            self.block,
            TRL,
            host=f"trl {installed('trl')} by callback",
            **of_arguments(args, model),
            trainer=read_trainer(model, autocast, None, device),
            packages=PACKAGES,
        )
