"""Runs of the real TRL with a user's own loss around the terms of a block."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from typing import Any

import torch
from mismatch_ext.adapters.trl import (
    MismatchGRPOConfig,
    MismatchGRPOTrainer,
    MismatchRLOOConfig,
    MismatchTrainerMixin,
)
from mismatch_ext.adapters.trl.passes import RolloutPass
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from mismatch_ext.errors import ConfigError, SeamError
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


KL = {"kl": {"estimator": "k3", "placement": "loss", "target": "token", "coef": 0.3}}


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


def own_losses(model: str, out: str) -> dict[str, Any]:
    """Train under losses that TRL's own is no part of; say how each ended."""
    result = {}
    blocks = {
        "surrogate": {"kl": {"estimator": "k3", "placement": "both", "coef": 10.0}},
        "rewards": {"kl": {"estimator": "k1", "placement": "reward", "reward_path": "rewards", "coef": 10.0}},
        "weights": {"correction": {"preset": "token_mask"}},
    }
    for cls, block in (
        (OwnLast, "surrogate"),
        (OwnSteps, "surrogate"),
        (OwnLast, "rewards"),
        (Alternating, "surrogate"),
        (DetachedFirst, "weights"),
    ):
        steps = {"gradient_accumulation_steps": 2, "steps_per_generation": 2} if cls is Alternating else {}
        if block == "weights":  # a correction is of an engine's rollouts
            steps = {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}
        trainer = built(model, f"{out}/{cls.__name__}-{block}", blocks[block], cls, **steps)
        before = digest_of(trainer.model)
        try:
            trainer.train()
            found = {"kl_rewards": [e["rewards/kl/mean"] for e in trainer.state.log_history if "rewards/kl/mean" in e]}
        except ConfigError as error:
            found = {"refused": str(error)}
        result[f"{cls.__name__}/{block}"] = {
            **found,
            "steps": trainer.state.global_step,
            "moved": digest_of(trainer.model) != before,
        }
    return result


def replaced(model: str, out: str) -> str:
    """Build with a function in the place of TRL's own loss that is not aggregated as its loss type is."""
    own = GRPOTrainer._compute_loss
    GRPOTrainer._compute_loss = lambda self, model, inputs: own(self, model, inputs) * 2
    try:
        built(model, out, KL, MismatchGRPOTrainer)
    except SeamError as error:
        return str(error)
    finally:
        GRPOTrainer._compute_loss = own
    return ""


class Rewarding:
    """Scores other prompts around the sampling of a batch, as an own reward or a filter does."""

    def _foreign(self) -> None:
        trainer: Any = self
        ids = torch.full((8, 20), 7)
        with torch.no_grad():
            for scored_model in filter(None, (trainer.model, trainer.ref_model)):
                trainer._get_per_token_logps_and_entropies(scored_model, ids, torch.ones_like(ids), 12)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._foreign()
        parent: Any = super()
        rewards: Tensor = parent._calculate_rewards(*args, **kwargs)
        return rewards

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        self._foreign()
        parent: Any = super()
        return parent._generate_and_score_completions(*args, **kwargs)


class RewardingLast(Rewarding, MismatchGRPOTrainer):
    """Before ours."""


class RewardingRloo(MismatchTrainerMixin, Rewarding, RLOOTrainer):
    """RLOO, which keeps its log-probabilities at sampling time to itself."""


def rewarded(model: str, out: str) -> dict[str, float]:
    """Compare the KL in the rewards, and RLOO's log-probabilities at sampling time, with those by hand."""
    block = {"kl": {"estimator": "k1", "placement": "reward", "reward_path": "rewards", "coef": 0.5}}
    trainer = built(model, f"{out}/grpo", block, RewardingLast)
    seen: dict[str, Tensor] = {}
    plain = trainer._calculate_rewards

    def spied(*args: Any) -> Tensor:
        seen["rewards"] = plain(*args)
        return seen["rewards"]

    trainer._calculate_rewards = spied
    batch = first(trainer)
    logps = torch.where(batch["completion_mask"].bool(), plainly(trainer, batch) - batch["ref_per_token_logps"], 0.0)
    error = float((seen["rewards"][:, 1] + 0.5 * logps.sum(1)).abs().max())

    rloo = RewardingRloo(
        model=model, reward_funcs=graded, train_dataset=rows(),
        args=MismatchRLOOConfig(**{
            key: value for key, value in arguments(
                f"{out}/rloo", mismatch={"lr": {"period": 5}}, use_vllm=False, bf16=False, max_completion_length=12
            ).items() if key != "vllm_importance_sampling_mode"
        }),
    )  # fmt: skip
    rloo.model.train()
    data = next(iter(rloo.get_train_dataloader()))
    # The engine alone asks for them, and none is needed for that.
    rollouts = RolloutPass()
    rloo.mm.scoring.batch, rloo.mm.scoring.passes = rollouts, rollouts.scored
    with torch.no_grad():
        batch = super(MismatchTrainerMixin, rloo)._generate_and_score_completions(data)
    mask = batch["completion_mask"].bool()
    rloo_error = float((rloo.mm.old_logprobs(batch) - plainly(rloo, batch))[mask].abs().max())
    return {"kl_error": error, "spread": float(logps.sum(1).std()), "rloo_error": rloo_error,
            "rloo_passes": len(rollouts.scored)}  # fmt: skip


def first(trainer: Any) -> Inputs:
    """Sample the first batch."""
    trainer.model.train()
    with torch.no_grad():
        batch: Inputs = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    return batch


def plainly(trainer: Any, batch: Inputs) -> Tensor:
    """Return log-probabilities of completions by a plain forward pass `[B, T]`."""
    ids, attention, width = whole_rows(batch)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
        return logits.double().log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
