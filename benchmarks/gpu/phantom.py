"""Phantom clipping: tokens that a PPO clip on pi_trainer / pi_engine stops although the policy has not changed since sampling.

One update per rollout: the engine has the weights of the trainer, so that every token that is clipped is clipped by the mismatch.
Where the checkpoint lies on the engine's grid, updates below half a step do not reach the engine, while the trainer's
probabilities of the reinforced tokens move on; the clip then stops the updates that would have carried the weights over.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.miniature import END, Grid, Language, Shape, Sides, advantages, coarse, on_grid, pretrained, step_of
from benchmarks.gpu.part import Found, Say, Setting
from benchmarks.gpu.svg import Figure, Panel, Series
from mismatch_ext.gap import k3

NAME, TITLE = "phantom", "phantom clipping, with controls"
EPSILON, RATE, STEPS, WINDOW = 0.2, 1e-3, 60, 3
FIRST = 20  # steps over which clipped tokens are counted
BITS = 4
QUICK = Shape(vocabulary=64, hidden=64, layers=2, pretraining=5, prompts=2, samples=4, new=6)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train.

    Args:
        said: What it is.
        trainer: What the trainer's forward pass computes in.
        on: Whether the checkpoint is rounded to the engine's grid before training.
        dithered: Whether the masters are spread over their cells then; the engine's weights stay what they were.
        clipped: Whether the ratio to the engine's log-probabilities is clipped.
    """

    said: str
    trainer: Grid = Grid()
    on: bool = True
    dithered: bool = False
    clipped: bool = True


ENGINE = Grid(dtype=torch.bfloat16, bits=BITS)
ARMS = {
    "bypass": Arm(said="checkpoint on the engine's int4 grid, clip on pi_trainer / pi_engine"),
    "matched": Arm(said="the same, and the trainer computes with the engine's weights and dtype: no mismatch", trainer=ENGINE),
    "off the grid": Arm(said="as bypass, with a checkpoint that was never rounded", on=False),
    "dithered": Arm(said="as bypass, with masters spread inside their cells", dithered=True),
    "no clip": Arm(said="as bypass, without the clip", clipped=False),
}  # fmt: skip


def run(setting: Setting, folder: Path, say: Say) -> Found:
    """Train every arm from the same checkpoint, several seeds each."""
    shape = QUICK if setting.quick else Shape()
    model, language = pretrained(shape, setting.device, setting.seed)
    steps = 2 if setting.quick else STEPS
    arms: dict[str, Any] = {}
    curves: dict[str, list[list[float]]] = {}
    for name, arm in ARMS.items():
        runs = []
        for seed in range(setting.seed, setting.seed + setting.seeds):
            say(f"{name}, seed {seed}")
            runs.append(train(model, language, arm, shape, seed=seed, steps=steps))
        arms[name] = {"said": arm.said, **summed_up(runs, shape)}
        curves[name] = [one["length"] for one in runs]
    parameters = sum(p.numel() for p in model.parameters())
    what = f"miniature Qwen3, {parameters / 1e6:.2g} million parameters, engine int{BITS} in bf16"
    return {"model": what, "epsilon": EPSILON, "rate": RATE, "steps": steps, "arms": arms, "points": curves}


def train(
    model: nn.Module, language: Language, arm: Arm, shape: Shape, *, seed: int, steps: int
) -> dict[str, list[float]]:
    """Train one arm, and return what each step measured."""
    master = copy.deepcopy(model)
    device = next(master.parameters()).device
    generator = torch.Generator(device).manual_seed(5000 + seed)
    if arm.on:
        put_on_grid(master, generator if arm.dithered else None)
    sides = Sides(master)
    optimizer = torch.optim.Adam(master.parameters(), lr=RATE, betas=(0.9, 0.99))
    kept: dict[str, list[float]] = {name: [] for name in ("length", "clipped", "clipped ends", "k3", "phantom")}
    for _ in range(steps):
        prompts = language.sample(shape.prompts, 4, generator, end=False).repeat_interleave(shape.samples, 0)
        ids, mask, engine = sides.rollout(ENGINE, prompts, shape.new, generator)
        lengths = mask.sum(1)
        reward = advantages(lengths, shape.samples)[:, None].expand_as(mask)
        logits = sides.logits(arm.trainer, sides.weights(arm.trainer, gradient=True), ids[:, :-1])[:, 3:]
        trainer = logits.log_softmax(-1).gather(-1, ids[:, 4:, None])[..., 0]
        loss, stopped = objective(trainer, engine, reward, arm.clipped)
        optimizer.zero_grad()
        ((loss * mask).sum() / mask.sum()).backward()
        nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        d, ends = (trainer.detach() - engine)[mask], mask & (ids[:, 4:] == END) & (reward > 0)
        kept["length"].append(float(lengths.float().mean()))
        # The engine sampled with these very weights: nothing but the mismatch moves the ratio.
        kept["phantom"].append(float(stopped[mask].float().mean()))
        kept["clipped"].append(float(((d.exp() - 1).abs() > EPSILON).float().mean()))
        kept["clipped ends"].append(float(stopped[ends].float().mean()) if bool(ends.any()) else 0.0)
        kept["k3"].append(float(k3(d.double()).mean()))
    return kept


