"""One run of the miniature: an engine in any precision, and a policy that learns to stop early."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.stability.arms import Arm
from benchmarks.stability.miniature import END, Grid, Language, Shape, Sides, advantages, coarse, on_grid, pretrained
from examples.dither import IntegerCells, dither
from mismatch_ext.config import CorrectionConfig, KlConfig, LrConfig
from mismatch_ext.correction import correct
from mismatch_ext.drift import clip_metrics, clip_sums, stopped_by_clip
from mismatch_ext.gap import k3
from mismatch_ext.kl import kl_estimate, kl_terms
from mismatch_ext.lr import LrControl
from mismatch_ext.precision.scaler import LossScaler

STEPS, PROMPT, KL = 60, 4, 0.05
SHORT = 1.3
"""Mean length at which nothing is left to learn."""
MEASURES = ("length", "stopped", "stopped_ends", "advantage_gap", "k3")

Curves = dict[str, list[float]]
Base = tuple[nn.Module, Language, Shape]


def base(vocabulary: int, *, quick: bool = False) -> Base:
    """Return a model that has learned its language, the language, and its shape."""
    shape = Shape(vocabulary=64, hidden=64, layers=2, pretraining=5, prompts=2, samples=4, new=6)
    if not quick:
        shape = Shape(vocabulary=vocabulary)
    model, language = pretrained(shape, 0 if vocabulary == 512 else 7)
    return model, language, shape


def train(arm: Arm, made: Base, *, seed: int, steps: int = STEPS) -> Curves:
    """Train one arm and return what each step measured, before its update.

    Args:
        arm: How.
        made: What it starts from; stays as it is.
        seed: Of prompts, samples and noise.
        steps: At most.
    """
    model, language, shape = made
    master = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1000 + seed)
    publish(master, arm, torch.Generator().manual_seed(5000 + seed))
    sides, first = Sides(master), Sides(copy.deepcopy(master))
    optimizer = torch.optim.Adam(master.parameters(), lr=arm.rate, betas=(0.9, 0.99))
    # Its own trigger is a growth of length, of which there is none here: the period is given.
    control = LrControl(LrConfig(period=arm.period), optimizer) if arm.period else None
    scaler = LossScaler("cpu") if arm.trainer.dtype == torch.float16 else None
    kept: Curves = {name: [] for name in MEASURES}
    for _ in range(steps):
        prompts = language.sample(shape.prompts, PROMPT, generator, end=False).repeat_interleave(shape.samples, 0)
        ids, mask, engine = sides.rollout(arm.engine, prompts, shape.new, generator)
        lengths = mask.sum(1)
        reward = advantages(lengths, shape.samples)[:, None].expand(mask.shape)
        trainer = _scored(sides, arm.trainer, ids, gradient=True)
        loss, stopped = objective(arm, trainer, engine, reward, mask)
        if arm.kl:
            with torch.no_grad():
                reference = _scored(first, arm.trainer, ids)
            loss = loss + kl_term(arm.kl, trainer, reference, mask, shape.samples)
        optimizer.zero_grad()
        with nullcontext() if control is None else control.applied():
            _step((loss * mask).sum() / mask.sum(), master, optimizer, scaler)
        note(kept, ids[:, PROMPT:], trainer.detach(), engine, reward, mask, stopped)
        if learned(kept["length"]):
            break
    return kept


def note(
    kept: Curves, ids: Tensor, trainer: Tensor, engine: Tensor, reward: Tensor, mask: Tensor, stopped: Tensor
) -> None:
    """Add a step's measures, by tokens `[B, T]`, to what was kept."""
    ends = mask & (ids == END) & (reward > 0)
    kept["length"].append(float(mask.sum(1).float().mean()))
    kept["stopped"].append(float(stopped[mask].float().mean()))
    kept["stopped_ends"].append(float(stopped[ends].float().mean()) if bool(ends.any()) else 0.0)
    kept["advantage_gap"].append(
        clip_metrics(clip_sums(trainer=trainer, engine=engine, advantages=reward, mask=mask))["advantage_gap"]
    )
    kept["k3"].append(float(k3((trainer - engine)[mask].double()).mean()))


def learned(lengths: list[float]) -> bool:
    """Tell whether three mean lengths in a row were so short that nothing is left to learn."""
    return len(lengths) > 6 and max(lengths[-3:]) < SHORT


@torch.no_grad()
def publish(master: nn.Module, arm: Arm, generator: torch.Generator) -> None:
    """Round the weights that the arm's engine stores as integers, as if they were published so, and spread them again."""
    for name, weight in master.named_parameters():
        if arm.on and coarse(name, weight):
            weight.copy_(on_grid(weight, arm.on))
            if arm.dithered:
                weight.copy_(dither(weight, IntegerCells(arm.on), generator))


def objective(arm: Arm, trainer: Tensor, engine: Tensor, reward: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss per token `[B, T]`, and which tokens' gradient a clip takes `[B, T]`."""
    lower, upper = 1 - arm.clip[0], 1 + arm.clip[1]
    none = torch.zeros_like(mask)
    if arm.objective == "decoupled":
        old = trainer.detach()
        found = correct(
            old_logprobs=old, rollout_logprobs=engine, response_mask=mask, config=CorrectionConfig(preset=arm.preset)
        )
        return -found.as_multiplier() * (trainer - old).exp() * reward, none
    if arm.objective == "sequence clip":
        mean = ((trainer - engine) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        ratio = mean.exp().expand(mask.shape)
        log_ratio = mean.detach().expand(mask.shape)
    else:
        ratio = (trainer - engine).exp()
        log_ratio = (trainer - engine).detach()
    if arm.objective == "ratio":
        return -ratio * reward, none
    stopped = stopped_by_clip(log_ratio, reward, *arm.clip)
    return -torch.minimum(ratio * reward, ratio.clamp(lower, upper) * reward), stopped


def kl_term(kind: str, trainer: Tensor, reference: Tensor, mask: Tensor, samples: int) -> Tensor:
    """Return the KL's term per token `[B, T]`: k3 as it stands in many losses, or the one whose gradient is the KL's own."""
    if kind == "surrogate":
        groups = torch.arange(len(mask)) // samples
        return kl_terms(
            logprobs=trainer, ref_logprobs=reference, mask=mask, settings=KlConfig(coef=KL), groups=groups
        ).loss
    return KL * torch.where(mask, kl_estimate(logprobs=trainer, ref_logprobs=reference, estimator="k3"), 0.0)


def _scored(sides: Sides, grid: Grid, ids: Tensor, *, gradient: bool = False) -> Tensor:
    """Return the log-probabilities `[B, T]` of the sampled tokens."""
    logits = sides.logits(grid, sides.weights(grid, gradient=gradient), ids[:, :-1])[:, PROMPT - 1 :]
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]


def _step(loss: Tensor, master: nn.Module, optimizer: Any, scaler: LossScaler | None) -> None:
    if scaler is None:
        loss.backward()
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        return
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(master.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
