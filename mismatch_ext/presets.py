"""The settings of an importance correction: level, bounds, rejection rules, and the presets of verl, TRL and slime (no torch)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mismatch_ext.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from mismatch_ext.config import CorrectionConfig

Level = Literal["none", "token", "sequence", "geometric"]
Bound = Literal["truncate", "mask", "clip", "icepop"]

RULES = (
    *(f"token_{k}" for k in ("k1", "k2", "k3")),
    *(f"seq_{how}_{k}" for how in ("sum", "mean") for k in ("k1", "k2", "k3")),
    "seq_max_k2",
    "seq_max_k3",
)
COMPAT = {
    "verl_inverse_k1": "k1 rules compare 1/rho with the bounds, so that they keep 1/upper <= rho <= 1/lower",
    "verl_empty_rows": "rows without tokens count in means over sequences, as sequences of ratio 1 and perplexity 1",
}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rejection rule.

    Args:
        name: One of `RULES`. It names what is judged (a token, or the sum, mean or maximum over a sequence) and the statistic:
            k1 = -log rho, k2 = (log rho)^2 / 2 or k3 = rho - 1 - log rho, with rho = pi/mu.
        upper: For k1, the largest ratio that is kept; for k2 and k3, the largest divergence that is kept, in nats.
        lower: For k1, the smallest ratio that is kept.
    """

    name: str
    upper: float
    lower: float | None = None

    @property
    def estimator(self) -> str:
        """k1, k2 or k3."""
        return self.name[-2:]

    @property
    def over(self) -> str:
        """token, sum, mean or max."""
        return self.name.split("_")[-2]


