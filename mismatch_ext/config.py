"""The `mismatch:` block: one strict, frozen configuration for every host trainer.

A section that is absent is off, and the host then behaves as stock. The same block is read from a dict, a JSON or
YAML string, the path of a JSON or YAML file, or a ready dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mismatch_ext.errors import ConfigError
from mismatch_ext.strict import build, load_mapping
from mismatch_ext.strict import require as _require

Action = Literal["error", "warn", "off"]


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scaling, used when `precision.dtype` is float16 (defaults of arXiv 2510.26788's code)."""

    init_scale: float = 2.0**16
    """First loss scale; a power of two keeps scaling exact."""
    growth_factor: float = 2.0
    """Factor after `growth_interval` steps without overflow."""
    backoff_factor: float = 0.5
    """Factor after a step whose gradients overflowed."""
    growth_interval: int = 400
    """Steps without overflow before the scale grows."""
    min_scale: float = 1.0
    """The run stops with an error when the scale would fall below this."""
    max_overflow_streak: int = 20
    """The run stops with an error after this many overflowing steps in a row."""

    def __post_init__(self) -> None:
        section = "mismatch.precision.loss_scale"
        _require(self.init_scale >= 1, f"{section}.init_scale", self.init_scale, "a number >= 1")
        _require(self.growth_factor > 1, f"{section}.growth_factor", self.growth_factor, "a number > 1")
        _require(0 < self.backoff_factor < 1, f"{section}.backoff_factor", self.backoff_factor, "0 < x < 1")
        _require(self.growth_interval >= 1, f"{section}.growth_interval", self.growth_interval, "an integer >= 1")
        _require(
            0 < self.min_scale <= self.init_scale,
            f"{section}.min_scale",
            self.min_scale,
            f"0 < x <= init_scale ({self.init_scale:g})",
        )
        _require(
            self.max_overflow_streak >= 1,
            f"{section}.max_overflow_streak",
            self.max_overflow_streak,
            "an integer >= 1",
        )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """One compute dtype for trainer, weight sync and rollout engine (uniform FP16, arXiv 2510.26788)."""

    dtype: Literal["float16", "bfloat16", "float32"]
    """Compute dtype of both sides. Master weights of the trainer stay float32."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """Loss scaler settings; only read when `dtype` is float16."""
    readiness: Action = "error"
    """What to do when the checkpoint's weights do not fit the dtype."""


@dataclass(frozen=True, kw_only=True)
class KlControllerConfig:
    """Adapts the KL coefficient towards a target: a PI controller with anti-windup, in the logarithm of the coefficient."""

    target_kl: float
    """Wanted KL divergence from the reference policy, nats per token."""
    proportional: float = 0.1
    """Gain of the relative error (KL / target - 1, clipped to +-`max_error`)."""
    integral: float = 0.05
    """Gain of the accumulated relative error."""
    max_error: float = 0.2
    """Relative errors are clipped to this, as in Ziegler et al. 2019."""
    min_coef: float = 1e-6
    """Least coefficient; the integral stops growing while the coefficient stands at a bound."""
    max_coef: float = 10.0
    """Largest coefficient."""

    def __post_init__(self) -> None:
        section = "mismatch.kl.controller"
        for name in ("target_kl", "max_error", "min_coef"):
            _require(getattr(self, name) > 0, f"{section}.{name}", getattr(self, name), "a number > 0")
        for name in ("proportional", "integral"):
            _require(getattr(self, name) >= 0, f"{section}.{name}", getattr(self, name), "a number >= 0")
        _require(
            self.max_coef >= self.min_coef, f"{section}.max_coef", self.max_coef, f"x >= min_coef ({self.min_coef:g})"
        )


