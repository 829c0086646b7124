"""The `mismatch:` block: one frozen dataclass per section, checked by pydantic however it is built (no torch).

A section that is absent is off, and the host then behaves as without this package. `lr: {}` is a section with its defaults.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import pydantic.dataclasses
from pydantic import BeforeValidator, Field, PlainValidator, Strict, ValidationError, WrapValidator

from mismatch_ext.errors import ConfigError, shown, suggestion
from mismatch_ext.precision.dtypes import MEANT
from mismatch_ext.presets import FROM_PRESET, resolve

if TYPE_CHECKING:
    from mismatch_ext.rollout import SamplingSettings

LEVELS = ("enforce", "observe")
"""Values of `level`: the sections are applied, or are checked and then left out, so that the run is only measured."""
MAX_BAD_ROWS = 0.01
"""Share of bad rows that a config that acts allows, unless it says otherwise. A choice."""
Trigger = Literal["response_length", "mismatch_kl", "grad_norm", "f_tau"]
_OFF = BeforeValidator(lambda value: "off" if value is False else value)  # YAML 1.1 reads a bare `off` as False
Action = Annotated[Literal["error", "warn", "off"], _OFF]
AlarmAction = Annotated[Literal["warn", "stop", "off"], _OFF]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
Count = Annotated[int, Strict(), Field(ge=1)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
_PAIR = BeforeValidator(
    lambda value: tuple(value) if isinstance(value, list) else value
)  # JSON and YAML have no tuples
_INHERITED = WrapValidator(lambda value, check: value if value is FROM_PRESET else check(value))
Section = TypeVar("Section")

_SECTIONS: dict[str, type] = {}


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def _section(path: str) -> typing.Callable[[type[Section]], type[Section]]:
    """Make a class a frozen dataclass whose constructor, and so `dataclasses.replace`, raises ConfigError."""

    def decorated(plain: type[Section]) -> type[Section]:
        cls: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})(plain)
        checked = cls.__init__

        @functools.wraps(checked)
        def init(self: object, **settings: Any) -> None:
            try:
                checked(self, **settings)
            except ValidationError as error:
                raise _refusal(error, path) from None

        cls.__init__ = init
        _SECTIONS[path] = cls
        return cls  # type: ignore[no-any-return]

    return decorated


@_section("mismatch.precision")
class PrecisionConfig:
    """One compute dtype for trainer, weight sync and rollout engine (uniform FP16, arXiv 2510.26788)."""

    dtype: Literal["float16", "bfloat16", "float32"]
    """Compute dtype of both sides. Master weights of the trainer stay float32."""
    head: Literal["float32"] | None = None
    """`float32` lets the output head multiply in float32 on both sides, outside of autocast."""
    init_scale: Annotated[Number, Field(ge=1)] = 2.0**16
    """First loss scale of float16; a power of two keeps scaling exact."""
    growth_interval: Count = 400
    """Steps without overflow before the loss scale doubles."""
    engine_weights: Text | None = None
    """The engine's name for the quantization of its weights (`quantization`), such as `fp8_per_channel` or
    `compressed-tensors`. Any other format raises an error."""
    engine_kv_cache: Text | None = None
    """The engine's name for its dtype of keys and values (`kv_cache_dtype`), such as `fp8_e4m3`; None is the compute dtype."""
    readiness: Action = "error"
    """What to do when the checkpoint's weights do not fit the dtype."""

    def __post_init__(self) -> None:
        for name in ("engine_weights", "engine_kv_cache"):
            value = getattr(self, name)
            if value is not None and value.strip().lower() in ("", "auto", "none"):
                raise ConfigError(
                    f"mismatch.precision.{name}: {value!r} is not allowed; allowed: the engine's name of a format."
                )

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients need loss scaling: only float16 has too few exponent bits for them."""
        return self.dtype == "float16"

    @property
    def head_dtypes(self) -> tuple[str, ...]:
        """Allowed dtypes of an output head."""
        return tuple(dict.fromkeys((self.dtype, "float32"))) if self.head is None else (self.head,)

    @property
    def kv_cache_dtypes(self) -> tuple[str, ...]:
        """Allowed dtypes of the engine's KV cache: the compute dtype, by name or as "auto", or the format asked for."""
        if self.engine_kv_cache is None:
            return ("auto", self.dtype)
        return (self.engine_kv_cache, "fp8_e4m3") if self.engine_kv_cache == "fp8" else (self.engine_kv_cache,)