@dataclass(frozen=True, kw_only=True)
class ResolvedCorrection:
    """A complete importance correction.

    Args:
        mode: `decoupled`: weights pi_old/mu beside the host's own ratio pi/pi_old. `bypass`: mu is used instead of pi_old.
        loss: Policy loss in `bypass` mode: `ppo_clip` clips pi/mu and takes no weights; `reinforce` weighs A log pi.
        level: The weight is per token, the product over the sequence, the geometric mean over the sequence, or none.
        bound: What happens to a weight beyond its bounds.
        upper: Upper bound of the weight, or None.
        lower: Lower bound of the weight, or None.
        normalize: Divide the weights by their mean: over tokens, or over sequences for the other levels.
        rules: Rejection rules; a token is kept if all keep it.
        veto: A sequence is dropped if the ratio of one of its tokens is below this.
        off_policy_threshold: A sequence of negative advantage whose mean log(mu/pi) exceeds this is dropped (DeepSeek-V3.2).
        compat: Quirks of hosts to reproduce; keys of `COMPAT`.
    """

    mode: Literal["decoupled", "bypass"] = "decoupled"
    loss: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    level: Level = "none"
    bound: Bound = "truncate"
    upper: float | None = None
    lower: float | None = None
    normalize: bool = False
    rules: tuple[Rule, ...] = ()
    veto: float | None = None
    off_policy_threshold: float | None = None
    compat: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        where = "mismatch.correction"
        if self.loss == "reinforce" and self.mode != "bypass":
            raise ConfigError(f"{where}.loss='reinforce' needs mode='bypass'.")
        if self.mode == "bypass" and self.loss == "ppo_clip" and (self.level != "none" or self.normalize):
            raise ConfigError(
                f"{where}: level={self.level!r} with mode='bypass' and loss='ppo_clip', whose clipped ratio pi/mu takes "
                "no weights; leave out the level, or set loss='reinforce' or mode='decoupled'."
            )
        if self.level != "none" and self.upper is None and self.lower is None:
            raise ConfigError(f"{where}: level={self.level!r} without bounds; set upper, lower or both.")
        if self.level != "none" and self.bound == "icepop" and (self.upper is None or self.lower is None):
            raise ConfigError(f"{where}: bound='icepop' is a band; set both lower and upper.")
        if self.level != "none" and self.bound == "truncate" and (self.upper is None or self.lower is not None):
            raise ConfigError(
                f"{where}: bound='truncate' is min(weight, upper) alone; for a lower bound take 'clip' or 'mask'."
            )
        if self.level == "none":
            useless = [name for name in ("upper", "lower") if getattr(self, name) is not None]
            useless += ["normalize"] if self.normalize else []
            if useless:
                raise ConfigError(f"{where}.{useless[0]} without a weight: set level to token, sequence or geometric.")
        threshold = self.off_policy_threshold
        if threshold is not None and not math.isfinite(threshold):
            raise ConfigError(f"{where}.off_policy_threshold: {threshold!r} is not allowed; allowed: a finite number.")
        for name in ("upper", "lower", "veto"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{where}.{name}: {value!r} is not allowed; allowed: a finite number > 0.")
        if self.upper is not None and self.lower is not None and self.lower > self.upper:
            raise ConfigError(f"{where}: lower={self.lower} exceeds upper={self.upper}.")
        if unknown := self.compat - set(COMPAT):
            raise ConfigError(f"{where}: unknown compatibility options {sorted(unknown)}; known: {', '.join(COMPAT)}.")


def parse_rules(reject: Mapping[str, float | tuple[float, float]]) -> tuple[Rule, ...]:
    """Read rejection rules with their thresholds (`mismatch.correction.reject`); raises ConfigError.

    For k1 a threshold is the bounds of the ratio, or a number x, which means 1/x to x, or x to 1/x; otherwise an upper bound
    in nats.
    """
    where = "mismatch.correction.reject"
    rules = []
    for name, bounds in reject.items():
        if name not in RULES:
            raise ConfigError(f"{where}: unknown rule {name!r}; known: {', '.join(RULES)}.{suggestion(name, RULES)}")
        if not name.endswith("k1"):
            if isinstance(bounds, tuple):
                raise ConfigError(f"{where}.{name}: {list(bounds)} is not allowed; allowed: a number > 0.")
            rules.append(Rule(name=name, upper=bounds))
            continue
        lower, upper = bounds if isinstance(bounds, tuple) else sorted((bounds, 1 / bounds))
        rules.append(Rule(name=name, lower=lower, upper=upper))
    return tuple(rules)


_GEO = parse_rules({"seq_mean_k1": (0.999, 1.001)})
_K3 = parse_rules({"seq_mean_k3": 0.01})
_TOKEN = ResolvedCorrection(level="token", upper=2.0)
_SEQUENCE = ResolvedCorrection(level="sequence", upper=2.0)
_ICEPOP = ResolvedCorrection(level="token", bound="icepop", lower=0.5, upper=5.0)
_NONE = ResolvedCorrection()
_CLIP = ResolvedCorrection(mode="bypass", loss="ppo_clip")
_PG: dict[str, object] = {"mode": "bypass", "loss": "reinforce"}

PRESETS: dict[str, ResolvedCorrection] = {
    # The names in verl 0.9.1's RolloutCorrectionConfig.
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": dataclasses.replace(_SEQUENCE, rules=parse_rules({"seq_sum_k1": (0.5, 2.0)})),
    "decoupled_geo_rs": dataclasses.replace(_NONE, rules=_GEO),
    "decoupled_geo_rs_seq_tis": dataclasses.replace(_SEQUENCE, rules=_GEO),
    "decoupled_geo_rs_token_tis": dataclasses.replace(_TOKEN, rules=_GEO),
    "decoupled_k3_rs": dataclasses.replace(_NONE, rules=_K3),
    "decoupled_k3_rs_seq_tis": dataclasses.replace(_SEQUENCE, rules=_K3),
    "decoupled_k3_rs_token_tis": dataclasses.replace(_TOKEN, rules=_K3),
    "bypass_ppo_clip": _CLIP,
    "bypass_ppo_clip_geo_rs": dataclasses.replace(_CLIP, rules=_GEO),
    "bypass_ppo_clip_k3_rs": dataclasses.replace(_CLIP, rules=_K3),
    "bypass_pg_is": dataclasses.replace(_SEQUENCE, **_PG),  # type: ignore[arg-type]
    "bypass_pg_token_icepop": dataclasses.replace(_ICEPOP, **_PG),  # type: ignore[arg-type]
    "bypass_pg_geo_rs": dataclasses.replace(_NONE, rules=_GEO, **_PG),  # type: ignore[arg-type]
    "bypass_pg_geo_rs_seq_tis": dataclasses.replace(_SEQUENCE, rules=_GEO, **_PG),  # type: ignore[arg-type]
    "bypass_pg_geo_rs_token_tis": dataclasses.replace(_TOKEN, rules=_GEO, **_PG),  # type: ignore[arg-type]
    "disabled": _NONE,
    # The names of TRL 1.16's vllm_importance_sampling_mode, with its default bound.
    "token_truncate": ResolvedCorrection(level="token", upper=3.0),
    "token_mask": ResolvedCorrection(level="token", bound="mask", upper=3.0),
    "sequence_truncate": ResolvedCorrection(level="sequence", upper=3.0),
    "sequence_mask": ResolvedCorrection(level="sequence", bound="mask", upper=3.0),
    # The names in papers and articles.
    "tis": _TOKEN,
    "seq_tis": _SEQUENCE,
    "seq_mis": ResolvedCorrection(level="sequence", bound="mask", upper=3.0),
    "icepop": _ICEPOP,
    "geo_mask": ResolvedCorrection(level="geometric", bound="mask", lower=0.999, upper=1.001),
    "opsm": ResolvedCorrection(off_policy_threshold=0.5),
    # slime's examples/train_infer_mismatch_helper/mis.yaml.
    "slime_mis": ResolvedCorrection(level="token", upper=2.0, normalize=True, veto=1e-4),
    "slime_cis": ResolvedCorrection(level="token", bound="clip", lower=0.5, upper=2.0),
}


def resolve(config: CorrectionConfig) -> ResolvedCorrection:
    """Return the settings of a `correction` section: those of its preset, overridden by the section's other keys.

    Raises ConfigError if a preset or rule is unknown, bounds contradict each other, or the section asks for nothing.
    """
    if config.preset is not None and config.preset not in PRESETS:
        raise ConfigError(
            f"mismatch.correction.preset: unknown preset {config.preset!r}; known: {', '.join(PRESETS)}."
            f"{suggestion(config.preset, PRESETS)}"
        )
    given = {
        name: getattr(config, name)
        for name in ("mode", "loss", "level", "bound", "upper", "lower", "normalize", "veto", "off_policy_threshold")
        if getattr(config, name) is not None
    }
    if config.reject is not None:
        given["rules"] = parse_rules(config.reject)
    if config.preset is None and not given:
        raise ConfigError(f"mismatch.correction is empty; name a preset ({', '.join(PRESETS)}) or set its keys.")
    settings = dataclasses.replace(PRESETS[config.preset] if config.preset else _NONE, **given)
    idle = settings.mode == "decoupled" and settings.level == "none" and not settings.rules
    if config.preset is None and idle and settings.veto is None and settings.off_policy_threshold is None:
        raise ConfigError(
            f"mismatch.correction: {', '.join(given)} alone corrects nothing; set a level with bounds, reject, veto or "
            "off_policy_threshold, or preset='disabled'."
        )
    return settings
