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
from mismatch_ext.adapters.trl.correction import CorrectionTerm, native_options
from mismatch_ext.adapters.trl.objective import sections_in_loss
from mismatch_ext.adapters.trl.passes import RolloutPass
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from mismatch_ext.config import MismatchConfig
from mismatch_ext.errors import ConfigError, SeamError
from mismatch_ext.kl import KlTerm
from mismatch_ext.presets import resolve
from tests.peers.trl.scenarios_kl import moved
from tests.peers.trl.scenarios_training import arguments, digest_of, graded, rows
from tests.peers.trl.user_losses import (
    RECIPES,
    Asked,
    Inputs,
    MixinFirst,
    MixinLast,
    Recipe,
    by_hand,
    rows_of,
    scored,
    tokens_of,
)

CORRECTIONS: dict[str, dict[str, Any]] = {
    "token_truncate": {"level": "token", "bound": "truncate", "upper": 1.002},
    "token_mask": {"level": "token", "bound": "mask", "upper": 1.002},
    "sequence_truncate": {"level": "sequence", "bound": "truncate", "upper": 1.002},
    "sequence_mask": {"level": "sequence", "bound": "mask", "upper": 1.002},
    "geometric": {"level": "geometric", "bound": "mask", "lower": 0.999, "upper": 1.001},
    "rejecting": {"level": "token", "upper": 2.0, "reject": {"seq_mean_k1": [0.999, 1.001]}},
    "bypass_clip": {"mode": "bypass", "loss": "ppo_clip"},
    "bypass_reinforce": {"mode": "bypass", "loss": "reinforce", "level": "sequence", "upper": 1.002},
}


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


def asked_for(trainer: Any, asked: Asked) -> None:
    """Make a trainer what it would have been built with another block."""
    sections: dict[str, Any] = {}
    if asked.kl is not None:
        sections["kl"] = {**asked.kl, "coef": asked.coef}
    if asked.correction is not None:
        sections["correction"] = CORRECTIONS[asked.correction]
    trainer.mm.block = block = MismatchConfig.parse(sections)
    trainer.mm.kl = None if block.kl is None else KlTerm(block.kl, asked.coef)
    trainer.mm.correction, options = None, {"vllm_importance_sampling_correction": False}
    if block.correction is not None:
        settings = resolve(block.correction)
        options = native_options(settings)
        if options is None:
            trainer.mm.correction = CorrectionTerm(settings, trainer.mm.ranks)
            options = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate",
                       "vllm_importance_sampling_clip_max": 1e30, "vllm_importance_sampling_clip_min": None}  # fmt: skip
    for name, value in options.items():
        setattr(trainer, name, value)
    trainer.beta = 0.0 if asked.kl is None else asked.coef
    trainer.mm.objective.sections = sections_in_loss(block)


def _kl(estimator: str, placement: str, target: str, ratio: str, baseline: str) -> dict[str, str]:
    return {
        "estimator": estimator, "placement": placement, "target": target, "ratio": ratio, "baseline": baseline,
    }  # fmt: skip


ASKED = (
    Asked(_kl("k3", "loss", "token", "none", "none"), None),
    Asked(_kl("k1", "reward", "sequence", "none", "leave_one_out"), None),
    Asked(_kl("k1", "both", "sequence", "token", "leave_one_out"), "geometric"),
    Asked(_kl("k2", "loss", "token", "token", "none"), "bypass_clip"),
    Asked(_kl("k2", "both", "sequence", "sequence", "leave_one_out"), None),
    Asked(_kl("k3", "reward", "token", "token", "leave_one_out"), "sequence_mask"),
    Asked(_kl("k3", "both", "token", "sequence", "none"), "bypass_reinforce"),
    Asked(_kl("abs", "both", "sequence", "token", "none"), "rejecting"),
    Asked(_kl("abs", "loss", "token", "sequence", "none"), None),
    Asked(_kl("k3", "loss", "token", "none", "none"), "token_truncate"),
    *(Asked(None, name) for name in CORRECTIONS),
)
"""Blocks with a KL term, a correction, or both."""


def stepped(trainer: Any, batches: list[Inputs]) -> Tensor:
    """Return the gradient that the optimizer would step with, float64, after TRL's training steps on micro-batches."""
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer._metrics["train"].clear()
    trainer.calls = 0
    for inputs in batches:
        trainer._prepare_inputs = lambda _, inputs=inputs: inputs  # the batch was sampled once
        trainer.training_step(trainer.model, inputs, None)
    trainer.callback_handler.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control)
    return gradient(trainer)


def gradient(trainer: Any) -> Tensor:
    """Return the gradient as one vector, float64."""
    return torch.cat([p.grad.flatten().double() for p in trainer.model.parameters() if p.grad is not None])


def hand_gradient(trainer: Any, batches: list[Inputs], recipe: Recipe, asked: Asked) -> Tensor:
    """Return the gradient of the hand-computed losses."""
    trainer.model.zero_grad()
    for inputs in batches:
        by_hand(trainer, inputs, recipe, asked).backward()
    return gradient(trainer)


def sampled(trainer: Any, correction: str | None) -> Inputs:
    """Return a batch of real completions of the engine, corrected, of a policy that has moved on since."""
    asked_for(trainer, Asked({"estimator": "k3"}, correction))
    trainer.recipe = Recipe()
    trainer.model.train()
    with torch.no_grad():
        batch = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
        tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        batch["old_of_trainer"] = trainer._get_per_token_logps_and_entropies(
            trainer.model, tokens, attention, batch["completion_ids"].size(1)
        )[0]
    # A reward of a random model can be the same for all of a group.
    batch["advantages"] = torch.linspace(-1.5, 1.5, len(batch["advantages"]))
    return batch


