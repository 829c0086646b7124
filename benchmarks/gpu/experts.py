"""Experts: how often trainer and engine route otherwise, and what replaying the engine's routes leaves of the tails."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.transformers.doctor.models import end_tokens
from mismatch_ext.adapters.transformers.routing import moe_layout, record_routing, replay_routing
from torch import Tensor, nn

from benchmarks.gpu.engine import MOST_LOGITS, Rollout, decode, logits_of, picked
from benchmarks.gpu.gap import TAILS, gap, scatter
from benchmarks.gpu.models import in_dtype, policy, prompts_of
from benchmarks.gpu.part import Found, Say, Setting
from benchmarks.gpu.svg import Figure, Panel, Series
from mismatch_ext.routing import RoutingTrace, agreement, agreement_metrics, align
from mismatch_ext.routing.agreement import of_layer
from mismatch_ext.sums import merged

NAME, TITLE = "experts", "experts, with and without the engine's routes"
DTYPES = {"bf16": torch.bfloat16, "FP16": torch.float16, "float32": torch.float32}
BATCH = 8


def run(setting: Setting, folder: Path, say: Say) -> Found:
    """Measure the gap under the trainer's own routes and under the engine's, on the same tokens of each dtype."""
    model, what = policy("experts", setting)
    prompts = prompts_of(model, setting, setting.responses)
    found: Found = {"model": what, "dtypes": {}, "points": {}}
    for number, (name, dtype) in enumerate(DTYPES.items()):
        held = in_dtype(model, dtype)
        say(f"{name}: the engine")
        rollout = decode(
            held,
            prompts,
            setting.new_tokens,
            generator=setting.generator(200 + number),
            rows=setting.rows,
            routed=True,
            ends=end_tokens(model),
        )
        say(f"{name}: the trainer's own routes")
        native, taken = own_routes(held, rollout)
        say(f"{name}: replay")
        replayed, obeyed = engines_routes(held, rollout)
        found["dtypes"][name] = {
            "own routes": gap(rollout.logprobs, native, rollout.mask),
            "replay": gap(rollout.logprobs, replayed, rollout.mask),
            "routes": {name: value for name, value in taken.items() if not of_layer(name)},
            "routes of the replayed pass that are the engine's": obeyed,
        }
        found["points"][name] = {
            "own routes": scatter(rollout.logprobs, native, rollout.mask),
            "replay": scatter(rollout.logprobs, replayed, rollout.mask),
        }
    return found


def _batches(model: nn.Module, rollout: Rollout) -> list[tuple[Tensor, list[RoutingTrace], Tensor]]:
    """Return tokens, the engine's routes of them, and which tokens are real, of each pass of the trainer."""
    assert rollout.routes is not None
    width: int = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    size = max(1, min(BATCH, MOST_LOGITS // (width * rollout.ids.shape[1])))
    found = []
    for first in range(0, len(rollout.ids), size):
        ids = rollout.ids[first : first + size]
        before = torch.ones(len(ids), rollout.prompt, dtype=torch.int64)
        real = torch.cat([before, rollout.mask[first : first + size].to(torch.int64)], 1)
        found.append((ids, list(rollout.routes[first : first + size]), real.to(ids.device)))
    return found


def _said(model: nn.Module, rollout: Rollout, ids: Tensor, real: Tensor) -> Tensor:
    logits, _ = logits_of(model, input_ids=ids, attention_mask=real, use_cache=False)
    return picked(logits[:, rollout.prompt - 1 : -1], ids[:, rollout.prompt :]).cpu()


@torch.no_grad()
def own_routes(model: nn.Module, rollout: Rollout) -> tuple[Tensor, dict[str, float]]:
    """Return log-probabilities `[B, T]` under the trainer's own routes, and how far these are the engine's."""
    parts, counts = [], []
    for ids, routes, real in _batches(model, rollout):
        with record_routing(model) as recording:
            parts.append(_said(model, rollout, ids, real))
        trace, known = align(routes, real)
        counts.append(agreement(trace, recording.trace, known, real=known))
    return torch.cat(parts), agreement_metrics(merged(*counts), trace.layers)


@torch.no_grad()
def engines_routes(model: nn.Module, rollout: Rollout) -> tuple[Tensor, float]:
    """Return log-probabilities `[B, T]` under the engine's routes, and the share of replayed routes that experts were run with.

    What experts ran with is read off their own arguments, not off what replay says that it did.
    """
    parts, equal, routed = [], 0, 0
    for ids, routes, real in _batches(model, rollout):
        trace, known = align(routes, real)
        with replay_routing(model, trace, known), _given_experts(model) as given:
            parts.append(_said(model, rollout, ids, real))
        for layer, chosen in given.items():
            same = (chosen.sort(-1).values == trace.layer(layer).to(chosen.device).sort(-1).values).all(-1).cpu()
            equal += int((same & known.cpu()).sum())
            routed += int(known.sum())
    return torch.cat(parts), equal / routed


@contextmanager
def _given_experts(model: nn.Module) -> Any:
    """Yield what ids the experts of each layer were called with `[R, K]`, once the block is over."""
    given: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_floating_point())
            given[layer] = ids.reshape(-1, ids.shape[-1])

        return hook

    hooks = []
    for router in moe_layout(model).routers:
        assert router.experts is not None
        hooks.append(router.experts.register_forward_pre_hook(keep(router.layer), with_kwargs=True))
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def figures(found: Found) -> dict[str, Figure]:
    """Draw the tails F(tau), and bf16's tokens on both sides."""
    tails = [
        Series(
            name=f"{name}, {routing}",
            x=TAILS,
            y=[found["dtypes"][name][routing]["F"][f"{tau:g}"] for tau in TAILS],
            line=True,
        )
        for name in ("bf16", "FP16")
        for routing in ("own routes", "replay")
    ]
    panels = [Panel(title="tails", x_title="tau", y_title="F(tau)", series=tails, log_x=True, log_y=True)]
    for routing, points in found["points"]["bf16"].items():
        series = [Series(name="", x=points["engine"], y=points["trainer"])]
        panels.append(
            Panel(
                title=f"bf16, {routing}",
                x_title="probability, engine",
                y_title="probability, trainer",
                series=series,
                log_x=True,
                log_y=True,
                diagonal=True,
            )
        )
    return {"tails": Figure(panels=panels, caption=found["model"])}
