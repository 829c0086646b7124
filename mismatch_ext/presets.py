"""The settings of an importance correction: level, bounds, rejection rules, and the presets of verl, TRL and slime (no torch)."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mismatch_ext.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from mismatch_ext.config import CenteringConfig, CorrectionConfig

Interval = tuple[float | None, float]
"""Lower and upper bound of what a rejection rule keeps."""


class Inherited(Enum):
    """The value of a key of `correction` that is left out. None is another one: it switches the key off."""

    FROM_PRESET = "from preset"


FROM_PRESET: Any = Inherited.FROM_PRESET
OF_THE_WEIGHT = ("bound", "upper", "lower", "confidence", "normalize")
"""Keys that do nothing without an importance weight."""
KEYS = ("mode", "loss", "level", *OF_THE_WEIGHT, "divergence", "reject", "veto", "off_policy_threshold", "centering")
"""Keys of `correction` that a preset may set."""

DPPO = ("dppo_tv", "dppo_kl")
"""Losses with a trust region by the divergence of a token (arXiv 2602.04879)."""
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
class ResolvedCorrection:
    """A complete importance correction: a preset, or a section with nothing left open.

    A token is kept if all `rules` keep it. Their names (`RULES`) say what is judged, a token or the sum, mean or maximum over a
    sequence, and by which statistic: k1 = -log rho, k2 = (log rho)^2 / 2 or k3 = rho - 1 - log rho, with rho = pi/mu. Each has
    bounds: for k1 the smallest and the largest ratio that are kept, for the others None and the largest divergence, in nats.
    """

    mode: Literal["decoupled", "bypass"] = "decoupled"
    """`decoupled`: weights pi_old/mu beside the host's own ratio pi/pi_old. `bypass`: mu takes the place of pi_old."""
    loss: Literal["ppo_clip", "reinforce", "dppo_tv", "dppo_kl"] = "ppo_clip"
    """Policy loss in `bypass` mode: `ppo_clip` clips pi/mu and takes no weights; `reinforce` weighs A log pi; `dppo_tv` and
    `dppo_kl` do so inside of a trust region."""
    level: Literal["none", "token", "sequence", "geometric"] = "none"
    bound: Literal["truncate", "mask", "clip", "icepop"] = "truncate"
    upper: float | None = None
    lower: float | None = None
    confidence: tuple[float, float] | None = None
    """Slope and floor of an upper bound that follows the policy: a token's weight is at most 1 + slope max(1 - pi, floor)."""
    normalize: bool = False
    """Divide the weights by their mean: over tokens, or over sequences for the other levels."""
    divergence: float | tuple[float, float] | None = None
    """Largest divergence of a token under `dppo_tv` or `dppo_kl`: one, or one for negative and one for positive advantages."""
    rules: Mapping[str, Interval] = dataclasses.field(default_factory=dict, hash=False)
    veto: float | None = None
    """A sequence is dropped if the ratio of one of its tokens is below this."""
    off_policy_threshold: float | None = None
    """A sequence of negative advantage whose mean log(mu/pi) exceeds this is dropped (DeepSeek-V3.2)."""
    centering: CenteringConfig | None = None
    """Score centering (arXiv 2609.20807); None is off."""
    compat: frozenset[str] = frozenset()
    """Quirks of hosts to reproduce, of `COMPAT`."""

    def __post_init__(self) -> None:
        """Refuse settings that contradict one another, or have no meaning; raises ConfigError."""
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise _refused(f": lower={self.lower} exceeds upper={self.upper}.")
        self._check_mode()
        if self.level == "none":
            self._check_nothing_is_idle()
        else:
            self._check_bounds_of_weights()
        if self.centering is not None:
            self._check_centering()
        unknown = sorted(self.compat - set(COMPAT))
        if unknown:
            raise _refused(f": unknown compatibility options {unknown}; known: {', '.join(COMPAT)}.")

    def _check_mode(self) -> None:
        if self.loss != "ppo_clip" and self.mode != "bypass":
            raise _refused(f".loss={self.loss!r} needs mode='bypass'.")
        if self.loss in DPPO and (self.divergence is None or self.level != "token"):
            raise _refused(
                f".loss={self.loss!r} is a trust region around token weights: it needs divergence, level='token' and upper; or "
                f"name the preset {self.loss!r}."
            )
        if self.loss not in DPPO and self.divergence is not None:
            raise _refused(f".divergence is the bound of loss={' and '.join(map(repr, DPPO))}; set one of them.")
        weighs = self.level != "none" or self.normalize
        if self.mode == "bypass" and self.loss == "ppo_clip" and weighs:
            raise _refused(
                f": level={self.level!r} with mode='bypass' and loss='ppo_clip', whose clipped ratio pi/mu takes no weights; "
                "leave out the level, or set loss='reinforce' or mode='decoupled'."
            )

    def _check_nothing_is_idle(self) -> None:
        for name in ("upper", "lower", "confidence", "normalize"):
            if getattr(self, name) not in (None, False):
                raise _refused(f".{name} without a weight: set level to token, sequence or geometric.")

    def _check_bounds_of_weights(self) -> None:
        if self.confidence is not None:
            truncates = self.level == "token" and self.bound == "truncate"
            if not truncates or self.upper is not None or self.lower is not None:
                raise _refused(
                    ".confidence is the upper bound of a token's weight: it needs level='token' and bound='truncate', and takes "
                    "the place of upper and lower."
                )
            return
        if self.upper is None and self.lower is None:
            raise _refused(f": level={self.level!r} without bounds; set upper, lower or both.")
        if self.bound == "icepop" and (self.upper is None or self.lower is None):
            raise _refused(": bound='icepop' is a band; set both lower and upper.")
        if self.bound == "truncate" and (self.upper is None or self.lower is not None):
            raise _refused(
                ": bound='truncate' is min(weight, upper) alone; for a lower bound take 'clip' or 'mask', or set lower to null."
            )

    def _check_centering(self) -> None:
        """Refuse weights and rules whose expectation over one token is not known from the sampler's distribution."""
        if self.mode == "bypass" and self.loss != "reinforce":
            raise _refused(
                f".centering with mode='bypass' and loss={self.loss!r}, whose clip depends on the advantage's sign; set "
                "mode='decoupled' or loss='reinforce'."
            )
        if self.level not in ("none", "token"):
            raise _refused(
                f".centering with level={self.level!r}: the weight of a token would depend on the whole answer; set level to "
                "'token' or 'none'."
            )
        if self.confidence is not None or self.normalize or self.bound == "clip":
            raise _refused(".centering takes weights of bound 'truncate', 'mask' or 'icepop'; set one of these.")
        if self.rules or self.veto is not None or self.off_policy_threshold is not None:
            raise _refused(
                ".centering with reject, veto or off_policy_threshold: what they leave out depends on more than one token; leave "
                "them out."
            )

    @property
    def weighs_score(self) -> bool:
        """Whether the policy loss is A log pi, with weights pi/mu of the current policy: REINFORCE, or DPPO."""
        return self.mode == "bypass" and self.loss != "ppo_clip"

    @property
    def divergences(self) -> tuple[float, float]:
        """Largest divergence of a token with a negative advantage, and of one with a positive one."""
        assert self.divergence is not None
        return self.divergence if isinstance(self.divergence, tuple) else (self.divergence, self.divergence)

    @property
    def bounds_of_tokens(self) -> dict[str, float | None]:
        """The weight's bounds as `centering_terms` takes them: none without a weight, and 0 as the lower one of a mask."""
        if self.level == "none":
            return {"upper": None, "lower": None}
        if self.bound == "truncate":
            return {"upper": self.upper, "lower": None}
        return {"upper": math.inf if self.upper is None else self.upper, "lower": self.lower or 0.0}