def _bounds(value: Any) -> float | tuple[float, float]:
    """Return the threshold of a rejection rule: a number, or a lower and an upper one."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    valid = [type(number) in (int, float) and 0 < number <= sys.float_info.max for number in numbers]
    if not all(valid) or len(valid) not in (1, 2) or numbers[0] > numbers[-1]:
        raise ValueError("a number > 0, or [lower, upper]")
    return tuple(map(float, numbers)) if len(numbers) == 2 else float(numbers[0])  # type: ignore[return-value]


def _regions(value: Any) -> float | tuple[float, float] | None:
    """Return the trust region of a token: a number, or one for negative and one for positive advantages."""
    if value is None:
        return None
    numbers = value if isinstance(value, (list, tuple)) else [value]
    valid = [type(number) in (int, float) and 0 < number <= sys.float_info.max for number in numbers]
    if not all(valid) or len(valid) not in (1, 2):
        raise ValueError("a number > 0, or [of negative advantages, of positive ones]")
    return tuple(map(float, numbers)) if len(numbers) == 2 else float(numbers[0])  # type: ignore[return-value]


@_section("mismatch.correction.centering")
class CenteringConfig:
    """Score centering (arXiv 2609.20807): takes out of each update what it would learn from the engine's distribution alone."""

    top_k: Count = 128
    """How many of its most likely tokens the engine reports at each place, with their log-probabilities. The rest of its
    distribution is taken to be the policy's, scaled."""
    only_measured: Flag = False
    """Log `mismatch/sampler_bias`, and leave the loss as it is."""


@_section("mismatch.correction")
class CorrectionConfig:
    """Importance weights and rejection for the gap between rollout and trainer policy.

    A key that you leave out has its preset's value. `null` switches a key off, except `mode`, `loss` and `bound`:
    `{preset: slime_mis, veto: null}` drops no sequence. With `level: none` the bounds of a preset's weight are off too.
    """

    preset: Text | None = None
    """A preset by verl's, TRL's or a paper's name (`mismatch_ext.PRESETS`). The other keys override it."""
    mode: Annotated[Literal["decoupled", "bypass"], _INHERITED] = FROM_PRESET
    """`decoupled` weighs by pi_old/mu in addition to the trainer's own ratio; `bypass` takes mu as the old policy."""
    loss: Annotated[Literal["ppo_clip", "reinforce", "dppo_tv", "dppo_kl"], _INHERITED] = FROM_PRESET
    """Policy loss of `bypass`: the trainer's clipped ratio pi/mu without weights, or A log pi with weights pi/mu, which
    `dppo_tv` and `dppo_kl` stop outside of a trust region (arXiv 2602.04879)."""
    level: Annotated[Literal["none", "token", "sequence", "geometric"] | None, _INHERITED] = FROM_PRESET
    """Level of the importance weight: per token, product over the sequence, or its geometric mean."""
    bound: Annotated[Literal["truncate", "mask", "clip", "icepop"], _INHERITED] = FROM_PRESET
    """What happens beyond the bounds: `truncate` min(w, upper), `clip` to [lower, upper], `mask`/`icepop` weight 0."""
    upper: Annotated[Positive | None, _INHERITED] = FROM_PRESET
    """Upper bound of the weight."""
    lower: Annotated[Positive | None, _INHERITED] = FROM_PRESET
    """Lower bound of the weight."""
    confidence: Annotated[tuple[Positive, Annotated[Number, Field(ge=0, le=1)]] | None, _PAIR, _INHERITED] = FROM_PRESET
    """Upper bound that follows the policy, `[slope, floor]`: a token's weight is at most 1 + slope max(1 - pi, floor)
    (CIS, arXiv 2609.32444). It takes the place of `upper`."""
    normalize: Annotated[Flag | None, _INHERITED] = FROM_PRESET
    """Divide the weights by their mean over the batch."""
    divergence: Annotated[
        float | tuple[float, float] | None,
        PlainValidator(_regions),
        _INHERITED,
    ] = FROM_PRESET
    """Trust region of `dppo_tv` and `dppo_kl`: the largest total variation or KL of a token, taken as sampled or not. A pair
    is for negative and for positive advantages."""
    reject: Annotated[
        dict[Text, Annotated[float | tuple[float, float], PlainValidator(_bounds)]] | None, _INHERITED
    ] = field(default=FROM_PRESET, hash=False)
    """Rejection rules, all of which must hold, such as `{token_k1: [0.5, 2], seq_mean_k3: 0.01}`:
    `{token,seq_sum,seq_mean}_{k1,k2,k3}`, `seq_max_{k2,k3}`. k1 bounds the ratio (x is 1/x to x), k2 and k3 have an upper
    bound in nats."""
    veto: Annotated[Positive | None, _INHERITED] = FROM_PRESET
    """Drop a sequence that has any token with ratio below this."""
    off_policy_threshold: Annotated[Number | None, _INHERITED] = FROM_PRESET
    """DeepSeek-V3.2: drop a sequence of negative advantage whose mean log(mu/pi) exceeds this."""
    centering: Annotated[CenteringConfig | None, _INHERITED] = FROM_PRESET
    """Score centering, alone or with token weights that are truncated or masked, such as those of `tis` and `icepop`."""

    def __post_init__(self) -> None:
        resolve(self)


