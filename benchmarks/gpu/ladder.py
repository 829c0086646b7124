"""The ladder of precisions: each engine with its trainer on the engine's own tokens, beside the trainer's noise and an oracle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mismatch_ext.adapters.transformers.doctor.models import end_tokens
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from benchmarks.gpu.engine import Context, Rollout, decode, score
from benchmarks.gpu.external import external_rollout
from benchmarks.gpu.gap import by_probability, gap, scatter
from benchmarks.gpu.models import in_dtype, policy, prompts_of, rounded
from benchmarks.gpu.part import Found, Say, Setting
from benchmarks.gpu.svg import Figure, Panel, Series

NAME, TITLE = "ladder", "gap by precision of both sides"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PADDING = 13
# Responses that are also scored in float64, to say what float32 itself leaves open.
WIDE = 32
# What two programs in float32 may differ by: each errs, and kernels of another order of sums by some times more.
FACTOR = 8.0
ORACLE = 1e-5
DRAWN = ("bf16", "bf16, float32 head", "FP16", "float32")


class Fp8Cache(DynamicCache):
    """Keys and values rounded to e4m3 as they are stored, with a scale of 1."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store rounded states and return all."""
        return super().update(_e4m3(key_states), _e4m3(value_states), *args, **kwargs)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """An engine's arithmetic and a trainer's.

    Args:
        engine: Dtype of the engine's weights.
        trainer: Dtype of the trainer's weights.
        head: Dtype of the head on both sides; None for that of the weights.
        autocast: Dtype that the trainer computes in, over float32 weights; None for that of its weights.
        cache: Kind of the engine's KV cache: "dynamic", "static" or "e4m3".
    """

    engine: torch.dtype
    trainer: torch.dtype
    head: torch.dtype | None = None
    autocast: torch.dtype | None = None
    cache: str = "dynamic"


RUNGS = {
    "bf16": Rung(engine=BF16, trainer=BF16),
    "bf16, float32 head": Rung(engine=BF16, trainer=BF16, head=FP32),
    "bf16, trainer autocast": Rung(engine=BF16, trainer=FP32, autocast=BF16),
    "FP16": Rung(engine=FP16, trainer=FP16),
    "FP16, trainer autocast": Rung(engine=FP16, trainer=FP32, autocast=FP16),
    "float32": Rung(engine=FP32, trainer=FP32),
    "bf16, static KV cache": Rung(engine=BF16, trainer=BF16, cache="static"),
    "bf16, e4m3 KV cache": Rung(engine=BF16, trainer=BF16, cache="e4m3"),
}


def caches(model: nn.Module) -> dict[str, Callable[[int, int], Any] | None]:
    """Return what makes each kind of cache for rows and tokens."""
    return {
        "dynamic": None,
        "static": lambda rows, tokens: StaticCache(config=model.config, max_cache_len=tokens),
        "e4m3": lambda rows, tokens: Fp8Cache(),
    }


def run(setting: Setting, folder: Path, say: Say) -> Found:
    """Measure every rung on its own tokens, then the trainer's noise on those of the first."""
    model, what = policy("any", setting)
    prompts = prompts_of(model, setting, setting.responses)
    sampled: dict[str, Rollout] = {}
    rungs, profiles, points = {}, {}, {}
    for number, (name, rung) in enumerate(RUNGS.items()):
        say(name)
        engine, trainer = in_dtype(model, rung.engine), in_dtype(model, rung.trainer)
        rollout = sampled[name] = decode(
            engine,
            prompts,
            setting.new_tokens,
            generator=setting.generator(number),
            rows=setting.rows,
            cache=caches(engine)[rung.cache],
            head=rung.head,
            ends=end_tokens(model),
        )
        del engine
        # Autocast is no question of `in_dtype`: it rounds weights where they are multiplied.
        context: Context = (
            nullcontext if rung.autocast is None else partial(torch.autocast, setting.device, rung.autocast)
        )
        said = score(trainer, rollout, head=rung.head, context=context)
        del trainer
        oracle = score(rounded(model, rung.engine), rollout)
        mask = rollout.mask
        rungs[name] = gap(rollout.logprobs, said, mask) | {
            "engine's error": float((rollout.logprobs - oracle)[mask].abs().mean()),
            "trainer's error": float((said - oracle)[mask].abs().mean()),
        }
        profiles[name] = by_probability(rollout.logprobs, said, mask)
        if name in DRAWN:
            points[name] = scatter(rollout.logprobs, said, mask)
    found: Found = {"model": what, "rungs": rungs, "by probability": profiles}
    found["trainer's noise"] = noise(model, sampled["bf16"], say)
    found["oracle"] = oracle_holds(model, sampled["float32"], rungs["float32"]["mean |d|"]["value"])
    if setting.engine:
        for dtype in (BF16, FP16):
            name = f"{setting.engine}, {str(dtype).removeprefix('torch.')}"
            say(name)
            rollout = external_rollout(model, prompts, setting, dtype, folder)
            said = score(in_dtype(model, dtype), rollout)
            rungs[name] = gap(rollout.logprobs, said, rollout.mask)
    return found | {"points": points}


def noise(model: nn.Module, rollout: Rollout, say: Say) -> dict[str, Any]:
    """Return what the trainer differs from itself by in bf16: in other batches, and with padding to the left."""
    say("trainer's noise")
    trainer = in_dtype(model, BF16)
    plain = score(trainer, rollout, batch=8)
    return {
        "batches of 1 and of 8": gap(score(trainer, rollout, batch=1), plain, rollout.mask),
        f"{PADDING} tokens of padding to the left": gap(score(trainer, rollout, padding=PADDING), plain, rollout.mask),
    }


def oracle_holds(model: nn.Module, rollout: Rollout, found: float) -> dict[str, Any]:
    """Return whether float32 decode and float32 forward agree, and how far float32 itself is from float64.

    Args:
        model: In float32.
        rollout: What it sampled.
        found: Mean |d| of the float32 rung.
    """
    few = Rollout(ids=rollout.ids[:WIDE], logprobs=rollout.logprobs[:WIDE], mask=rollout.mask[:WIDE])
    exact = in_dtype(model, torch.float64)
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # grouped products are not of float64
    wide = score(exact, few, batch=4)
    error = float((score(model, few) - wide)[few.mask].abs().mean())
    bound = max(ORACLE, FACTOR * error)
    return {
        "mean |d| of decode and forward in float32": found,
        "mean |float32 - float64|": error,
        "bound": bound,
        "within 1e-5": found <= ORACLE,
        "holds": found <= bound,
    }


def figures(found: Found) -> dict[str, Figure]:
    """Draw the tokens' probabilities on both sides, and the gap by probability."""
    scatters = [
        Panel(
            title=name,
            x_title="probability, engine",
            y_title="probability, trainer",
            series=[Series(name="", x=points["engine"], y=points["trainer"])],
            log_x=True,
            log_y=True,
            diagonal=True,
        )
        for name, points in found["points"].items()
    ]
    curves = [
        Series(name=name, x=profile["log p"], y=profile["mean |d|"], line=True)
        for name, profile in found["by probability"].items()
    ]
    profile = Panel(
        title="gap by probability of the token",
        x_title="log-probability under the engine",
        y_title="mean |d|, nats",
        series=curves,
        log_y=True,
    )
    caption = found["model"]
    return {
        "scatter": Figure(panels=scatters, caption=caption),
        "by_probability": Figure(panels=[profile], caption=caption),
    }
