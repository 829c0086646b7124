"""Draws settings of TRL and of a `mismatch` block, and says what must become of them: a run, or a refusal by name."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from mismatch_ext.presets import PRESETS

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
COEF = 0.05
KL: dict[str, dict[str, Any] | None] = {
    "TRL's own": None,
    "in the loss": {"estimator": "k3", "placement": "loss", "target": "token"},
    "in the rewards": {"estimator": "k1", "reward_path": "rewards"},
}
TRLS_KL: dict[str, dict[str, Any]] = {
    "TRL's own": {"beta": COEF},
    # The gradient of k3 without a ratio, which is what the block computes in the loss.
    "in the loss": {"beta": COEF, "use_bias_correction_kl": False},
}
"""TRL's own settings for the same term, where it has them."""


@dataclass(frozen=True)
class Draw:
    """A run of TRL.

    Attributes:
        host: Arguments of GRPOConfig.
        preset: The correction.
        kl: The key of the term in KL.
        period: Optimizer steps after which a generation ends together with a step.
        on_policy: Whether every pass is of the weights that its rollout was sampled with.
        steps: Optimizer steps of the run.
        resume_at: The step of the checkpoint that the run is resumed from.
    """

    host: dict[str, Any]
    preset: str
    kl: str
    period: int
    on_policy: bool
    steps: int
    resume_at: int

    @property
    def block(self) -> dict[str, Any]:
        """Every section; the rate is halved after every second step."""
        return {
            "precision": {"dtype": "float32"},
            "correction": {"preset": self.preset},
            **({} if (kl := KL[self.kl]) is None else {"kl": {**kl, "coef": COEF}}),
            "routing": {"mode": "R3", "measured": 1.0},
            "lr": {"period": 2},
            "monitor": {"default_alarms": False},
        }

    @property
    def refusals(self) -> list[str]:
        """Words of every reason to refuse the draw; none if it must run."""
        settings, loss, found = PRESETS[self.preset], self.host["loss_type"], []
        if loss == "vespo" and not (
            settings.mode == "decoupled" and settings.level in ("none", "token")
            and not (settings.rules or settings.veto or settings.normalize or settings.confidence)
        ):  # fmt: skip
            found.append("mismatch.correction with loss_type='vespo'")
        if settings.weighs_score:
            named = {"importance_sampling_level": self.host["importance_sampling_level"] == "sequence"}
            named["loss_type"] = loss not in ("grpo", "dr_grpo", "dapo", "bnpo")
            found += [
                f"mismatch.correction.loss={settings.loss!r} with {name}" for name, given in named.items() if given
            ]
        if self.kl == "in the rewards" and self.host["mask_truncated_completions"]:
            found.append("mismatch.kl.reward_path='rewards' with mask_truncated_completions=True")
        return found

    @property
    def of_trl(self) -> dict[str, Any] | None:
        """TRL's own arguments for what the block computes in float32, where all weights are 1; None if it has none."""
        if PRESETS[self.preset].weighs_score or self.kl not in TRLS_KL:
            return None
        return {**self.host, **TRLS_KL[self.kl], "vllm_importance_sampling_mode": "token_truncate"}


def drawn(rng: random.Random) -> Draw:
    """Draw a run of at most six steps."""
    while True:
        accumulation, iterations = rng.choice((1, 2, 4)), rng.choice((1, 2, 3))
        per_generation = rng.choice((None, 1, 2, 4))
        passes = (per_generation or accumulation) * iterations
        period = math.lcm(accumulation, passes) // accumulation
        if period <= 3:
            break
    loss = rng.choice(LOSSES)
    host = {
        "loss_type": loss,
        "importance_sampling_level": "token" if loss == "vespo" else rng.choice(("token", "sequence")),
        "num_iterations": iterations,
        "steps_per_generation": per_generation,
        "gradient_accumulation_steps": accumulation,
        "scale_rewards": rng.choice(("group", "batch", "none")),
        "mask_truncated_completions": rng.random() < 0.25,
        "per_device_train_batch_size": 4,
        # So that of four responses some end by themselves.
        "max_completion_length": 24,
    }
    steps = max(3, 2 * period)
    preset, kl = rng.choice(sorted(PRESETS)), rng.choice(sorted(KL))
    if KL[kl] is None:
        host["beta"] = COEF
    return Draw(
        host, preset, kl, period, accumulation % passes == 0, steps,
        rng.randrange(1, steps),
    )  # fmt: skip