def _no_reward(key: str, value: str, why: str) -> ConfigError:
    return ConfigError(
        f"mismatch.kl.reward_path='rewards' with {key}={value!r}: {why}; leave out reward_path, or set another {key}."
    )


@_section("mismatch.kl")
class KlConfig:
    """KL term towards the reference policy, with the gradient that it claims (arXiv 2512.21852).

    To keep the trainer's own KL term, leave the section out. In TRL, `ratio` replaces `use_bias_correction_kl`.
    """

    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """Estimator of the log-ratio d = log pi - log pi_ref; `full` is exact over the vocabulary and needs logits (`Run` only)."""
    placement: Literal["loss", "reward", "both"] | None = None
    """Path-wise part (`loss`), score-function part (`reward`), or `both`; None takes `reward` for k1, `loss` for k2
    (unbiased for target `token` only) and `both` for the others (abs is biased everywhere)."""
    target: Literal["token", "sequence"] = "sequence"
    """`sequence` credits later KL to earlier tokens; `token` treats each token on its own, given its prefix."""
    ratio: Literal["none", "token", "sequence"] = "none"
    """Importance ratio pi/mu on the KL term, for samples of a rollout policy mu that differs from pi."""
    coef: Positive | None = None
    """Coefficient beta, the same on both parts; None takes the trainer's own (`beta` in TRL)."""
    reward_path: Literal["surrogate", "rewards"] = "surrogate"
    """Score-function part as a `surrogate` loss term, which group normalization cannot rescale, or inside the `rewards`."""
    baseline: Literal["none", "leave_one_out"] = "leave_one_out"
    """Baseline of the surrogate's score-function part: the mean over other samples of the prompt keeps its expectation."""
    target_kl: Positive | None = None
    """Target KL from the reference, in nats per token. The coefficient starts at `coef` and follows it; None keeps it
    constant."""

    def __post_init__(self) -> None:
        placement = self.applied_placement
        if self.in_rewards:
            if placement == "loss":
                raise _no_reward("placement", placement, "nothing of it is a reward")
            if self.target == "token":
                raise _no_reward("target", self.target, "a reward is credited to all earlier tokens as well")
            if self.ratio != "none":
                raise _no_reward("ratio", self.ratio, "a reward is weighed with the policy term that it is part of")
            if self.estimator == "full":
                raise _no_reward("estimator", self.estimator, "the vocabulary is not kept from sampling time")
        if (self.estimator, placement, self.target) == ("full", "reward", "token"):
            raise ConfigError(
                "mismatch.kl.estimator='full' with placement='reward' and target='token': this term has no gradient, because a "
                "token's exact KL has no score-function part; set placement to 'loss', or target to 'sequence'."
            )

    @property
    def applied_placement(self) -> Literal["loss", "reward", "both"]:
        """The placement that is used: `placement`, or where that is None the estimator's own."""
        if self.placement is not None:
            return self.placement
        if self.estimator == "k1":
            return "reward"
        return "loss" if self.estimator == "k2" else "both"

    @property
    def in_rewards(self) -> bool:
        """Whether a part of the KL enters the host's rewards, before they become advantages."""
        return self.reward_path == "rewards"

    @property
    def in_loss(self) -> bool:
        """Whether a part of the KL is a term of this package in the host's loss."""
        return not (self.applied_placement == "reward" and self.in_rewards)

    @property
    def has_baseline(self) -> bool:
        """Whether the term in the loss subtracts the KL of the prompt's other samples from each token's KL."""
        return self.baseline != "none" and self.applied_placement != "loss" and not self.in_rewards


