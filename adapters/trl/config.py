"""TRL's configurations with one more field: the `mismatch:` block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_ext.adapters.transformers.lr import check_optimizer
from mismatch_ext.adapters.trl.correction import native_options, own_options
from mismatch_ext.adapters.trl.refusals import check_sharding, refuse
from transformers import TrainerState
from transformers.trainer_pt_utils import AcceleratorConfig
from trl import GRPOConfig, RLOOConfig

from mismatch_ext.config import CorrectionConfig, KlConfig, MismatchConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.presets import resolve
from mismatch_ext.rollout import SamplingSettings

if TYPE_CHECKING:
    from trl import GRPOConfig as _Host
else:
    _Host = object

TAKEN_BY_VESPO = ("token_truncate", "token_mask", "token")
"""Modes of TRL's own correction that VESPO runs with; "token" stands for none at all."""
# Keys of `generation_kwargs` that change the engine's distribution and leave the trainer's as it is.
ENGINE_ONLY = (
    "allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "logits_processors", "min_tokens",
    "presence_penalty", "structured_outputs",
)  # fmt: skip


class BlockAcceleratorConfig(AcceleratorConfig):
    """The accelerator's options in a configuration with a block: each trainer's constructor asks for them as a mapping."""

    _config: Any  # that the options are of

    @classmethod
    def of(cls, config: MismatchConfigMixin) -> BlockAcceleratorConfig:
        """Return the options of a configuration, which it gives to no trainer that does not know its block."""
        made = cls()
        # As they are: transformers removes an option that it has read, which a constructor would bring back.
        vars(made).clear()
        vars(made).update(vars(config.accelerator_config), _config=config)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the options by name."""
        self._config.expect_claimed()
        options: dict[str, Any] = self.options().to_dict()
        return options

    def options(self) -> AcceleratorConfig:
        """Return the options as transformers holds them."""
        plain = AcceleratorConfig()
        vars(plain).clear()
        vars(plain).update({name: value for name, value in vars(self).items() if name != "_config"})
        return plain


@dataclass
class MismatchConfigMixin(_Host):
    """Adds `mismatch` to a configuration of TRL: `class MyConfig(MismatchConfigMixin, SomeTrlConfig)`.

    With `mismatch.precision` set, `fp16`, `bf16` and the dtype of the trainer's master weights follow from it; a
    contradicting flag is an error. A config that does not act changes no setting.

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

    _claimed = False

    def __post_init__(self) -> None:
        if isinstance(self.accelerator_config, BlockAcceleratorConfig):
            # A copy with other settings, and perhaps without a block.
            self.accelerator_config = self.accelerator_config.options()
        block = MismatchConfig.parse(self.mismatch)
        if block is None:
            super().__post_init__()
            return
        self.mismatch = block.to_dict()
        refuse("class", type(self), block)
        if block.precision is not None:
            self._follow_precision(block.precision.dtype)
            self._follow_head(block.precision.head)
        self._follow_objective(block)
        super().__post_init__()
        self.accelerator_config = BlockAcceleratorConfig.of(self)  # type: ignore[assignment]  # as parsed by the parent
        refuse("settings", self, block)
        if block.acts:
            self._check_settled(block)

    def mismatch_block(self) -> MismatchConfig | None:
        """Return the config; None without one."""
        return MismatchConfig.parse(self.mismatch)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Let the accelerator's options be read: a trainer that knows the block builds its accelerator from them."""
        before, self._claimed = self._claimed, True
        try:
            yield
        finally:
            self._claimed = before

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as JSON-able data, as in the parent."""
        with self.claimed():
            settings: dict[str, Any] = super().to_dict()
        return settings

    def expect_claimed(self) -> None:
        """Refuse a trainer that would build its accelerator and train without the block."""
        if not self._claimed:
            raise ConfigError(
                f"mismatch={self.mismatch!r} was given to a trainer that does not know it, and would train without it. Use "
                "MismatchGRPOTrainer, or put MismatchTrainerMixin before your own trainer class. attach(trainer) measures a "
                "stock trainer without a config."
            )

    def _check_settled(self, block: MismatchConfig) -> None:
        """Refuse what can be judged only when the parent has parsed dictionaries and knows processes, optimizer and DeepSpeed."""
        settings = sampling_settings(self, self.generation_kwargs)  # type: ignore[arg-type]  # a mapping by now
        if block.sampling_mask is not None:
            block.sampling_mask.asked(settings)
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
        for name, given, computes in (("fp16", self.fp16, "float16"), ("bf16", self.bf16, "bfloat16")):
            if (given and dtype != computes) or (name == "bf16" and given is False and dtype == computes):
                raise ConfigError(f"{name}={given} contradicts mismatch.precision.dtype={dtype!r}; remove {name}.")
        self.fp16, self.bf16 = dtype == "float16", dtype == "bfloat16"

    def _follow_head(self, head: str | None) -> None:
        """Set TRL's own option of a head in float32, without which its fused head multiplies under autocast."""
        if head is None:
            return
        if not hasattr(self, "cast_lm_head_to_fp32"):
            raise ConfigError(
                f"mismatch.precision.head with {type(self).__name__}: TRL's trainer has no output head in float32 there. Remove "
                "it, or use MismatchGRPOConfig."
            )
        self.cast_lm_head_to_fp32 = True


