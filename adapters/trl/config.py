"""GRPOConfig with one more field: the `mismatch:` block."""

# mypy: disable-error-code="has-type"

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mismatch_ext.adapters.trl.correction import native_options, own_options
from transformers import Trainer
from trl import GRPOConfig

from mismatch_ext.config import CorrectionConfig, KlConfig, MismatchConfig, RoutingConfig
from mismatch_ext.correction import Settings, resolve
from mismatch_ext.errors import ConfigError
from mismatch_ext.precision.dtypes import canonical


@dataclass
class MismatchGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` plus `mismatch`.

    With `mismatch.precision` set, `fp16`, `bf16` and the dtype of the trainer's master weights follow from it; a
    contradicting flag is an error.

    Args:
        mismatch: The block as a mapping, as a JSON or YAML string, or as the path of a JSON or YAML file; None leaves
            the trainer stock.

    Raises:
        ConfigError: The block is malformed, or contradicts another argument.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "mismatch"]

    mismatch: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "The mismatch block: a mapping, a JSON or YAML string, or the path of a JSON or YAML file. "
            "None leaves the trainer stock."
        },
    )

    def __post_init__(self) -> None:
        block = self.mismatch_block()
        if block is not None:
            self.mismatch = block.to_dict()
            self._check_host(block)
            if block.precision is not None:
                self._follow_precision(block.precision.dtype)
            if block.kl is not None:
                self._follow_kl(block.kl)
            if block.correction is not None:
                self._follow_correction(block.correction)
            if block.routing is not None:
                self._check_routing(block.routing)
        super().__post_init__()

    def mismatch_block(self) -> MismatchConfig | None:
        """Return the parsed block, or None when there is none."""
        return MismatchConfig.parse(self.mismatch)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Tell the configuration that the trainer which is being built knows the block."""
        self._claimed = True
        try:
            yield
        finally:
            self._claimed = False

    @property
    def train_batch_size(self) -> int:
        """The batch size per process, as in the parent.

        `Trainer.__init__` asks for it: the one moment at which a trainer that would ignore the block can be told from ours.
        """
        builder = inspect.unwrap(Trainer.__init__).__code__
        if self.mismatch is not None and not getattr(self, "_claimed", False) and sys._getframe(1).f_code is builder:
            raise ConfigError(
                f"mismatch={self.mismatch!r} was given, but the trainer that is being built does not know the block and would "
                "run without it; use MismatchGRPOTrainer, or put MismatchTrainerMixin before your own trainer class."
            )
        return super().train_batch_size

    def _check_host(self, block: MismatchConfig) -> None:
        if not self.use_vllm:
            needing = [name for name in ("precision", "correction") if getattr(block, name) is not None]
            if block.lr is not None and block.lr.trigger in ("mismatch_kl", "f_tau"):
                needing.append(f"lr.trigger={block.lr.trigger!r}")
            if needing or (block.kl is None and block.routing is None and block.lr is None):
                what = f"mismatch.{needing[0]}" if needing else "a mismatch block without kl, routing or lr"
                raise ConfigError(
                    f"use_vllm=False with {what}: generation by transformers reports no rollout log-probabilities, "
                    "so there is no gap to measure or correct; set use_vllm=True or remove it."
                )
            return
        if self.vllm_mode != "colocate":
            raise ConfigError(
                f"vllm_mode={self.vllm_mode!r} with a mismatch block: only 'colocate' is supported, because a server's "
                "weights and dtypes cannot be read back; set vllm_mode='colocate' or remove the mismatch block."
            )
        if self.vllm_enable_sleep_mode and block.monitor.weight_sync != "off":
            raise ConfigError(
                "vllm_enable_sleep_mode=True with mismatch.monitor.weight_sync="
                f"{block.monitor.weight_sync!r}: the weights of a sleeping engine cannot be verified; set "
                "vllm_enable_sleep_mode=False, or mismatch.monitor.weight_sync='off' to go on unverified."
            )

    def _check_routing(self, routing: RoutingConfig) -> None:
        """Refuse ways of generating whose routes cannot be followed."""
        if routing.reference and self.beta == 0.0:
            raise ConfigError(
                "mismatch.routing.reference=True with beta=0 and no mismatch.kl: there is no reference model whose routing could "
                "be replayed; set reference=False, or a KL coefficient."
            )
        if not self.use_vllm and routing.native_gap_rate:
            raise ConfigError(
                f"mismatch.routing.native_gap_rate={routing.native_gap_rate} with use_vllm=False: generation by transformers "
                "reports no rollout log-probabilities, so there is no gap to measure; leave it out."
            )
        if routing.mode != "R3":
            return
        if not self.use_vllm and self.use_transformers_continuous_batching:
            raise ConfigError(
                "mismatch.routing.mode='R3' with use_transformers_continuous_batching=True: it packs the tokens of several "
                "completions into one row, whose routes are not told apart; set it to False, or use_vllm=True."
            )
        if self.use_vllm and self.vllm_tensor_parallel_size != 1:
            raise ConfigError(
                f"mismatch.routing.mode='R3' with vllm_tensor_parallel_size={self.vllm_tensor_parallel_size}: routes are "
                "followed on engines of one rank only; set it to 1, or mode='R2'."
            )
        for key in (key for key in self.generation_kwargs or {} if key.startswith("routed_experts")):
            raise ConfigError(
                f"generation_kwargs[{key!r}]={self.generation_kwargs[key]!r} with mismatch.routing.mode='R3', which needs the "
                "routes of all tokens; remove it from generation_kwargs."
            )

    def _follow_kl(self, kl: KlConfig) -> None:
        """Make TRL's `beta` the coefficient, so that TRL builds the reference model."""
        if kl.coef is None and self.beta == 0.0:
            raise ConfigError("mismatch.kl without a coefficient: set mismatch.kl.coef, or beta > 0.")
        if kl.coef is not None and self.beta not in (0.0, kl.coef):
            raise ConfigError(f"beta={self.beta} contradicts mismatch.kl.coef={kl.coef}; remove one of the two.")
        self.beta = self.beta if kl.coef is None else kl.coef
        if kl.preset is not None or kl.reward_path == "surrogate":
            return
        if kl.ratio != "none":
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards' with ratio={kl.ratio!r}: a reward is weighed with the policy term "
                "that it is part of; set ratio='none', or reward_path='surrogate'."
            )
        if self.mask_truncated_completions:
            raise ConfigError(
                "mismatch.kl.reward_path='rewards' with mask_truncated_completions=True: masked completions have no KL "
                "but stay in their group, so that finishing would be punished; use reward_path='surrogate'."
            )
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards' with multi_objective_aggregation={self.multi_objective_aggregation!r}: the "
                "KL would be normalised by itself; use reward_path='surrogate'."
            )
        if kl.estimator == "full":
            raise ConfigError(
                "mismatch.kl.reward_path='rewards' with estimator='full': the vocabulary's log-probabilities are not kept from "
                "sampling time; use reward_path='surrogate', or another estimator."
            )

    def _follow_correction(self, correction: CorrectionConfig) -> None:
        """Set TRL's own importance-sampling options; where TRL has none, to plain ratios that are replaced later."""
        settings = resolve(correction)
        options = native_options(settings)
        if options is None and self.loss_type == "vespo":
            raise ConfigError(
                "mismatch.correction with loss_type='vespo': VESPO takes the logarithm of the weights, so that only plain "
                "token weights have a meaning there; use the preset token_truncate or token_mask."
            )
        if options is None:
            self._check_own_correction(settings)
        options = own_options() if options is None else options
        if settings.off_policy_threshold is not None:
            options["off_policy_mask_threshold"] = settings.off_policy_threshold
        defaults = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
        for name, value in options.items():
            given = getattr(self, name)
            if given not in (defaults[name], value):
                raise ConfigError(
                    f"{name}={given!r} contradicts mismatch.correction, which sets it to {value!r}; remove one of the two."
                )
            setattr(self, name, value)

    def _check_own_correction(self, settings: Settings) -> None:
        """Refuse what weights of our own would silently not do."""
        if settings.compat & {"unscored_is_one"}:
            raise ConfigError(
                "mismatch.correction.compat='unscored_is_one': rollouts without a log-probability are refused before they are "
                "corrected; remove it."
            )
        if settings.normalize and (settings.loss == "reinforce" or self.world_size > 1):
            raise ConfigError(
                "mismatch.correction.normalize: weights would be divided by the mean of a micro-batch or of one process, "
                "not of the whole batch; it is supported on one process, and not with loss='reinforce'. Remove it."
            )
        if settings.loss != "reinforce":
            return
        ignored = {
            "off_policy_mask_threshold": settings.off_policy_threshold is not None
            or self.off_policy_mask_threshold is not None,
            "top_entropy_quantile": self.top_entropy_quantile < 1.0,
            "delta": self.delta is not None,
            "importance_sampling_level": self.importance_sampling_level != "token",
            "loss_type": self.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo"),
        }
        for name, given in ignored.items():
            if given:
                raise ConfigError(
                    f"mismatch.correction.loss='reinforce' with {name}: it belongs to the policy term that REINFORCE "
                    "takes the place of, and would be ignored; leave out one of the two."
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
        kwargs = self.model_init_kwargs
        if isinstance(kwargs, dict) and canonical(kwargs.get("dtype") or "float32") != "float32":
            raise ConfigError(
                f"model_init_kwargs['dtype']={kwargs['dtype']!r} contradicts mismatch.precision: the trainer's master "
                f"weights stay float32 and autocast computes in {dtype}; remove the dtype from model_init_kwargs."
            )