@dataclass(frozen=True, kw_only=True)
class KlConfig:
    """KL regularisation towards the reference policy, with the gradient that it claims (arXiv 2512.21852)."""

    preset: Literal["trl"] | None = None
    """`trl` leaves the KL term to TRL, unchanged: k3 in the loss, weighed as its `use_bias_correction_kl` says; the other
    keys then stay unset. Without the preset `use_bias_correction_kl` has no effect: `ratio` takes its place."""
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """Estimator of the log-ratio d = log pi - log pi_ref; `full` is exact over the vocabulary and needs logits."""
    placement: Literal["loss", "reward", "both"] | None = None
    """Path-wise part (`loss`), score-function part (`reward`), or `both`; None takes `reward` for k1, `loss` for k2
    (unbiased for target `token` only) and `both` for the others (abs is biased everywhere)."""
    target: Literal["token", "sequence"] = "sequence"
    """`sequence` credits later KL to earlier tokens; `token` regularises each token given its prefix."""
    ratio: Literal["none", "token", "sequence"] = "none"
    """Importance ratio pi/mu on the KL term, for samples of a rollout policy mu that differs from pi."""
    coef: float | None = None
    """Coefficient beta, the same on both parts; None takes the host's own (`beta` in TRL)."""
    reward_path: Literal["surrogate", "rewards"] = "surrogate"
    """Score-function part as a `surrogate` loss term, which group normalisation cannot rescale, or inside the `rewards`."""
    baseline: Literal["none", "leave_one_out"] = "leave_one_out"
    """Baseline of the surrogate's score-function part: the mean over other samples of the prompt keeps its expectation."""
    controller: KlControllerConfig | None = None
    """Adaptive coefficient, starting at `coef`; absent keeps it constant."""

    def __post_init__(self) -> None:
        if self.coef is not None:
            _require(
                self.coef > 0, "mismatch.kl.coef", self.coef, "a number > 0, or leave it out to take the host's own"
            )
        self._check_preset()
        if self.placement is None and self.preset is None:
            object.__setattr__(self, "placement", {"k1": "reward", "k2": "loss"}.get(self.estimator, "both"))
        if self.reward_path == "rewards" and self.placement == "loss":
            raise ConfigError(
                f"mismatch.kl.reward_path='rewards' with placement='loss' (estimator={self.estimator!r}): nothing of it "
                "is a reward; leave out reward_path, or set placement to 'reward' or 'both'."
            )
        if self.target == "token" and self.reward_path == "rewards" and self.placement != "loss":
            raise ConfigError(
                "mismatch.kl.reward_path='rewards' with target='token': a reward is credited to all earlier tokens as "
                "well; use reward_path='surrogate', or target='sequence'."
            )

    def _check_preset(self) -> None:
        if self.preset is not None:
            for f in dataclasses.fields(self):
                if f.name not in ("preset", "coef") and getattr(self, f.name) != f.default:
                    raise ConfigError(
                        f"mismatch.kl.{f.name}: {getattr(self, f.name)!r} together with preset={self.preset!r}, which "
                        "leaves the KL term to the host; leave out one of the two."
                    )


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Importance weights and rejection for the gap between rollout and trainer policy."""

    preset: str | None = None
    """A named preset of `mismatch_ext.correction.presets` (verl's and TRL's names); the other keys override it."""
    mode: Literal["decoupled", "bypass"] | None = None
    """`decoupled` weighs by pi_old/mu beside the host's own ratio; `bypass` takes mu as the old policy."""
    loss: Literal["ppo_clip", "reinforce"] | None = None
    """Policy loss of `bypass`: the host's clipped ratio pi/mu without weights, or A log pi with weights pi/mu."""
    level: Literal["none", "token", "sequence", "geometric"] | None = None
    """Level of the importance weight: per token, product over the sequence, or its geometric mean."""
    bound: Literal["truncate", "mask", "clip", "icepop"] | None = None
    """What happens beyond the bounds: `truncate` min(w, upper), `clip` to [lower, upper], `mask`/`icepop` weight 0."""
    upper: float | None = None
    """Upper bound of the weight."""
    lower: float | None = None
    """Lower bound of the weight."""
    normalize: bool | None = None
    """Divide the weights by their mean over the batch."""
    reject: str | None = None
    """Rejection rules, comma-separated, all must hold: `{token,seq_sum,seq_mean}_{k1,k2,k3}`, `seq_max_{k2,k3}`."""
    reject_threshold: str | float | None = None
    """One threshold per rule, comma-separated: `lo_hi` or a number for k1 (ratio bounds), an upper bound for k2 and k3.
    Quote it: YAML reads a bare 0.5_2 as 0.52."""
    veto: float | None = None
    """Drop a sequence that has any token with ratio below this."""
    off_policy_threshold: float | None = None
    """DeepSeek-V3.2: drop a sequence of negative advantage whose mean log(mu/pi) exceeds this."""
    compat: str | None = None
    """Quirks of hosts that are wanted, comma-separated: `verl_inverse_k1`, `verl_empty_rows`, `unscored_is_one`."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """Replay of the experts that a mixture-of-experts model chose before (R3, arXiv 2510.11370; R2, arXiv 2512.01374)."""

    mode: Literal["R2", "R3"]
    """`R3` replays the choice of whoever sampled the tokens, `R2` the trainer's own of its old-logprob pass."""
    reference: bool = False
    """Replay in the reference model too."""
    agreement_rate: float = 0.05
    """Share of replayed forward passes in which the model's own choice is measured as well, at the cost of a top-k per layer."""
    native_gap_rate: float = 0.0
    """Share of rollout batches that are scored once more without replay: the gap there is what replay closes."""

    def __post_init__(self) -> None:
        for name in ("agreement_rate", "native_gap_rate"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"mismatch.routing.{name}", value, "0 <= x <= 1")
        if self.mode == "R2" and self.native_gap_rate:
            raise ConfigError(
                f"mismatch.routing.native_gap_rate={self.native_gap_rate} with mode='R2': the pass that is measured there is "
                "the one that R2 records, and is native already; leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """What is measured and checked while training; the host's own numbers stay as they are.

    On a CPU any block makes TRL's engine run uncompiled and update its weights by vLLM's layer-wise reload: compiled it
    starts far slower, and TRL's own update fails there, or garbles the experts.
    """

    run_dir: str | None = None
    """Folder of `metrics.jsonl`; default is `<output_dir>/mismatch`."""
    weight_sync: Action = "error"
    """What to do when the engine holds stale or garbled weights after a weight update."""
    weight_sync_probes: int = 8
    """Number of probe sequences that both sides score after each weight update."""
    weight_sync_probe_length: int = 32
    """Tokens per probe sequence."""
    profile_every: int = 5
    """Logs of the trainer between two records of the per-position and per-probability profiles."""
    scatter_samples: int = 500
    """Tokens kept per profile record for the rollout-vs-trainer scatter; 0 keeps none."""

    def __post_init__(self) -> None:
        for name, least in (
            ("weight_sync_probes", 1),
            ("weight_sync_probe_length", 2),
            ("profile_every", 1),
            ("scatter_samples", 0),
        ):
            value = getattr(self, name)
            _require(value >= least, f"mismatch.monitor.{name}", value, f"an integer >= {least}")


@dataclass(frozen=True, kw_only=True)
class MismatchConfig:
    """The whole `mismatch:` block."""

    precision: PrecisionConfig | None = None
    """Uniform precision on both sides; absent leaves the host's dtypes alone."""
    correction: CorrectionConfig | None = None
    """Importance weights; absent leaves the host's own correction alone."""
    kl: KlConfig | None = None
    """KL regularisation; absent leaves the host's own KL term alone."""
    routing: RoutingConfig | None = None
    """Expert routing replay; absent lets every forward pass route for itself."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Measurement; on with its defaults whenever a block is given, even an empty one."""

    @classmethod
    def parse(cls, value: MismatchConfig | Mapping[str, Any] | str | Path | None) -> MismatchConfig | None:
        """Read the block from any form that users have it in.

        Args:
            value: None (no block: stock behaviour), a mapping, a JSON or YAML string, the path of a `.json`, `.yaml`
                or `.yml` file (with or without a top-level `mismatch:` key), or a `MismatchConfig`.

        Returns:
            The frozen configuration, or None when no block was given.

        Raises:
            ConfigError: Unknown key, wrong type, value out of range, unreadable text or file. The message names the
                key, the value, what is allowed, and the nearest known key.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, (str, Path)):
            value = load_mapping(value)
        return build(cls, value, "mismatch")

    def to_dict(self) -> dict[str, Any]:
        """Return the block as plain JSON-able data, absent sections left out."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