@dataclass
class MismatchGRPOConfig(MismatchConfigMixin, GRPOConfig):
    """TRL's `GRPOConfig` plus `mismatch`; see `MismatchConfigMixin`."""

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "mismatch"]

    def _follow_objective(self, block: MismatchConfig) -> None:
        if block.kl is not None:
            self._follow_kl(block.kl)
        if block.correction is not None:
            self._follow_correction(block.correction)

    def _follow_kl(self, kl: KlConfig) -> None:
        """Make TRL's `beta` the coefficient, so that TRL builds the reference model."""
        if kl.coef is None and self.beta == 0.0:
            raise ConfigError("mismatch.kl without a coefficient: set mismatch.kl.coef, or beta > 0.")
        if kl.coef is not None and self.beta not in (0.0, kl.coef):
            raise ConfigError(f"beta={self.beta} contradicts mismatch.kl.coef={kl.coef}; remove one of the two.")
        self.beta = self.beta if kl.coef is None else kl.coef

    def _follow_correction(self, correction: CorrectionConfig) -> None:
        """Set TRL's own importance-sampling options; if TRL has none for the section, set plain ratios, replaced later."""
        settings = resolve(correction)
        options = native_options(settings)
        taken = options is not None and options.get("vllm_importance_sampling_mode", "token") in TAKEN_BY_VESPO
        if self.loss_type == "vespo" and not taken:
            raise ConfigError(
                "mismatch.correction with loss_type='vespo': VESPO takes the logarithm of the weights, so that only plain "
                "token weights have a meaning there; use the preset token_truncate or token_mask."
            )
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


@dataclass
class MismatchRLOOConfig(MismatchConfigMixin, RLOOConfig):
    """TRL's `RLOOConfig` plus `mismatch`, of which it takes precision, routing, lr and monitor."""

    _VALID_DICT_FIELDS = [*RLOOConfig._VALID_DICT_FIELDS, "mismatch"]


def sampling_settings(source: Any, generation_kwargs: Mapping[str, Any] | None) -> SamplingSettings:
    """Return what the engine of a trainer, configuration or wrapper samples with; `generation_kwargs` come last, as in TRL."""
    given = generation_kwargs or {}
    settings = {
        "temperature": source.temperature,
        "top_p": source.top_p,
        "top_k": source.top_k,
        "min_p": source.min_p or 0.0,
        "repetition_penalty": source.repetition_penalty,
    }
    settings.update({k: v for k, v in given.items() if k in settings})
    for key, value in (("logprobs", 0), ("n", 1)):
        if given.get(key, value) != value:
            raise ConfigError(
                f"generation_kwargs[{key!r}]={given[key]!r}: with more than one candidate per token or prompt, TRL takes the "
                f"most likely one's log-probability for the sampled one's; allowed: {value}. Remove it from generation_kwargs."
            )
    if settings["temperature"] != source.temperature:
        raise ConfigError(
            f"generation_kwargs['temperature']={settings['temperature']} but temperature={source.temperature}: the engine "
            "would sample at one temperature and the trainer score at the other; set temperature and remove it from "
            "generation_kwargs."
        )
    return SamplingSettings(**settings)


def ratio_bias(trainer: Any, sampling: SamplingSettings) -> str | None:
    """Say why the gap is not only numerics (truncated support, penalties, constrained decoding), or return None."""
    sentences = [sampling.ratio_bias()]
    if sampling.truncates_support and trainer.args.vllm_mode == "colocate":
        sentences.append(
            "mismatch.sampling_mask, where it is allowed, scores over the tokens that survive, with the ratio at 1."
        )
    keys = [key for key in ENGINE_ONLY if (trainer.args.generation_kwargs or {}).get(key)]
    keys += ["vllm_structured_outputs_regex"] if trainer.args.vllm_structured_outputs_regex else []
    if keys:
        sentences.append(
            f"{' and '.join(keys)} change the engine's distribution and not the trainer's: every ratio contains that "
            "change, and the gap is not numerics alone."
        )
    return " ".join(filter(None, sentences)) or None


def step_of_checkpoint(checkpoint: str | None) -> int | None:
    """Return the last step of a checkpoint; None without one."""
    state = Path(checkpoint or "") / "trainer_state.json"
    return TrainerState.load_from_json(str(state)).global_step if checkpoint and state.is_file() else None