ESTIMATORS = tuple(name for name in typing.get_args(typing.get_type_hints(KlConfig)["estimator"]) if name != "full")
"""Estimators from the log-probabilities of the sampled tokens alone: the values of `KlConfig.estimator` but `full`."""


@_section("mismatch.routing")
class RoutingConfig:
    """Replay of the experts that a mixture-of-experts model chose before (R3, arXiv 2510.11370; R2, arXiv 2512.01374)."""

    mode: Literal["R2", "R3"]
    """`R3` replays the choice of the engine that sampled the tokens, `R2` that of the trainer's old-logprob pass."""
    reference: Flag = False
    """Replay in the reference model too."""
    measured: Annotated[Number, Field(ge=0, le=1)] = 0.05
    """Share of replayed forward passes in which the model's own choice is recorded too. Under R3, the same share of
    batches is also scored without replay."""


@_section("mismatch.sampling_mask")
class SamplingMaskConfig:
    """Log-probabilities over the tokens that top_p, top_k and min_p left to sample from (DeepSeek-V3.2, arXiv 2512.02556).

    The reference is scored over the same tokens, so the KL of equal models is 0.
    """

    max_support: Annotated[int, Strict(), Field(ge=2)] | None = None
    """How many of the most likely tokens the engine reports per position. If truncation left more, the run ends with
    an error. None is `2 * top_k + 8`."""

    def asked(self, sampling: SamplingSettings) -> int:
        """Return how many of the most likely tokens the engine is asked for; raises ConfigError if nothing bounds them."""
        cut = f"top_p={sampling.top_p:g}, top_k={sampling.top_k} and min_p={sampling.min_p:g}"
        if not sampling.truncates_support:
            raise ConfigError(f"mismatch.sampling_mask with {cut}: nothing is cut off; remove mismatch.sampling_mask.")
        if self.max_support is None and sampling.top_k <= 0:
            raise ConfigError(
                f"mismatch.sampling_mask.max_support is absent with {cut}: nothing bounds how many tokens are left; set "
                "max_support to the most that you expect, or top_k."
            )
        return self.max_support or 2 * sampling.top_k + 8


