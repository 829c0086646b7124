"""TRL's configurations with one more field: the `mismatch:` block."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.transformers.lr import check_optimizer
from mismatch_ext.adapters.trl.options import GrpoOptions
from mismatch_ext.adapters.trl.readings import sampling_settings
from mismatch_ext.adapters.trl.refusals import check_sampling_mask, check_sharding
from transformers import Trainer
from trl import GRPOConfig, RLOOConfig

from mismatch_ext.config import MismatchConfig, RoutingConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.dtypes import canonical
from mismatch_ext.presets import resolve
from mismatch_ext.verdicts import Verdicts

if TYPE_CHECKING:
    from trl import GRPOConfig as _Host
else:
    _Host = object


@dataclass
class MismatchConfigMixin(_Host):
    """Adds `mismatch` to a configuration of TRL: `class MyConfig(MismatchConfigMixin, SomeTrlConfig)`.

    With `mismatch.precision` set, `fp16`, `bf16` and the dtype of the trainer's master weights follow from it; a
    contradicting flag is an error.

    Args:
        mismatch: The block as a mapping, as a JSON or YAML string, or as the path of a JSON or YAML file; None leaves
            the trainer stock.

    Raises:
        ConfigError: The block is malformed, or contradicts another argument.
    """

    mismatch: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "The mismatch block: a mapping, a JSON or YAML string, or the path of a JSON or YAML file. "
            "None leaves the trainer stock."
        },
    )

    def __post_init__(self) -> None:
        given = MismatchConfig.parse(self.mismatch)
        if given is not None:
            self.mismatch, block = given.to_dict(), given.acting
            # Findings of the configuration wait in it for the trainer.
            self._verdicts = verdicts = Verdicts(block.level)
            with verdicts.checking("settings"):
                self._check_host(block)
            if block.precision is not None:
                self._follow_precision(block.precision.dtype)
            self._follow_objective(block)
            if block.routing is not None:
                self._check_routing(block.routing)
        super().__post_init__()
        if given is not None:
            with verdicts.checking("settled_settings"):
                self._check_settled(block)

    def mismatch_block(self) -> MismatchConfig | None:
        """Return the block with the sections that act, which under `observe` are none; None without a block."""
        block = MismatchConfig.parse(self.mismatch)
        return None if block is None else block.acting

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Tell the configuration that the trainer which is being built knows the block."""
        self._claimed = self._known = True
        try:
            yield
        finally:
            self._claimed = False

    @property
    def train_batch_size(self) -> int:
        """The batch size per process, as in the parent.

        `Trainer.__init__` reads it. Only at that moment can a trainer that would ignore the block be told from ours.
        """
        builder = inspect.unwrap(Trainer.__init__).__code__
        if not getattr(self, "_claimed", False) and sys._getframe(1).f_code is builder:
            self._refuse_unknown_trainer()
        return super().train_batch_size

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """The number of warmup steps, as in the parent; a training asks for it, however its constructor was wrapped."""
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if asks.partition(".")[0] == "transformers" and not getattr(self, "_known", False):
            self._refuse_unknown_trainer()
        steps: int = super().get_warmup_steps(num_training_steps)
        return steps

    def _refuse_unknown_trainer(self) -> None:
        if self.mismatch is None:
            return
        with self._verdicts.checking("trainer"):
            raise ConfigError(
                f"mismatch={self.mismatch!r} was given, but the trainer does not know the block and would run without it; "
                "use MismatchGRPOTrainer, or put MismatchTrainerMixin before your own trainer class."
            )

    @property
    def sleeps(self) -> bool:
        """Whether the engine sleeps between generations; TRL lets no server sleep."""
        return self.vllm_enable_sleep_mode and self.vllm_mode == "colocate"

    def _check_host(self, block: MismatchConfig) -> None:
        if not self.use_vllm and block.monitor.doctor is not None:
            raise ConfigError(
                f"mismatch.monitor.doctor={block.monitor.doctor!r} with use_vllm=False: generation by transformers reports no "
                "rollout log-probabilities, so that there are no two sides; set use_vllm=True or remove it."
            )
        if not self.use_vllm:
            needing = [
                name for name in ("precision", "correction", "sampling_mask") if getattr(block, name) is not None
            ]
            if block.lr is not None and block.lr.trigger in ("mismatch_kl", "f_tau"):
                needing.append(f"lr.trigger={block.lr.trigger!r}")
            if needing or not (block.kl or block.routing or block.lr or block.monitor.alarms):
                what = (
                    f"mismatch.{needing[0]}"
                    if needing
                    else "a mismatch block without kl, routing, lr or monitor.alarms"
                )
                raise ConfigError(
                    f"use_vllm=False with {what}: generation by transformers reports no rollout log-probabilities, "
                    "so there is no gap to measure or correct; set use_vllm=True or remove it."
                )

    def _check_routing(self, routing: RoutingConfig) -> None:
        """Refuse ways of generating whose routes cannot be followed."""
        if routing.reference and self.beta == 0.0:
            raise ConfigError(
                "mismatch.routing.reference=True with beta=0 and no mismatch.kl: there is no reference model whose routing could "
                "be replayed; set reference=False, or a KL coefficient."
            )
        if routing.mode != "R3":
            return
        if not self.use_vllm:
            raise ConfigError(
                "mismatch.routing.mode='R3' with use_vllm=False: the routes of transformers' generation are not recorded; use "
                "mode='R2', or use_vllm=True."
            )
        if self.vllm_mode == "colocate" and self.vllm_tensor_parallel_size != 1:
            raise ConfigError(
                f"mismatch.routing.mode='R3' with vllm_tensor_parallel_size={self.vllm_tensor_parallel_size}: routes are "
                "followed on engines of one rank only; set it to 1, or mode='R2'."
            )

    def _check_settled(self, block: MismatchConfig) -> None:
        """Refuse what can be judged only when the parent has parsed dictionaries and knows processes, optimizer and DeepSpeed."""
        # These are mappings by now, although they are JSON on a command line.
        given: Any = self.generation_kwargs or {}
        kwargs: Any = self.model_init_kwargs or {}
        sampling_settings(self, given)
        check_sampling_mask(self, block, given)
        if block.precision is not None and canonical(kwargs.get("dtype") or "float32") != "float32":
            raise ConfigError(
                f"model_init_kwargs['dtype']={kwargs['dtype']!r} contradicts mismatch.precision: the trainer's "
                f"master weights stay float32 and autocast computes in {block.precision.dtype}; remove the dtype from "
                "model_init_kwargs."
            )
        if block.routing is not None and block.routing.mode == "R3":
            for key in (key for key in given if key.startswith("routed_experts")):
                raise ConfigError(
                    f"generation_kwargs[{key!r}]={given[key]!r} with mismatch.routing.mode='R3', which needs the "
                    "routes of all tokens; remove it from generation_kwargs."
                )
        if block.lr is not None:
            check_optimizer(self)
        plugin = self.deepspeed_plugin
        # Only an accelerator can say whether FSDP shards, and there is none yet.
        check_sharding(block, deepspeed=None if plugin is None else plugin.deepspeed_config, fsdp=None)

    def _follow_objective(self, block: MismatchConfig) -> None:
        """Refuse what changes the objective of a trainer that has no seam for it."""
        for name in ("kl", "correction", "sampling_mask"):
            if getattr(block, name) is not None:
                raise ConfigError(
                    f"mismatch.{name} with {type(self).__name__}, whose trainer's loss is not known to have a seam for it; "
                    "allowed: precision, routing, lr and monitor. Remove it, or use MismatchGRPOConfig, or derive from that."
                )

    def _follow_precision(self, dtype: str) -> None:
        """Derive the host's own precision arguments, refusing those that say otherwise."""
        if self.fp16 and dtype != "float16":
            raise ConfigError(f"fp16=True contradicts mismatch.precision.dtype={dtype!r}; remove fp16.")
        if self.bf16 and dtype != "bfloat16":
            raise ConfigError(f"bf16=True contradicts mismatch.precision.dtype={dtype!r}; remove bf16.")
        if self.bf16 is False and dtype == "bfloat16":
            raise ConfigError("bf16=False contradicts mismatch.precision.dtype='bfloat16'; remove bf16.")
        self.fp16, self.bf16 = dtype == "float16", dtype == "bfloat16"


@dataclass
class MismatchGRPOConfig(MismatchConfigMixin, GrpoOptions, GRPOConfig):
    """TRL's `GRPOConfig` plus `mismatch`; see `MismatchConfigMixin`."""

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "mismatch"]

    def _follow_objective(self, block: MismatchConfig) -> None:
        if block.kl is not None:
            self._follow_kl(block.kl)
        if block.correction is not None:
            self._follow_correction(block.correction)

    def _check_settled(self, block: MismatchConfig) -> None:
        super()._check_settled(block)
        if block.correction is not None:
            self._check_own_correction(resolve(block.correction))


@dataclass
class MismatchRLOOConfig(MismatchConfigMixin, RLOOConfig):
    """TRL's `RLOOConfig` plus `mismatch`, of which it takes precision, routing, lr and monitor."""

    _VALID_DICT_FIELDS = [*RLOOConfig._VALID_DICT_FIELDS, "mismatch"]
