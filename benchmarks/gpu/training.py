"""The gap over 100 steps of training in bf16, FP16 and float32: k3 of every step between decode and forward pass."""

from __future__ import annotations

import copy
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.miniature import Grid, Language, Shape, Sides, advantages, pretrained
from benchmarks.gpu.part import Found, Say, Setting
from benchmarks.gpu.svg import Figure, Panel, Series
from mismatch_ext.gap import k3
from mismatch_ext.precision.scaler import LossScaler

NAME, TITLE = "training", "the gap over 100 steps of training"
STEPS, RATE = 100, 2e-4
SHAPE = Shape(vocabulary=8192, hidden=512, layers=8, pretraining=300, prompts=16, new=64)
QUICK = Shape(vocabulary=64, hidden=64, layers=2, pretraining=5, prompts=2, samples=4, new=6)
SMALL = Shape()
ARMS = {"bf16": torch.bfloat16, "FP16": torch.float16, "float32": torch.float32}


def run(setting: Setting, folder: Path, say: Say) -> Found:
    """Train with both sides in each dtype from the same checkpoint, prompts and seeds."""
    on_gpu = torch.device(setting.device).type == "cuda"
    shape = QUICK if setting.quick else SHAPE if on_gpu else SMALL
    steps = 2 if setting.quick else STEPS
    tenth = max(1, steps // 10)
    say("a model to start from")
    model, language = pretrained(shape, setting.device, setting.seed)
    arms: dict[str, Any] = {}
    points = {}
    for name, dtype in ARMS.items():
        say(name)
        one = train(model, language, dtype, shape, seed=setting.seed, steps=steps)
        arms[name] = {
            "k3, mean over steps": statistics.fmean(one["k3"]),
            "k3, first and last tenth": [statistics.fmean(one["k3"][:tenth]), statistics.fmean(one["k3"][-tenth:])],
            "length, first and last": [one["length"][0], one["length"][-1]],
            "overflows": one["overflows"][-1],
        }
        points[name] = one
    ratio = arms["bf16"]["k3, mean over steps"] / max(arms["FP16"]["k3, mean over steps"], 1e-30)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "model": f"miniature Qwen3, {parameters / 1e6:.2g} million parameters",
        "steps": steps,
        "rate": RATE,
        "k3 of bf16 over that of FP16": ratio,
        "arms": arms,
        "points": points,
    }


def train(
    model: nn.Module, language: Language, dtype: torch.dtype, shape: Shape, *, seed: int, steps: int
) -> dict[str, list[float]]:
    """Train with the engine's weights in a dtype and the trainer in autocast of it over float32 masters."""
    master = copy.deepcopy(model)
    device = next(master.parameters()).device
    generator = torch.Generator(device).manual_seed(6000 + seed)
    sides, grid = Sides(master), Grid(dtype=dtype)
    optimizer = torch.optim.Adam(master.parameters(), lr=RATE, betas=(0.9, 0.99))
    half, scaled = dtype != torch.float32, dtype == torch.float16
    scaler = LossScaler(device) if scaled else None
    kept: dict[str, list[float]] = {"k3": [], "length": [], "overflows": []}
    for _ in range(steps):
        prompts = language.sample(shape.prompts, 4, generator, end=False).repeat_interleave(shape.samples, 0)
        ids, mask, engine = sides.rollout(grid, prompts, shape.new, generator)
        lengths = mask.sum(1)
        reward = advantages(lengths, shape.samples)[:, None]
        with torch.autocast(device.type, dtype, enabled=half):
            logits = master(input_ids=ids[:, :-1], use_cache=False).logits[:, 3:].float()
        trainer = logits.log_softmax(-1).gather(-1, ids[:, 4:, None])[..., 0]
        # The weight of a recomputed policy is 1: nothing here corrects the gap, and nothing depends on it.
        loss = -((trainer - trainer.detach()).exp() * reward * mask).sum() / mask.sum()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(master.parameters(), 1.0)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(master.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        kept["k3"].append(float(k3((trainer.detach() - engine)[mask].double()).mean()))
        kept["length"].append(float(lengths.float().mean()))
        kept["overflows"].append(0.0 if scaler is None else float(scaler.overflow_steps))
    return kept


def figures(found: Found) -> dict[str, Figure]:
    """Draw k3 and the length of responses over steps."""
    panels = []
    for title, key, log in (("k3 between engine and trainer", "k3", True), ("length of responses", "length", False)):
        series = [
            Series(name=name, x=list(range(len(one[key]))), y=one[key], line=True)
            for name, one in found["points"].items()
        ]
        panels.append(Panel(title=title, x_title="step", y_title=key, series=series, log_y=log))
    return {"steps": Figure(panels=panels, caption=found["model"])}