@_section("mismatch.lr")
class LrConfig:
    """Lowers the learning rate when responses grow (arXiv 2602.01826): your schedule times max(decay^floor(t/period),
    floor).

    t counts from the end of warm-up.
    """

    period: Count | None = None
    """Steps per decay; None finds it: 1.8 times the step of the surge, as in the paper."""
    decay: Annotated[Positive, Field(lt=1)] = 0.5
    """Factor on the learning rate, per period."""
    floor: Annotated[Positive, Field(le=1)] = 0.1
    """Smallest multiplier."""
    trigger: Trigger = "response_length"
    """Statistic whose surge starts the decay."""
    surge_ratio: Annotated[Number, Field(gt=1)] = 2.0
    """A surge is at least this multiple of the baseline, more if the statistic is noisy."""
    baseline_window: Count = 50
    """Number of first rollout batches whose median is the baseline. No surge is found before they are complete, nor
    one in their first half."""
    warmup_steps: Annotated[int, Strict(), Field(ge=0)] | None = None
    """Steps of warm-up; None takes the trainer's own, 0 in your own loop."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            surges = setting.name in ("trigger", "surge_ratio", "baseline_window")
            if surges and not self.watches and value != setting.default:
                raise ConfigError(
                    f"mismatch.lr.{setting.name}: {value!r} has no effect with period={self.period}, which needs no surge; leave "
                    "out one of the two."
                )

    @property
    def watches(self) -> bool:
        """Whether the rule waits for a surge and therefore needs the trigger's statistic from every batch."""
        return self.period is None


@_section("mismatch.monitor.alarms")
class AlarmConfig:
    """Bounds of a logged metric, and what happens outside them.

    A value that is not finite is out of bounds under any rule. If you name the metric of a built-in alarm
    (docs/metrics.md), only the keys that you give change: `{"k3_kl": {"action": "stop"}}` keeps its threshold. Any
    other metric needs `above` or `below`.
    """

    above: Number | None = None
    """Values greater than this are out of bounds."""
    below: Number | None = None
    """Values less than this are out of bounds."""
    patience: Count | None = None
    """Logs in a row out of bounds that raise the alarm; None is the built-in alarm's, else 3. Logs without the metric
    do not count."""
    action: AlarmAction | None = None
    """`stop` saves a checkpoint and ends training after the step; `off` switches a built-in alarm off; None is `warn`."""


@_section("mismatch.monitor")
class MonitorConfig:
    """Measures and checks while training, and changes no number of the trainer's.

    On a CPU, any config makes TRL's engine run uncompiled and reload its weights layer by layer. Stock TRL's weight
    update crashes or corrupts experts there.
    """

    run_dir: Text | None = None
    """Folder of `metrics-*.jsonl`; None is `<output_dir>/mismatch`. A leading `~` is your home folder."""
    metrics: Literal["short", "all"] = "short"
    """Metrics that the console and the loggers get: the short list of docs/metrics.md, with those that `alarms` names,
    or all."""
    weight_sync: Action | None = None
    """What to do if the engine computes with stale or corrupted weights after an update. None ends a run whose config
    acts, and warns in others. `error` by itself makes a config act. With `warn` no such update ends the run."""
    alarms: dict[Text, AlarmConfig] = field(default_factory=dict, hash=False)
    """Alarms by the name of the logged metric, with or without the prefix `mismatch/`. They change or extend the
    built-in ones. Evaluation metrics are not watched."""
    default_alarms: Flag = True
    """Whether built-in alarms that `alarms` does not name are on."""
    evidence: Flag = True
    """Whether an alarm, a failed weight check or a bad row keeps rows of the batch in the run folder, for the doctor: at
    most three files a run, with whole prompts and responses."""
    max_bad_rows: Annotated[Number, Field(ge=0, le=1)] | None = None
    """Share of bad rows in the last 20 steps above which the run ends after the step, with a checkpoint. Fewer than three
    rows end it only if this is 0. None is 0.01 in a config that acts, and 1, which allows any number, in others. A share
    below 1 by itself makes a config act."""

    def __post_init__(self) -> None:
        if self.run_dir is not None and not self.run_dir.strip():
            raise ConfigError(
                f"mismatch.monitor.run_dir: {self.run_dir!r} is not allowed; allowed: the path of a folder. Leave it out for the "
                "default."
            )
        if self.alarms:
            from mismatch_ext.alarms import rules_of

            rules_of(self)  # raises ConfigError for an alarm without a bound

    @property
    def share_of_bad_rows(self) -> float:
        """Share of bad rows above which a run ends if its config acts."""
        return MAX_BAD_ROWS if self.max_bad_rows is None else self.max_bad_rows


