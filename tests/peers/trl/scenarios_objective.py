"""Runs of the real TRL with a user's own loss around the terms of a block."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from typing import Any

import pytest
import torch
from mismatch_ext.adapters.trl import (
    MismatchGRPOConfig,
    MismatchGRPOTrainer,
    MismatchTrainerMixin,
)
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from mismatch_ext.errors import ConfigError
from tests.peers.trl.scenarios_kl import moved
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows

Inputs = dict[str, Any]


def built(model: str, out: str, block: Any, cls: Any, **overrides: Any) -> Any:
    """Build a trainer whose policy is not the reference."""
    given = {"mismatch": block} if block is not None else {}
    config = (GRPOConfig if block is None else MismatchGRPOConfig)(
        **arguments(
            out, **{"use_vllm": False, "bf16": False, "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant",
                    "max_completion_length": 12, "max_steps": 1, "learning_rate": 1e-2, **given, **overrides}
        )
    )  # fmt: skip
    trainer = cls(model=model, reward_funcs=graded, args=config, train_dataset=rows())
    moved(trainer)
    return trainer


def whole_rows(inputs: Inputs) -> tuple[Tensor, Tensor, int]:
    """Return prompts with completions, their mask, and the width of the completions."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    return ids, attention, inputs["completion_ids"].size(1)


class Own:
    """REINFORCE that never asks TRL for its loss."""

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        parent: Any = self
        ids, attention, width = whole_rows(inputs)
        logps = parent._get_per_token_logps_and_entropies(model, ids, attention, width)[0]
        return -(logps * inputs["advantages"][:, None] * inputs["completion_mask"]).sum() / 100


class OwnLast(Own, MismatchGRPOTrainer):
    """The user's loss before our trainer."""


class Detached(GRPOTrainer):
    """A user's loss that logs TRL's own and trains on something else."""

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        parent: Any = super()
        logged: Tensor = parent._compute_loss(model, inputs)
        return logged.detach() + Own._compute_loss(self, model, inputs)  # type: ignore[arg-type]


class DetachedFirst(MismatchTrainerMixin, Detached):
    """Ours before it."""


class OwnSteps(MismatchGRPOTrainer):
    """A subclass that takes its training steps by itself, with a loss of which TRL's own is no part."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        inputs = self._prepare_inputs(inputs)
        loss = Own._compute_loss(self, model, inputs)
        loss.backward()
        return loss.detach()


class Alternating(MismatchGRPOTrainer):
    """A subclass whose every second micro-batch has a loss of its own."""

    taken = 0

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.taken += 1
        return (
            super().compute_loss(model, inputs, *args, **kwargs)
            if self.taken % 2
            else Own._compute_loss(self, model, inputs)
        )


def own_losses(model: str, out: str) -> None:
    """Train under losses that TRL's own is no part of: refused before the first step, unless nothing is asked of TRL's loss."""
    surrogate = {"kl": {"estimator": "k3", "placement": "both", "coef": 10.0}}
    # A correction is of an engine's rollouts.
    engine = {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}
    two = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
    cases: tuple[tuple[Any, dict[str, Any], dict[str, Any], str], ...] = (
        (OwnLast, surrogate, {}, r"mismatch.kl with OwnLast.*super\(\)._compute_loss"),
        (OwnSteps, surrogate, {}, "mismatch.kl with OwnSteps"),
        (Alternating, surrogate, two, "mismatch.kl with Alternating.*micro-batch"),
        (
            DetachedFirst,
            {"correction": {"preset": "token_mask"}},
            engine,
            "mismatch.correction with DetachedFirst.*does not depend on the weights",
        ),
    )
    for cls, block, given, words in cases:
        trainer = built(model, f"{out}/{cls.__name__}", block, cls, **given)
        before = digest_of(trainer.model)
        with pytest.raises(ConfigError, match=f"(?s){words}"):
            trainer.train()
        assert trainer.state.global_step == 0 and digest_of(trainer.model) == before, cls
    # A KL that is all in the rewards needs nothing of TRL's loss.
    block = {"kl": {"estimator": "k1", "placement": "reward", "reward_path": "rewards", "coef": 10.0}}
    trainer = built(model, f"{out}/rewards", block, OwnLast)
    before = digest_of(trainer.model)
    trainer.train()
    assert digest_of(trainer.model) != before
    assert any(entry.get("rewards/kl/mean") for entry in trainer.state.log_history)