def _refused(message: str) -> ConfigError:
    return ConfigError(f"mismatch.correction{message}")


def parse_rules(reject: Mapping[str, float | tuple[float, float]]) -> dict[str, Interval]:
    """Read `mismatch.correction.reject`: for k1, a number x means ratios from 1/x to x, or x to 1/x. Raises ConfigError."""
    where, rules = "mismatch.correction.reject", dict[str, Interval]()
    for name, bounds in reject.items():
        if name not in RULES:
            raise ConfigError(f"{where}: unknown rule {name!r}; known: {', '.join(RULES)}.{suggestion(name, RULES)}")
        if name.endswith("k1"):
            lower, upper = bounds if isinstance(bounds, tuple) else sorted((bounds, 1 / bounds))
            rules[name] = lower, upper
        elif isinstance(bounds, tuple):
            raise ConfigError(f"{where}.{name}: {list(bounds)} is not allowed; allowed: a number > 0.")
        else:
            rules[name] = None, bounds
    return rules


def _read_presets() -> dict[str, ResolvedCorrection]:
    presets = {}
    for name, keys in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        rules = {rule: _tuple(bounds) for rule, bounds in keys.pop("reject", {}).items()}
        settings = {key: _tuple(value) for key, value in keys.items()}
        presets[name] = ResolvedCorrection(**settings, rules=parse_rules(rules))
    return presets


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