def losses(model: str, out: str) -> dict[str, Any]:
    """Compare the gradients of users' losses with the hand-computed ones, or say how they were refused."""
    block = {"kl": {"estimator": "k3", "coef": 0.4}, "correction": CORRECTIONS["geometric"]}
    trainer = built(model, out, block, MixinFirst, use_vllm=True)
    noise = torch.Generator().manual_seed(3)
    batches = {name: sampled(trainer, name) for name in (None, *CORRECTIONS)}
    moved(trainer, 1e-3)  # from here on the policy is not the one that sampled
    trainer.model.double(), trainer.ref_model.double()
    torch.set_num_threads(1)  # the engine has set as many as there are cores, which wait for each other
    found = []
    plain = [(Recipe(mixin_first=asked.correction != "bypass_reinforce"), asked) for asked in ASKED]
    for recipe, asked in [*plain, *((recipe, ASKED[at % len(ASKED)]) for at, recipe in enumerate(RECIPES, 4))]:
        size = 4 // recipe.micro_batches
        micro = [rows_of(batches[asked.correction], [0, 5, 1, 4][at : at + size]) for at in range(0, 4, size)]
        for inputs in micro:  # whatever the batch's was
            inputs["mismatch_kl_baseline"] = torch.randn(inputs["completion_ids"].shape, generator=noise) * 0.1
        case = {"recipe": str(recipe), "asked": str(asked), "refuses": recipe.refused(asked)}
        found.append(case | compared(trainer, micro, recipe, asked))
    return {"cases": found, "correction": refused_with_an_engine(trainer)}


def compared(trainer: Any, micro: list[Inputs], recipe: Recipe, asked: Asked) -> dict[str, Any]:
    """Compare one loss with what it comes to by hand, and with what it would be without the block."""
    trainer.__class__ = MixinFirst if recipe.mixin_first else MixinLast
    asked_for(trainer, asked)
    trainer.recipe, trainer.loss_type = recipe, recipe.loss_type
    try:
        ours = stepped(trainer, micro)
    except ConfigError as error:
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - a crash is a finding too
        return {"crashed": f"{type(error).__name__}: {error}"}
    calls, logged = trainer.calls / len(micro), list(trainer._metrics["train"].get("kl", []))
    hand = hand_gradient(trainer, micro, recipe, asked)
    size = float(hand.norm().clamp(min=1e-12))  # a correction can reject all of a batch
    # Without the block TRL's loss has the trainer's log-probabilities at sampling time as the old ones.
    old = {"old_per_token_logps": "old_of_trainer"} if asked.correction else {}
    before = [inputs | {name: inputs[source] for name, source in old.items()} for inputs in micro]
    without = hand_gradient(trainer, before, recipe, Asked(None, None))
    result = {
        "calls": calls,
        "error": float((ours - hand).norm()) / size,
        "effect": float((without - hand).norm()) / size,
    }
    if asked.kl is not None and recipe.call in ("super", "unbound"):
        result["kl_error"] = max(
            abs(a - b) for a, b in zip(logged, (mean_k3(trainer, part) for part in micro), strict=True)
        )
    return result


def mean_k3(trainer: Any, inputs: Inputs) -> float:
    """Return what TRL logs as `kl`."""
    with torch.no_grad():
        logps = scored(trainer.model, *tokens_of("same", inputs)[:3])[0]
    d, mask = logps - inputs["ref_per_token_logps"].double(), inputs["completion_mask"]
    return float(((torch.exp(-d) - 1 + d) * mask).sum() / mask.sum())


def refused_with_an_engine(trainer: Any) -> dict[str, Any]:
    """Train with a correction that is TRL's own, under a loss that never asks TRL's; say how it ended."""
    trainer.model.float(), trainer.ref_model.float()
    del trainer._prepare_inputs
    trainer.__class__ = MixinFirst
    asked_for(trainer, Asked(None, "token_mask"))
    trainer.recipe = Recipe("none")
    try:
        trainer.train()
    except ConfigError as error:
        return {"refused": str(error), "steps": trainer.state.global_step}
    return {"steps": trainer.state.global_step}


KL = {"kl": {"estimator": "k3", "placement": "loss", "target": "token", "coef": 0.3}}
STOCK = {"beta": 0.3, "use_bias_correction_kl": False}


class Own:
    """REINFORCE that never asks TRL for its loss."""

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        ids, attention, completions, mask = tokens_of("same", inputs)
        parent: Any = self
        logps = parent._get_per_token_logps_and_entropies(model, ids, attention, completions.size(1))[0]
        return -(logps * inputs["advantages"][:, None] * mask).sum() / 100


class OwnLast(Own, MismatchGRPOTrainer):
    """The user's loss before our trainer."""


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
    }
    for cls, block in (
        (OwnLast, "surrogate"),
        (OwnSteps, "surrogate"),
        (OwnLast, "rewards"),
        (Alternating, "surrogate"),
    ):
        steps = {"gradient_accumulation_steps": 2, "steps_per_generation": 2} if cls is Alternating else {}
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
    with torch.no_grad():
        return scored(trainer.model, *tokens_of("same", batch)[:3])[0]