@_section("mismatch")
class MismatchConfig:
    """The `mismatch` config: one section for each feature.

    A section that you leave out changes no number of TRL's or verl's, bit for bit. Unknown keys, wrong types, values
    out of range and contradictions raise ConfigError. `MismatchConfig.parse` reads text, files and mappings.
    """

    precision: PrecisionConfig | None = None
    """One precision on both sides."""
    correction: CorrectionConfig | None = None
    """Importance weights; if absent, the trainer's own correction stays."""
    kl: KlConfig | None = None
    """KL term; if absent, the trainer's own stays."""
    routing: RoutingConfig | None = None
    """Replay of expert choices."""
    sampling_mask: SamplingMaskConfig | None = None
    """Replay of sampling masks."""
    lr: LrConfig | None = None
    """Learning-rate control."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Measurement, in every config."""

    @property
    def monitor_of_updates(self) -> MonitorConfig:
        """The `monitor` section as the check of weight updates takes it.

        Without an acting section `weight_sync: warn` is the default, by which a failed check is also counted.
        """
        if self.monitor.weight_sync == "warn" and not self.acts:
            return replace(self.monitor, weight_sync=None)
        return self.monitor

    @property
    def features(self) -> tuple[str, ...]:
        """The features that the block switches on, such as ("monitor", "monitor.weight_sync", "routing.R3")."""
        features = ["monitor"]
        if self.monitor.weight_sync != "off":
            features.append("monitor.weight_sync")
        sections = ("precision", "lr", "kl", "correction", "sampling_mask")
        features += [name for name in sections if getattr(self, name) is not None]
        if self.routing is not None:
            features.append(f"routing.{self.routing.mode}")
        return tuple(features)

    @property
    def acts(self) -> bool:
        """Whether the config changes training or may end it; one that does neither measures and warns.

        It acts with any section but `monitor`, with an alarm whose action is `stop`, with `monitor.weight_sync: error`, and
        with a `monitor.max_bad_rows` below 1.
        """
        sections = (self.precision, self.correction, self.kl, self.routing, self.sampling_mask, self.lr)
        changes_training = any(section is not None for section in sections)
        stops = any(alarm.action == "stop" for alarm in self.monitor.alarms.values())
        counts = self.monitor.share_of_bad_rows < 1 and self.monitor.max_bad_rows is not None
        return changes_training or stops or counts or self.monitor.weight_sync == "error"

    def only_measuring(self) -> MismatchConfig:
        """Return the config that measures as this one does, and neither changes training nor ends it."""
        monitor = self.monitor
        alarms = {
            metric: replace(alarm, action="warn") if alarm.action == "stop" else alarm
            for metric, alarm in monitor.alarms.items()
        }
        weight_sync = None if monitor.weight_sync == "error" else monitor.weight_sync
        return MismatchConfig(monitor=replace(monitor, alarms=alarms, weight_sync=weight_sync, max_bad_rows=None))

    @classmethod
    def parse(cls, value: Any, source: str = "the mismatch block") -> MismatchConfig | None:
        """Read the block from any of its forms.

        Args:
            value: None (no block: stock behavior), a mapping, a JSON or YAML string, the path of a `.json`, `.yaml` or `.yml`
                file (with or without a top-level `mismatch:` key), or a `MismatchConfig`.
            source: Name of a text in messages.

        Returns:
            The frozen configuration, or None when no block was given.

        Raises:
            ConfigError: Unknown key, key given twice, wrong type, value out of range, contradiction, unreadable text or file.
                A section with nothing after it (null, None) is refused, because some mean "on" by it and others "off".
        """
        if value is None or isinstance(value, cls):
            return value
        value = _plain(_read(value, source) if isinstance(value, (str, Path)) else value)
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: expected a mapping of sections, found {type(value).__name__} {shown(value)}.")
        for key in _keys("mismatch"):
            if value.get(key, {}) is None:
                raise _nothing_given(f"mismatch.{key}")
        if unnamed := [key for key in value if not isinstance(key, str)]:
            known = ", ".join(_known_keys("mismatch"))
            raise ConfigError(f"{source}: unknown key {shown(unnamed[0])}; known keys: {known}.")
        level = value.pop("level", "enforce")
        if level not in LEVELS:
            raise ConfigError(
                f"mismatch.level: {shown(level)} is not allowed; allowed: {' or '.join(map(repr, LEVELS))}."
                f"{suggestion(level, LEVELS)}"
            )
        config = cls(**value)
        return config if level == "enforce" else config.only_measuring()

    def to_dict(self) -> dict[str, Any]:
        """Return the block as plain JSON-able data, without absent sections.

        Keys of `correction` that take their preset's value are absent, because None stands for off.
        """
        data = _plain(asdict(self))
        if data["correction"] is not None:
            data["correction"] = {key: value for key, value in data["correction"].items() if value is not FROM_PRESET}
        return {key: value for key, value in data.items() if value is not None}


