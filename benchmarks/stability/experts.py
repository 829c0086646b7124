"""Mixtures of experts: what flipped routes alone do to learning, with everything else in float32 on both sides."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from mismatch_ext.adapters.transformers.routing import moe_layout, replay_routing
from torch import Tensor, nn

from benchmarks.gpu import Rollout, decode
from benchmarks.stability.arms import ExpertArm
from benchmarks.stability.miniature import Language, Shape, advantages, on_grid, pretrained
from benchmarks.stability.train import MEASURES, PROMPT, Curves, learned, note
from mismatch_ext.drift import stopped_by_clip
from mismatch_ext.routing import RoutingTrace, align

VOCABULARY, PROMPTS, SAMPLES, NEW, RATE, EPSILON = 256, 8, 8, 32, 1e-3, 0.2
STEPS = 50
COUNTED = 10  # steps after which flipped routes are counted again
Base = tuple[nn.Module, Language]


def base(*, quick: bool = False) -> Base:
    """Return a mixture of 8 experts that has learned its language, and the language."""
    shape = Shape(vocabulary=VOCABULARY, hidden=64, layers=2, pretraining=5 if quick else 250)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return pretrained(shape, 0, spread=0.06, **experts)


def engine_of(policy: nn.Module, bits: int) -> nn.Module:
    """Return the engine's copy of a policy, which picks experts by rounded routers."""
    held = copy.deepcopy(policy).requires_grad_(False)
    if bits:
        for router in moe_layout(held).routers:
            weight = router.module.weight
            weight.copy_(on_grid(weight, bits))  # type: ignore[operator, arg-type]
    return held


def train(arm: ExpertArm, made: Base, *, seed: int, steps: int = STEPS) -> Curves:
    """Train one arm and return what each step measured, before its update."""
    model, language = made
    policy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2000 + seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=RATE, betas=(0.9, 0.99))
    kept: Curves = {name: [] for name in (*MEASURES, "flipped")}
    for step in range(steps):
        prompts = language.sample(PROMPTS, PROMPT, generator, end=False).repeat_interleave(SAMPLES, 0)
        rollout = decode(engine_of(policy, arm.bits), prompts, NEW, generator, routed=True)
        mask, engine = rollout.mask, rollout.logprobs.float()
        reward = advantages(mask.sum(1), SAMPLES)[:, None].expand(mask.shape)
        trainer, flipped = _scored(policy, rollout, arm.replayed, counting=step % COUNTED == 0)
        ratio = (trainer - engine).exp()
        stopped = stopped_by_clip((trainer - engine).detach(), reward, EPSILON, EPSILON)
        loss = -torch.minimum(ratio * reward, ratio.clamp(1 - EPSILON, 1 + EPSILON) * reward)
        optimizer.zero_grad()
        ((loss * mask).sum() / mask.sum()).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        note(kept, rollout.ids[:, PROMPT:], trainer.detach(), engine, reward, mask, stopped)
        kept["flipped"] += flipped
        if learned(kept["length"]):
            break
    return kept


def _scored(policy: nn.Module, rollout: Rollout, replayed: bool, *, counting: bool) -> tuple[Tensor, list[float]]:
    """Return the trainer's log-probabilities `[B, T]`, and where asked the share of tokens that it would route otherwise."""
    ids = rollout.ids[:, :-1]
    trace, known = align(rollout.routes, torch.ones_like(ids))
    real = torch.cat([torch.ones(len(ids), PROMPT, dtype=torch.bool), rollout.mask], 1)[:, :-1]
    flipped = [_flipped(policy, ids, trace, known, known & real.flatten())] if counting else []
    with replay_routing(policy, trace, known) if replayed else nullcontext():
        logits = policy(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 :]
    logprobs = logits.float().log_softmax(-1).gather(-1, rollout.ids[:, PROMPT:, None])[..., 0]
    return logprobs, flipped


@torch.no_grad()
def _flipped(policy: nn.Module, ids: Tensor, trace: RoutingTrace, known: Tensor, counted: Tensor) -> float:
    """Return the share of counted tokens, mean over layers, that the policy would route otherwise than the engine did."""
    with replay_routing(policy, trace, known, native=True) as replay:
        policy(input_ids=ids, use_cache=False)
    own = replay.native
    other = [own.layer(at).sort(-1).values != trace.layer(at).sort(-1).values for at in trace.layers]
    return float(torch.stack([rows.any(-1)[counted].float().mean() for rows in other]).mean())
