"""Sets the GRPOConfig options that carry out `kl` and `correction`, and refuses options that would contradict them."""

# mypy: disable-error-code="has-type"

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mismatch_ext.adapters.trl.correction import native_options, own_options
from trl import GRPOConfig

from mismatch_ext.config import CorrectionConfig, KlConfig
from mismatch_ext.errors import ConfigError
from mismatch_ext.presets import ResolvedCorrection, resolve

if TYPE_CHECKING:
    from trl import GRPOConfig as _Host
else:
    _Host = object


TAKEN_BY_VESPO = ("token_truncate", "token_mask", "token")
"""Modes of TRL's own correction that VESPO runs with; "token" stands for none at all."""


class GrpoOptions(_Host):
    """Methods of `MismatchGRPOConfig` that read and write GRPO's own options."""

    def _follow_kl(self, kl: KlConfig) -> None:
        """Make TRL's `beta` the coefficient, so that TRL builds the reference model."""
        if kl.coef is None and self.beta == 0.0:
            raise ConfigError("mismatch.kl without a coefficient: set mismatch.kl.coef, or beta > 0.")
        if kl.coef is not None and self.beta not in (0.0, kl.coef):
            raise ConfigError(f"beta={self.beta} contradicts mismatch.kl.coef={kl.coef}; remove one of the two.")
        self.beta = self.beta if kl.coef is None else kl.coef
        if kl.reward_path == "surrogate":
            return
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

    def _check_own_correction(self, settings: ResolvedCorrection) -> None:
        """Refuse settings that our own weights would silently ignore; the number of processes must be known."""
        if native_options(settings) is not None:
            return
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