def section_of(kind: type[Section], given: Section | Mapping[str, Any] | str, argument: str, key: str) -> Section:
    """Return a section that a function of its own got as an argument, whose errors then speak of that argument.

    Args:
        kind: The section's class.
        given: A section, a mapping of its keys, or the value of its one `key`, such as a preset's name.
        argument: The argument's name.
        key: The key that a text is the value of.

    Raises:
        ConfigError: A key is unknown, or its value is not allowed.
    """
    if isinstance(given, kind):
        return given
    keys = {key: given} if isinstance(given, str) else given
    path = next(path for path, section in _SECTIONS.items() if section is kind)
    if not isinstance(keys, Mapping):
        raise ConfigError(
            f"{argument}: {shown(given)} is not allowed; allowed: a {kind.__name__}, a mapping of its keys, or its {key} as text."
        )
    with speaking_of(argument, path):
        return kind(**keys)


@contextmanager
def speaking_of(argument: str, path: str) -> Iterator[None]:
    """Let errors about a section at `path` speak of the argument that somebody wrote in its place."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace(path, argument)) from None


# Reading, and refusals: what was found, what is allowed.

GONE = {
    "mismatch.level": "this is no setting of a run. Remove it, or give the whole mapping to MismatchConfig.parse.",
    "mismatch.monitor.doctor": "this key is gone, and no run examines its own batches. Remove it: after an alarm the run keeps "
    "rows (mismatch.monitor.evidence) and prints the `mismatch-ext doctor` command that examines them.",
}
"""What to do instead of a key that earlier versions had."""


def _section_at(path: str) -> Any:
    """Return the class of a section, or of one alarm, whose name may have dots."""
    while path not in _SECTIONS:
        path = path.rpartition(".")[0]
    return _SECTIONS[path]


def _keys(path: str) -> list[str]:
    return [key.name for key in fields(_section_at(path))]


def _listed(hint: Any) -> list[Any]:
    """Return the values that a type lists, itself or in a part of it."""
    parts = typing.get_args(hint)
    return [*parts] if typing.get_origin(hint) is Literal else [value for part in parts for value in _listed(part)]


def _known_keys(path: str) -> list[str]:
    """Return what may be written in a section: its fields, and at the top the level, which is no setting of a run."""
    return ["level", *_keys(path)] if path == "mismatch" else _keys(path)


def _nothing_given(path: str) -> ConfigError:
    return ConfigError(
        f"{path}: nothing is given, which could mean on or off; allowed: a mapping. Write `{path.rpartition('.')[2]}: {{}}` for "
        "the defaults, or leave the key out to switch it off."
    )


def _refusal(error: ValidationError, path: str) -> ConfigError:
    """Return the first of pydantic's errors in our form; an unknown key goes first, because it may explain a missing one."""
    wrong = min(error.errors(), key=lambda entry: entry["type"] != "unexpected_keyword_argument")
    kind, value, key = wrong["type"], wrong["input"], ".".join(map(str, (path, *wrong["loc"])))
    section, _, name = key.rpartition(".")
    allowed = wrong["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    hint = ""
    if kind == "value_error" and isinstance(wrong["ctx"]["error"], ConfigError):
        return wrong["ctx"]["error"]
    if key in GONE:
        return ConfigError(f"{key}: {GONE[key]}")
    if kind == "unexpected_keyword_argument":
        known = _known_keys(section)
        return ConfigError(
            f"{section}: unknown key {name!r} (value {shown(value)}); known keys: {', '.join(known)}."
            f"{suggestion(name, known)}"
        )
    if kind == "missing":
        choices = _listed(typing.get_type_hints(_section_at(section))[name])
        return ConfigError(f"{section}: missing key {name!r}; allowed: {' or '.join(map(repr, choices))}.")
    if kind in ("dataclass_type", "dict_type"):
        if value is None:
            return _nothing_given(key)
        allowed = "a mapping of its keys, or {} for its defaults. Left out, it is off"
    elif kind == "literal_error":
        hint = suggestion(value, _listed(typing.get_type_hints(_section_at(section))[name]), MEANT)
    elif kind == "float_type" and re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", str(value)):
        hint = " YAML reads 1e-3 as text; write 1.0e-3."
    return ConfigError(f"{key}: {shown(value)} is not allowed; allowed: {allowed}.{hint}")


def _plain(value: Any) -> Any:
    """Return mappings and lists of any kind, such as OmegaConf's, as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return [_plain(entry) for entry in value] if listed else value


def _read(text: str | Path, source: str) -> Any:
    """Return the data of a JSON or YAML text, or of the file at a path."""
    if str(text).strip().lower().endswith((".json", ".yaml", ".yml")):
        path = Path(str(text).strip())
        source = f"mismatch file {path}"
        try:
            text = path.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: there is no such user
            raise ConfigError(f"{source} cannot be read: {error}. Give the path of a JSON or YAML file.") from error
    data = _parsed(str(text), source)
    if isinstance(data, dict) and set(data) == {"mismatch"}:
        data = data["mismatch"]
        if data is None:
            raise _nothing_given("mismatch")
    return {} if data is None else data


def _parsed(text: str, source: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in pairs:
            if key in data:
                raise _twice(source, key, data[key], value)
            data[key] = value
        return data

    try:
        return json.loads(text, object_pairs_hook=unique)
    except ConfigError:
        raise
    except ValueError as error:  # also for numbers of more than 4300 digits
        json_error = error
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{source} is not valid JSON ({json_error}); to read YAML, `pip install pyyaml`."
        ) from json_error

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader, but a key given twice is refused; a merged-in key may be overridden."""

        def flatten_mapping(self, node: Any) -> None:
            values: dict[Any, Any] = {}
            for key_node, value_node in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge" or not isinstance(key_node, yaml.ScalarNode):
                    continue
                key = self.construct_object(key_node)
                if key in values:
                    first, second = (self.construct_object(part, deep=True) for part in (values[key], value_node))
                    raise _twice(f"{source}, line {key_node.start_mark.line + 1}", key, first, second)
                values[key] = value_node
            super().flatten_mapping(node)

    try:
        return yaml.load(text, Loader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise ConfigError(f"{source} is neither valid JSON nor valid YAML: {error}") from error


def _twice(source: str, key: Any, first: Any, second: Any) -> ConfigError:
    return ConfigError(
        f"{source}: key {key!r} is given twice, as {shown(first)} and as {shown(second)}; leave out one of the two."
    )