PRESETS = _read_presets()
"""Complete corrections by the names that verl, TRL, slime and papers give them, for `correction.preset` and `correct`.

Truncated importance sampling is `tis` per token and `seq_tis` per sequence; `seq_mis` drops sequences beyond the bound, `icepop`
tokens outside of a band, `geo_mask` sequences by their geometric mean, and `opsm` is DeepSeek-V3.2's mask (arXiv 2512.02556).
`cis` truncates by a bound that follows the policy's confidence in the token (arXiv 2609.32444). `dppo_tv` and `dppo_kl` stop a
token once its divergence from the engine is too large (arXiv 2602.04879), with the bounds of verl's example.
"""


def resolve(config: CorrectionConfig) -> ResolvedCorrection:
    """Return the settings of a `correction` section. Raises ConfigError.

    A key that is left out has its preset's value. None has the value without a preset, which switches the key off.
    """
    if config.preset is not None and config.preset not in PRESETS:
        raise ConfigError(
            f"mismatch.correction.preset: unknown preset {config.preset!r}; known: {', '.join(PRESETS)}."
            f"{suggestion(config.preset, PRESETS)}"
        )
    of_preset = ResolvedCorrection() if config.preset is None else PRESETS[config.preset]
    given = {name: value for name in KEYS if (value := getattr(config, name)) is not FROM_PRESET}
    if config.preset is None and all(value is None for value in given.values()):
        raise ConfigError(f"mismatch.correction is empty; name a preset ({', '.join(PRESETS)}) or set its keys.")
    without_preset = {**vars(ResolvedCorrection()), "reject": None}
    asked = {name: without_preset[name] if value is None else value for name, value in given.items()}
    if asked.get("level") == "none":
        # The bounds of a preset's weight go with the weight.
        asked = {name: without_preset[name] for name in OF_THE_WEIGHT} | asked
    if "reject" in asked:
        rules = asked.pop("reject")
        asked["rules"] = {} if rules is None else parse_rules(rules)
    settings = dataclasses.replace(of_preset, **asked)
    idle = settings.mode == "decoupled" and settings.level == "none" and not settings.rules
    idle = idle and settings.veto is None and settings.off_policy_threshold is None and settings.centering is None
    if config.preset is None and idle:
        raise ConfigError(
            f"mismatch.correction: {', '.join(given)} alone corrects nothing; set a level with bounds, reject, veto, "
            "off_policy_threshold or centering, or preset='disabled'."
        )
    return settings