def objective(trainer: Tensor, engine: Tensor, reward: Tensor, clipped: bool) -> tuple[Tensor, Tensor]:
    """Return PPO's loss per token with the engine's log-probabilities as the old ones, and where the clip takes the gradient.

    Args:
        trainer, engine: Log-probabilities `[B, T]`.
        reward: Advantages `[B, T]`.
        clipped: Whether there is a clip.
    """
    ratio = (trainer - engine).exp()
    if not clipped:
        return -ratio * reward, torch.zeros_like(ratio, dtype=torch.bool)
    stopped = ((ratio > 1 + EPSILON) & (reward > 0)) | ((ratio < 1 - EPSILON) & (reward < 0))
    return -torch.minimum(ratio * reward, ratio.clamp(1 - EPSILON, 1 + EPSILON) * reward), stopped


@torch.no_grad()
def put_on_grid(master: nn.Module, dither: torch.Generator | None) -> None:
    """Round the weights that an engine stores as integers, as a checkpoint that was published so.

    Args:
        master: Changed in place.
        dither: Spreads them evenly inside their cells, but for the largest of a row, which make the scale; None for none.
    """
    for name, weight in master.named_parameters():
        if not coarse(name, weight):
            continue
        weight.copy_(on_grid(weight, BITS))
        if dither is not None:
            noise = torch.rand(weight.shape, generator=dither, device=weight.device) - 0.5
            largest = weight.abs() >= weight.abs().amax(1, keepdim=True) * 0.999
            weight.add_(torch.where(largest, 0.0, noise * step_of(weight, BITS) * 0.96))


def summed_up(runs: list[dict[str, list[float]]], shape: Shape) -> dict[str, Any]:
    """Return an arm's figures over its seeds; a run that never halves its responses has None."""
    return {
        "steps to half the length": [half(one["length"], shape.new / 2) for one in runs],
        "tokens clipped with no policy change": statistics.fmean(
            statistics.fmean(one["phantom"][:FIRST]) for one in runs
        ),
        "ratios outside of the clip": statistics.fmean(statistics.fmean(one["clipped"][:FIRST]) for one in runs),
        "reinforced ends clipped": statistics.fmean(statistics.fmean(one["clipped ends"][:FIRST]) for one in runs),
        "largest k3": max(max(one["k3"]) for one in runs),
        "last length": [one["length"][-1] for one in runs],
    }


def half(lengths: list[float], target: float) -> int | None:
    """Return the first step from which the mean length of three is at most a target; None where there is none."""
    windows = (lengths[at : at + WINDOW] for at in range(len(lengths)))
    return next((at for at, window in enumerate(windows) if statistics.fmean(window) <= target), None)


def figures(found: Found) -> dict[str, Figure]:
    """Draw the length of responses over steps, and what the clip stops."""
    lengths = []
    for name, curves in found["points"].items():
        mean = [statistics.fmean(step) for step in zip(*curves, strict=True)]
        lengths.append(Series(name=name, x=list(range(len(mean))), y=mean, line=True))
    shares = [arm["tokens clipped with no policy change"] for arm in found["arms"].values()]
    panels = [
        Panel(title="learning", x_title="step", y_title="mean length of responses", series=lengths),
        Panel(
            title="clipped with no policy change, first 20 steps",
            x_title="",
            y_title="share of tokens",
            series=[Series(name="", x=list(range(len(shares))), y=shares)],
            labels=list(found["arms"]),
        ),
    ]
    return {"clipping": Figure(panels=panels, caption=found["model"])}
