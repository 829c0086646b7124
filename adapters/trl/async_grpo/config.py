"""AsyncGRPOConfig with one more field, the `mismatch:` block; refuses the parts of a block that this trainer does not take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mismatch_ext.adapters.transformers.lr import check_optimizer
from mismatch_ext.adapters.trl.config import MismatchConfigMixin
from mismatch_ext.adapters.trl.seams import REFUSALS
from trl.experimental.async_grpo import AsyncGRPOConfig

from mismatch_ext.config import CorrectionConfig, MismatchConfig, RoutingConfig
from mismatch_ext.errors import ConfigError, PrecisionError
from mismatch_ext.precision.dtypes import canonical
from mismatch_ext.presets import resolve
from mismatch_ext.seams import named


@dataclass
class MismatchAsyncGRPOConfig(MismatchConfigMixin, AsyncGRPOConfig):  # type: ignore[misc]  # sleeps, which is GRPO's
    """TRL's `AsyncGRPOConfig` plus `mismatch`, of which it takes precision, correction, routing R3, lr and monitor."""

    _VALID_DICT_FIELDS = [*AsyncGRPOConfig._VALID_DICT_FIELDS, "mismatch"]

    def __post_init__(self) -> None:
        block = self.mismatch_block()
        if block is not None and block.level == "observe":
            raise ConfigError(
                "mismatch.level='observe' with AsyncGRPO: which weights have sampled a token is known because requests end where "
                "weights are updated, and that is another run than without it; allowed: enforce."
            )
        super().__post_init__()

    def _check_host(self, block: MismatchConfig) -> None:
        for refusal in REFUSALS:
            if "AsyncGRPOTrainer" in refusal.where and refusal.feature in block.features:
                raise ConfigError(
                    f"{named([refusal.feature])} with AsyncGRPO: {refusal.why}; allowed: {refusal.instead}. Change or remove it."
                )

    def _check_routing(self, routing: RoutingConfig) -> None:
        if routing.reference:
            raise ConfigError(
                "mismatch.routing.reference=True with AsyncGRPO: there is no reference model; allowed: False. Change it."
            )

    def _follow_objective(self, block: MismatchConfig) -> None:
        if block.correction is not None:
            self._check_correction(block.correction)

    def _check_correction(self, correction: CorrectionConfig) -> None:
        settings = resolve(correction)
        if settings.normalize:
            raise ConfigError(
                "mismatch.correction.normalize=True with AsyncGRPO: weights would be divided by the mean of a micro-batch, whose "
                "size depends on the lengths of its rollouts; set it to False."
            )

    def _check_settled(self, block: MismatchConfig) -> None:
        """Refuse what can be judged only when the parent has parsed dictionaries and knows processes and optimizer."""
        kwargs: Any = self.model_init_kwargs or {}
        dtype = str(kwargs.get("dtype") or self.dtype)
        if block.precision is not None and (dtype == "auto" or canonical(dtype) != "float32"):
            raise ConfigError(
                f"dtype={dtype!r} contradicts mismatch.precision: the trainer's master weights stay float32 and autocast "
                f"computes in {block.precision.dtype}; remove the dtype."
            )
        if block.lr is not None:
            check_optimizer(self)
        check_unsharded(block, deepspeed=self.deepspeed_plugin is not None, fsdp=False)


def check_unsharded(block: MismatchConfig, *, deepspeed: bool, fsdp: bool) -> None:
    """Refuse sections that have been run only with whole (unsharded) parameters.

    Raises:
        PrecisionError: float16 with DeepSpeed.
        ConfigError: `lr` with DeepSpeed, or verified weights with sharded parameters.
    """
    if deepspeed and block.precision is not None and block.precision.dtype == "float16":
        raise PrecisionError(
            "mismatch.precision.dtype='float16' with AsyncGRPO and DeepSpeed: its loss scaler is read back by "
            "MismatchGRPOTrainer alone; use DDP, or MismatchGRPOTrainer."
        )
    if deepspeed and block.lr is not None:
        raise ConfigError(
            "mismatch.lr with AsyncGRPO and DeepSpeed, whose engine steps before the statistics of the step are collected. Use "
            "DDP, MismatchGRPOTrainer, or remove mismatch.lr."
        )
    if (deepspeed or fsdp) and block.monitor.weight_sync != "off":
        raise ConfigError(
            f"mismatch.monitor.weight_sync={block.monitor.weight_sync!r} with AsyncGRPO and sharded parameters (FSDP or "
            "DeepSpeed): its updates are verified with whole parameters alone; use DDP, MismatchGRPOTrainer, or set "
            "mismatch.monitor.weight_sync='off' to go on unverified."
        )
